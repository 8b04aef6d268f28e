"""Depthwise convolutions in clusters on the device: values, gradients, and that kernels hold them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion_compiler as fc
from benchmarks.harness.accuracy import not_worse

# channels, image size, kernel, stride, dilation, dimensions
SHAPES = [
    (64, 56, 3, 1, 1, 2), (96, 33, 5, 2, 1, 2), (72, 14, 7, 1, 1, 2), (40, 28, 3, 1, 2, 2),
    (64, 500, 31, 1, 1, 1),
]  # fmt: skip


@pytest.fixture(autouse=True)
def whole_float32() -> Any:
    """cuDNN multiplies in TF32 otherwise."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def convolution(channels: int, kernel: int, stride: int, dilation: int, dimensions: int) -> nn.Module:
    """Return a depthwise convolution with bias."""
    kind = nn.Conv1d if dimensions == 1 else nn.Conv2d
    padding = dilation * (kernel // 2)
    return kind(channels, channels, kernel, stride, padding, dilation, groups=channels).cuda()


def last(model: Any) -> Any:
    """Return a model whose weights have their channels last."""
    return model.to(memory_format=torch.channels_last)


def gradient_of(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def order(x: Tensor) -> list[int]:
    """Return the strides of a tensor, but for dimensions of one element, which have any."""
    return [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize(("channels", "size", "kernel", "stride", "dilation", "dimensions"), SHAPES)
def test_values_and_gradients_are_as_close_as_eagers(
    channels: int, size: int, kernel: int, stride: int, dilation: int, dimensions: int,
    is_last: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    model = nn.Sequential(convolution(channels, kernel, stride, dilation, dimensions), nn.SiLU()).to(dtype)
    x = torch.randn(32, channels, *[size] * dimensions, device="cuda", dtype=dtype)
    if is_last and dimensions == 2:
        model, x = last(model), x.contiguous(memory_format=torch.channels_last)
    compiled: Any = fc.compile(copy.deepcopy(model), strict=True)
    exact = copy.deepcopy(model).double()
    gradient = torch.randn_like(model(x))
    results: list[list[Tensor]] = []
    clone, double = torch.Tensor.clone, torch.Tensor.double
    for called, of in ((compiled, clone), (model, clone), (exact, double)):
        for _ in range(3 if called is compiled else 1):  # recorded as a CUDA graph at last
            image = of(x).requires_grad_()
            called.zero_grad()
            called(image).backward(of(gradient))
        (weight,) = (p for p in called.parameters() if p.ndim > 1)
        results.append([called(image).detach(), *map(gradient_of, (image, weight))])
    for ours, eager, truth in zip(*results, strict=True):
        assert not (problem := not_worse(ours, eager, truth)), problem
        assert order(ours) == order(eager)


def test_a_convolution_fuses_with_norm_and_activation() -> None:
    block = nn.Sequential(convolution(96, 5, 1, 1, 2), nn.BatchNorm2d(96).cuda(), nn.SiLU())
    model = last(block.to(torch.bfloat16)).eval()
    x = torch.randn(128, 96, 28, 28, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    compiled, exact = fc.compile(model, strict=True), copy.deepcopy(model).double()
    with torch.no_grad():
        results = [compiled(x) for _ in range(3)]
        assert not (problem := not_worse(results[-1], model(x), exact(x.double()))), problem
    (plan,) = compiled.plan
    assert len(plan.clusters) == 1 and not plan.leftovers, str(plan)
