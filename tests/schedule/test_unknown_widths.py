"""Sizes that are known only at run time: one kernel for all of them costs little more than one for a known
size, and is right for each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_compiler as fc

ELEMENTS = 1 << 26


def predicted(function: Callable[[Tensor], Tensor], shape: tuple[int, ...], static: bool) -> float:
    """Microseconds of a function's kernel, planned with the sizes as numbers or as symbols."""
    fast = fc.compile(function, dynamic=not static, backend="eager", device="h200")
    with FakeTensorMode(allow_non_fake_inputs=True):
        fast(torch.zeros(shape, dtype=torch.bfloat16))
    (plan,) = fast.report().plans
    (cluster,) = plan.clusters
    assert all(isinstance(axis.size, int) for axis in cluster.loops.axes) == static
    return cluster.cost.us


# A turn reads a sector of each row, of which the shortest rows fill a part.
TIMES = {2: 8, 4: 4, 9: 1.5, 49: 1.5, 200: 1.5, 1000: 1.5, 4096: 1.5, 100_000: 1.5}


@pytest.mark.parametrize("width", TIMES)
def test_an_unknown_width_costs_little_more_than_a_known_one(width: int) -> None:
    shape = ELEMENTS // width, width
    static, unknown = (predicted(lambda x: x.sum(-1), shape, static) for static in (True, False))
    assert unknown <= TIMES[width] * static


SUMS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "all elements": (lambda x: x.sum(), (4096, 4096)),
    "the mean of all squares": (lambda x: x.float().pow(2).mean(), (4096, 4096)),
    "a norm of all elements": (lambda x: x.float().norm(), (8192, 1024)),
    "the gradient of a bias": (lambda x: x.sum(0), (16384, 1024)),
    "the same of few channels": (lambda x: x.sum((0, 2, 3)), (32, 3, 512, 512)),
    "few columns": (lambda x: x.sum((1, 3)), (5, 512, 31, 768, 3)),
    "the maximum of few images": (lambda x: x.amax((1, 2, 3)), (8, 3, 512, 512)),
}


@pytest.mark.parametrize("name", SUMS)
def test_an_unknown_number_of_terms_is_shared_by_many_programs(name: str) -> None:
    """A program that added up all of them would take a hundred times as long."""
    function, shape = SUMS[name]
    static, unknown = (predicted(function, shape, static) for static in (True, False))
    assert unknown <= 1.5 * static


REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: (x * 2).sum(),
    "mean": lambda x: x.mean(),
    "columns": lambda x: x.sum(0),
    "maximum": lambda x: x.amax(),
    "place": lambda x: x.argmax(),
    "any": lambda x: (x > 3).any(),
    "columns of blocks": lambda x: x.reshape(3, -1, x.shape[1]).sum(1),
    "rows of blocks": lambda x: x.reshape(3, -1).sum(1),
    "product": lambda x: (1 + x / 1000).prod(0),
    "the middle": lambda x: x.reshape(3, -1, 2, x.shape[1]).sum(1),
    "around the middle": lambda x: x.reshape(3, -1, 2, x.shape[1]).sum((1, 3)),
    "channels": lambda x: x.reshape(-1, 3, x.shape[1]).sum((0, 2)),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_one_kernel_adds_up_any_number_of_terms(name: str) -> None:
    """One block, less than a block, and more than one program has."""
    function = REDUCTIONS[name]
    fast = fc.compile(function, dynamic=True, backend="interpret")
    for shape in ((60, 9), (6, 2), (3000, 40), (6, 5000)):
        x = torch.randn(shape)
        result, truth = fast(x), function(x.double())
        torch.testing.assert_close(result.to(truth.dtype), truth, rtol=1e-5, atol=2e-4)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda x: F.relu(x.mean(-1)),
    "softmax": lambda x: torch.softmax(x * 2, -1),
    "norm": lambda x: (x - x.mean(-1, keepdim=True)) * x.var(-1, keepdim=True, correction=0).add(1).rsqrt(),
    "maximum and its place": lambda x: x.amax(-1) + x.argmax(-1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_one_kernel_is_right_for_every_width(name: str) -> None:
    """The width at capture is that of short rows; those that follow are shorter and longer than a block."""
    function = FUNCTIONS[name]
    fast = fc.compile(function, dynamic=True, backend="interpret")
    for shape in ((600, 9), (7, 3), (513, 40), (3, 5000)):
        x = torch.randn(shape, requires_grad=True)
        wide = x.detach().double().requires_grad_()
        result, truth = fast(x), function(wide)
        gradient = torch.randn_like(truth)
        result.backward(gradient.to(result.dtype))
        truth.backward(gradient)
        torch.testing.assert_close(result.double(), truth, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)
