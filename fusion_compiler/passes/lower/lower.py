"""Lower a set of ops to one loop nest over one iteration space, or raise `Illegal` with the reason.

The space has two groups of axes: those that the cluster's main reductions keep and those that they reduce.
Values are *pulled* from the stores back to the loads: each op is asked for its value at coordinates that are
affine in the axes. Views only change coordinates, so they vanish. A value that is needed at two different
coordinates is computed twice. A reduction exists only at the identity coordinates of the group that it keeps.
The result is therefore right by construction: the place of an output in the space affects the speed, never
the value.
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import sympy
import torch
from torch._ops import OpOverload

from fusion_compiler.ir import layout
from fusion_compiler.ir.dag import Op, OpDag, Ref
from fusion_compiler.ir.dims import Dim, product, quotient, simple, strides_of
from fusion_compiler.ir.index import (
    ZERO,
    NeedsSplit,
    NotExpressible,
    axis,
    combine,
    digits,
    fixed,
    flatten,
    is_bijection,
    regroup,
    shifted,
)
from fusion_compiler.ir.layout import Cut
from fusion_compiler.ir.loops import (
    COLS,
    GROUPS,
    INNER,
    RAGGED,
    ROWS,
    TILE,
    Axis,
    Compute,
    Constant,
    Coordinate,
    Index,
    Load,
    LoopNest,
    Reduce,
    Store,
    Value,
    axes_in,
)
from fusion_compiler.ir.writes import stored_shape
from fusion_compiler.ops.arithmetic import (
    ADD,
    EQ,
    IS_NAN,
    MASKED_FILL,
    MAXIMUM,
    MINIMUM,
    MUL,
    OF_BOOLEANS,
    OR,
    WHERE,
)
from fusion_compiler.ops.own.put import put
from fusion_compiler.ops.schema import HALVES
from fusion_compiler.ops.table import Kind, spec_of
from fusion_compiler.ops.views import Permuted
from fusion_compiler.passes.lower import scans
from fusion_compiler.passes.lower.algebra import corrected_means
from fusion_compiler.passes.lower.builder import Builder
from fusion_compiler.passes.lower.effort import Effort
from fusion_compiler.passes.lower.index_splits import IndexSplit
from fusion_compiler.passes.lower.products import product_of
from fusion_compiler.passes.lower.rounding import Rounder, Rounding, unrounded
from fusion_compiler.passes.lower.space import (
    Coords,
    Illegal,
    Reduced,
    Space,
    anchor_space,
    compute_dtype,
    free_space,
    is_reduction,
    largest,
    reduced_by,
)
from fusion_compiler.passes.lower.special import handler_of, looked_up, put_place

# A program has each row of a product as a value of its own, and so each of the few elements that a tensor has
# for every row of the space: a reduction of such values is an expression.
UNROLLED: dict[str | None, OpOverload] = {"sum": ADD, "max": MAXIMUM, "min": MINIMUM}
# Elements of one unrolled reduction, and of all pieces together: the attention of one decoding step had
# sixty-four, and took more than a minute to compile.
MOST_UNROLLED, MOST_TERMS = 8, 16
# Values of one attempt, including views and dead values. Laws allow 96 operations, for which at most 261
# values were observed. Ops that read shifted copies of values that do the same have exponentially many.
MOST_VALUES = 4096


def lower(
    dag: OpDag,
    ops: tuple[str, ...],
    outputs: tuple[str, ...],
    *,
    index_split: IndexSplit | None = None,
    in_tile: bool = False,
    stored: frozenset[str] = frozenset(),
    like_eager: bool = False,
    effort: Effort | None = None,
) -> LoopNest:
    """Lower `ops` (in topological order) to a loop nest that stores `outputs`. Raises Illegal.

    index_split: the space is that of one piece of this split.
    in_tile: a tile holds all axes that some reduction reduces (see `free_space`).
    stored: ops whose results this or another program stores.
    like_eager: round as numerics="eager" asks.
    effort: counts the work.
    """
    rounding = Rounding(stored.union(outputs), like_eager)
    if in_tile:
        space = free_space(dag, ops)
    else:
        space = _with_rows(dag, ops, outputs, anchor_space(dag, ops, outputs, index_split))
    loops = attempts(lambda space: Lowering(dag, ops, outputs, space, rounding), space, effort)
    return corrected_means(loops, _halves(dag, loops)) if in_tile else loops


def attempts(start: Callable[[Space], Lowering], space: Space, effort: Effort | None = None) -> LoopNest:
    """Return the nest of the first lowering that needs no axis to be split. Raises Illegal."""
    for _ in range(24):
        attempt = start(space)
        try:
            return attempt.run()
        except NeedsSplit as split:
            space = space.split_axis(split.axis, split.inner)
        except NotExpressible as error:
            raise Illegal("layout", str(error)) from None
        except RecursionError:
            raise Illegal("size", f"{len(attempt.ops)} ops nest too deep") from None
        finally:
            if effort is not None:
                effort.spent += len(attempt.memo)
    raise Illegal("layout", "the views of these ops cut the space into too many pieces")


def _halves(dag: OpDag, loops: LoopNest) -> frozenset[str]:
    """Return the buffers that a nest loads and whose elements have 16 bits."""
    loads = {node.buffer for node in loops.nodes if isinstance(node, Load)}
    return frozenset(name for name in loads if dag.op(name).outputs[0].dtype in HALVES)


def _with_rows(dag: OpDag, ops: tuple[str, ...], outputs: tuple[str, ...], space: Space) -> Space:
    """Return the space of the largest output if all reductions are of the few elements that a tensor has for
    each row of it, else `space`. A program of whole rows computes such reductions once for each row."""
    reduced = [reduced_by(dag, op) for op in map(dag.op, ops) if is_reduction(op)]
    output = largest(dag, outputs)
    few, shape = space.axes, stored_shape(dag, output)
    if space.index_split is not None or not reduced or len(few) != len(shape):
        return space
    differ = [d for d, (n, size) in enumerate(zip(few, shape, strict=True)) if n != size]
    if len(differ) != 1 or any(r.is_product or (r.shape, r.dims) != (few, tuple(differ)) for r in reduced):
        return space
    (dim,) = differ
    count, size = few[dim], shape[dim]
    if not isinstance(count, int) or not isinstance(size, int) or not 1 < count <= min(MOST_UNROLLED, size):
        return space
    along, across = (COLS, ROWS) if output.outputs[0].stride[dim] == 1 else (ROWS, COLS)
    return Space(tuple((s,) for s in shape), tuple(along if d == dim else across for d in range(len(shape))))


@dataclass(frozen=True)
class Part:
    """A part has the coordinates of a value that has only some of the space's elements. ranges: (index, low,
    high); the part consists of the elements with low <= index < high for all ranges."""

    coords: Coords
    ranges: tuple[tuple[Index, Dim, Dim], ...] = ()

    @property
    def fixed_axes(self) -> dict[int, int]:
        """Return the axes that have a single position in the part, with that position. Coordinates do not
        name them."""
        ones = [(i, low) for i, low, high in self.ranges if isinstance(low, int) and high == low + 1]
        return {i.terms[0][0]: low for i, low in ones if i.terms and i == axis(i.terms[0][0])}

    def cut(self, cut: Cut) -> Part:
        """Return the part that a view cuts out of this one."""
        along = self.coords[cut.dim]
        kept = (shifted(along, simple(-cut.start)),) if cut.keeps else ()
        coords = (*self.coords[: cut.dim], *kept, *self.coords[cut.dim + 1 :])
        return Part(coords, (*self.ranges, (along, cut.start, simple(cut.start + cut.length))))


class Lowering(Builder):
    """A lowering is one attempt to build a loop nest over a space. It stops at the first axis that must be
    split."""

    def __init__(
        self, dag: OpDag, ops: tuple[str, ...], outputs: tuple[str, ...], space: Space, rounding: Rounding
    ) -> None:
        groups = space.axis_groups
        sizes = enumerate(space.axes)
        axes = tuple(Axis(f"a{i}", size, groups[i], most=_most(dag, size)) for i, size in sizes)
        super().__init__(dag, axes, space.extents)
        self.ops, self.outputs, self.space = ops, outputs, space
        self.rounder = Rounder(self, rounding)
        self.inside = set(ops)
        self.memo: dict[tuple[str, Coords, int | None], int] = {}
        self.coords_of: dict[str, Coords] = {}  # the coordinates at which a value was computed first
        self.loaded_at: dict[str, Coords] = {}  # the same of what is loaded
        self.fixed_axes: dict[int, int] = {}  # axes with a single position in the current part
        self.reduced: dict[str, tuple[Coords, int]] = {}
        self.inner: dict[str, Coords] = {}  # axes of sums over windows, after the space's axes
        self.terms: Counter[str] = Counter()  # counts of unrolled terms
        live = [i for i, size in enumerate(space.axes) if size != 1]
        self.group_axes = {g: tuple(i for i in live if groups[i] == g) for g in GROUPS}
        columns = scans.Columns.of(space.axes, self.group_axes[COLS], self.group_axes[ROWS])
        self.scans = scans.Scans(self, columns)
        products = filter(None, (product_of(dag, dag.op(n)) for n in ops))
        # the group that the products reduce
        self.along = next((space.groups[p.reduced] for p in products), None)

    def run(self) -> LoopNest:
        self.seed_anchor()
        for name in self.ops:  # reductions first: they fix the coordinates of everything upstream
            if is_reduction(self.dag.op(name)) and name not in self.reduced:
                coords = self.place(name)
                for piece in self.pieces(coords) if coords is not None else ():
                    self.value(name, piece, None)
        placed, waiting = dict[str, list[Store]](), list(self.outputs)
        while waiting:  # what lies where nothing says yet comes after results that say it
            placed |= {name: of_name for name in waiting if (of_name := self.stores_of(name)) is not None}
            if placed.keys().isdisjoint(waiting):
                name, axes = waiting[0], list(self.space.axes)
                shape = list(stored_shape(self.dag, self.dag.op(name)))
                raise Illegal("space", f"{name} is {shape}, and the others' space is {axes}")
            waiting = [name for name in waiting if name not in placed]
        stores = [store for name in self.outputs for store in placed[name]]
        axes = self.tile_axes(stores) if self.space.is_free else self.axes
        return LoopNest(axes, tuple(self.nodes), tuple(stores), tuple(self.names))

    def stores_of(self, name: str) -> list[Store] | None:
        """Return the stores of an output, or None if nothing says yet where in the space its elements are."""
        part = None if self.along is None else self.part(name)
        if part is not None and part.ranges:
            return self.stores_of_part(name, part)
        coords, shape = self.place(name), stored_shape(self.dag, self.dag.op(name))
        if coords is not None and is_bijection(coords, shape, self.extents):
            return [self.store(name, at, piece=i) for i, at in enumerate(self.pieces(coords))]
        if (places := self.beside(shape)) and self.dag.op(name).target is not put:
            return [self.store(name, at) for at in places]
        return None

    def tile_axes(self, stores: list[Store]) -> tuple[Axis, ...]:
        """Return the axes of a free space. Inner are those that some reduction reduces, or that some result
        does not have: a program that holds them computes it once."""
        everywhere = set.intersection(*({k for k, _ in store.index.terms} for store in stores))
        reduced = frozenset[int]().union(*(n.axes for n in self.nodes if isinstance(n, Reduce)))
        kept = everywhere - reduced
        fixed = kept | axes_in(self.axes, (RAGGED,))
        return tuple(a if k in fixed else replace(a, group=INNER) for k, a in enumerate(self.axes))

    def store(self, name: str, coords: Coords, within: int | None = None, piece: int = 0) -> Store:
        """Return the store of an output at `coords`, which lie in the piece with number `piece`."""
        op = self.dag.op(name)
        meta = op.outputs[0]
        value = unrounded(self.nodes, self.stored(name, coords, within), meta.dtype)
        if op.target is put:
            index, within = put_place(self, op, coords, within)
        else:
            index = flatten(coords, meta.stride)
        split = self.space.index_split
        # the piece may not exist; its value does not depend on that
        if piece and split is not None and split.runtime_count is not None:
            assert split.nested is None, "rows of an unknown number are not cut"
            within, _ = self.in_range(Index(piece, ()), 0, split.runtime_count, within)
        return Store(name, index, value, within)

    def stored(self, name: str, coords: Coords, within: int | None = None) -> int:
        """Return the node that an output stores: its value, or the source of `put_`."""
        op = self.dag.op(name)
        if op.target is not put:
            return self.value(name, coords, within)
        source = op.operand("source")
        lead = len(stored_shape(self.dag, op)) - len(self.dag.op(source).outputs[0].shape)
        self.coords_of.setdefault(name, coords)
        node = self.value(source, coords[lead:], within)
        return self.converted(node, compute_dtype(op.outputs[0].dtype), name)

    def stores_of_part(self, name: str, part: Part) -> list[Store]:
        """Return the stores of an output that has a part of the space, one for each piece that meets the
        part."""
        stores: list[Store] = []
        rank = len(part.coords)
        self.fixed_axes = part.fixed_axes
        for i, piece in enumerate(self.pieces((*part.coords, *(index for index, _, _ in part.ranges)))):
            within, never = None, False
            for index, (_, low, high) in zip(piece[rank:], part.ranges, strict=True):
                within, partial = self.in_range(index, low, high, within)
                never |= within is None and partial
            if not never:
                stores.append(self.store(name, piece[:rank], within, i))
        self.fixed_axes = {}
        return stores

    # -- coordinates ----------------------------------------------------------------------------

    def seed_anchor(self) -> None:
        """Pull the anchor at the identity: a scan, the reduction's input, or the largest output."""
        identity = self.space.identity()
        for op in map(self.dag.op, self.ops):
            if op.kind is Kind.SCAN and op.outputs[0].shape == tuple(map(product, self.space.factors)):
                stored = op.name in self.outputs
                coords = identity if stored else scans.scan_coords(self.dag, op, identity, self.scans.columns)
                self.value(op.name, coords, None)
                return
        if not any(is_reduction(self.dag.op(n)) for n in self.ops):
            anchor, split = largest(self.dag, self.outputs), self.space.index_split
            if split is None or stored_shape(self.dag, anchor) == split.shape:
                self.stored(anchor.name, self.pieces(self.space.tensor_coords())[0])
            return
        reductions = [op for op in map(self.dag.op, self.ops) if is_reduction(op)]
        for op in sorted(reductions, key=lambda op: op.kind is not Kind.CONTRACTION):
            reduced, split = reduced_by(self.dag, op), self.space.index_split
            shape, dims = reduced.shape, reduced.dims
            if reduced.is_product and split is not None and split.shape == shape:
                for piece in self.pieces(self.space.tensor_coords()):
                    self.value(op.name, reduced_coords(op, piece, dims), None)
                return
            if shape == tuple(product(f) for f in self.space.factors):
                groups = {self.space.groups[d] for d in dims if shape[d] != 1}
                kept = {self.space.groups[d] for d in range(len(shape)) if d not in dims and shape[d] != 1}
                if self.space.is_free or not groups & kept:
                    self.value(op.name, reduced_coords(op, identity, dims), None)
                    return

    def pieces(self, coords: Coords) -> list[Coords]:
        """Return the coordinates in each piece of the index split, or once if they are the same in all
        pieces."""
        split, first = self.space.index_split, len(self.space.axes)
        pieces = [coords]
        for key, numbers in enumerate(() if split is None else split.piece_numbers, first):
            if any(k == key for c in coords for k, _ in c.terms):
                pieces = [tuple(fixed(c, key, i) for c in piece) for piece in pieces for i in numbers]
        return pieces

    def place(self, name: str) -> Coords | None:
        """Return coordinates at which a value covers the space, or None.

        They are the coordinates at which the value was needed before, those of an operand, the identity, or
        the elements of the space in row-major order.
        """
        if name in self.coords_of:
            return self.coords_of[name]
        op = self.dag.op(name)
        shape = stored_shape(self.dag, op)
        if is_reduction(op):
            reduced = reduced_by(self.dag, op)
            source = self.in_order(reduced.shape) if reduced.is_product else self.place_of_operand(op.first)
            return self.in_order(shape) if source is None else reduced_coords(op, source, reduced.dims)
        for operand in op.inputs:
            if not self.dag.op(operand).outputs or self.dag.op(operand).outputs[0].shape != shape:
                continue
            if layout.is_view(op) or spec_is_pointwise(op) or op.kind is Kind.SCAN or op.target is put:
                coords = self.place_of_operand(operand)
                if coords is not None and is_bijection(coords, shape, self.extents):
                    return coords
        return None if self.along is None and self.beside(shape) else self.in_order(shape)

    def beside(self, shape: tuple[Dim, ...]) -> tuple[Coords, ...]:
        """Return the coordinates of each of the few elements that a tensor has for every row of the space, or
        for every column; an empty tuple if it has no such elements."""
        if self.space.index_split is not None:
            return ()
        for dim, count in enumerate(shape):
            if isinstance(count, int) and 1 < count <= MOST_UNROLLED:
                one = (*shape[:dim], 1, *shape[dim + 1 :])
                at = self.in_order(one) if self.along is not None else self.without(dim, shape)
                if at is not None and is_bijection(at, one, self.extents):
                    return tuple((*at[:dim], Index(i, ()), *at[dim + 1 :]) for i in range(count))
        return ()

    def without(self, dim: int, shape: tuple[Dim, ...]) -> Coords | None:
        """Return the space's coordinates with that of `dim` set to zero, or None unless this dimension is a
        group by itself, and the only one whose size differs from that in `shape`."""
        sizes, groups = tuple(map(product, self.space.factors)), self.space.groups
        if len(shape) != len(sizes) or [d for d, size in enumerate(sizes) if size != shape[d]] != [dim]:
            return None
        if any(groups[d] == groups[dim] and size != 1 for d, size in enumerate(sizes) if d != dim):
            return None
        at = self.space.identity()
        return (*at[:dim], ZERO, *at[dim + 1 :])

    def place_of_operand(self, name: str) -> Coords | None:
        """Return the coordinates of an operand that has some, also through views."""
        if name in self.coords_of:
            return self.coords_of[name]
        op = self.dag.op(name)
        if not layout.is_view(op):
            return self.place(name) if name in self.inside else self.loaded_at.get(name)
        source = self.place_of_operand(op.first)
        return None if source is None else self.push(op, source)

    def part(self, name: str) -> Part | None:
        """Return the part of the space that an output covers, such as the keys within one product's result;
        None if unknown."""
        op = self.dag.op(name)
        if name in self.coords_of or (name in self.inside and is_reduction(op)):
            return None if (coords := self.place(name)) is None else Part(coords)
        if layout.is_view(op):
            cut = layout.cut_of(self.dag, op)
            part = self.part(op.first if cut is None else cut.source)
            if part is None:
                return None
            if cut is not None:
                return part.cut(cut)
            coords = self.push(op, part.coords)
            return None if coords is None else Part(coords, part.ranges)
        if name not in self.inside:
            return None
        inputs = ((o, self.dag.op(o).outputs) for o in op.inputs)
        same = (o for o, outputs in inputs if outputs and outputs[0].shape == stored_shape(self.dag, op))
        return next((part for o in same if (part := self.part(o)) is not None), None)

    def push(self, op: Op, coords: Coords) -> Coords | None:
        """Return the coordinates of a view's result, given those of its operand; None unless the view keeps
        every element."""
        shape, out = self.dag.op(op.first).outputs[0].shape, op.outputs[0].shape
        if product(shape) != product(out) or op.target is operator.getitem:
            return None
        _, view = layout.view_of(self.dag, op)
        if isinstance(view, Permuted):
            return tuple(coords[d] for d in view.order)
        try:
            return regroup(coords, shape, out, self.extents)
        except NotExpressible:
            return None

    def in_order(self, shape: tuple[Dim, ...]) -> Coords | None:
        """Return coordinates that enumerate the space, or one group of it, in row-major order, if those are
        affine."""
        if shape == tuple(product(f) for f in self.space.factors):
            return self.space.identity()
        if self.space.index_split is not None and shape == self.space.index_split.shape:
            return self.space.tensor_coords()
        size = product(shape)
        every = tuple(sorted(i for axes in self.group_axes.values() for i in axes))
        # a product's result has the other group
        kept = sorted((ROWS, COLS), key=lambda g: g == self.along)
        for axes in (every, *(self.group_axes[g] for g in kept)):
            sizes = tuple(self.space.axes[i] for i in axes)
            if product(sizes) == size:
                try:
                    return self.spread(axes, shape)
                except NotExpressible:
                    return None
        return None

    def spread(self, axes: tuple[int, ...], shape: tuple[Dim, ...]) -> Coords:
        """Return row-major coordinates in `shape` of the element numbered by `axes`."""
        sizes = tuple(self.space.axes[i] for i in axes)
        flat = combine([(axis(i), s) for i, s in zip(axes, strides_of(sizes), strict=True)]) if axes else ZERO
        return tuple(
            ZERO if s == 1 else c for s, c in zip(shape, digits(flat, shape, self.extents), strict=True)
        )

    # -- values --------------------------------------------------------------------------------

    def value(self, name: str, coords: Coords, within: int | None) -> int:
        op = self.dag.op(name)
        if not op.outputs:
            raise Illegal("operand", f"{name} is not a tensor")
        shape = op.outputs[0].shape
        coords = tuple(ZERO if s == 1 else c for s, c in zip(shape, coords, strict=True))
        key = (name, coords, within)
        if key in self.memo:
            return self.memo[key]
        # the value is also used outside of the condition that narrows the extents
        if within is None and self.extents.narrowed:
            narrowed, self.extents.narrowed = self.extents.narrowed, {}
            try:
                return self.value(name, coords, None)
            finally:
                self.extents.narrowed = narrowed
        if len(self.memo) >= MOST_VALUES:
            raise Illegal("size", f"more than {MOST_VALUES} values are needed at several places")
        if name in self.inside:
            node = self.compute(op, coords, within)
            # Neither a piece of the value nor a window.
            if not self.is_window(coords) and (
                self.space.index_split is None or is_bijection(coords, shape, self.extents)
            ):
                self.coords_of.setdefault(name, coords)
        elif layout.is_view(op):
            node = self.through(op, coords, within)
        else:
            node = self.load(op, coords, within)
            if self.space.is_free:
                self.loaded_at.setdefault(name, coords)
        self.memo[key] = node
        return node

    def inner_axes(self, key: str, sizes: tuple[Dim, ...]) -> Coords:
        if self.space.index_split is not None:
            raise Illegal("space", f"{key} sums over windows, which cannot be computed in pieces")
        if key not in self.inner:
            self.inner[key] = tuple(ZERO if size == 1 else axis(self.add_inner_axis(size)) for size in sizes)
        return self.inner[key]

    def add_inner_axis(self, size: Dim) -> int:
        """Add an axis after all others and return its number."""
        number = len(self.axes)
        self.axes += (Axis(f"a{number}", size, INNER),)
        self.extents.axes += (size,)
        return number

    def is_window(self, coords: Coords) -> bool:
        """True if the coordinates move along inner axes."""
        return any(k >= len(self.space.extents) for c in coords for k, _ in c.terms)

    def through(self, op: Op, coords: Coords, within: int | None) -> int:
        try:
            source, inner = layout.pull(self.dag, op, coords, self.extents)
        except NotExpressible:
            if self.touches_inside(op.first):
                raise
            return self.load(op, coords, within)  # the view exists as a tensor: read it by its strides
        except NeedsSplit as split:
            if split.axis < len(self.space.extents) or self.touches_inside(op.first):
                raise
            return self.load(op, coords, within)
        return self.value(source, inner, within)

    def touches_inside(self, name: str) -> bool:
        while name not in self.inside and layout.is_view(self.dag.op(name)):
            name = self.dag.op(name).first
        return name in self.inside

    def load(self, op: Op, coords: Coords, within: int | None) -> int:
        meta = op.outputs[0]
        if len(op.outputs) != 1:
            raise Illegal("operand", f"{op.name} has several results")
        index = flatten(coords, meta.stride)
        return self.emit(Load(op.name, index, within, compute_dtype(meta.dtype)), op.name)

    def compute(self, op: Op, coords: Coords, within: int | None) -> int:
        if is_reduction(op):
            return self.reduce(op, coords, within)
        if op.kind is Kind.SCAN:
            return self.rounder.rounded(op, self.scans.value(op, coords))
        handler = handler_of(op)
        if handler is not None:
            return self.rounder.rounded(op, handler(self, op, coords, within))
        spec = spec_of(op.target)
        if spec is None or spec.expr is None:
            raise Illegal("operator", f"{op.target} has no expression")
        operands: list[tuple[str, object]] = []
        for name, arg in op.arguments.items():
            if isinstance(arg, Ref):
                operands.append((name, Value(self.operand(op, arg.name, coords, within))))
            elif isinstance(arg, bool | int | float | str) or arg is None:
                operands.append((name, arg))
            elif isinstance(arg, torch.dtype | torch.device | torch.layout | torch.memory_format):
                operands.append((name, str(arg)))
            elif isinstance(arg, sympy.Expr) and arg.is_integer:  # a size
                size = Coordinate(Index(arg, ()), torch.int64)
                operands.append((name, Value(self.emit(size, f"{op.name}_size"))))
            else:
                raise Illegal("operand", f"{name}={arg} of {op.name} is neither a tensor nor a constant")
        dtype, target = op.outputs[0].dtype, spec.target
        if spec.operator is MASKED_FILL:
            target, operands = WHERE, self.of_where(operands, op)
        elif dtype is torch.bool and spec.operator in OF_BOOLEANS and are_values(operands):
            target = OF_BOOLEANS[spec.operator]
        if spec.discontinuous:
            operands = self.rounder.comparable(op, operands)
        reproducible = self.rounder.rounding.pins(op)
        bf16 = spec.bf16 is not None and dtype is torch.bfloat16 and not reproducible
        compute = Compute(target, tuple(operands), compute_dtype(dtype), bf16, reproducible)
        node = self.emit(compute, op.name)
        return self.rounder.rounded(op, node)

    def of_where(self, operands: Iterable[tuple[str, object]], op: Op) -> list[tuple[str, object]]:
        """Return the operands with which a `where` does what `masked_fill` does."""
        named = dict(operands)
        value = named["value"]
        if isinstance(value, bool | int | float):
            value = Value(self.constant(value, compute_dtype(op.outputs[0].dtype), op.name))
        return [("condition", named["mask"]), ("self", value), ("other", named["self"])]

    # -- reductions -----------------------------------------------------------------------------

    def reduce(self, op: Op, coords: Coords, within: int | None) -> int:
        if op.name in self.reduced and not self.is_one_row(coords):
            coords_before, node = self.reduced[op.name]
            if self.with_fixed_axes(coords_before) != coords:
                raise Illegal("rows", f"{op.name} is needed at rows other than the one being reduced")
            return node
        reduced = reduced_by(self.dag, op)
        shape, dims = reduced.shape, reduced.dims
        split = self.space.index_split
        if split is not None and shape == split.shape:
            if not split.dims.isdisjoint(dims):
                raise Illegal("rows", f"{op.name} reduces across the pieces of {op.first}")
            return self.reduce_piece(op, coords, dims)
        matrix_product = None if self.space.is_free else product_of(self.dag, op)
        if matrix_product is not None and matrix_product.rows != 1:
            raise Illegal("rows", f"{op.name} is made for all of its rows at once, in a space of its own")
        keepdim = len(op.outputs[0].shape) == len(shape)
        kept_dims = reduced.kept
        kept = tuple(coords[d] for d in kept_dims) if keepdim else coords
        if self.is_unrolled(op, reduced):
            return self.unrolled(op, dict(zip(kept_dims, kept, strict=True)), reduced)
        if product(shape[d] for d in dims) == 1 and not reduced.is_product:
            index_of_kept = dict(zip(kept_dims, kept, strict=True))
            source = tuple(index_of_kept.get(d, ZERO) for d in range(len(shape)))
            node = self.rounder.rounded(op, self.of_one(op, self.value(op.first, source, None)))
            self.reduced[op.name] = (coords, node)
            return node
        if self.space.is_free:
            axes = self.free_axes(op, reduced, kept)
        else:
            kept_shape = tuple(shape[d] for d in kept_dims)
            axes = self.reduced_axes(op, kept, kept_shape, tuple(shape[d] for d in dims))
        live = tuple(i for i in sorted(axes) if self.axes[i].size != 1)
        inner = self.spread_like_operand(op, live, reduced)
        full: list[Index] = [ZERO] * len(shape)
        for d, c in zip(kept_dims, kept, strict=True):
            full[d] = c
        for d, c in zip(dims, inner, strict=True):
            full[d] = c
        position = flatten(inner, strides_of(tuple(shape[d] for d in dims)))
        node = self.combine(op, tuple(full), axes, position)
        self.reduced[op.name] = (coords, node)
        return node

    def with_fixed_axes(self, coords: Coords) -> Coords:
        """Return the coordinates with the current part's single positions filled in."""
        for key, place in self.fixed_axes.items():
            coords = tuple(fixed(c, key, place) for c in coords)
        return coords

    def is_unrolled(self, op: Op, reduced: Reduced) -> bool:
        """True if a reduction is of few elements, beside a product or of those that each row has."""
        spec, count = spec_of(op.target), product(reduced.shape[d] for d in reduced.dims)
        few = isinstance(count, int) and 1 < count <= MOST_UNROLLED
        if not few or spec is None or spec.combine not in UNROLLED:
            return False
        return self.along is not None or bool(self.beside(reduced.shape))

    def unrolled(self, op: Op, kept: dict[int, Index], reduced: Reduced) -> int:
        """Return a reduction of few elements as an expression. Raises Illegal if all pieces together have too
        many."""
        spec, dtype = spec_of(op.target), compute_dtype(op.outputs[0].dtype)
        assert spec is not None
        count = int(product(reduced.shape[d] for d in reduced.dims))
        self.terms[op.name] += count
        if self.terms[op.name] > MOST_TERMS:
            raise Illegal("size", f"{op.name} has {count} elements in each of too many pieces")
        total: int | None = None
        for place in itertools.product(*(range(int(reduced.shape[d])) for d in reduced.dims)):
            at = kept | {d: Index(i, ()) for d, i in zip(reduced.dims, place, strict=True)}
            value = self.value(op.first, tuple(at[d] for d in range(len(reduced.shape))), None)
            value = self.converted(value, dtype, op.name)
            if total is not None:
                value = self.apply(op.name, UNROLLED[spec.combine], total, value)
            total = value
        assert total is not None
        return self.rounder.rounded(op, total)

    def is_one_row(self, kept: Coords) -> bool:
        """True if a reduction's result is one row of a product's few rows. Each piece has its own."""
        return self.along is not None and not any(c.terms for c in kept)

    def reduce_piece(self, op: Op, coords: Coords, dims: tuple[int, ...]) -> int:
        """Return one piece of a reduction that keeps the split dimension."""
        shape, groups = op.outputs[0].shape, self.space.groups
        live = [d for d, factors in enumerate(self.space.factors) if product(factors) != 1]
        over = frozenset(groups[d] for d in live if d in dims)
        if over and not over & {groups[d] for d in live if d not in dims}:
            for piece in self.pieces(self.space.tensor_coords()):
                kept = self.with_fixed_axes(reduced_coords(op, piece, dims))
                if coords == tuple(ZERO if s == 1 else c for s, c in zip(shape, kept, strict=True)):
                    inner = tuple(piece[d] for d in dims)
                    sizes = tuple(product(self.space.factors[d]) for d in dims)
                    position = flatten(inner, strides_of(sizes))
                    return self.combine(op, piece, axes_in(self.axes, over), position)
        raise Illegal("rows", f"{op.name} does not keep whole axes")

    def spread_like_operand(self, op: Op, axes: tuple[int, ...], reduced: Reduced) -> Coords:
        """Return coordinates of the reduced dimensions: those of the operand if they use exactly these axes,
        else row-major."""
        sizes = tuple(reduced.shape[d] for d in reduced.dims)
        source = None if reduced.is_product else self.place_of_operand(op.first)
        if source is not None:
            inner = tuple(source[d] for d in reduced.dims)
            keys = {k for c in inner for k, _ in c.terms}
            if keys == set(axes) and is_bijection(inner, sizes, self.extents):
                return inner
        return self.spread(axes, sizes)

    def free_axes(self, op: Op, reduced: Reduced, kept: Coords) -> frozenset[int]:
        """Return the axes of a free space that a reduction runs over: those along which its operand lies in
        the dimensions that it reduces, or those of the same dimensions of the space."""
        sizes = tuple(reduced.shape[d] for d in reduced.dims)
        where = None if reduced.is_product else self.place_of_operand(op.first)
        if where is None and len(reduced.shape) == len(self.space.factors):
            where = self.space.identity()
        keys = {k for c in kept for k, _ in c.terms}
        if where is None:
            axes = frozenset(self.group_axes[COLS]) - keys
        else:
            axes = frozenset(k for d in reduced.dims for k, _ in where[d].terms if reduced.shape[d] != 1)
        if not axes <= frozenset(range(len(self.space.axes))):  # others are loaded indices
            raise Illegal("rows", f"{op.name} reduces elements at loaded indices, not along an axis")
        is_whole = simple(product(self.space.axes[k] for k in axes)) == simple(product(sizes))
        kept_shape = tuple(reduced.shape[d] for d in reduced.kept)
        if not is_whole or axes & keys or not is_bijection(kept, kept_shape, self.extents):
            raise Illegal("rows", f"{op.name} does not keep whole axes")
        return axes

    def reduced_axes(
        self, op: Op, kept: Coords, kept_shape: tuple[Dim, ...], reduced: tuple[Dim, ...]
    ) -> frozenset[int]:
        """Return the axes over which a reduction with these kept coordinates runs. Raises Illegal if there
        are none."""
        if self.is_one_row(kept):
            assert self.along is not None
            size = product(self.space.axes[i] for i in self.group_axes[self.along])
            if simple(product(reduced)) == size:
                return axes_in(self.axes, (self.along,))
        keys = {k for c in kept for k, _ in c.terms}
        if not is_bijection(kept, kept_shape, self.extents):
            raise Illegal("rows", f"{op.name} does not keep whole axes")
        sizes = {g: product(self.space.axes[i] for i in axes) for g, axes in self.group_axes.items()}
        count = product(reduced)
        both = simple(sizes[ROWS] * sizes[COLS])
        for candidate, kept_group in ((COLS, ROWS), (ROWS, COLS)):
            if keys == set(self.group_axes[kept_group]) and count == sizes[candidate]:
                return axes_in(self.axes, (candidate,))
        if not keys:
            if count == both:
                return axes_in(self.axes, TILE)
            for candidate in (ROWS, COLS):
                if count == sizes[candidate]:
                    return axes_in(self.axes, (candidate,))
        elif set(self.group_axes[COLS]) - keys and keeps_parts(op):
            if simple(count * product(self.space.axes[k] for k in keys)) == both:
                return axes_in(self.axes, TILE) - keys
        raise Illegal(
            "rows",
            f"{op.name} reduces {count} elements of {sizes[ROWS]} rows x {sizes[COLS]}: no whole axis",
        )

    def combine(self, op: Op, coords: Coords, axes: frozenset[int], position: Index) -> int:
        """Return the reduction node. argmax and argmin become the first position that holds the extremum."""
        if op.kind is Kind.CONTRACTION:
            return self.combine_product(op, coords, axes)
        spec = spec_of(op.target)
        assert spec is not None and spec.combine is not None
        value = self.value(op.first, coords, None)
        dtype = compute_dtype(op.outputs[0].dtype)
        count = product(self.axes[i].size for i in axes)
        fits_int32 = isinstance(count, int) and count < 2**31  # programs can exchange int32
        counts = spec.combine == "sum" and dtype is torch.int64 and self.nodes[value].dtype is torch.bool
        if counts and fits_int32:
            return self.widened(Reduce("sum", value, axes, torch.int32), op.name)
        if spec.combine not in ("argmax", "argmin"):
            node = self.emit(Reduce(spec.combine, value, axes, dtype), op.name)
            return self.rounder.rounded(op, node)
        operand_dtype = self.nodes[value].dtype
        best = self.emit(Reduce(spec.combine[3:], value, axes, operand_dtype), f"{op.name}_value")
        hit = self.apply(f"{op.name}_hit", EQ, value, best)
        if operand_dtype.is_floating_point:
            hit = self.apply(f"{op.name}_hit", OR, hit, self.apply(f"{op.name}_nan", IS_NAN, value))
        integer = torch.int32 if fits_int32 else torch.int64
        position_node = self.emit(Coordinate(position, integer), f"{op.name}_position")
        never = self.emit(Constant(torch.iinfo(integer).max, integer), "never")
        candidates = self.choose(hit, position_node, never, integer, f"{op.name}_candidate")
        return self.widened(Reduce("min", candidates, axes, integer), op.name)

    def combine_product(self, op: Op, coords: Coords, axes: frozenset[int]) -> int:
        """Return alpha * sum(left * right) + beta * added, at [.., m, k, n]."""
        factors = product_of(self.dag, op)
        assert factors is not None
        *batch, m, k, n = coords
        left = self.value(factors.left, (*batch, m, k), None)
        if factors.chosen is None:
            right = self.value(factors.right, (*batch, k, n), None)
        else:
            right = looked_up(self, op, factors.right, (ZERO, k, n), [(m,)], None)
        dtype = compute_dtype(op.outputs[0].dtype)
        term = self.apply(f"{op.name}_terms", MUL, left, right, dtype=dtype)
        node = self.emit(Reduce("sum", term, axes, dtype), op.name)
        if factors.alpha != 1:
            alpha = self.constant(factors.alpha, dtype, "alpha")
            node = self.apply(op.name, MUL, node, alpha)
        if factors.added is not None and factors.beta != 0:
            added = self.operand(op, factors.added, (*batch, m, n), None)
            if factors.beta != 1:
                beta = self.constant(factors.beta, dtype, "beta")
                added = self.apply(op.name, MUL, added, beta)
            node = self.apply(op.name, ADD, node, added, dtype=dtype)
        return self.rounder.rounded(op, node)

    def widened(self, reduce: Reduce, name: str) -> int:
        """Return an int32 reduction converted to int64."""
        return self.converted(self.emit(reduce, name), torch.int64, name)


