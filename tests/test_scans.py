"""Scans along a row: values and gradients of each, alone and among neighbours, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusion_compiler as fc
from fusion_compiler.codegen import assemble
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.loops import Scan
from fusion_compiler.runtime.target import compile_for
from tests.exactness import Compiled, cramped, misaligned_forms, not_as_close, rounding_noise, wide

H200 = device_spec("h200")

SCANS: dict[str, Callable[..., Tensor]] = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "cummax": lambda x, dim: torch.cummax(x, dim)[0],
    "cummin": lambda x, dim: torch.cummin(x, dim)[0],
    "logcumsumexp": torch.logcumsumexp,
    "where_max": lambda x, dim: torch.cummax(x, dim)[1],
    "where_min": lambda x, dim: torch.cummin(x, dim)[1],
}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.bool, torch.uint8, torch.int32, torch.int64)
SHAPES = {  # of any rank, widths of one, odd and long, along the last dimension and before it
    "one": ((3, 1), 1),
    "vector": ((37,), 0),
    "odd": ((2, 3, 61), -1),
    "long": ((3, 1000), 1),
    "before": ((2, 24, 5), 1),
    "first": ((33, 3), 0),
    "scalar": ((), 0),
    "empty": ((0, 4), 1),
    "no width": ((4, 0), 1),
}


def backwards(scan: Callable[..., Tensor], x: Tensor, dim: int) -> Tensor:
    return scan(x.flip(dim), dim).flip(dim) if x.ndim else scan(x, dim)


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers near 1, so that products stay in range; few integers, so that many are equal."""
    if dtype.is_floating_point:
        return (torch.rand(shape, dtype=torch.float64) * 0.4 + 0.8).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 5, shape).to(dtype)


def check(fn: Callable[..., Any], x: Tensor, fast: Compiled, width: int) -> None:
    """Values and gradients of one tensor, beside eager's and float64's.

    Kernels scan in float32, as eager does on a GPU; on a CPU it does in float64. So besides there may be what
    float32 loses in log2(width) steps, of what all terms come to without their signs.
    """
    grads = x.dtype.is_floating_point
    inputs = [wide(x).requires_grad_(grads), *(x.clone().requires_grad_(grads) for _ in range(2))]
    truth, eager, ours = (f(i) for f, i in zip((fn, fn, fast), inputs, strict=True))
    steps = (8 + math.log2(max(width, 1))) / 8
    kinds = [x if x.dtype is torch.float64 else x.float()]
    noise = steps * rounding_noise(kinds, [truth])
    assert (problem := not_as_close(ours, eager, truth, noise)) is None, problem
    if not eager.requires_grad:
        return
    outer = torch.randn(truth.shape, dtype=torch.float64)
    most = torch.autograd.grad(truth, inputs[0], outer.abs(), retain_graph=True)[0]
    results = zip((truth, eager, ours), inputs, strict=True)
    found = [torch.autograd.grad(y, i, outer.to(y.dtype))[0] for y, i in results]
    noise = steps * rounding_noise(kinds, [most])
    assert (problem := not_as_close(found[2], found[1], found[0], noise)) is None, problem


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reverse", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("name", SCANS)
def test_each_scan_beside_float64(name: str, reverse: bool, shape: str) -> None:
    sizes, dim = SHAPES[shape]
    scan = SCANS[name]

    def fn(x: Tensor) -> Tensor:
        return backwards(scan, x, dim) if reverse else scan(x, dim)

    for dtype in (*FLOATS, *(() if name == "logcumsumexp" else INTEGERS)):
        fast = Compiled(fn)
        check(fn, drawn(sizes, dtype), fast, sizes[dim] if sizes else 1)
        assert not fast.eager_ops() - {"aten.scatter_add.default"}
