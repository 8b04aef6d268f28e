"""Say of every view which element of its operand each element of its result is.

A view moves no data, and its geometry is one of six values. Whoever asks where an element lies reads that
value instead of an operator's arguments: lowering, layouts, chunks of rows, and rewrites above autograd.

    permute(x, (2, 0, 1))   Permuted((2, 0, 1))       result dimension 0 is operand dimension 2
    x[:, 4:9:2]             Part(1, 4, 2)             element i along dimension 1 is element 4 + 2 * i
    x[:, 3]                 Selected(1, 3)            dimension 1 is gone
    diagonal(x, 1, 0, 2)    Diagonal(0, 2, 1)
    expand(x, (8, -1, 4))   Expanded()                dimensions align at the last one; those of size 1 repeat
    view(x, (6, 4))         Reshaped()                the same elements in row-major order
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload

aten = torch.ops.aten
Size = Any  # an integer, a torch.SymInt, a sympy expression or a node of a graph


@dataclass(frozen=True)
class Permuted:
    """Dimension i of the result is dimension order[i] of the operand."""

    order: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Element i along `dim` is element start + i * step of the operand."""

    dim: int
    start: Size
    step: Size = 1


@dataclass(frozen=True)
class Selected:
    """The result is element `index` of the operand along `dim`, and lacks that dimension."""

    dim: int
    index: Size


@dataclass(frozen=True)
class Diagonal:
    """The last dimension of the result runs along `first` and, `offset` elements further, along `second`."""

    first: int
    second: int
    offset: int


@dataclass(frozen=True)
class Expanded:
    """Dimensions align at the last one; those of size 1, and those that the operand lacks, are repeated."""


@dataclass(frozen=True)
class Reshaped:
    """The result has the operand's elements in row-major order, in another shape or the same."""


View = Permuted | Part | Selected | Diagonal | Expanded | Reshaped
Shape = Sequence[Size]
Reader = Callable[..., View]  # of the operand's shape, then the arguments of the operator by name


def wrap(dim: int, rank: int) -> int:
    """Return the number of a dimension that may be counted from the end."""
    return dim + rank if dim < 0 else dim


def _swapped(shape: Shape, dim0: int, dim1: int) -> View:
    order = list(range(len(shape)))
    if order:
        a, b = wrap(dim0, len(order)), wrap(dim1, len(order))
        order[a], order[b] = order[b], order[a]
    return Permuted(tuple(order))


def _moved(shape: Shape, source: int | Sequence[int], destination: int | Sequence[int]) -> View:
    rank = len(shape)
    pair = ([end] if isinstance(end, int) else end for end in (source, destination))
    sources, destinations = ([wrap(d, rank) for d in dims] for dims in pair)
    others = iter(d for d in range(rank) if d not in sources)
    to = dict(zip(destinations, sources, strict=True))
    return Permuted(tuple(to[d] if d in to else next(others) for d in range(rank)))


def _slice(shape: Shape, dim: int = 0, start: Size = None, step: Size = 1, **_: Size) -> View:
    dim = wrap(dim, len(shape))
    start = 0 if start is None else start
    if isinstance(start, int):
        start = start + shape[dim] if start < 0 else start
    if isinstance(start, int) and isinstance(shape[dim], int):
        start = min(max(start, 0), shape[dim])
    return Part(dim, start, step)


def _select(shape: Shape, dim: int, index: Size) -> View:
    dim = wrap(dim, len(shape))
    return Selected(dim, index + shape[dim] if isinstance(index, int) and index < 0 else index)


def _diagonal(shape: Shape, offset: int = 0, dim1: int = 0, dim2: int = 1) -> View:
    return Diagonal(wrap(dim1, len(shape)), wrap(dim2, len(shape)), offset)


def _split(shape: Shape, split_size: Size, dim: int = 0, *, part: int) -> View:
    return Part(wrap(dim, len(shape)), split_size * part)


def _split_with_sizes(shape: Shape, split_sizes: Sequence[Size], dim: int = 0, *, part: int) -> View:
    return Part(wrap(dim, len(shape)), sum(split_sizes[:part]))


def _turned(shape: Shape, /, **_: Size) -> View:
    return Permuted(tuple(reversed(range(len(shape)))))


def _reshaped(shape: Shape, /, **_: Size) -> View:
    return Reshaped()


# The views that are rows of the operator table.
VIEWS: Mapping[OpOverload, Reader] = {
    aten.permute.default: lambda shape, dims: Permuted(tuple(wrap(d, len(shape)) for d in dims)),
    aten.transpose.int: _swapped,
    aten.t.default: _turned,
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.diagonal.default: _diagonal,
    aten.expand.default: lambda shape, **_: Expanded(),
    **dict.fromkeys(
        (
            aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default,
            aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.alias.default,
            aten.detach.default, aten.lift_fresh_copy.default,
        ),
        _reshaped,
    ),
}  # fmt: skip
# Views of several results. Each result is a part of the operand.
SPLITS: Mapping[OpOverload, Reader] = {
    aten.split.Tensor: _split, aten.split_with_sizes.default: _split_with_sizes,
    aten.unbind.int: lambda shape, dim=0, *, part: Selected(wrap(dim, len(shape)), part),
}  # fmt: skip
# Views that only graphs above autograd have, since tracing decomposes them.
COMPOSITES: Mapping[OpOverload, Reader] = {
    aten.flatten.using_ints: _reshaped,
    aten.unflatten.int: _reshaped,
    aten.swapaxes.default: lambda shape, axis0, axis1: _swapped(shape, axis0, axis1),
    aten.swapdims.default: _swapped,
    aten.movedim.int: _moved,
    aten.movedim.intlist: _moved,
    aten.mT.default: lambda shape: _swapped(shape, -2, -1),
    aten.numpy_T.default: _turned,
}
# Operators whose result is `self` with `src` in the place of a view of it, and that view.
OVERLAYS: Mapping[OpOverload, OpOverload] = {
    aten.slice_scatter.default: aten.slice.Tensor,
    aten.select_scatter.default: aten.select.int,
    aten.diagonal_scatter.default: aten.diagonal.default,
}
_ALL: Mapping[OpOverload, Reader] = {**VIEWS, **SPLITS, **COMPOSITES}


def is_view(target: object) -> bool:
    """True for an operator whose result, or each of whose results, is a view of its operand."""
    return target in _ALL


def view_of(
    target: OpOverload, shape: Shape, arguments: Mapping[str, Any], part: int | None = None
) -> View | None:
    """Return the geometry of a view; None for another operator, and for a split without `part`.

    target: a view, or one of OVERLAYS for the view into which it writes.
    shape: the operand's. arguments: the others, by the names of the schema; defaults may be missing.
    part: of the results of a split, the number of the one that is asked for.
    """
    reader = _ALL.get(OVERLAYS.get(target, target))
    if reader is None or (target in SPLITS) != (part is not None):
        return None
    others = {n: v for n, v in arguments.items() if n not in ("self", "src", "end")}
    if part is not None:
        others["part"] = part
    return reader(shape, **others)


def indexed(dims: Sequence[int], shapes: Sequence[Shape]) -> tuple[int, Shape]:
    """Return where the dimensions of tensors stand that index some dimensions, and their sizes together: in
    the place of those that they index if these are side by side, or else first."""
    rank = max(map(len, shapes))
    filled = [(*(1 for _ in range(rank - len(shape))), *shape) for shape in shapes]
    common = tuple(next((n for n in sizes if n != 1), 1) for sizes in zip(*filled, strict=True))
    return (dims[0] if list(dims) == list(range(dims[0], dims[-1] + 1)) else 0), common
