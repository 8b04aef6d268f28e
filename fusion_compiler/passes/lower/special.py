"""Lower ops that are no expression of their operands at the same point: ops that cut, join, reorder, look up
or fill.

A handler returns the node that holds an op's value at `coords`. `within` is as in `Builder.value`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch._ops import OpOverload

from fusion_compiler.ir import layout
from fusion_compiler.ir.dag import Op, Ref
from fusion_compiler.ir.dims import Dim, simple, strides_of
from fusion_compiler.ir.index import ZERO, combine, flatten, shifted
from fusion_compiler.ir.loops import (
    RAGGED,
    Checked,
    Coordinate,
    Index,
    InRange,
    Random,
    Reduce,
    axes_in,
    axes_of,
    exact,
)
from fusion_compiler.ops.arithmetic import ADD, FLOOR_DIVIDE, LT, MINIMUM, MUL
from fusion_compiler.ops.own import sum_rows
from fusion_compiler.ops.syntax import Literal, Name
from fusion_compiler.ops.table import Form, form_of, spec_of
from fusion_compiler.ops.views import Part, Selected, indexed, wrap
from fusion_compiler.passes.lower import windows
from fusion_compiler.passes.lower.builder import Builder
from fusion_compiler.passes.lower.ranges import Lookup, lookups, start_and_step
from fusion_compiler.passes.lower.space import Coords, Illegal, compute_dtype

Handler = Callable[[Builder, Op, Coords, int | None], int]


def _joined(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    """Return the tensor that has the place at `coords`, of several side by side along a dimension."""
    dim, is_new = wrap(op.arguments["dim"], len(coords)), form_of(op.target) is Form.STACK
    dtype = compute_dtype(op.outputs[0].dtype)
    end: Dim = 0
    parts: list[tuple[int, int | None]] = []
    for tensor in op.arguments["tensors"]:
        shape = build.dag.op(tensor.name).outputs[0].shape
        if shape == (0,):
            continue
        start, end = end, simple(end + (1 if is_new else shape[dim]))
        inside, partial = build.in_range(coords[dim], start, end, within)
        if inside is None and partial:
            continue
        moved = () if is_new else (shifted(coords[dim], simple(-start)),)
        value = build.value(tensor.name, (*coords[:dim], *moved, *coords[dim + 1 :]), inside)
        parts.append((value, inside if partial else None))
    result: int | None = None
    for value, inside in reversed(parts):
        result = (
            value if result is None or inside is None else build.choose(inside, value, result, dtype, op.name)
        )
    if result is None:
        return build.constant(0, dtype, op.name)
    return build.converted(result, dtype, op.name)


def _pad(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    source = op.first
    shape = build.dag.op(source).outputs[0].shape
    pads, fill = op.arguments["pad"], op.arguments["value"]
    dtype = compute_dtype(op.outputs[0].dtype)
    inner = list(coords)
    inside, padded = within, list[int]()
    for i in range(len(pads) // 2):
        dim = len(shape) - 1 - i
        inner[dim] = shifted(coords[dim], simple(-pads[2 * i]))
        now, partial = build.in_range(inner[dim], 0, shape[dim], inside)
        if now is None and partial:
            return build.constant(fill, dtype, op.name)
        inside, padded = now, [*padded, dim] if partial else padded
    if not padded or inside is None:
        return build.value(source, tuple(inner), inside)
    value = build.value_in_range(source, tuple(inner), padded, inside)
    if exact(fill) in map(exact, (0, 0.0, False)):
        return build.zero_outside(value, inside, dtype, op.name)
    return build.choose(inside, value, build.constant(fill, dtype, "fill"), dtype, op.name)


def _overlay(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    """Return the written tensor where the view of the base lies that it replaces, and the base elsewhere."""
    base, source = op.operand("self"), op.operand("src")
    match layout.overlay_of(op):
        case Part(dim, start, step):
            length, is_kept = build.dag.op(source).outputs[0].shape[dim], True
        case Selected(dim, start):
            length, step, is_kept = 1, 1, False
        case view:
            raise Illegal("operator", f"{op.name} writes into {view}")
    moved = shifted(coords[dim], simple(-start))
    if step == 1:
        inside, partial = build.in_range(coords[dim], start, simple(start + length), within)
        never = partial and inside is None
    else:
        moved, inside, never = build.stepped(op, moved, length, step, within)
        partial = inside not in (None, within)
    if never:
        return build.value(base, coords, within)
    dtype = compute_dtype(op.outputs[0].dtype)
    value = build.value(source, (*coords[:dim], *((moved,) if is_kept else ()), *coords[dim + 1 :]), inside)
    if not partial or inside is None:
        return build.converted(value, dtype, op.name)
    return build.choose(inside, value, build.value(base, coords, within), dtype, op.name)


def _flip(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    shape = op.outputs[0].shape
    dims = layout.reversed_dims(op)
    turned = tuple(
        shifted(combine([(c, -1)]), simple(shape[d] - 1)) if d in dims else c for d, c in enumerate(coords)
    )
    return build.value(op.first, turned, within)


def _copied(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    """Return the argument that an op copies or fills with, broadcast and converted to the op's result."""
    spec, dtype = spec_of(op.target), compute_dtype(op.outputs[0].dtype)
    assert spec is not None
    match spec.expr and spec.applied(spec.expr, {name: Name(name) for name in op.arguments}):
        case Name(argument):
            value = op.arguments[argument]
        case Literal(number):
            value = number
        case _:
            value = 0
    if isinstance(value, Ref):
        return build.converted(build.operand(op, value.name, coords, within), dtype, op.name)
    if not isinstance(value, bool | int | float):
        raise Illegal("operand", f"{op.name} is filled with a size that is only known at run time")
    return build.constant(value, dtype, op.name)


