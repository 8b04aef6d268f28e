"""Decompose reductions, running ones and top-k."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_compiler.ops.decompositions.tensors import (
    coordinates,
    count_of,
    on_gpu,
    sum_over,
    widened,
    zero_like,
)
from fusion_compiler.ops.dims import wrapped
from fusion_compiler.ops.own import running

aten = torch.ops.aten

LARGE = 1 << 24  # elements that no cache holds until they are read again
SAMPLE = 64  # one of so many rows is read beforehand
# Top-k of more elements stays a library call: each adds a search, two reductions, to the kernel, and lowering
# stores no more of them beside a row.
MOST_SEARCHED = 8
# So does top-k of longer rows: all searches are of one tile, in registers. If a row's elements are not
# neighbours in memory, the tile has several rows side by side.
LONGEST, LONGEST_ACROSS = 4096, 2048


def _mean(x: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    dims = wrapped(dim, x.ndim)
    return (sum_over(widened(x), dims, keepdim) / count_of(x, dims)).to(x.dtype)


def _var_mean(
    x: Tensor, dim: Any = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    dims, wide = wrapped(dim, x.ndim), widened(x)
    count = count_of(x, dims)
    near = _near_mean(wide, dims)
    mean = sum_over(wide if near is None else wide - near, dims, True) / count
    centred = wide - (mean if near is None else near)
    squares = sum_over(centred * centred, dims, True)
    if near is not None:
        squares, mean = (squares - count * mean * mean).clamp_min(0), near + mean
    freedom = torch.sym_max(count - (1 if correction is None else correction), 0)
    var = squares / freedom
    if not keepdim:
        var, mean = var.squeeze(dims), mean.squeeze(dims)
    return var.to(x.dtype), mean.to(x.dtype)


def _near_mean(x: Tensor, dims: Sequence[int]) -> Tensor | None:
    """Return the mean of one in `SAMPLE` rows for a large tensor whose columns are reduced, or None for any
    other.

    Programs hold a row until its mean is known, but must read columns a second time for the variance. With a
    value near the mean, both sums are computed in one pass. Rounding errors grow by the square of its
    distance, which is at most SAMPLE - 1 variances for the mean of such a part (Chan, Golub and LeVeque 1983,
    on shifted data).
    """
    kept = [d for d in range(x.ndim) if d not in dims and not statically_known_true(x.shape[d] == 1)]
    across = any(statically_known_true(x.stride(d) == 1) for d in kept)
    if not across or not statically_known_true(x.numel() >= LARGE):
        return None
    outermost = max((d for d in dims if not statically_known_true(x.shape[d] == 1)), key=x.stride)
    part = x.narrow(outermost, 0, -(-x.shape[outermost] // SAMPLE))
    return sum_over(part, dims, True) / count_of(part, dims)


def _logsumexp(x: Tensor, dim: Any, keepdim: bool = False) -> Tensor:
    wide = widened(x if x.is_floating_point() else x.to(torch.get_default_dtype()))
    dims = wrapped(dim, x.ndim)
    if statically_known_true(count_of(x, dims) == 0):  # there is no largest
        nothing = torch.log(sum_over(torch.exp(wide), dims, keepdim))
        return nothing.to(x.dtype if x.is_floating_point() else wide.dtype)
    top = torch.amax(wide, dims, keepdim=True)
    top = torch.where(torch.isinf(top), zero_like(top), top)
    total = torch.log(sum_over(torch.exp(wide - top), dims, True)) + top
    return (total if keepdim else total.squeeze(dims)).to(x.dtype if x.is_floating_point() else wide.dtype)


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    dims, size = wrapped(dim, x.ndim), widened(x).abs()
    match float(ord):
        case 0.0:
            norm = sum_over((size != 0).to(size.dtype), dims, keepdim)
        case _ if all(statically_known_true(x.shape[d] == 1) for d in dims):
            norm = size if keepdim else size.squeeze(dims)  # exact, as eager's: no power and its root
        case 1.0:
            norm = sum_over(size, dims, keepdim)
        case 2.0:
            norm = torch.sqrt(sum_over(size * size, dims, keepdim))
        case power if math.isinf(power):
            norm = (torch.amax if power > 0 else torch.amin)(size, dims, keepdim)
        case power:
            norm = sum_over(size**power, dims, keepdim) ** (1 / power)
    return norm.to(x.dtype)


def _with_place(
    value: Callable[..., Tensor], place: Callable[..., Tensor], x: Tensor, dim: int, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Compute max or min along a dimension, and where it stands."""
    ordered = x.to(torch.uint8) if x.dtype is torch.bool else x
    return value(x, dim, keepdim), place(ordered, dim, keepdim)


def _topk(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the largest (smallest) elements of each row and their positions, which searches find one after
    the other, each among the elements that are left.

    position: the place of each element in its row. Of equal elements the first is taken; zeros of both signs
    are equal, and the sign of a result may be that of another zero than the one at its index. A NaN is larger
    than any number: it counts as infinite, and its position lies before the row for the largest, behind the
    row for the smallest. An element that was taken counts as the last of all, and has the last position.
    """
    if not on_gpu(x) or not x.is_floating_point() or not -x.ndim <= dim < x.ndim:
        return NotImplemented
    size, is_row = x.shape[dim], statically_known_true(x.stride(dim) == 1)
    if type(k) is not int or type(size) is not int or not 0 < k <= MOST_SEARCHED or k >= size:
        return NotImplemented
    if size > (LONGEST if is_row else LONGEST_ACROSS) or statically_known_true(x.numel() == 0):
        return NotImplemented
    reduce, last, shift = (torch.amax, -math.inf, -size) if largest else (torch.amin, math.inf, size)
    position, is_nan = coordinates(size, dim % x.ndim, x).to(torch.int32), torch.isnan(x)
    left, position = torch.where(is_nan, math.inf, x), torch.where(is_nan, position + shift, position)
    values, indices = list[Tensor](), list[Tensor]()
    for _ in range(k):
        value = reduce(left, dim, keepdim=True)
        first = torch.amin(torch.where(left == value, position, 2 * size), dim, keepdim=True)
        index, taken = first % size, position == first
        left, position = torch.where(taken, last, left), torch.where(taken, 2 * size, position)
        values.append(torch.where(first == index, value, math.nan))
        indices.append(index.to(torch.int64))
    return torch.cat(values, dim).contiguous(), torch.cat(indices, dim).contiguous()


def _running(value: OpOverload, place: OpOverload, x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Compute cummax or cummin by two operators of one result each."""
    return value(x, dim), place(x, dim)


TABLE: dict[OpOverload, Callable[..., Any]] = {
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.var.correction: lambda *args, **named: _var_mean(*args, **named)[0],
    aten.var_mean.correction: _var_mean,
    aten.logsumexp.default: _logsumexp,
    aten.linalg_vector_norm.default: _vector_norm,
    aten.max.default: lambda x: torch.amax(x),
    aten.min.default: lambda x: torch.amin(x),
    aten.cummax.default: functools.partial(_running, running.largest, running.where_largest),
    aten.cummin.default: functools.partial(_running, running.smallest, running.where_smallest),
    aten.max.dim: functools.partial(_with_place, torch.amax, torch.argmax),
    aten.min.dim: functools.partial(_with_place, torch.amin, torch.argmin),
    aten.topk.default: _topk,
}
