"""Lower a set of ops to one tile program over one iteration space, or say why that is impossible.

The space has two groups of axes: those that the cluster's main reductions keep and those that they
reduce. Every value is *pulled*: from the stores back to the loads, each op is asked for its value at
coordinates that are affine in the axes. Views only change coordinates, so they vanish; a value that
is needed at two different coordinates is computed twice; a reduction exists only at the identity
coordinates of the group that it keeps. What comes out is therefore right by construction: where an
output is placed in the space decides how fast it is, never what it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fusion_compiler.dag import Op, OpDag, Ref
from fusion_compiler.dims import Dim, not_above, numel, product, simple, strides_of
from fusion_compiler.loops import (
    COLS,
    ROWS,
    Axis,
    Compute,
    Constant,
    Coordinate,
    Index,
    InRange,
    Load,
    LoopNest,
    Node,
    Random,
    Reduce,
    Store,
)
from fusion_compiler.loops import Ref as Value
from fusion_compiler.ops import Kind, spec_of
from fusion_compiler.passes import layout
from fusion_compiler.passes.index import (
    ZERO,
    Extents,
    NeedsSplit,
    NotExpressible,
    axis,
    combine,
    digits,
    flatten,
    is_bijection,
    regroup,
    shifted,
)

aten = torch.ops.aten
Coords = tuple[Index, ...]


class Illegal(Exception):
    """The ops do not share one iteration space. rule names the law, reason the numbers."""

    def __init__(self, rule: str, reason: str) -> None:
        super().__init__(reason)
        self.rule, self.reason = rule, reason


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for every float but float64; integers and bool as they are."""
    if dtype.is_complex:
        raise Illegal("dtype", f"{dtype} has no Triton type")
    if dtype.is_floating_point:
        return torch.float64 if dtype is torch.float64 else torch.float32
    return dtype


@dataclass(frozen=True)
class Space:
    """Dimensions of the anchor, each cut into factors from the outside in, with their groups."""

    factors: tuple[tuple[Dim, ...], ...]
    groups: tuple[str, ...]

    @property
    def axes(self) -> tuple[Dim, ...]:
        return tuple(f for factors in self.factors for f in factors)

    @property
    def axis_groups(self) -> tuple[str, ...]:
        return tuple(g for factors, g in zip(self.factors, self.groups, strict=True) for _ in factors)

    def split(self, number: int, inner: Dim) -> Space:
        position = 0
        cut: list[tuple[Dim, ...]] = []
        for factors in self.factors:
            if position <= number < position + len(factors):
                i = number - position
                outer = factors[i] // inner if isinstance(factors[i], int) else simple(factors[i] / inner)  # type: ignore[arg-type]
                factors = (*factors[:i], outer, inner, *factors[i + 1 :])
                position -= 1
            cut.append(factors)
            position += len(factors)
        return Space(tuple(cut), self.groups)

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


def lower(
    dag: OpDag, ops: tuple[str, ...], outputs: tuple[str, ...], *, round_like_eager: bool = False
) -> LoopNest:
    """The tile program of `ops` (topological order), storing `outputs`. Raises Illegal."""
    space = anchor_space(dag, ops, outputs)
    for _ in range(24):
        try:
            return _Lowering(dag, ops, outputs, space, round_like_eager).run()
        except NeedsSplit as split:
            space = space.split(split.axis, split.inner)
        except NotExpressible as error:
            raise Illegal("layout", str(error)) from None
        except RecursionError:
            raise Illegal("size", f"{len(ops)} ops nest too deep") from None
    raise Illegal("layout", "the views of these ops cut the space into too many pieces")


def anchor_space(dag: OpDag, ops: tuple[str, ...], outputs: tuple[str, ...]) -> Space:
    """The iteration space: a reduction's input, best one that is broadcast back; else the largest output."""
    reductions = [dag.op(n) for n in ops if dag.op(n).kind is Kind.REDUCTION]
    if not reductions:
        largest = max((dag.op(n) for n in outputs), key=lambda op: numel(op.outputs[0].shape))
        shape = largest.outputs[0].shape
        return Space(tuple((s,) for s in shape), tuple(COLS for _ in shape))
    inside = set(ops)
    best = max(reductions, key=lambda op: (_is_broadcast_back(dag, op, inside), _input_size(dag, op)))
    source = dag.op(best.inputs[0]).outputs[0]
    reduced = reduced_dims(best, len(source.shape))
    contiguous = next(
        (d for d, s in enumerate(source.stride) if s == 1 and source.shape[d] != 1), len(source.shape) - 1
    )
    inner = COLS if contiguous in reduced else ROWS
    outer = ROWS if inner == COLS else COLS
    groups = tuple(inner if d in reduced else outer for d in range(len(source.shape)))
    return Space(tuple((s,) for s in source.shape), groups)


