"""Add up rows by their numbers: gradients of lookups, `index_add`, scatters by whole rows.

    index_put(x, [index], rows, accumulate=True)   ->   x + sum_rows(rows, order, bounds)

Every operator here becomes one call of `ops/own/sum_rows.py` on a table `x`: [R, C], numbers: [N] and rows:
[N, C]. The numbers are sorted, and each sum is made in the order of the rows, to the same bits each time.
Calls with the same numbers share the sorted order, in forward and backward: `merge_equal` makes one call of
several equal ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_compiler.ops.decompositions.tensors import hinted
from fusion_compiler.ops.own.sum_rows import largest_rows, smallest_rows, sum_rows
from fusion_compiler.ops.views import indexed

aten = torch.ops.aten

SPARSE = 8  # rows of a table for each row that is added, beyond which most of a table of narrow rows is empty
SPARSE_CACHE = 3
NARROW = 32  # elements of a row; below, the numbers' bounds take about as many bytes as the sums
MOST_IN_TURN = 256  # rows that a program combines, one after the other
LEAST_IN_TURN = 64


def index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Any:
    """Return x + the sum of the values that each element of x gets.

    indices: integers, for any dimensions of x, which broadcast. values: broadcast to what the indices select.
    """
    dims = [d for d, index in enumerate(indices) if index is not None]
    chosen = [index for index in indices if index is not None]
    masks = any(index.dtype in (torch.bool, torch.uint8) for index in chosen)
    if not accumulate or not x.is_floating_point() or masks:
        return NotImplemented
    start, _ = indexed(dims, [tuple(index.shape) for index in chosen])
    common = torch.broadcast_shapes(*(index.shape for index in chosen))
    kept = [d for d in range(x.ndim) if d not in dims]
    sizes, rest = [x.shape[d] for d in dims], [x.shape[d] for d in kept]
    size, width = math.prod(sizes), math.prod(rest)
    by_rows = dims == [0] and values.shape == (*common, *rest)
    if not _is_worth_sorting(size, math.prod(common), width, by_rows):
        return NotImplemented
    number = _numbers(sizes[0], chosen[0])
    for more, index in zip(sizes[1:], chosen[1:], strict=True):
        number = number.to(_held(size)) * more + _numbers(more, index)
    values = values.expand(*rest[:start], *common, *rest[start:])
    first = range(start, start + len(common))
    values = values.permute(*first, *(d for d in range(values.ndim) if d not in first))
    each = 1  # numbers that a row is added to, one after the other
    for d in reversed(range(len(common))):
        if values.stride(d) != 0 or not isinstance(common[d], int) or common[d] < 2:
            break
        each, values = each * common[d], values.select(d, 0)
    rows = values.reshape(math.prod(common) // each, math.prod(rest))
    if number.ndim != 1 or len(dims) > 1:
        number = number.expand(common).reshape(math.prod(common))
    total = sort(number, size).combined(rows, "sum", each)
    places = [*dims, *kept]
    total = total.view(*sizes, *rest).permute(*(places.index(d) for d in range(x.ndim)))
    return x + total


def embedding_backward(
    grad: Tensor, indices: Tensor, size: Any, padding: int, scale_grad_by_freq: bool
) -> Any:
    """Return the gradient of a lookup whose rows are added up in bags. Any other gradient is left to ATen."""
    bags = indices.ndim > 0 and indices.shape[-1] != 1 and grad.stride(indices.ndim - 1) == 0
    if not bags or padding >= 0 or scale_grad_by_freq:
        return NotImplemented
    return index_put(grad.new_zeros((size, grad.shape[-1])), [indices], grad, accumulate=True)


def scatter_reduce(
    x: Tensor, dim: int, index: Tensor, src: Tensor, reduce: str, *, include_self: bool = True
) -> Any:
    """Scatter by an index of rows, expanded over the other dimensions. Any other index is left to ATen. The
    result is contiguous, whatever the strides of `x`."""
    combine = {"sum": "sum", "amax": "max", "amin": "min"}.get(reduce)
    if combine is None or not x.is_floating_point() or not _by_rows(x, dim, index):
        return NotImplemented
    dim %= x.ndim
    dims = [dim, *(d for d in range(x.ndim) if d != dim)]
    size, count, rest = x.shape[dim], index.shape[dim], [x.shape[d] for d in dims[1:]]
    atomics = combine == "sum" and not torch.are_deterministic_algorithms_enabled()
    if not _is_worth_sorting(size, count, math.prod(rest)) or (atomics and math.prod(rest) == 1):
        return NotImplemented  # an atomic operation for each row costs less than to sort them
    numbers = index.permute(dims)[(slice(None), *(0 for _ in rest))]
    ordered = sort(torch.gather(_count(size, x), 0, numbers), size)
    rows = src.permute(dims)[tuple(slice(n) for n in (count, *rest))]
    total = ordered.combined(rows.reshape(count, math.prod(rest)), combine)
    back = [dims.index(d) for d in range(x.ndim)]
    total = total.view(size, *rest).permute(back)
    if not include_self:
        taken = (ordered.last > ordered.first).view(size, *(1 for _ in rest)).permute(back)
        return torch.where(taken, total, x).contiguous()
    return {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[combine](x, total).contiguous()


def _by_rows(x: Tensor, dim: int, index: Tensor) -> bool:
    """True if `index` is one number for each row of `x` along `dim`, expanded over the other dimensions."""
    if not x.ndim or index.ndim != x.ndim:
        return False
    others = (d for d in range(x.ndim) if d != dim % x.ndim)
    return all(
        statically_known_true(index.shape[d] == x.shape[d])
        and (statically_known_true(index.shape[d] == 1) or statically_known_true(index.stride(d) == 0))
        for d in others
    )


def _is_worth_sorting(size: Any, count: Any, width: Any, by_rows: bool = True) -> bool:
    """True if a table of `size` rows of `width` elements takes `count` rows in this way.

    The bounds have an entry for each row of the table: where these are short, and most are left alone, bounds
    cost more than the rows that are added. Along other dimensions than the first the table may be a cache, of
    which the library's operator writes only what is added to. The answer decides about time alone, so sizes
    that differ from call to call are those of the first.
    """
    most = SPARSE if by_rows else SPARSE_CACHE
    return (by_rows and hinted(width) >= NARROW) or hinted(size) <= most * hinted(count)


def _numbers(size: Any, index: Tensor) -> Tensor:
    """Return an index of a dimension of `size` elements, checked, with negative numbers replaced by the
    positive ones of the same elements."""
    return aten.index.Tensor(_count(size, index), [index])


def _count(size: Any, like: Tensor) -> Tensor:
    """Return 0, 1, ... size - 1."""
    return torch.arange(size, dtype=_held(size), device=like.device)


def _held(size: Any) -> torch.dtype:
    """Return the least dtype in which numbers up to `size` fit, because fewer bytes are sorted faster."""
    if not isinstance(size, int):
        return torch.int64
    return next((d for d in (torch.int16, torch.int32) if size < torch.iinfo(d).max), torch.int64)


def checked(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return (0, 1, ... size - 1; numbers) of a call that checks numbers before they are sorted; None for any
    other call.

    Numbers that are not negative are checked by `gather`, and others by `index`, for which negative ones wrap
    around. Numbers that `gather` has checked do not wrap around, so it can take the place of `index`.
    """
    count = node.args[0] if node.args and node.target in _CHECKS else None
    if not isinstance(count, fx.Node) or count.target is not aten.arange.default:
        return None
    numbers: Any = node.args[2] if node.target is aten.gather.default else node.args[1][0]  # type: ignore[index]
    return (count, numbers) if len(node.args) < 4 and numbers.meta["val"].ndim == 1 else None


