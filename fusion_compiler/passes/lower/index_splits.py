"""Index splits: a cluster's output as equal pieces, each computed by an expression of its own.

Over the space of the whole output, every element of a concatenation computes all parts under conditions and
selects one. Over the space of one piece, every element computes each part once and stores it in its place:

    out[c] = where(c < n, a[c], b[c - n])   for c < 2 n    ->    out[c], out[n + c] = a[c], b[c]   for c < n

This is index-set splitting with unroll-and-jam: values that several pieces need are computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from fusion_compiler.ir import layout
from fusion_compiler.ir.dag import Op, OpDag
from fusion_compiler.ir.dims import Dim, product, quotient, simple, smaller
from fusion_compiler.ir.index import axis, combine
from fusion_compiler.ir.loops import Index
from fusion_compiler.ir.writes import stored_shape
from fusion_compiler.ops.table import Form, form_of
from fusion_compiler.ops.views import Part, wrap

MOST_PIECES = 8  # every piece's values stay in registers until they are stored
SECTOR = 32  # bytes of one memory transaction


@dataclass(frozen=True)
class IndexSplit:
    """A tensor of `shape` as `count` equal pieces along `dim`.

    block: without it, a piece is a contiguous range of `dim`. With it, `dim` is cut into blocks of `block`
        elements, and a piece has the same part of each block; with blocks of `count` elements, a piece is
        every count-th element.
    nested: how each piece is split along another dimension.
    runtime_count: for pieces of one element, the number of pieces if it is known only at run time; it is at
        most `count`. The remaining pieces repeat the last one and are not stored.
    """

    shape: tuple[Dim, ...]
    dim: int
    count: int
    block: int | None = None
    nested: IndexSplit | None = None
    runtime_count: Dim | None = None

    @property
    def counts(self) -> tuple[Dim, ...]:
        """Return the number of pieces along each split dimension."""
        count = self.count if self.runtime_count is None else self.runtime_count
        return (count,) if self.nested is None else (count, *self.nested.counts)

    @property
    def piece_numbers(self) -> tuple[tuple[Dim, ...], ...]:
        """Return the numbers of the computed pieces along each split dimension."""
        numbers: tuple[Dim, ...] = tuple(range(self.count))
        if self.runtime_count is not None:
            last = simple(self.runtime_count - 1)
            numbers = (0, *(smaller(i, last) for i in range(1, self.count)))
        return (numbers,) if self.nested is None else (numbers, *self.nested.piece_numbers)

    @property
    def dims(self) -> frozenset[int]:
        return frozenset({self.dim}) | (frozenset() if self.nested is None else self.nested.dims)

    @property
    def length(self) -> Dim:
        """Return the length of a piece along `dim`."""
        if self.runtime_count is not None:
            return 1
        length = quotient(self.shape[self.dim], self.count)
        assert length is not None
        return length

    @property
    def piece(self) -> tuple[Dim, ...]:
        """Return the shape of a piece."""
        shape = self.shape if self.nested is None else self.nested.piece
        return (*shape[: self.dim], self.length, *shape[self.dim + 1 :])

    @property
    def run(self) -> Dim:
        """Return the number of elements of a piece that are adjacent along `dim` in the tensor."""
        return self.length if self.block is None else self.block // self.count

    @property
    def factors(self) -> tuple[tuple[Dim, ...], ...]:
        """Return the dimensions of a piece, each as a tuple of factors: (number of blocks, run) for a
        dimension cut into blocks."""
        factors: tuple[Dim, ...] = (self.length,)
        if self.block is not None and self.run != 1:
            blocks = quotient(self.shape[self.dim], self.block)
            assert blocks is not None
            factors = (blocks, self.run)
        others = tuple((size,) for size in self.shape) if self.nested is None else self.nested.factors
        return (*others[: self.dim], factors, *others[self.dim + 1 :])

    def tensor_coords(self, coords: tuple[Index, ...], key: int) -> tuple[Index, ...]:
        """Return the coordinates in the tensor of the element at `coords` of a piece.

        Every term of `coords` moves either between blocks or within a run.
        key: the key of the piece number along `dim`; those of nested splits follow it.
        """
        coords = coords if self.nested is None else self.nested.tensor_coords(coords, key + 1)
        position = coords[self.dim]
        steps = ((k, c if self.is_within_run(c) else simple(c * self.count)) for k, c in position.terms)
        along = combine([(Index(position.const, tuple(steps)), 1), (axis(key), self.run)])
        return (*coords[: self.dim], along, *coords[self.dim + 1 :])

    def is_within_run(self, step: Dim) -> bool:
        return self.block is None or (isinstance(step, int) and step < self.block // self.count)


def index_splits_of(dag: OpDag, ops: tuple[str, ...], outputs: tuple[str, ...]) -> tuple[IndexSplit, ...]:
    """Return the index splits that the ops of a cluster suggest and that apply to a tensor as large as one of
    its outputs."""
    sizes = {product(stored_shape(dag, dag.op(name))) for name in outputs}
    splits = (index_split_by(dag, dag.op(name)) for name in ops)
    return tuple(dict.fromkeys(c for c in splits if c is not None and product(c.shape) in sizes))


def index_split_by(dag: OpDag, op: Op) -> IndexSplit | None:
    """Return how an op's result splits into a few equal pieces with different expressions, or None if it does
    not."""
    form, shape = form_of(op.target), op.outputs[0].shape
    if form not in _RANGES:
        return None
    if form is Form.OVERLAY:
        match layout.overlay_of(op):
            case Part(dim, _, step) if isinstance(step, int) and step > 1:
                fits = step <= MOST_PIECES and quotient(shape[dim], step) is not None
                return IndexSplit(shape, dim, step, block=step) if fits else None
            case _:
                pass
    dim, lengths = _RANGES[form](dag, op)
    lengths = [n for n in lengths if n != 0]
    counts = (_count(shape[dim], piece, lengths) for piece in lengths)
    count = next((c for c in counts if c is not None), None)
    return None if count is None else IndexSplit(shape, dim, count)


def index_splits_below(dag: OpDag, name: str) -> Iterator[IndexSplit]:
    """Yield the splits into which views cut a tensor, such as the gate and the gated half of one product."""
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
    """Return the number of pieces, or None unless every length is a positive number of pieces."""
    count, multiples = quotient(size, piece), [quotient(n, piece) for n in lengths]
    if not isinstance(count, int) or not 2 <= count <= MOST_PIECES:
        return None
    return count if all(isinstance(n, int) and n > 0 for n in multiples) else None


# -- Handlers return (dimension, lengths of the ranges along it that have one expression each) -------------


def _joined(dag: OpDag, op: Op) -> tuple[int, list[Dim]]:
    dim, is_new = wrap(op.arguments["dim"], len(op.outputs[0].shape)), form_of(op.target) is Form.STACK
    shapes = [dag.op(a.name).outputs[0].shape for a in op.arguments["tensors"]]
    return dim, [1 if is_new else shape[dim] for shape in shapes if shape != (0,)]


def _pad(dag: OpDag, op: Op) -> tuple[int, list[Dim]]:
    pads, shape = op.arguments["pad"], dag.op(op.first).outputs[0].shape
    padded = [i for i in range(len(pads) // 2) if pads[2 * i : 2 * i + 2] != (0, 0)]
    if len(padded) != 1:
        return 0, []
    (i,) = padded
    dim, itemsize = len(shape) - 1 - i, op.outputs[0].dtype.itemsize
    lengths = [n for n in pads[2 * i : 2 * i + 2] if isinstance(n, int) and n != 0]
    if i == 0 and lengths and min(lengths) * itemsize < SECTOR:  # a piece would store parts of sectors
        return 0, []
    return dim, [pads[2 * i], shape[dim], pads[2 * i + 1]]


def _overlay(dag: OpDag, op: Op) -> tuple[int, list[Dim]]:
    match layout.overlay_of(op):
        case Part(dim, start):
            size, length = (dag.op(op.operand(name)).outputs[0].shape[dim] for name in ("self", "src"))
            return dim, [start, length, simple(size - start - length)]
        case _:
            return 0, []


_RANGES: Mapping[Form | None, Callable[[OpDag, Op], tuple[int, list[Dim]]]] = {
    Form.CONCATENATION: _joined,
    Form.STACK: _joined,
    Form.PADDING: _pad,
    Form.OVERLAY: _overlay,
}
