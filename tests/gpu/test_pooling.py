"""Pooling in clusters on the device: values, gradients, and that kernels hold it with what is around it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from benchmarks.harness.accuracy import not_worse
from tests.gpu.test_depthwise import gradient_of, last

Pool = Callable[[Tensor], Tensor]
POOLS: dict[str, Pool] = {
    "average, 3 x 3 by 2": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "average, 2 x 2": lambda x: F.avg_pool2d(x, 2),
    "average, 3 x 3, inside": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "average, 3 x 2 by 2 x 3, beyond": lambda x: F.avg_pool2d(x, (3, 2), (2, 3), (1, 0), ceil_mode=True),
    "average, 3 x 3 by 2, of 5": lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5),
    "maximum, 3 x 3 by 2": lambda x: F.max_pool2d(x, 3, 2, 1),
    "maximum, 2 x 2": lambda x: F.max_pool2d(x, 2),
    "maximum, 3 x 3": lambda x: F.max_pool2d(x, 3, 1, 1),
    "maximum, 3 x 3 by 2, beyond": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
}


def step(called: Any, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return what a function gives and the gradient of its argument."""
    y = called(x.requires_grad_())
    y.backward(gradient)
    return [y.detach(), gradient_of(x)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("size", [(64, 56), (20, 33)])
@pytest.mark.parametrize("name", POOLS)
def test_values_and_gradients_are_as_close_as_eagers(
    name: str, size: tuple[int, int], is_last: bool, dtype: torch.dtype
) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.silu(POOLS[name](F.relu(x * 2 + 1)))

    channels, side = size
    x = torch.randn(16, channels, side, side + 3, device="cuda", dtype=dtype)
    x = x.contiguous(memory_format=torch.channels_last) if is_last else x
    compiled: Any = fc.compile(fn, strict=True)
    gradient = torch.randn_like(fn(x))
    ours = [step(compiled, x.clone(), gradient.clone()) for _ in range(3)][-1]  # a CUDA graph at last
    # PyTorch's CUDA kernel of this gradient is wrong for channels last and padding (its issue 188344).
    x, gradient = x.contiguous(), gradient.contiguous()
    eager, truth = step(fn, x.clone(), gradient.clone()), step(fn, x.double(), gradient.double())
    for our, their, true in zip(ours, eager, truth, strict=True):
        assert not (problem := not_worse(our, their, true)), problem
        assert our.is_contiguous(memory_format=torch.channels_last if is_last else torch.contiguous_format)
    assert not any(plan.leftovers for plan in compiled.plan), str(compiled.plan)


def test_a_sequence_is_pooled_as_an_image_of_one_row() -> None:
    x = torch.randn(32, 40, 501, device="cuda")
    for fn in (lambda x: F.avg_pool1d(x * 2, 5, 2, 2), lambda x: F.max_pool1d(x * 2, 5, 2, 2)):
        compiled: Any = fc.compile(fn)
        with torch.no_grad():
            assert not (problem := not_worse(compiled(x), fn(x), fn(x.double()))), problem


@pytest.mark.parametrize("name", ["average, 3 x 3 by 2", "average, 3 x 3, inside", "maximum, 3 x 3 by 2"])
def test_pooling_fuses_with_a_norm_in_inference_and_an_activation(name: str) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(96)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.norm(POOLS[name](x)))

    model = last(Block().cuda().to(torch.bfloat16)).eval()
    x = torch.randn(64, 96, 56, 56, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    compiled, exact = fc.compile(model, strict=True), copy.deepcopy(model).double()
    with torch.no_grad():
        results = [compiled(x) for _ in range(3)]
        assert not (problem := not_worse(results[-1], model(x), exact(x.double()))), problem
    (plan,) = compiled.plan
    assert len(plan.clusters) == 1 and not plan.leftovers, str(plan)


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_maxima_of_what_is_not_finite_are_eagers(value: float) -> None:
    def fn(x: Tensor) -> Tensor:
        return F.max_pool2d(x * 2, 3, 2, 1)

    compiled: Any = fc.compile(fn, strict=True)
    for share in (0.2, 1.0):
        x = torch.randn(4, 8, 33, 30, device="cuda")
        x = x.masked_fill(torch.rand_like(x) < share, value)
        gradient = torch.randn_like(fn(x))
        results: list[list[Tensor]] = []
        for called in (compiled, fn):
            results.append(step(called, x.clone(), gradient))
        for ours, eager in zip(*results, strict=True):
            torch.testing.assert_close(ours, eager, equal_nan=True)
