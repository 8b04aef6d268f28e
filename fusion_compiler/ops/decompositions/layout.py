"""Decompose operators that cut, pad and repeat."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten


def _pad(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [before, after])


def _cut(x: Tensor, pads: Sequence[int | torch.SymInt], value: float = 0) -> Tensor:
    """Return a copy of a range of `x` for pads that are all negative, which is how a padding's gradient is
    written: clusters read a view where it lies."""
    if not all(isinstance(pad, int) and pad <= 0 for pad in pads):
        return NotImplemented
    for i in range(len(pads) // 2):
        dim = x.ndim - 1 - i
        x = x.narrow(dim, -pads[2 * i], x.shape[dim] + pads[2 * i] + pads[2 * i + 1])
    return x.clone()


def _slice_backward(grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    dim %= len(sizes)
    size, length = sizes[dim], grad.shape[dim]
    if step != 1:
        return torch.slice_scatter(grad.new_zeros(sizes), grad, dim, start, end, step)
    start = min(max(start + size if start < 0 else start, 0), size)
    return _pad(grad, dim, start, size - start - length)


def _select_backward(grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    dim %= len(sizes)
    index = index + sizes[dim] if index < 0 else index
    return _pad(grad.unsqueeze(dim), dim, index, sizes[dim] - index - 1)


def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    starts = [0, *itertools.accumulate(sizes)]
    return [x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    sizes = [1] * (len(repeats) - x.ndim) + list(x.shape)
    spread = x.view([extent for size in sizes for extent in (1, size)])
    spread = spread.expand([extent for pair in zip(repeats, sizes, strict=True) for extent in pair])
    return spread.clone(memory_format=torch.contiguous_format).view(
        [times * size for times, size in zip(repeats, sizes, strict=True)]
    )


TABLE: dict[OpOverload, Callable[..., Any]] = {
    aten.constant_pad_nd.default: _cut,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.repeat.default: _repeat,
}
