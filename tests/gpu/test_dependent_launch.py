"""Dependent launch on the device: kernels that overlap give what kernels one after the other give, always."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from benchmarks.harness.accuracy import not_worse
from fusion_compiler.passes.fuse.dependent import NOTE
from fusion_compiler.runtime import launch
from tests.codegen.test_dependent_launch import PLACES, Decoder

CUDA = torch.device("cuda")
WIDTH, LAYERS, REPLAYS = 1024, 6, 10_000

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs sm_90"
)


def a_round(called: object, inputs: Tensor) -> list[Tensor]:
    places = torch.arange(PLACES, device=CUDA)
    return [called(inputs[i : i + 1], places[i : i + 1]).clone() for i in range(PLACES)]  # type: ignore[operator]


@pytest.mark.parametrize("some", [False, True], ids=["all", "some"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_ten_thousand_replays(dtype: torch.dtype, some: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replay gives the bits of kernels one after the other, also right behind a write of the weights,
    and where some kernels do not start early."""
    if some:
        numbers, init = itertools.count(), launch._Bound.__init__

        def every_second(self: launch._Bound, *arguments: Any) -> None:
            init(self, *arguments, behind=next(numbers) % 2 == 0)

        monkeypatch.setattr(launch._Bound, "__init__", lambda s, *passed, **_: every_second(s, *passed))
    model = Decoder(LAYERS, WIDTH).to(CUDA, dtype)
    plain = fc.compile(
        copy.deepcopy(model), dependent_launch=False, tune=False, dynamic=False, strict=True, cudagraphs=True
    )
    fast = fc.compile(model, dependent_launch=True, tune=False, dynamic=False, strict=True, cudagraphs=True)
    exact, other = copy.deepcopy(model).double(), copy.deepcopy(model)
    inputs, places = torch.randn(PLACES, WIDTH, device=CUDA, dtype=dtype), torch.arange(PLACES, device=CUDA)
    wrong = torch.zeros((), dtype=torch.int64, device=CUDA)
    with torch.no_grad():
        for _ in range(LAYERS + 1):  # each layer's cache stays as it is once the one before it does
            expected, results, theirs = (a_round(f, inputs) for f in (plain, fast, other))
            truth = a_round(exact, inputs.double())
        assert fast.plan[0].notes[NOTE].startswith("done"), fast.plan[0].notes[NOTE]
        assert plain.plan[0].notes[NOTE].startswith("refused")
        assert all(torch.equal(x, y) for x, y in zip(expected, results, strict=True))
        for ours, eager, true in zip(results, theirs, truth, strict=True):
            assert not (problem := not_worse(ours, eager, true)), problem
        weight = model.get_parameter("layers.0.up.weight")
        kept, none = weight.clone(), torch.zeros_like(weight)
        for i in range(REPLAYS):
            if i % 7 == 0:  # an optimizer's write: the next replay's first kernel comes right behind it
                weight.copy_(none)
                weight.copy_(kept)
            at = i % PLACES
            wrong += (fast(inputs[at : at + 1], places[at : at + 1]) != expected[at]).any()
    assert int(wrong) == 0, f"{int(wrong)} of {REPLAYS} replays differ"