def check_as(first: fx.Node, node: fx.Node) -> None:
    """Let `first`, a call that is equal to `node`, refuse the numbers that `node` refuses; in place."""
    if node.target is aten.gather.default is not first.target:
        first.target, first.args = node.target, (node.args[0], 0, first.args[1][0])  # type: ignore[index]


_CHECKS = (aten.gather.default, aten.index.Tensor)


@dataclass(frozen=True)
class Sorted:
    """The object has numbers of rows in sorted order.

    order: int64 [N], the rows in the order of their numbers. first, last: int64 [size], where the rows of
    each number begin and end in `order`. beyond: int64 [ceil(N / block)], for every block-th row in that
    order, where those of its number end.
    """

    order: Tensor
    first: Tensor
    last: Tensor
    block: int
    beyond: Tensor

    def combined(self, rows: Tensor, combine: str, each: int = 1) -> Tensor:
        """Combine rows [N / each, C] -> [size, C]: the "sum", "max" or "min" of the rows of each number,
        where a row has `each` numbers, one after the other.

        A number may have most of the rows. Those up to the next multiple of `block`, in the sorted order, are
        one sum, and from there each block has a sum of its own: these are rows again, already in order.
        """
        call, join = _COMBINES[combine]
        count: Any = self.order.shape[0]
        if not isinstance(count, int) or count <= MOST_IN_TURN:
            return call(rows, self.order, self.first, self.last, each)
        dtype, rows = rows.dtype, rows.to(torch.promote_types(rows.dtype, torch.float32))
        order: Tensor | None = self.order
        heads, beyond, unit, block = [], self.beyond, 1, self.block
        while count > MOST_IN_TURN:
            heads.append(call(rows, order, self.first, self.last, each, unit, block))
            rows = call(rows, order, None, beyond, each, unit, block)
            order, each, unit, count = None, 1, unit * block, beyond.shape[0]
            block = _block_of(count)
            beyond = beyond[::block]
        total = call(rows, order, self.first, self.last, each, unit)
        return functools.reduce(join, heads, total).to(dtype)


def _block_of(count: Any) -> int:
    """Return about as many rows as there are blocks of them, within bounds."""
    root = math.isqrt(count) if isinstance(count, int) else MOST_IN_TURN
    return min(MOST_IN_TURN, max(LEAST_IN_TURN, 1 << root.bit_length()))


_COMBINES: dict[str, tuple[OpOverload, Callable[..., Tensor]]] = {
    "sum": (sum_rows, torch.add),
    "max": (largest_rows, torch.maximum),
    "min": (smallest_rows, torch.minimum),
}


def sort(number: Tensor, size: Any) -> Sorted:
    """Sort numbers, [N] of an integer dtype, each of 0 <= i < size."""
    held = _held(size)
    places, order = torch.sort(number.to(held), stable=True)
    bounds = torch.searchsorted(places, _count(size + 1, number).to(held))
    last, block = bounds[1:], _block_of(number.shape[0])
    return Sorted(order, bounds[:-1], last, block, aten.index.Tensor(last, [places[::block].long()]))
