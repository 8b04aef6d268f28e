"""The memory-bound clusters at the sizes that count: values, gradients, launches, dropout."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc
from benchmarks.harness.accuracy import not_worse
from benchmarks.harness.timing import device_time
from benchmarks.kernels.case import Case
from benchmarks.kernels.clusters import CASES
from benchmarks.kernels.measure import leaves, run, truth_of

CUDA = torch.device("cuda")
EACH = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
# Gradients of transposed results that AOTAutograd lays out anew before the backward graph sees them.
COPIED = {"RoPE on Q and K": 2}


@EACH
def test_values_and_gradients_are_as_close_as_eagers(case: Case) -> None:
    truth = truth_of(case, case.inputs(CUDA), case.differentiate)
    fast = fc.compile(case.without_randomness(), strict=True)
    results = run(fast, leaves(truth.inputs, case.differentiate), case.differentiate, truth.gradients)
    names = [f"out{i}" for i in range(len(truth.gradients))] + [f"d {n}" for n in case.differentiate]
    wrong = {
        name: problem
        for name, ours, eager, exact in zip(names, results, truth.eager, truth.exact, strict=True)
        if (problem := not_worse(ours, eager, exact))
    }
    assert not wrong


@EACH
def test_one_kernel_a_cluster_and_at_most_one_finishing_sum(case: Case) -> None:
    inputs = case.inputs(CUDA)
    fast = fc.compile(case.fn, strict=True)
    seed = int(case.random)  # drawn from PyTorch's generator by a launch of PyTorch's
    forward = device_time(lambda: run(fast, inputs, (), ()), CUDA, repetitions=3)
    assert forward.kernels == 1 + seed, forward.names
    wanting = leaves(inputs, case.differentiate)
    with torch.no_grad():
        outputs = case.fn(*inputs.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [torch.ones_like(o) for o in outputs]
    both = device_time(lambda: run(fast, wanting, case.differentiate, gradients), CUDA, repetitions=3)
    launches = both.kernels - COPIED.get(case.name, 0)
    assert launches <= 3 + seed, both.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_keeps_its_rate_its_seed_and_its_mask(dtype: torch.dtype) -> None:
    p, n = 0.1, 1 << 22

    def drop(x: Tensor) -> Tensor:
        return F.dropout(x, p)

    fast = fc.compile(drop, strict=True)
    x = torch.ones(n, device=CUDA, dtype=dtype, requires_grad=True)
    torch.manual_seed(7)
    first = fast(x)
    torch.manual_seed(7)
    assert torch.equal(first, fast(x))
    assert not torch.equal(first, fast(x))
    kept = first != 0
    # Five standard deviations of a binomial proportion.
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * (p * (1 - p) / n) ** 0.5
    assert torch.equal(first[kept], torch.full_like(first[kept], 1 / (1 - p)))
    (gradient,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(gradient != 0, kept)


def test_neighbouring_dropout_masks_are_independent() -> None:
    n = 1 << 22
    fast = fc.compile(lambda x: (F.dropout(x, 0.5), F.dropout(x, 0.5)), strict=True)
    a, b = (t != 0 for t in fast(torch.ones(n, device=CUDA)))
    agreement = (a == b).double().mean().item()
    assert abs(agreement - 0.5) < 5 * 0.5 / n**0.5
    lagged = (a[1:] == a[:-1]).double().mean().item()
    assert abs(lagged - 0.5) < 5 * 0.5 / n**0.5