def _input_size(dag: OpDag, op: Op) -> int:
    return numel(dag.op(op.inputs[0]).outputs[0].shape)


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
            if name in inside and consumer.kind is not Kind.REDUCTION:
                if numel(consumer.outputs[0].shape) >= size:
                    return True
            seen.add(name)
            stack.append(name)
    return False


class _Lowering:
    def __init__(
        self, dag: OpDag, ops: tuple[str, ...], outputs: tuple[str, ...], space: Space, rounded: bool
    ) -> None:
        self.dag, self.ops, self.outputs, self.space, self.rounded = dag, ops, outputs, space, rounded
        self.inside = set(ops)
        self.extents = Extents(space.axes)
        self.nodes: list[Node] = []
        self.names: list[str] = []
        self.numbering: dict[Node, int] = {}
        self.memo: dict[tuple[str, Coords, int | None], int] = {}
        self.placed: dict[str, Coords] = {}  # where a value was computed first
        self.reduced: dict[str, tuple[Coords, int]] = {}
        groups = space.axis_groups
        live = [i for i, size in enumerate(space.axes) if size != 1]
        self.group_axes = {g: tuple(i for i in live if groups[i] == g) for g in (ROWS, COLS)}

    def run(self) -> LoopNest:
        stores: list[Store] = []
        self.seed_anchor()
        for name in self.ops:  # reductions first: they fix where everything upstream lies
            if self.dag.op(name).kind is Kind.REDUCTION and name not in self.reduced:
                coords = self.place(name)
                if coords is not None:
                    self.value(name, coords, None)
        for name in self.outputs:
            coords = self.place(name)
            meta = self.dag.op(name).outputs[0]
            if coords is None or not is_bijection(coords, meta.shape, self.extents):
                raise Illegal(
                    "space", f"{name} {list(meta.shape)} does not fill the space {list(self.space.axes)}"
                )
            node = self.value(name, coords, None)
            stores.append(Store(name, flatten(coords, meta.stride), node))
        groups = self.space.axis_groups
        axes = tuple(Axis(f"a{i}", s, groups[i]) for i, s in enumerate(self.space.axes))
        return LoopNest(axes, tuple(self.nodes), tuple(stores), tuple(self.names))

    # -- where things lie -------------------------------------------------------------------

    def seed_anchor(self) -> None:
        """Pull the anchor reduction's input at the identity."""
        for name in self.ops:
            op = self.dag.op(name)
            if op.kind is not Kind.REDUCTION:
                continue
            shape = self.dag.op(op.inputs[0]).outputs[0].shape
            if shape == tuple(product(f) for f in self.space.factors):
                identity = self.space.identity()
                dims = reduced_dims(op, len(shape))
                groups = {self.space.groups[d] for d in dims if shape[d] != 1}
                kept = {self.space.groups[d] for d in range(len(shape)) if d not in dims and shape[d] != 1}
                if not groups & kept:
                    self.value(name, _reduced_coords(op, identity, dims), None)
                    return

    def place(self, name: str) -> Coords | None:
        """Coordinates at which a value fills the space: where it was needed already, where its operands
        lie, the identity, or the space's elements in order."""
        if name in self.placed:
            return self.placed[name]
        op = self.dag.op(name)
        shape = op.outputs[0].shape
        if op.kind is Kind.REDUCTION:
            source = self.place_of_operand(op.inputs[0])
            if source is not None:
                dims = reduced_dims(op, len(source))
                return _reduced_coords(op, source, dims)
            return self.in_order(shape)
        for operand in op.inputs:
            if not self.dag.op(operand).outputs or self.dag.op(operand).outputs[0].shape != shape:
                continue
            if layout.is_view(op) or spec_is_pointwise(op):
                coords = self.place_of_operand(operand)
                if coords is not None and is_bijection(coords, shape, self.extents):
                    return coords
        return self.in_order(shape)

    def place_of_operand(self, name: str) -> Coords | None:
        """Coordinates of an operand that was placed, seen through views."""
        if name in self.placed:
            return self.placed[name]
        op = self.dag.op(name)
        if not layout.is_view(op):
            return self.place(name) if name in self.inside else None
        source = self.place_of_operand(op.inputs[0])
        return None if source is None else self.push(op, source)

    def push(self, op: Op, coords: Coords) -> Coords | None:
        """Coordinates of a view's result from those of its operand, for views that keep every element."""
        shape, out = self.dag.op(op.inputs[0]).outputs[0].shape, op.outputs[0].shape
        if product(shape) != product(out) or op.target is operator.getitem:
            return None
        if op.target in (aten.permute.default, aten.transpose.int, aten.t.default):
            rank = len(shape)
            order = list(range(rank))
            if op.target is aten.permute.default:
                order = [layout.wrap(d, rank) for d in op.args[1]]  # type: ignore[union-attr]
            elif rank > 1:
                a, b = (0, 1) if op.target is aten.t.default else (layout.wrap(d, rank) for d in op.args[1:3])  # type: ignore[arg-type]
                order[a], order[b] = order[b], order[a]
            return tuple(coords[d] for d in order)
        try:
            return regroup(coords, shape, out, self.extents)
        except NotExpressible:
            return None

    def in_order(self, shape: tuple[Dim, ...]) -> Coords | None:
        """The elements of the whole space, or of one group of it, in row-major order if that is affine."""
        if shape == tuple(product(f) for f in self.space.factors):
            return self.space.identity()
        size = product(shape)
        every = tuple(sorted(self.group_axes[ROWS] + self.group_axes[COLS]))
        for axes in (every, self.group_axes[ROWS], self.group_axes[COLS]):
            sizes = tuple(self.space.axes[i] for i in axes)
            if product(sizes) == size:
                try:
                    return self.spread(axes, shape)
                except NotExpressible:
                    return None
        return None

    def spread(self, axes: tuple[int, ...], shape: tuple[Dim, ...]) -> Coords:
        """Row-major coordinates in `shape` of the element numbered by `axes`."""
        sizes = tuple(self.space.axes[i] for i in axes)
        flat = combine([(axis(i), s) for i, s in zip(axes, strides_of(sizes), strict=True)]) if axes else ZERO
        return tuple(
            ZERO if s == 1 else c for s, c in zip(shape, digits(flat, shape, self.extents), strict=True)
        )

    # -- values --------------------------------------------------------------------------------

    def emit(self, node: Node, name: str) -> int:
        number = self.numbering.get(node)
        if number is None:
            number = self.numbering[node] = len(self.nodes)
            self.nodes.append(node)
            self.names.append(name)
        return number

    def value(self, name: str, coords: Coords, within: int | None) -> int:
        """The node that holds `name` at `coords`; outside `within` it may be anything finite to read."""
        op = self.dag.op(name)
        if not op.outputs:
            raise Illegal("operand", f"{name} is not a tensor")
        shape = op.outputs[0].shape
        coords = tuple(ZERO if s == 1 else c for s, c in zip(shape, coords, strict=True))
        key = (name, coords, within)
        if key in self.memo:
            return self.memo[key]
        if name in self.inside:
            node = self.compute(op, coords, within)
            self.placed.setdefault(name, coords)
        elif layout.is_view(op):
            node = self.through(op, coords, within)
        else:
            node = self.load(op, coords, within)
        self.memo[key] = node
        return node

    def through(self, op: Op, coords: Coords, within: int | None) -> int:
        try:
            source, inner = layout.pull(self.dag, op, coords, self.extents)
        except NotExpressible:
            if self.touches_inside(op.inputs[0]):
                raise
            return self.load(op, coords, within)  # the view exists as a tensor: read it by its strides
        return self.value(source, inner, within)

    def touches_inside(self, name: str) -> bool:
        while name not in self.inside and layout.is_view(self.dag.op(name)):
            name = self.dag.op(name).inputs[0]
        return name in self.inside

    def load(self, op: Op, coords: Coords, within: int | None) -> int:
        meta = op.outputs[0]
        if len(op.outputs) != 1:
            raise Illegal("operand", f"{op.name} has several results")
        index = flatten(coords, meta.stride)
        return self.emit(Load(op.name, index, within, compute_dtype(meta.dtype)), op.name)

    def compute(self, op: Op, coords: Coords, within: int | None) -> int:
        if op.kind is Kind.REDUCTION:
            return self.reduce(op, coords, within)
        special = SPECIAL.get(op.target)
        if special is not None:
            return special(self, op, coords, within)
        spec = spec_of(op.target)
        if spec is None or spec.expr is None:
            raise Illegal("operator", f"{op.target} has no expression")
        operands: list[tuple[str, object]] = []
        schema = op.target._schema.arguments  # type: ignore[union-attr]
        given = dict(op.kwargs)
        for position, argument in enumerate(schema):
            arg = (
                op.args[position]
                if position < len(op.args)
                else given.get(argument.name, argument.default_value)
            )
            if isinstance(arg, Ref):
                operands.append((argument.name, Value(self.operand(op, arg.name, coords, within))))
            elif isinstance(arg, bool | int | float | str) or arg is None:
                operands.append((argument.name, arg))
            elif isinstance(arg, torch.dtype | torch.device | torch.layout | torch.memory_format):
                operands.append((argument.name, str(arg)))
            else:
                raise Illegal(
                    "operand", f"{argument.name}={arg} of {op.name} is neither a tensor nor a constant"
                )
        dtype = op.outputs[0].dtype
        node = self.emit(Compute(op.target, tuple(operands), compute_dtype(dtype)), op.name)  # type: ignore[arg-type]
        return self.rounded_like(op, node)

    def rounded_like(self, op: Op, node: int) -> int:
        """numerics="eager": every 16-bit result is rounded as if it had been stored."""
        dtype = op.outputs[0].dtype
        if not self.rounded or dtype not in (torch.float16, torch.bfloat16):
            return node
        operands = (("self", Value(node)), ("rounding", str(dtype)))
        return self.emit(Compute(aten._to_copy.default, operands, torch.float32), op.name)

    def operand(self, op: Op, name: str, coords: Coords, within: int | None) -> int:
        """An operand of an element-wise op, broadcast to its result."""
        shape = self.dag.op(name).outputs[0].shape if self.dag.op(name).outputs else ()
        lead = len(op.outputs[0].shape) - len(shape)
        return self.value(name, coords[lead:], within)

    # -- reductions -----------------------------------------------------------------------------

    def reduce(self, op: Op, coords: Coords, within: int | None) -> int:
        if op.name in self.reduced:
            where, node = self.reduced[op.name]
            if where != coords:
                raise Illegal("rows", f"{op.name} is needed at rows other than the one being reduced")
            return node
        source = op.inputs[0]
        shape = self.dag.op(source).outputs[0].shape
        dims = reduced_dims(op, len(shape))
        keepdim = len(op.outputs[0].shape) == len(shape)
        kept_dims = [d for d in range(len(shape)) if d not in dims]
        kept = tuple(coords[d] for d in kept_dims) if keepdim else coords
        over = self.reduced_groups(
            op, kept, tuple(shape[d] for d in kept_dims), tuple(shape[d] for d in dims)
        )
        axes = tuple(sorted(i for g in over for i in self.group_axes[g]))
        inner = self.spread_like_operand(source, axes, dims, shape)
        full: list[Index] = [ZERO] * len(shape)
        for d, c in zip(kept_dims, kept, strict=True):
            full[d] = c
        for d, c in zip(dims, inner, strict=True):
            full[d] = c
        node = self.combine(
            op, source, tuple(full), over, flatten(inner, strides_of(tuple(shape[d] for d in dims)))
        )
        self.reduced[op.name] = (coords, node)
        return node

    def spread_like_operand(
        self, source: str, axes: tuple[int, ...], dims: tuple[int, ...], shape: tuple[Dim, ...]
    ) -> Coords:
        """Coordinates of the reduced dimensions: where the operand lies, if it covers just these axes."""
        sizes = tuple(shape[d] for d in dims)
        known = self.place_of_operand(source)
        if known is not None:
            inner = tuple(known[d] for d in dims)
            keys = {k for c in inner for k, _ in c.terms}
            if keys == set(axes) and is_bijection(inner, sizes, self.extents):
                return inner
        return self.spread(axes, sizes)

    def reduced_groups(
        self, op: Op, kept: Coords, kept_shape: tuple[Dim, ...], reduced: tuple[Dim, ...]
    ) -> frozenset[str]:
        """Which axis groups a reduction at these coordinates runs over."""
        if not is_bijection(kept, kept_shape, self.extents):
            raise Illegal("rows", f"{op.name} does not keep whole axes")
        keys = {k for c in kept for k, _ in c.terms}
        sizes = {g: product(self.space.axes[i] for i in axes) for g, axes in self.group_axes.items()}
        count = product(reduced)
        both = simple(sizes[ROWS] * sizes[COLS])
        for candidate, kept_group in ((COLS, ROWS), (ROWS, COLS)):
            if keys == set(self.group_axes[kept_group]) and count == sizes[candidate]:
                return frozenset({candidate})
        if not keys:
            if count == both:
                return frozenset({ROWS, COLS})
            for candidate in (ROWS, COLS):
                if count == sizes[candidate]:
                    return frozenset({candidate})
        raise Illegal(
            "rows", f"{op.name} reduces {count} elements, which is not a whole axis group of {sizes}"
        )

    def combine(self, op: Op, source: str, coords: Coords, over: frozenset[str], position: Index) -> int:
        """The reduction node; argmax and argmin as the first position that holds the extremum."""
        spec = spec_of(op.target)
        assert spec is not None and spec.combine is not None
        value = self.value(source, coords, None)
        dtype = compute_dtype(op.outputs[0].dtype)
        if spec.combine not in ("argmax", "argmin"):
            node = self.emit(Reduce(spec.combine, value, over, dtype), op.name)
            return self.rounded_like(op, node)
        operand_dtype = self.nodes[value].dtype
        best = self.emit(Reduce(spec.combine[3:], value, over, operand_dtype), f"{op.name}_value")
        hit = self.emit(
            Compute(aten.eq.Tensor, (("self", Value(value)), ("other", Value(best))), torch.bool),
            f"{op.name}_hit",
        )
        if operand_dtype.is_floating_point:
            nan = self.emit(
                Compute(aten.isnan.default, (("self", Value(value)),), torch.bool), f"{op.name}_nan"
            )
            hit = self.emit(
                Compute(aten.logical_or.default, (("self", Value(hit)), ("other", Value(nan))), torch.bool),
                f"{op.name}_hit",
            )
        here = self.emit(Coordinate(position, torch.int64), f"{op.name}_position")
        never = self.emit(Constant(2**62, torch.int64), "never")
        first = (("condition", Value(hit)), ("self", Value(here)), ("other", Value(never)))
        candidates = self.emit(Compute(aten.where.self, first, torch.int64), f"{op.name}_candidate")
        return self.emit(Reduce("min", candidates, over, torch.int64), op.name)

    # -- predicates -----------------------------------------------------------------------------

    def in_range(self, index: Index, low: Dim, high: Dim, within: int | None) -> tuple[int | None, bool]:
        """(node of low <= index < high and within, whether it can be false); (None, ...) when never true."""
        smallest, largest = self.extents.limits(index)
        if not_above(low, smallest) and not_above(largest, simple(high - 1)):
            return within, False
        if not_above(high, smallest) or not_above(largest, simple(low - 1)):
            return None, True
        node = self.emit(InRange(index, low, high), "inside")
        return (node if within is None else self.both(within, node)), True

    def both(self, a: int, b: int) -> int:
        return self.emit(
            Compute(aten.logical_and.default, (("self", Value(a)), ("other", Value(b))), torch.bool), "inside"
        )

    def choose(self, condition: int, a: int, b: int, dtype: torch.dtype, name: str) -> int:
        operands = (("condition", Value(condition)), ("self", Value(a)), ("other", Value(b)))
        return self.emit(Compute(aten.where.self, operands, dtype), name)

    def constant(self, value: bool | int | float, dtype: torch.dtype, name: str) -> int:
        typed = (
            float(value) if dtype.is_floating_point else bool(value) if dtype is torch.bool else int(value)
        )
        return self.emit(Constant(typed, dtype), name)


