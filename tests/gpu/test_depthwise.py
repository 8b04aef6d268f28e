"""Depthwise convolutions in clusters on the device: values, gradients, and that kernels hold them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion_compiler as fc
from benchmarks.accuracy import not_worse

# channels, image size, kernel, stride, dilation, dimensions
SHAPES = [
    (64, 56, 3, 1, 1, 2), (96, 33, 5, 2, 1, 2), (72, 14, 7, 1, 1, 2), (40, 28, 3, 1, 2, 2),
    (64, 500, 31, 1, 1, 1),
]  # fmt: skip


@pytest.fixture(autouse=True)
def whole_float32() -> Any:
    """cuDNN multiplies in TF32 otherwise."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


class Block(nn.Module):
    """A depthwise convolution with bias between a multiplication and a batch norm with SiLU."""

    def __init__(self, channels: int, kernel: int, stride: int, dilation: int, dimensions: int) -> None:
        super().__init__()
        convolution, norm = (nn.Conv1d, nn.BatchNorm1d) if dimensions == 1 else (nn.Conv2d, nn.BatchNorm2d)
        padding = dilation * (kernel // 2)
        self.convolution = convolution(channels, channels, kernel, stride, padding, dilation, groups=channels)
        self.norm = norm(channels)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(self.norm(self.convolution(x * 0.5)))


def last(model: Any) -> Any:
    """Return a model whose weights have their channels last."""
    return model.to(memory_format=torch.channels_last)


def kernels(compiled: Any) -> set[str]:
    return {name for plan in compiled.plan for c in plan.clusters for name in c.ops if "depthwise" in name}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize(("channels", "size", "kernel", "stride", "dilation", "dimensions"), SHAPES)
def test_values_and_gradients_are_as_close_as_eagers(
    channels: int, size: int, kernel: int, stride: int, dilation: int, dimensions: int,
    is_last: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    model = Block(channels, kernel, stride, dilation, dimensions).cuda().to(dtype)
    x = torch.randn(32, channels, *[size] * dimensions, device="cuda", dtype=dtype)
    if is_last and dimensions == 2:
        model, x = last(model), x.contiguous(memory_format=torch.channels_last)
    compiled, exact = fc.compile(copy.deepcopy(model), strict=True), copy.deepcopy(model).double()
    results: list[list[Tensor]] = []
    gradient: Any = None
    for called in (compiled, model, exact):
        wide = called is exact
        image = (x.double() if wide else x).detach().requires_grad_()
        for _ in range(3 if called is compiled else 1):
            called.zero_grad()
            image.grad = None
            result = called(image)
            if gradient is None:
                gradient = torch.randn_like(result)
            result.backward(gradient.double() if wide else gradient)
        named = dict(called.named_parameters())
        weight = next(p for n, p in named.items() if n.endswith("convolution.weight"))
        results.append([result.detach(), image.grad, weight.grad])
    for ours, eager, truth in zip(*results, strict=True):
        assert not (problem := not_worse(ours, eager, truth)), problem
        assert ours.stride() == eager.stride()


def test_a_convolution_fuses_with_norm_and_activation() -> None:
    model = last(Block(96, 5, 1, 1, 2).cuda().to(torch.bfloat16)).eval()
    x = torch.randn(128, 96, 28, 28, device="cuda", dtype=torch.bfloat16)
    x = x.contiguous(memory_format=torch.channels_last)
    compiled, exact = fc.compile(model, strict=True), copy.deepcopy(model).double()
    with torch.no_grad():
        results = [compiled(x) for _ in range(3)]
        assert not (problem := not_worse(results[-1], model(x), exact(x.double()))), problem
    (plan,) = compiled.plan
    assert len(plan.clusters) == 1 and not plan.leftovers, str(plan)
    assert kernels(compiled)
