"""Where a cluster's output falls into pieces of one size, each made by an expression of its own.

A concatenation computes as many things as it has parts. Over the space of the whole, every element computes
all of them under conditions and chooses; over the space of one piece, every element computes each once and
stores it where it belongs:

    out[c] = where(c < n, a[c], b[c - n])   for c < 2 n    ->    out[c], out[n + c] = a[c], b[c]   for c < n

This is index-set splitting with unroll-and-jam. An index split says how an output falls apart; `lower` then
asks for the output's value in each of the pieces, where the conditions are known. What several pieces need
is computed once, and outputs of a piece's size fit in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from fusion_compiler.ir import layout
from fusion_compiler.ir.dag import Op, OpDag, Ref
from fusion_compiler.ir.dims import Dim, product, quotient, simple, smaller
from fusion_compiler.ir.index import axis, combine
from fusion_compiler.ir.loops import Index
from fusion_compiler.ir.writes import stored_shape

aten = torch.ops.aten
MOST_PIECES = 8  # what is computed of each is in registers until it is stored
SECTOR = 32  # bytes that memory moves at once


@dataclass(frozen=True)
class IndexSplit:
    """A tensor of `shape` as `count` equal pieces along `dim`: ranges of it, or those of each `block` of its
    elements there. Of blocks of `count` elements a piece is every count-th element.

    then: how each of these pieces falls apart along another dimension.
    there: of pieces of one element, how many there are where that is only known at run time, at most `count`.
    The others are the last one again, and are not stored.
    """

    shape: tuple[Dim, ...]
    dim: int
    count: int
    block: int | None = None
    then: IndexSplit | None = None
    there: Dim | None = None

    @property
    def counts(self) -> tuple[Dim, ...]:
        """How many pieces there are along each dimension that is split."""
        own = self.count if self.there is None else self.there
        return (own,) if self.then is None else (own, *self.then.counts)

    @property
    def numbers(self) -> tuple[tuple[Dim, ...], ...]:
        """Of the pieces that are made along each dimension that is split."""
        own: tuple[Dim, ...] = tuple(range(self.count))
        if self.there is not None:
            last = simple(self.there - 1)
            own = (0, *(smaller(i, last) for i in range(1, self.count)))
        return (own,) if self.then is None else (own, *self.then.numbers)

    @property
    def dims(self) -> frozenset[int]:
        return frozenset({self.dim}) | (frozenset() if self.then is None else self.then.dims)

    @property
    def length(self) -> Dim:
        """Of a piece along `dim`."""
        if self.there is not None:
            return 1
        length = quotient(self.shape[self.dim], self.count)
        assert length is not None
        return length

    @property
    def piece(self) -> tuple[Dim, ...]:
        """The shape of a piece."""
        shape = self.shape if self.then is None else self.then.piece
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    @property
    def run(self) -> Dim:
        """How many elements of a piece follow each other in the tensor."""
        return self.length if self.block is None else self.block // self.count

    @property
    def factors(self) -> tuple[tuple[Dim, ...], ...]:
        """The dimensions of a piece, one that is cut into blocks as their number and a run."""
        own: tuple[Dim, ...] = (self.length,)
        if self.block is not None and self.run != 1:
            blocks = quotient(self.shape[self.dim], self.block)
            assert blocks is not None
            own = (blocks, self.run)
        others = tuple((size,) for size in self.shape) if self.then is None else self.then.factors
        return (*others[: self.dim], own, *others[self.dim + 1 :])

    def whole(self, coords: tuple[Index, ...], key: int) -> tuple[Index, ...]:
        """Coordinates in the tensor of the element at `coords` of a piece, whose terms are each of blocks or
        within a run. key: of the number of the piece; those along other dimensions are behind it.
        """
        coords = coords if self.then is None else self.then.whole(coords, key + 1)
        here = coords[self.dim]
        steps = ((k, c if self.is_within_run(c) else simple(c * self.count)) for k, c in here.terms)
        along = combine([(Index(here.const, tuple(steps)), 1), (axis(key), self.run)])
        return (*coords[: self.dim], along, *coords[self.dim + 1 :])

    def is_within_run(self, step: Dim) -> bool:
        return self.block is None or (isinstance(step, int) and step < self.block // self.count)


def index_splits_of(dag: OpDag, ops: tuple[str, ...], outputs: tuple[str, ...]) -> tuple[IndexSplit, ...]:
    """Every index split, by an op of a cluster, of a tensor as large as one of its outputs."""
    sizes = {product(stored_shape(dag, dag.op(name))) for name in outputs}
    splits = (index_split_by(dag, dag.op(name)) for name in ops)
    return tuple(dict.fromkeys(c for c in splits if c is not None and product(c.shape) in sizes))


def index_split_by(dag: OpDag, op: Op) -> IndexSplit | None:
    """How an op's result falls into few equal pieces that are made differently; None if it does not."""
    if op.target not in RANGES:
        return None
    shape = op.outputs[0].shape
    step = layout.argument(op, 5, "step", 1) if op.target is aten.slice_scatter.default else 1
    if isinstance(step, int) and step > 1:
        dim = _dim(op, 2)
        fits = step <= MOST_PIECES and quotient(shape[dim], step) is not None
        return IndexSplit(shape, dim, step, block=step) if fits else None
    dim, lengths = RANGES[op.target](dag, op)
    lengths = [n for n in lengths if n != 0]
    counts = (_count(shape[dim], piece, lengths) for piece in lengths)
    count = next((c for c in counts if c is not None), None)
    return None if count is None else IndexSplit(shape, dim, count)


