"""The iteration space of a cluster: the dimensions of its anchor, in two groups of axes."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusion_compiler.ir import depthwise, layout
from fusion_compiler.ir.dag import Op, OpDag
from fusion_compiler.ir.dims import Dim, numel, simple, strides_of
from fusion_compiler.ir.index import ZERO, axis, combine
from fusion_compiler.ir.loops import BATCH, COLS, ROWS, Index
from fusion_compiler.ir.ops import Kind
from fusion_compiler.ir.writes import stored_shape
from fusion_compiler.passes.lower.index_splits import MOST_PIECES, IndexSplit
from fusion_compiler.passes.lower.products import product_of

Coords = tuple[Index, ...]


class Illegal(Exception):
    """The ops do not share one iteration space. rule names the law, reason the numbers."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(reason)
        self.rule, self.reason = rule, reason


HELD = frozenset({
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
})  # fmt: skip


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for every float but float64; integers and bool as they are."""
    if dtype not in HELD:
        raise Illegal("dtype", f"{dtype} has no Triton type")
    if dtype.is_floating_point:
        return torch.float64 if dtype is torch.float64 else torch.float32
    return dtype


@dataclass(frozen=True)
class Space:
    """Dimensions of the anchor, each cut into factors from the outside in, with their groups.

    index_split: where the anchor is one of several pieces of a larger tensor, all of which every element
    makes. The number of the piece, along each dimension that is split, is then a key behind the axes', and no
    axis.
    """

    factors: tuple[tuple[Dim, ...], ...]
    groups: tuple[str, ...]
    index_split: IndexSplit | None = None

    @property
    def axes(self) -> tuple[Dim, ...]:
        return tuple(f for factors in self.factors for f in factors)

    @property
    def extents(self) -> tuple[Dim, ...]:
        """Sizes of all keys: the axes', and the number of pieces."""
        return self.axes if self.index_split is None else (*self.axes, *self.index_split.counts)

    @property
    def axis_groups(self) -> tuple[str, ...]:
        return tuple(g for factors, g in zip(self.factors, self.groups, strict=True) for _ in factors)

    def split_axis(self, number: int, inner: Dim) -> Space:
        if number >= len(self.axes):
            across = "windows" if self.index_split is None else "the pieces of a concatenation"
            raise Illegal("layout", f"a view cuts across {across}")
        position = 0
        found: list[tuple[Dim, ...]] = []
        for factors in self.factors:
            if position <= number < position + len(factors):
                i = number - position
                outer = factors[i] // inner if isinstance(factors[i], int) else simple(factors[i] / inner)  # type: ignore[arg-type]
                factors = (*factors[:i], outer, inner, *factors[i + 1 :])
                position -= 1
            found.append(factors)
            position += len(factors)
        return Space(tuple(found), self.groups, self.index_split)

    def identity(self) -> Coords:
        """Coordinates of the anchor: one index a dimension."""
        coords: list[Index] = []
        number = 0
        for factors in self.factors:
            parts: list[tuple[Index, Dim]] = []
            for step in strides_of(factors):
                parts.append((axis(number), step))
                number += 1
            live = [p for p, f in zip(parts, factors, strict=True) if f != 1]
            coords.append(combine(live) if live else ZERO)
        return tuple(coords)

    def whole(self) -> Coords:
        """Coordinates of the tensor of which the anchor is a piece, or of the anchor itself."""
        split, piece = self.index_split, self.identity()
        return piece if split is None else split.whole(piece, len(self.axes))


def reduced_dims(op: Op, rank: int) -> tuple[int, ...]:
    """Dimensions that a reduction reduces, counted from the front."""
    arg = (
        layout.argument(op, 1, "dim") if len(op.args) > 1 or dict(op.kwargs).get("dim") is not None else None
    )
    if op.target.__name__ == "default" and op.target._opname in ("sum", "prod", "any", "all", "mean"):  # type: ignore[union-attr]
        arg = None
    if arg is None or arg == ():
        return tuple(range(rank))
    dims = arg if isinstance(arg, tuple) else (arg,)
    return () if rank == 0 else tuple(sorted(layout.wrap(d, rank) for d in dims))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Reduced:
    """What a reduction reads as one tensor: of a product that of all terms, whose strides are its matrix's.

    dims: those that it reduces, counted from the front.
    """

    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    dims: tuple[int, ...]
    is_product: bool = False

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.shape)) if d not in self.dims)