def _most(dag: OpDag, size: Dim) -> int | None:
    """Return an upper bound of a size, that of a multiple of it if no other is known; None without one."""
    if isinstance(size, int) or size in dag.most:
        return dag.most.get(size)
    bounds = ((quotient(multiple, size), bound) for multiple, bound in dag.most.items())
    return min((bound // times for times, bound in bounds if isinstance(times, int)), default=None)


def reduced_coords(op: Op, coords: Coords, dims: tuple[int, ...]) -> Coords:
    """Return the coordinates of a reduction's result, given those of its operand."""
    keepdim = len(op.outputs[0].shape) == len(coords)
    if keepdim:
        return tuple(ZERO if d in dims else c for d, c in enumerate(coords))
    return tuple(c for d, c in enumerate(coords) if d not in dims)


def keeps_parts(op: Op) -> bool:
    """True if a reduction may keep some of the columns. argmax and argmin may not."""
    spec = spec_of(op.target)
    return spec is not None and spec.combine not in ("argmax", "argmin")


def spec_is_pointwise(op: Op) -> bool:
    """True if the result at a point depends only on the operands at that point."""
    spec = spec_of(op.target)
    return spec is not None and spec.expr is not None and op.kind is Kind.ELEMENTWISE


def are_values(operands: Iterable[tuple[str, object]]) -> bool:
    """True if none of an expression's operands is a literal."""
    return all(isinstance(value, Value) for _, value in operands)
