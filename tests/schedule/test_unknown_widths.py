"""Rows whose length is known only at run time: short ones share programs, and every length is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc

ELEMENTS = 1 << 26


def predicted(width: int, known: bool) -> float:
    """Microseconds of a sum of each row, planned with the width as a number or as a symbol."""
    x = torch.zeros((ELEMENTS // width, width), dtype=torch.bfloat16)
    fast = fc.compile(lambda x: x.sum(-1), dynamic=not known, backend="eager", device="h200")
    fast(x)
    (plan,) = fast.report().plans
    (cluster,) = plan.clusters
    assert isinstance(cluster.loops.axes[-1].size, int) == known
    return cluster.cost.us


# A turn reads a sector of each row, of which the shortest rows fill a part.
TIMES = {2: 8, 4: 4, 9: 1.5, 49: 1.5, 200: 1.5, 1000: 1.5, 4096: 1.5, 100_000: 1.5}


@pytest.mark.parametrize("width", TIMES)
def test_an_unknown_width_costs_little_more_than_a_known_one(width: int) -> None:
    assert predicted(width, known=False) <= TIMES[width] * predicted(width, known=True)


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
