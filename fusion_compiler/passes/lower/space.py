"""The iteration space of a cluster: the dimensions of its anchor, in two groups of axes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from fusion_compiler.ir import layout
from fusion_compiler.ir.dag import Op, OpDag
from fusion_compiler.ir.dims import Dim, numel, simple, strides_of
from fusion_compiler.ir.index import ZERO, axis, combine
from fusion_compiler.ir.loops import COLS, ROWS, Index
from fusion_compiler.ir.walk import walk
from fusion_compiler.ir.writes import stored_shape
from fusion_compiler.ops.dims import dim_of, reduced_dims
from fusion_compiler.ops.own import depthwise
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.lower.index_splits import IndexSplit
from fusion_compiler.passes.lower.products import product_of

Coords = tuple[Index, ...]


class Illegal(Exception):
    """The ops do not share one iteration space. rule: the violated law. reason: the details."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(reason)
        self.rule, self.reason = rule, reason


SUPPORTED = frozenset({
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
})  # fmt: skip


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float32 for every float but float64; integers and bool are unchanged."""
    if dtype not in SUPPORTED:
        raise Illegal("dtype", f"{dtype} has no Triton type")
    if dtype.is_floating_point:
        return torch.float64 if dtype is torch.float64 else torch.float32
    return dtype


@dataclass(frozen=True)
class Space:
    """A space has the dimensions of the anchor, each split into factors from the outermost, with their
    groups.

    index_split: given if the anchor is one piece of a larger tensor. Each element computes all pieces. The
        number of the piece along each split dimension is a key after the axes, but not an axis.
    is_free: True if reductions may be over any axes; no group says anything then.
    """

    factors: tuple[tuple[Dim, ...], ...]
    groups: tuple[str, ...]
    index_split: IndexSplit | None = None
    is_free: bool = False

    @property
    def axes(self) -> tuple[Dim, ...]:
        return tuple(f for factors in self.factors for f in factors)

    @property
    def extents(self) -> tuple[Dim, ...]:
        """Return the sizes of all keys: the axes, and the numbers of pieces."""
        return self.axes if self.index_split is None else (*self.axes, *self.index_split.counts)

    @property
    def axis_groups(self) -> tuple[str, ...]:
        return tuple(g for factors, g in zip(self.factors, self.groups, strict=True) for _ in factors)

    def split_axis(self, number: int, inner: Dim) -> Space:
        if number >= len(self.axes):
            across = "windows" if self.index_split is None else "the pieces of a concatenation"
            raise Illegal("layout", f"a view cuts across {across}")
        position = 0
        result: list[tuple[Dim, ...]] = []
        for factors in self.factors:
            if position <= number < position + len(factors):
                i = number - position
                outer = factors[i] // inner if isinstance(factors[i], int) else simple(factors[i] / inner)  # type: ignore[arg-type]
                factors = (*factors[:i], outer, inner, *factors[i + 1 :])
                position -= 1
            result.append(factors)
            position += len(factors)
        return replace(self, factors=tuple(result))

    def identity(self) -> Coords:
        """Return the coordinates of the anchor, one index per dimension."""
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

    def tensor_coords(self) -> Coords:
        """Return the coordinates of the tensor that the anchor is a piece of, or of the anchor itself."""
        split, piece = self.index_split, self.identity()
        return piece if split is None else split.tensor_coords(piece, len(self.axes))


@dataclass(frozen=True)
class Reduced:
    """The operand of a reduction. For a matrix product it is the tensor of all terms, with the matrix's
    strides. dims: the reduced dimensions, counted from the front."""

    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    dims: tuple[int, ...]
    is_product: bool = False

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(d for d in range(len(self.shape)) if d not in self.dims)

    @property
    def contiguous(self) -> int:
        """Return the dimension with stride 1, or the last one if there is none."""
        unit = (d for d, s in enumerate(self.stride) if s == 1 and self.shape[d] != 1)
        return next(unit, len(self.shape) - 1)


def is_reduction(op: Op) -> bool:
    """True if an op reduces whole axes of the cluster, as products do and sums over windows do not."""
    return op.kind in (Kind.REDUCTION, Kind.CONTRACTION) and op.target not in depthwise.CALLS


def reduced_by(dag: OpDag, op: Op) -> Reduced:
    """Return the operand of a reduction."""
    product = product_of(dag, op)
    if product is not None:
        return Reduced(product.shape, product.stride, (product.reduced,), True)
    source = dag.op(op.first).outputs[0]
    return Reduced(source.shape, source.stride, reduced_dims(op.arguments, len(source.shape)))


def scanned_dim(op: Op) -> int | None:
    """Return the dimension of a scan, counted from the front; None for a 0-d tensor."""
    return dim_of(op.arguments, len(op.outputs[0].shape))


def anchor_space(
    dag: OpDag, ops: tuple[str, ...], outputs: tuple[str, ...], split: IndexSplit | None = None
) -> Space:
    """Return the iteration space of a cluster.

    It has the dimensions of a scan's input, else of a reduction's input (preferring one that is broadcast
    back), else of the largest output or a piece of it. Raises Illegal if the input of the scan or reduction
    does not match the pieces.
    """
    scans = [dag.op(n) for n in ops if dag.op(n).kind is Kind.SCAN]
    if scans:
        if split is not None or any(dag.op(n).kind is Kind.CONTRACTION for n in ops):
            raise Illegal("space", f"{scans[0].name} is a scan, which has no pieces and no product beside it")
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
    inner = COLS if source.contiguous in reduced else ROWS
    outer = ROWS if inner == COLS else COLS
    groups = tuple(inner if d in reduced else outer for d in range(len(source.shape)))
    if split is None:
        return Space(tuple((s,) for s in source.shape), groups)
    same_shape = source.shape == split.shape and split.dims.isdisjoint(reduced)
    if not same_shape and _without_ones(source.shape) != _without_ones(split.piece):
        raise Illegal("space", f"{best.name} reduces {list(source.shape)}, pieces are {list(split.piece)}")
    if not same_shape:  # the pieces may be side by side, in a dimension of their own
        left = iter(g for g, s in zip(groups, source.shape, strict=True) if s != 1)
        groups = tuple(outer if s == 1 else next(left) for s in split.piece)
    return Space(split.factors, groups, split)


def free_space(dag: OpDag, ops: tuple[str, ...]) -> Space:
    """Return the space of the largest tensor that is reduced, whose reductions may be over any of its axes:
    a tile holds the axes that some of them reduce, or a part of these.

    Raises Illegal where all reduce the same and none is a product of several rows, or scans are beside them.
    """
    reductions = [reduced_by(dag, dag.op(n)) for n in ops if is_reduction(dag.op(n))]
    alike = {(r.shape, frozenset(d for d in r.dims if r.shape[d] != 1)) for r in reductions}
    products = [p for n in ops if (p := product_of(dag, dag.op(n))) is not None]
    if not all(p.shares_matrix for p in products):
        raise Illegal("space", "a product of one or two rows, or of several matrices, is computed row by row")
    if (len(alike) < 2 and not products) or any(dag.op(n).kind is Kind.SCAN for n in ops):
        raise Illegal("space", "only reductions over different axes need a tile with all of these axes")
    largest = max(reductions, key=lambda r: numel(r.shape))
    dims = [d for _, d in alike]
    innermost = next((d for d, s in enumerate(largest.stride) if s == 1 and largest.shape[d] != 1), None)
    has_several = any(d != dims[0] for d in dims) and not largest.is_product
    if has_several and innermost not in frozenset[int]().union(*dims):
        raise Illegal("space", "neighbours in memory would be in different tiles")
    return Space(tuple((s,) for s in largest.shape), tuple(COLS for _ in largest.shape), is_free=True)


def _without_ones(shape: tuple[Dim, ...]) -> list[Dim]:
    return [s for s in shape if s != 1]


def largest(dag: OpDag, outputs: tuple[str, ...]) -> Op:
    """Return the largest output, whose elements are those of the space if nothing is reduced."""
    return max((dag.op(n) for n in outputs), key=lambda op: numel(stored_shape(dag, op)))


def _input_size(dag: OpDag, op: Op) -> int:
    return numel(reduced_by(dag, op).shape)


def _precedence(dag: OpDag, op: Op, inside: set[str]) -> tuple[bool, bool, int]:
    """Return the sort key of a reduction as the anchor. Products come first: their operands are recomputed
    wherever they are needed."""
    product = op.kind is Kind.CONTRACTION
    return product, not product and _is_broadcast_back(dag, op, inside), _input_size(dag, op)


def _is_broadcast_back(dag: OpDag, op: Op, inside: set[str]) -> bool:
    """True if a descendant inside the cluster is as large as the reduction's input."""
    size = _input_size(dag, op)
    if numel(op.outputs[0].shape) == size:
        return False

    def readers(name: str) -> list[str]:
        consumers = (dag.op(n) for n in dag.consumers(name))
        return [c.name for c in consumers if c.outputs and (c.name in inside or layout.is_view(c))]

    behind = (dag.op(name) for name in walk(readers(op.name), readers) if name in inside)
    return any(not is_reduction(o) and numel(stored_shape(dag, o)) >= size for o in behind)