def _reduced_coords(op: Op, coords: Coords, dims: tuple[int, ...]) -> Coords:
    """Coordinates of a reduction's result from those of its operand."""
    keepdim = len(op.outputs[0].shape) == len(coords)
    if keepdim:
        return tuple(ZERO if d in dims else c for d, c in enumerate(coords))
    return tuple(c for d, c in enumerate(coords) if d not in dims)


def spec_is_pointwise(op: Op) -> bool:
    """Element-wise in the strict sense: the result at a point depends on its operands at that point."""
    spec = spec_of(op.target)
    return spec is not None and spec.expr is not None and op.kind is Kind.ELEMENTWISE


# -- ops whose value is not one expression of their operands at the same point ----------------------

Handler = Callable[[_Lowering, Op, Coords, "int | None"], int]


def _cat(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    tensors = [a.name for a in op.args[0] if isinstance(a, Ref)]  # type: ignore[union-attr]
    tensors = [t for t in tensors if self.dag.op(t).outputs[0].shape != (0,)]
    dim = layout.wrap(layout.argument(op, 1, "dim", 0), len(coords))  # type: ignore[arg-type]
    dtype = compute_dtype(op.outputs[0].dtype)
    result: int | None = None
    end: Dim = 0
    parts: list[tuple[int, int | None]] = []
    for tensor in tensors:
        start, end = end, simple(end + self.dag.op(tensor).outputs[0].shape[dim])
        inside, partial = self.in_range(coords[dim], start, end, within)
        if inside is None and partial:
            continue
        moved = (*coords[:dim], shifted(coords[dim], simple(-start)), *coords[dim + 1 :])
        parts.append((self.value(tensor, moved, inside), inside if partial else None))
    for value, inside in reversed(parts):
        result = (
            value if result is None or inside is None else self.choose(inside, value, result, dtype, op.name)
        )
    if result is None:
        return self.constant(0, dtype, op.name)
    return result


def _stack(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    tensors = [a.name for a in op.args[0] if isinstance(a, Ref)]  # type: ignore[union-attr]
    dim = layout.wrap(layout.argument(op, 1, "dim", 0), len(coords))  # type: ignore[arg-type]
    dtype = compute_dtype(op.outputs[0].dtype)
    inner = (*coords[:dim], *coords[dim + 1 :])
    result: int | None = None
    for number, tensor in reversed(list(enumerate(tensors))):
        inside, partial = self.in_range(coords[dim], number, number + 1, within)
        if inside is None and partial:
            continue
        value = self.value(tensor, inner, inside)
        result = (
            value
            if result is None or not partial or inside is None
            else self.choose(inside, value, result, dtype, op.name)
        )
    assert result is not None
    return result


def _pad(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    source = op.inputs[0]
    shape = self.dag.op(source).outputs[0].shape
    pads = op.args[1]
    assert isinstance(pads, tuple)
    dtype = compute_dtype(op.outputs[0].dtype)
    fill = layout.argument(op, 2, "value", 0)
    inner = list(coords)
    inside, cut = within, False
    for i in range(len(pads) // 2):
        dim = len(shape) - 1 - i
        inner[dim] = shifted(coords[dim], simple(-pads[2 * i]))  # type: ignore[operator]
        now, partial = self.in_range(inner[dim], 0, shape[dim], inside)
        if now is None and partial:
            return self.constant(fill, dtype, op.name)  # type: ignore[arg-type]
        inside, cut = now, cut or partial
    value = self.value(source, tuple(inner), inside)
    if not cut or inside is None:
        return value
    return self.choose(inside, value, self.constant(fill, dtype, "fill"), dtype, op.name)  # type: ignore[arg-type]


def _scatter_slice(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    base, source = op.inputs[0], op.inputs[1]
    shape = op.outputs[0].shape
    dim = layout.wrap(layout.argument(op, 2, "dim", 0), len(shape))  # type: ignore[arg-type]
    step = layout.argument(op, 5, "step", 1)
    start = layout.argument(op, 3, "start") or 0
    if isinstance(start, int) and start < 0:
        start = max(start + shape[dim], 0)  # type: ignore[type-var]
    length = self.dag.op(source).outputs[0].shape[dim]
    if isinstance(step, int) and step != 1:
        return _overlay_with_steps(self, op, coords, within, dim, start, length, step)  # type: ignore[arg-type]
    return _overlay(self, op, coords, within, base, source, dim, start, length, keep=True)  # type: ignore[arg-type]


def _scatter_select(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    base, source = op.inputs[0], op.inputs[1]
    shape = op.outputs[0].shape
    dim = layout.wrap(layout.argument(op, 2, "dim", 0), len(shape))  # type: ignore[arg-type]
    index = layout.argument(op, 3, "index", 0)
    if isinstance(index, int) and index < 0:
        index = index + shape[dim]
    return _overlay(self, op, coords, within, base, source, dim, index, 1, keep=False)  # type: ignore[arg-type]


def _overlay(
    self: _Lowering,
    op: Op,
    coords: Coords,
    within: int | None,
    base: str,
    source: str,
    dim: int,
    start: Dim,
    length: Dim,
    keep: bool,
) -> int:
    """`source` on the slice [start, start + length) of `dim`, `base` elsewhere."""
    inside, partial = self.in_range(coords[dim], start, simple(start + length), within)
    if inside is None and partial:
        return self.value(base, coords, within)
    moved = (shifted(coords[dim], simple(-start)),) if keep else ()
    value = self.value(source, (*coords[:dim], *moved, *coords[dim + 1 :]), inside)
    if not partial or inside is None:
        return value
    rest = self.value(base, coords, within)
    return self.choose(inside, value, rest, compute_dtype(op.outputs[0].dtype), op.name)


def _overlay_with_steps(
    self: _Lowering,
    op: Op,
    coords: Coords,
    within: int | None,
    dim: int,
    start: Dim,
    length: Dim,
    step: int,
) -> int:
    """Element i of the written tensor at start + i * step of `dim`, the other operand elsewhere."""
    base, source = op.inputs[0], op.inputs[1]
    rest = self.value(base, coords, within)
    moved = shifted(coords[dim], simple(-start))
    inside, partial = self.in_range(moved, 0, simple((length - 1) * step + 1), within)
    if inside is None and partial:
        return rest
    here = (
        ("self", Value(self.emit(Coordinate(moved, torch.int64), f"{op.name}_position"))),
        ("other", step),
    )
    over = self.emit(Compute(aten.remainder.Scalar, here, torch.int64), f"{op.name}_over")
    hit = self.emit(
        Compute(aten.eq.Scalar, (("self", Value(over)), ("other", 0)), torch.bool), f"{op.name}_hit"
    )
    hit = hit if inside is None else self.both(inside, hit)
    number = self.emit(Compute(aten.floor_divide.default, here, torch.int64), f"{op.name}_number")
    position = _indirect(self, op, number, length, signed=False)
    value = self.value(source, (*coords[:dim], position, *coords[dim + 1 :]), hit)
    return self.choose(hit, value, rest, compute_dtype(op.outputs[0].dtype), op.name)


def _flip(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    shape = op.outputs[0].shape
    dims = [layout.wrap(d, len(shape)) for d in op.args[1]]  # type: ignore[union-attr]
    turned = tuple(
        shifted(combine([(c, -1)]), simple(shape[d] - 1)) if d in dims else c for d, c in enumerate(coords)
    )
    return self.value(op.inputs[0], turned, within)


def _full(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    fill: object = {
        "zeros": 0,
        "zeros_like": 0,
        "new_zeros": 0,
        "ones": 1,
        "ones_like": 1,
        "new_ones": 1,
        "empty": 0,
        "empty_permuted": 0,
        "empty_strided": 0,
        "new_empty_strided": 0,
        "_efficientzerotensor": 0,
    }.get(op.target._opname)  # type: ignore[union-attr]
    if fill is None:
        fill = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0, "fill": 1}[op.target._opname]  # type: ignore[union-attr]
        fill = op.args[fill]  # type: ignore[call-overload]
    if isinstance(fill, Ref):
        return self.value(fill.name, (), within)
    if not isinstance(fill, bool | int | float):
        raise Illegal("operand", f"{op.name} is filled with a size that is only known at run time")
    return self.constant(fill, compute_dtype(op.outputs[0].dtype), op.name)


def _iota(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    dtype = compute_dtype(op.outputs[0].dtype)
    if op.target._opname == "iota":  # type: ignore[union-attr]
        start, step = dict(op.kwargs)["start"], dict(op.kwargs)["step"]
    else:
        bounds = [a for a in op.args if not isinstance(a, torch.dtype)]
        start, step = (0, 1) if len(bounds) == 1 else (bounds[0], bounds[2] if len(bounds) > 2 else 1)
    if not isinstance(start, int) or not isinstance(step, int):
        raise Illegal("operand", f"{op.name} counts in fractions")
    return self.emit(Coordinate(shifted(combine([(coords[0], step)]), start), dtype), op.name)


def _indirect(self: _Lowering, op: Op, node: int, length: Dim, signed: bool) -> Index:
    """An index that is data; `signed`: negative ones count from the end."""
    if signed:
        dtype = self.nodes[node].dtype
        zero = self.constant(0, dtype, "zero")
        negative = self.emit(
            Compute(aten.lt.Tensor, (("self", Value(node)), ("other", Value(zero))), torch.bool),
            f"{op.name}_negative",
        )
        if not isinstance(length, int):
            raise Illegal("operand", f"{op.name} wraps around a size that is only known at run time")
        wrapped = Compute(aten.add.Tensor, (("self", Value(node)), ("other", length), ("alpha", 1)), dtype)
        node = self.choose(
            negative, self.emit(wrapped, f"{op.name}_wrapped"), node, dtype, f"{op.name}_index"
        )
    self.extents.indirect[~node] = length
    return Index(0, ((~node, 1),))


def _embedding(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    weight, indices = op.inputs[0], op.inputs[1]
    node = self.value(indices, coords[:-1], within)
    row = _indirect(self, op, node, self.dag.op(weight).outputs[0].shape[0], signed=False)
    return self.value(weight, (row, coords[-1]), within)


def _gather(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    source, indices = op.inputs[0], op.args[2]
    assert isinstance(indices, Ref)
    shape = self.dag.op(source).outputs[0].shape
    if not shape:
        return self.value(source, (), within)
    dim = layout.wrap(op.args[1], len(shape))  # type: ignore[arg-type]
    node = self.value(indices.name, coords, within)
    row = _indirect(self, op, node, shape[dim], signed=False)
    return self.value(source, (*coords[:dim], row, *coords[dim + 1 :]), within)


def _index_select(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    source, indices = op.inputs[0], op.args[2]
    assert isinstance(indices, Ref)
    shape = self.dag.op(source).outputs[0].shape
    if not shape:
        return self.value(source, (), within)
    dim = layout.wrap(op.args[1], len(shape))  # type: ignore[arg-type]
    place = (coords[dim],) if self.dag.op(indices.name).outputs[0].shape else ()
    node = self.value(indices.name, place, within)
    row = _indirect(self, op, node, shape[dim], signed=False)
    return self.value(source, (*coords[:dim], row, *coords[dim + 1 :]), within)


def _index(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    """index.Tensor with integer indices; where they are not side by side their dimensions come first."""
    source = op.inputs[0]
    shape = self.dag.op(source).outputs[0].shape
    indices = op.args[1]
    assert isinstance(indices, tuple)
    used = [i for i, a in enumerate(indices) if a is not None]
    metas = [self.dag.op(indices[i].name).outputs[0] for i in used]  # type: ignore[union-attr]
    if any(m.dtype in (torch.bool, torch.uint8) for m in metas):
        raise Illegal("operand", f"{op.name} selects by a mask: its result has no size before it runs")
    rank = max(len(m.shape) for m in metas)
    start = used[0] if used == list(range(used[0], used[-1] + 1)) else 0
    common = coords[start : start + rank]
    whole = iter((*coords[:start], *coords[start + rank :]))
    inner: list[Index] = []
    for i, size in enumerate(shape):
        if i not in used:
            inner.append(next(whole))
            continue
        meta = metas[used.index(i)]
        node = self.value(indices[i].name, common[rank - len(meta.shape) :], within)  # type: ignore[union-attr]
        inner.append(_indirect(self, op, node, size, signed=True))
    return self.value(source, tuple(inner), within)


def _uniform(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    seed, _, salt = op.args
    assert isinstance(seed, Ref) and isinstance(salt, int)
    node = self.value(seed.name, (ZERO,), None)
    return self.emit(Random(node, flatten(coords, strides_of(op.outputs[0].shape)), salt), op.name)


def _same(self: _Lowering, op: Op, coords: Coords, within: int | None) -> int:
    """clone and its kin: the operand in another memory format."""
    return self.value(op.inputs[0], coords, within)


def _special() -> dict[object, Handler]:
    table: dict[object, Handler] = {
        aten.cat.default: _cat,
        aten.stack.default: _stack,
        aten.constant_pad_nd.default: _pad,
        aten.slice_scatter.default: _scatter_slice,
        aten.select_scatter.default: _scatter_select,
        aten.flip.default: _flip,
        aten.embedding.default: _embedding,
        aten.gather.default: _gather,
        aten.index_select.default: _index_select,
        aten.index.Tensor: _index,
        aten._unsafe_index.Tensor: _index,
        aten.clone.default: _same,
        torch.ops.prims.iota.default: _iota,
        aten.arange.default: _iota,
        aten.arange.start: _iota,
        aten.arange.start_step: _iota,
    }
    for overload in (
        aten.full.default, aten.full_like.default, aten.zeros_like.default, aten.ones_like.default,
        aten.scalar_tensor.default, aten.zeros.default, aten.ones.default, aten.fill.Scalar, aten.fill.Tensor,
        aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.empty.memory_format,
        aten.empty_permuted.default, aten.empty_strided.default, aten._efficientzerotensor.default,
        aten.new_empty_strided.default,
    ):  # fmt: skip
        table[overload] = _full
    if hasattr(torch.ops, "fusion_compiler"):
        table[torch.ops.fusion_compiler.uniform.default] = _uniform
    return table


SPECIAL: dict[object, Handler] = _special()
