"""What stands beside convolutions, in rows of the operator table.

cuDNN's convolutions add no bias: ATen adds it in a pass over the result, and sums its gradient in another
over the result's gradient. Apart from the convolution both join the clusters around them. Everything here
keeps channels-last. On a CPU convolutions have their bias inside, which rounds once, and stay whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _adds_apart(x: Tensor) -> bool:
    return x.device.type == "cuda" and x.is_floating_point()


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """conv(x [n, c, ...], weight, bias [o]) -> conv(x, weight) + bias, on CUDA."""
    if bias is None or not _adds_apart(x) or bias.dtype != x.dtype:
        return NotImplemented
    result = aten.convolution.default(x, weight, None, *geometry)
    return result + bias.view([-1 if d == 1 else 1 for d in range(result.ndim)])


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *rest: Any
) -> Gradients:
    """The bias's gradient as a sum over all but the channels, in float32, on CUDA."""
    *geometry, wanted = rest
    if not wanted[2] or not _adds_apart(gradient):
        return NotImplemented
    dims = [d for d in range(gradient.ndim) if d != 1]
    half = gradient.dtype in (torch.float16, torch.bfloat16)
    bias = torch.sum(gradient, dims, dtype=torch.float32 if half else None).to(gradient.dtype)
    if not (wanted[0] or wanted[1]):
        return None, None, bias
    found = aten.convolution_backward.default(
        gradient, x, weight, bias_sizes, *geometry, [wanted[0], wanted[1], False]
    )
    return found[0], found[1], bias


def nearest_backward(
    gradient: Tensor, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None
) -> Tensor:
    """gradient [n, c, *output_size] summed over the block that each element of [n, c, ...] was spread to.

    Where sizes grow by powers of two, for which eager's places are exact in float32; else NotImplemented.
    """
    sizes = input_size[2:]
    if not all(type(s) is int and s for s in (*output_size, *input_size)):
        return NotImplemented
    factors = [out // size for out, size in zip(output_size, sizes, strict=True)]
    told = [
        factor if s is None else s for factor, s in zip(factors, scales or [None] * len(factors), strict=True)
    ]
    whole = all(size * f == out for size, f, out in zip(sizes, factors, output_size, strict=True))
    if not whole or told != factors or any(f & (f - 1) for f in factors):
        return NotImplemented
    blocks = [n for size, factor in zip(sizes, factors, strict=True) for n in (size, factor)]
    half = gradient.dtype in (torch.float16, torch.bfloat16)
    wide = gradient.reshape([*input_size[:2], *blocks]).to(torch.float32 if half else gradient.dtype)
    total = wide.sum(list(range(3, wide.ndim, 2))).to(gradient.dtype)
    return total.contiguous(memory_format=suggest_memory_format(gradient))


TABLE: dict[OpOverload, Callable[..., Any]] = {
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.upsample_nearest1d_backward.default: nearest_backward,
    aten.upsample_nearest2d_backward.default: nearest_backward,
    aten.upsample_nearest3d_backward.default: nearest_backward,
}