def index_splits_below(dag: OpDag, name: str) -> Iterator[IndexSplit]:
    """The pieces into which views cut a tensor, as those of the gate and what it gates, of one product."""
    stack, seen = [name], {name}
    while stack:
        for op in map(dag.op, dag.consumers(stack.pop())):
            if op.name in seen or not layout.is_view(op):
                continue
            seen.add(op.name)
            stack.append(op.name)
            if (cut := layout.cut_of(dag, op)) is not None and cut.length != 0:
                shape = dag.op(cut.source).outputs[0].shape
                if (count := _count(shape[cut.dim], cut.length, [])) is not None:
                    yield IndexSplit(shape, cut.dim, count)


def _count(size: Dim, piece: Dim, lengths: list[Dim]) -> int | None:
    """How many pieces, where every length is a number of whole ones."""
    count, parts = quotient(size, piece), [quotient(n, piece) for n in lengths]
    if not isinstance(count, int) or not 2 <= count <= MOST_PIECES:
        return None
    return count if all(isinstance(n, int) and n > 0 for n in parts) else None


# -- (dimension, lengths of the ranges along it within which a result is made in one way) ------------------


def _dim(op: Op, position: int) -> int:
    return layout.wrap(layout.argument(op, position, "dim", 0), len(op.outputs[0].shape))  # type: ignore[arg-type]


def _cat(dag: OpDag, op: Op) -> tuple[int, list[Dim]]:
    dim = _dim(op, 1)
    shapes = [dag.op(a.name).outputs[0].shape for a in op.args[0] if isinstance(a, Ref)]  # type: ignore[union-attr]
    return dim, [shape[dim] for shape in shapes if shape != (0,)]


def _stack(dag: OpDag, op: Op) -> tuple[int, list[Dim]]:
    return _dim(op, 1), [1] * len(op.args[0])  # type: ignore[arg-type]


def _pad(dag: OpDag, op: Op) -> tuple[int, list[Dim]]:
    pads, shape = op.args[1], dag.op(op.first).outputs[0].shape
    assert isinstance(pads, tuple)
    padded = [i for i in range(len(pads) // 2) if pads[2 * i : 2 * i + 2] != (0, 0)]
    if len(padded) != 1:
        return 0, []
    (i,) = padded
    dim, itemsize = len(shape) - 1 - i, op.outputs[0].dtype.itemsize
    known = [n for n in pads[2 * i : 2 * i + 2] if isinstance(n, int) and n != 0]
    if i == 0 and known and min(known) * itemsize < SECTOR:  # stores of parts of sectors
        return 0, []
    return dim, [pads[2 * i], shape[dim], pads[2 * i + 1]]  # type: ignore[list-item]


def _slice_scatter(dag: OpDag, op: Op) -> tuple[int, list[Dim]]:
    dim = _dim(op, 2)
    size, length = op.outputs[0].shape[dim], dag.op(op.operand("src")).outputs[0].shape[dim]
    start: Dim = layout.argument(op, 3, "start") or 0  # type: ignore[assignment]
    start = start + size if isinstance(start, int) and start < 0 else start
    return dim, [start, length, simple(size - start - length)]


RANGES: dict[object, Callable[[OpDag, Op], tuple[int, list[Dim]]]] = {
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.constant_pad_nd.default: _pad,
    aten.slice_scatter.default: _slice_scatter,
}