def is_reduction(op: Op) -> bool:
    """Whether an op of a cluster reduces whole axes: products do, and sums over windows do not."""
    return op.kind in (Kind.REDUCTION, Kind.CONTRACTION) and op.target not in depthwise.CALLS


def reduced_by(dag: OpDag, op: Op) -> Reduced:
    product = product_of(dag, op)
    if product is not None:
        return Reduced(product.shape, product.stride, (product.reduced,), True)
    source = dag.op(op.first).outputs[0]
    return Reduced(source.shape, source.stride, reduced_dims(op, len(source.shape)))


def scanned_dim(op: Op) -> int | None:
    """The dimension along which a scan runs, counted from the front; None of a tensor without dimensions."""
    rank = len(op.outputs[0].shape)
    return layout.wrap(layout.argument(op, 1, "dim"), rank) if rank else None  # type: ignore[arg-type]


def anchor_space(
    dag: OpDag, ops: tuple[str, ...], outputs: tuple[str, ...], split: IndexSplit | None = None
) -> Space:
    """The iteration space: a scan's input; else a reduction's, best one that is broadcast back; else the
    largest output, or a piece of it. Raises Illegal where the input of a scan or a reduction is no piece."""
    scans = [dag.op(n) for n in ops if dag.op(n).kind is Kind.SCAN]
    if scans:
        if split is not None or any(dag.op(n).kind is Kind.CONTRACTION for n in ops):
            raise Illegal("space", f"{scans[0].name} is a scan, and not made in pieces or beside a product")
        best = max(scans, key=lambda op: _input_size(dag, op))
        shape, dim = best.outputs[0].shape, scanned_dim(best)
        return Space(tuple((s,) for s in shape), tuple(COLS if d == dim else ROWS for d in range(len(shape))))
    reductions = [dag.op(n) for n in ops if is_reduction(dag.op(n))]
    if not reductions:
        shape = stored_shape(dag, largest(dag, outputs)) if split is None else split.piece
        factors = tuple((s,) for s in shape) if split is None else split.factors
        return Space(factors, tuple(COLS for _ in shape), split)
    inside = set(ops)
    best = max(reductions, key=lambda op: _precedence(dag, op, inside))
    source = reduced_by(dag, best)
    reduced = source.dims
    contiguous = next(
        (d for d, s in enumerate(source.stride) if s == 1 and source.shape[d] != 1), len(source.shape) - 1
    )
    inner = COLS if contiguous in reduced else ROWS
    outer = ROWS if inner == COLS else COLS
    groups = tuple(inner if d in reduced else outer for d in range(len(source.shape)))
    if split is None:
        return Space(tuple((s,) for s in source.shape), groups)
    whole = source.shape == split.shape and split.dims.isdisjoint(reduced)
    if not whole and _long(source.shape) != _long(split.piece):
        raise Illegal("space", f"{best.name} reduces {list(source.shape)}, pieces are {list(split.piece)}")
    if not whole:  # they may lie in it side by side, in a dimension of their own
        left = iter(g for g, s in zip(groups, source.shape, strict=True) if s != 1)
        groups = tuple(outer if s == 1 else next(left) for s in split.piece)
    return Space(split.factors, groups, split)


def matrix_space(
    dag: OpDag, ops: tuple[str, ...], outputs: tuple[str, ...], split: IndexSplit | None = None
) -> Space:
    """The space of matrices whose rows are reduced by some ops and whose columns by others, or are not there
    for them; what is left numbers the matrices. Raises Illegal where these ops have no such space.

    Found are reductions of tensors with the dimensions of the largest one. split: along one of those that
    number the matrices, of which one program then makes several.
    """
    space = _matrices(dag, ops)
    if space is None:
        raise Illegal("space", "what these ops reduce are no rows and columns of matrices")
    if split is None:
        return space
    if split.shape != space.axes or space.groups[split.dim] != BATCH:
        raise Illegal("space", f"the pieces of {list(split.shape)} are no matrices")
    return Space(split.factors, space.groups, split)