def _iota(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    dtype = compute_dtype(op.outputs[0].dtype)
    start, step = start_and_step(op)
    if not isinstance(start, int | float) or not isinstance(step, int | float):
        raise Illegal("operand", f"{op.name} has a step that is only known at run time")
    if not dtype.is_floating_point:  # eager converts both before it counts
        start, step = int(start), int(step)
    if isinstance(start, float) or isinstance(step, float):
        return _in_fractions(build, op, coords[0], start, step)
    return build.emit(Coordinate(shifted(combine([(coords[0], step)]), start), dtype), op.name)


def _in_fractions(build: Builder, op: Op, place: Index, start: float, step: float) -> int:
    """Return start + step * place in floating point."""
    dtype = compute_dtype(op.outputs[0].dtype)
    position = build.emit(Coordinate(place, torch.int64), f"{op.name}_position")
    place_in_dtype = build.converted(position, dtype, op.name)
    steps = build.apply(f"{op.name}_steps", MUL, place_in_dtype, other=step)
    return build.apply(op.name, ADD, steps, other=start)


def looked_up(
    build: Builder, op: Op, source: str, coords: Coords, at: Sequence[Coords], within: int | None
) -> int:
    """Return the value of an op's operand `source` if some of its coordinates are data.

    coords: coordinates of the operand; those along lookups are ignored.
    at: the coordinates of each index.
    An index that is not proved to be in bounds is checked before it is used. A dimension of one element needs
    no index, so the check is attached to the value instead.
    """
    inner = list(coords)
    deferred: list[Checked] = []
    for lookup, place in zip(lookups(build.dag, op), at, strict=True):
        node = build.value(lookup.index, place, within)
        if lookup.unproved:
            dtype = build.nodes[node].dtype
            check = Checked(node, node, lookup.low, lookup.high, within, lookup.unproved, dtype)
            if lookup.high == 1:
                deferred.append(check)
            else:
                node = build.emit(check, f"{op.name}_index")
        if inner:
            inner[lookup.dim] = build.indirect(op, node, lookup.high, lookup.low != 0)
    value = build.value(source, tuple(inner), within)
    for check in deferred:
        value = build.emit(replace(check, operand=value, dtype=build.nodes[value].dtype), op.name)
    return value


def _sum_rows(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    """Return the sum of a ragged segment of rows (see ops/own/sum_rows.py)."""
    rows, order, each = op.operand("rows"), op.arguments["order"], op.arguments["each"]
    first, last = _ends(build, op, coords[:1], within)
    along = build.ragged_axis(first, last)
    turn = build.emit(Coordinate(Index(0, ((~first, 1), (along, 1))), torch.int64), f"{op.name}_turn")
    inside = build.apply("inside", LT, turn, last)
    read = inside if within is None else build.both(within, inside)
    place = turn
    if isinstance(order, Ref):
        count = build.dag.op(order.name).outputs[0].shape[0]
        place = build.value(order.name, (build.indirect(op, turn, count, False),), read)
    if each != 1:
        place = build.apply(f"{op.name}_floor_divide", FLOOR_DIVIDE, place, other=each)
    count = build.dag.op(rows).outputs[0].shape[0]
    value = build.value(rows, (build.indirect(op, place, count, False), coords[1]), read)
    axes = axes_of(build.nodes)
    if (axes[value] | axes[inside]) & axes_in(build.axes, (RAGGED,)) - {along}:
        raise Illegal("rows", f"{op.name} would be summed again in each iteration of another sum of rows")
    dtype = compute_dtype(op.outputs[0].dtype)
    value = build.converted(value, dtype, op.name)
    assert isinstance(op.target, OpOverload)
    return build.emit(Reduce(sum_rows.COMBINES[op.target], value, frozenset({along}), dtype, inside), op.name)


def _ends(build: Builder, op: Op, row: Coords, within: int | None) -> tuple[int, int]:
    """Return the nodes of the first and last row of a segment (see `sum_rows.ends`)."""
    first, last, unit, block = (op.arguments[name] for name in ("first", "last", "unit", "block"))

    def round_up(node: int, unit: int) -> int:
        if unit == 1:
            return node
        above = build.apply(f"{op.name}_add", ADD, node, other=unit - 1)
        return build.apply(f"{op.name}_floor_divide", FLOOR_DIVIDE, above, other=unit)

    stops = round_up(build.value(last.name, row, within), unit)
    if isinstance(first, Ref):
        begins = round_up(build.value(first.name, row, within), unit)
        limit = build.apply(f"{op.name}_mul", MUL, round_up(begins, block), other=block) if block else None
    else:
        begins = build.emit(Coordinate(combine([(row[0], block)]), torch.int64), f"{op.name}_first")
        limit = build.apply(f"{op.name}_add", ADD, begins, other=block)
    if limit is None:
        return begins, stops
    return begins, build.apply(f"{op.name}_last", MINIMUM, stops, limit, dtype=torch.int64)


def _lookup(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    looked = layout.lookups_of(build.dag, op)
    assert looked is not None
    source = op.operand(looked.operand)
    rank = len(build.dag.op(source).outputs[0].shape)
    if looked.is_pointwise:
        inner, at = coords if rank else (), [coords]
    else:
        inner, at = _indexed(build, op, lookups(build.dag, op), rank, coords)
    return looked_up(build, op, source, inner, at, within)


def _indexed(
    build: Builder, op: Op, indices: Sequence[Lookup], rank: int, coords: Coords
) -> tuple[Coords, list[Coords]]:
    """Return the coordinates in the indexed tensor (0 along indexed dimensions) and those of each index.

    coords: coordinates of the result.
    rank: number of dimensions of the indexed tensor.
    """
    indexed_dims = [lookup.dim for lookup in indices]
    metas = [build.dag.op(lookup.index).outputs[0] for lookup in indices]
    if any(m.dtype in (torch.bool, torch.uint8) for m in metas):
        raise Illegal("operand", f"{op.name} selects by a mask: its result has no size before it runs")
    start, _ = indexed(indexed_dims, [meta.shape for meta in metas])
    end = start + len(coords) - (rank - len(indexed_dims))
    common, rest = coords[start:end], iter((*coords[:start], *coords[end:]))
    inner = tuple(ZERO if i in indexed_dims else next(rest) for i in range(rank))
    ranks = [len(meta.shape) for meta in metas]
    return inner, [(*(ZERO,) * (n - len(common)), *common[len(common) - n :]) for n in ranks]


def put_place(
    build: Builder, op: Op, coords: Coords, within: int | None = None
) -> tuple[Index, int | None]:
    """Return where `put_` stores its value at `coords`: the index in its base, and the node of the store's
    mask. An index that may be out of bounds is checked, and its element is not stored."""
    base, name, inside = op.operand("self"), op.operand("view"), within
    indices = lookups(build.dag, op)
    if indices:
        coords, at = _indexed(build, op, indices, len(build.dag.op(name).outputs[0].shape), coords)
        inner = list(coords)
        for lookup, place in zip(indices, at, strict=True):
            mask = within if any(c.terms for c in place) else None  # a constant position is always read
            node = build.value(lookup.index, place, mask)
            if lookup.unproved:
                in_bounds = build.emit(InRange(Index(0, ((~node, 1),)), lookup.low, lookup.high), "inside")
                inside = in_bounds if inside is None else build.both(inside, in_bounds)
                dtype = build.nodes[node].dtype
                check = Checked(node, node, lookup.low, lookup.high, mask, lookup.unproved, dtype)
                node = build.emit(check, f"{op.name}_index")
            inner[lookup.dim] = build.indirect(op, node, lookup.high, lookup.low != 0)
        coords = tuple(inner)
    while name != base:
        name, coords = layout.pull(build.dag, build.dag.op(name), coords, build.extents)
    return flatten(coords, op.outputs[0].stride), inside


def _uniform(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    seed, _, salt = op.args
    assert isinstance(seed, Ref) and isinstance(salt, int)
    node = build.value(seed.name, (ZERO,), None)
    return build.emit(Random(node, flatten(coords, strides_of(op.outputs[0].shape)), salt), op.name)


_HANDLERS: Mapping[Form, Handler] = {
    Form.FILL: _copied,
    Form.COPY: _copied,
    Form.COUNT: _iota,
    Form.LOOKUP: _lookup,
    Form.SEGMENTS: _sum_rows,
    Form.CONCATENATION: _joined,
    Form.STACK: _joined,
    Form.PADDING: _pad,
    Form.OVERLAY: _overlay,
    Form.REVERSAL: _flip,
    Form.RANDOM: _uniform,
}


def handler_of(op: Op) -> Handler | None:
    """Return how an op that is no expression of its operands is lowered; None for others."""
    form = form_of(op.target)
    return windows.HANDLERS.get(op.target) if form is None else _HANDLERS[form]
