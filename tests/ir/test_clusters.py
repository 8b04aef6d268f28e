"""The memory-bound clusters of the benchmarks: as close as eager in the interpreter, and one kernel each."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fusion_compiler as fc
from benchmarks.harness.accuracy import not_worse
from benchmarks.kernels.case import Case
from benchmarks.kernels.clusters import CASES, CAT_CASES
from benchmarks.kernels.measure import leaves, run, truth_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.sample(16)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", (*CASES, *CAT_CASES), ids=lambda case: case.name)
def test_values_and_gradients_are_as_close_as_eagers(case: Case, dtype: torch.dtype) -> None:
    truth = truth_of(case, case.inputs("cpu", quick=True, dtype=dtype), case.differentiate)
    fast = fc.compile(case.without_randomness(), backend="interpret", strict=True)
    results = run(fast, leaves(truth.inputs, case.differentiate), case.differentiate, truth.gradients)
    names = [f"out{i}" for i in range(len(truth.gradients))] + [f"d {n}" for n in case.differentiate]
    wrong = {
        name: problem
        for name, ours, eager, exact in zip(names, results, truth.eager, truth.exact, strict=True)
        if (problem := not_worse(ours, eager, exact))
    }
    assert not wrong


@pytest.mark.parametrize("case", (*CASES, *CAT_CASES), ids=lambda case: case.name)
def test_one_cluster_forward_and_one_backward_at_the_sizes_that_count(case: Case) -> None:
    """The plan is that of meta tensors, for the device of the published figures."""
    tensors = case.inputs("meta")
    if case.name == "cross-entropy":  # PyTorch's nll_loss loses its gradient on meta tensors: fewer rows
        tensors = dataclasses.replace(case, sizes={**case.sizes, "rows": 64}).inputs("cpu")
    inputs = leaves(tensors, case.differentiate)
    fast = fc.compile(case.fn, backend="eager", device="h200")
    outputs = fast(*inputs.values())
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.grad(
        outputs, [inputs[n] for n in case.differentiate], [torch.empty_like(o) for o in outputs]
    )
    forward, backward = fast.plan
    assert len(forward.clusters) == len(backward.clusters) == 1, f"{forward}\n{backward}"
    for plan in (forward, backward):
        assert {left.target for left in plan.leftovers} <= {"fusion_compiler.seed.default"}, plan
