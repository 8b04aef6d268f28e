"""Tiles that begin with the word in which their row begins, on the device: every form, any storage offset."""

from __future__ import annotations

import functools
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import fusion_compiler as fc
from benchmarks.harness.accuracy import not_worse
from benchmarks.kernels.case import Case
from benchmarks.kernels.clusters import CASES
from benchmarks.kernels.measure import leaves, run, truth_of
from fusion_compiler.codegen import emit as templates
from tests.codegen.test_misaligned import FORMS, in_form, several_rows
from tests.exactness import placing

CUDA = torch.device("cuda")
SCHEDULES = (
    *(functools.partial(in_form, form) for form in FORMS),
    *(functools.partial(several_rows, 2, programs) for programs in (8, 4)),
)
NAMES = ("bias + GELU(tanh)", "LayerNorm", "RMSNorm written out", "softmax", "cross-entropy")


@pytest.mark.parametrize("number", range(len(SCHEDULES)))
@pytest.mark.parametrize("case", [c for c in CASES if c.name in NAMES], ids=lambda case: case.name)
def test_values_and_gradients_are_as_close_as_eagers(case: Case, number: int) -> None:
    odd = replace(case, sizes={"rows": 4099, "columns": 5793})
    truth = truth_of(odd, odd.inputs(CUDA), odd.differentiate)
    with patch.object(templates, "schedules_of", placing(SCHEDULES[number])):
        fast = fc.compile(odd.without_randomness(), strict=True, tune=False)
        results = run(fast, leaves(truth.inputs, odd.differentiate), odd.differentiate, truth.gradients)
    wrong = map(not_worse, results, truth.eager, truth.exact)
    assert not any(wrong)


@pytest.mark.parametrize("offset", [1, 4, 7])
def test_inputs_that_begin_within_a_word(offset: int) -> None:
    """The kernel is compiled and tuned for aligned inputs, then called with others, and the reverse."""
    x = torch.randn(2049 * 5793 + offset, device=CUDA, dtype=torch.bfloat16)
    aligned, shifted = x[:-offset].view(2049, 5793), x[offset:].view(2049, 5793)
    for first, second in ((aligned, shifted), (shifted, aligned)):
        torch._dynamo.reset()
        fast = fc.compile(lambda t: torch.softmax(t, -1), strict=True)
        for argument in (first, second):
            got, want = fast(argument), torch.softmax(argument.double(), -1)
            torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-9)