def _matrices(dag: OpDag, ops: tuple[str, ...]) -> Space | None:
    found = [dag.op(n) for n in ops if dag.op(n).kind is Kind.REDUCTION]
    if len(found) < 2 or any(dag.op(n).kind in (Kind.SCAN, Kind.CONTRACTION) for n in ops):
        return None
    read = [reduced_by(dag, op) for op in found]
    source = max(read, key=lambda r: numel(r.shape))
    shape, rank = source.shape, len(source.shape)
    if any(len(r.shape) != rank for r in read):
        return None
    sets = {frozenset(d for d in r.dims if shape[d] != 1) for r in read} - {frozenset()}
    groups = [s for s in sets if not any(other < s for other in sets)]
    if len(groups) == 1:
        groups.append(frozenset(d for r in read for d, s in enumerate(r.shape) if s != shape[d]))
    if len(groups) != 2 or groups[0] & groups[1]:
        return None
    contiguous = next((d for d, s in enumerate(source.stride) if s == 1 and shape[d] != 1), rank - 1)
    rows, cols = sorted(groups, key=lambda dims: contiguous in dims)
    if contiguous not in cols:  # neighbours in memory would be in different matrices
        return None
    own = tuple(ROWS if d in rows else COLS if d in cols else BATCH for d in range(rank))
    numbered = any(g == BATCH and s != 1 for g, s in zip(own, shape, strict=True))
    return Space(tuple((s,) for s in shape), own) if numbered else None


def matrix_splits_of(dag: OpDag, ops: tuple[str, ...]) -> tuple[IndexSplit, ...]:
    """Where several matrices have an operand in common: one program that makes them all loads it once."""
    space = _matrices(dag, ops)
    if space is None:
        return ()
    shape = space.axes
    made = (op for op in map(dag.op, ops) if op.outputs[0].shape == shape)
    read = [dag.op(n).outputs[0].shape for op in made for n in op.inputs if dag.op(n).outputs]
    tile = [d for d, g in enumerate(space.groups) if g != BATCH]
    whole = [s for s in read if len(s) == len(shape) and all(s[d] == shape[d] for d in tile)]
    found: list[IndexSplit] = []
    for d, count in enumerate(shape):
        few = d not in tile and isinstance(count, int) and 1 < count <= MOST_PIECES
        if few and any(s[d] == 1 for s in whole):
            found.append(IndexSplit(shape, d, int(count)))
    return tuple(found)


def _long(shape: tuple[Dim, ...]) -> list[Dim]:
    return [s for s in shape if s != 1]


def largest(dag: OpDag, outputs: tuple[str, ...]) -> Op:
    """The output that has the space's elements where nothing is reduced."""
    return max((dag.op(n) for n in outputs), key=lambda op: numel(stored_shape(dag, op)))


def _input_size(dag: OpDag, op: Op) -> int:
    return numel(reduced_by(dag, op).shape)


def _precedence(dag: OpDag, op: Op, inside: set[str]) -> tuple[bool, bool, int]:
    """Products before others: what they read is computed again wherever it is needed."""
    product = op.kind is Kind.CONTRACTION
    return product, not product and _is_broadcast_back(dag, op, inside), _input_size(dag, op)


def _is_broadcast_back(dag: OpDag, op: Op, inside: set[str]) -> bool:
    """Whether a descendant inside the cluster is as large as the reduction's input."""
    size = _input_size(dag, op)
    if numel(op.outputs[0].shape) == size:
        return False
    seen, stack = {op.name}, [op.name]
    while stack:
        for name in dag.consumers(stack.pop()):
            consumer = dag.op(name)
            if name in seen or not (name in inside or layout.is_view(consumer)) or not consumer.outputs:
                continue
            if name in inside and not is_reduction(consumer):
                if numel(stored_shape(dag, consumer)) >= size:
                    return True
            seen.add(name)
            stack.append(name)
    return False
