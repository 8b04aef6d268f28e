"""Lower ops that are no expression of their operands at the same point: ops that cut, join, reorder, look up
or fill.

A handler returns the node that holds an op's value at `coords`. `within` is as in `Builder.value`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    Compute,
    Coordinate,
    Index,
    InRange,
    Random,
    Reduce,
    Value,
    axes_in,
    axes_of,
    exact,
)
from fusion_compiler.ops.own import sum_rows
from fusion_compiler.ops.views import indexed, wrap
from fusion_compiler.passes.lower import windows
from fusion_compiler.passes.lower.builder import Builder
from fusion_compiler.passes.lower.ranges import Lookup, lookups, start_and_step
from fusion_compiler.passes.lower.space import Coords, Illegal, compute_dtype

aten = torch.ops.aten
Handler = Callable[[Builder, Op, Coords, int | None], int]
FILLS = dict.fromkeys(("ones", "ones_like", "new_ones"), 1) | dict.fromkeys(
    ("zeros", "zeros_like", "new_zeros", "_efficientzerotensor", "empty", "empty_permuted", "empty_strided",
     "new_empty_strided"), 0,
)  # fmt: skip
FILL_ARGUMENTS = {"full": 1, "full_like": 1, "new_full": 2, "scalar_tensor": 0, "fill": 1}


def _cat(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    tensors = [a.name for a in op.args[0] if isinstance(a, Ref)]  # type: ignore[union-attr]
    tensors = [t for t in tensors if build.dag.op(t).outputs[0].shape != (0,)]
    dim = wrap(layout.argument(op, 1, "dim", 0), len(coords))  # type: ignore[arg-type]
    dtype = compute_dtype(op.outputs[0].dtype)
    result: int | None = None
    end: Dim = 0
    parts: list[tuple[int, int | None]] = []
    for tensor in tensors:
        start, end = end, simple(end + build.dag.op(tensor).outputs[0].shape[dim])
        inside, partial = build.in_range(coords[dim], start, end, within)
        if inside is None and partial:
            continue
        moved = (*coords[:dim], shifted(coords[dim], simple(-start)), *coords[dim + 1 :])
        parts.append((build.value(tensor, moved, inside), inside if partial else None))
    for value, inside in reversed(parts):
        result = (
            value if result is None or inside is None else build.choose(inside, value, result, dtype, op.name)
        )
    if result is None:
        return build.constant(0, dtype, op.name)
    return build.converted(result, dtype, op.name)


def _stack(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    tensors = [a.name for a in op.args[0] if isinstance(a, Ref)]  # type: ignore[union-attr]
    dim = wrap(layout.argument(op, 1, "dim", 0), len(coords))  # type: ignore[arg-type]
    dtype = compute_dtype(op.outputs[0].dtype)
    inner = (*coords[:dim], *coords[dim + 1 :])
    result: int | None = None
    for number, tensor in reversed(list(enumerate(tensors))):
        inside, partial = build.in_range(coords[dim], number, number + 1, within)
        if inside is None and partial:
            continue
        value = build.value(tensor, inner, inside)
        result = (
            value
            if result is None or not partial or inside is None
            else build.choose(inside, value, result, dtype, op.name)
        )
    assert result is not None
    return build.converted(result, dtype, op.name)


def _pad(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    source = op.first
    shape = build.dag.op(source).outputs[0].shape
    pads = op.args[1]
    assert isinstance(pads, tuple)
    dtype = compute_dtype(op.outputs[0].dtype)
    fill = layout.argument(op, 2, "value", 0)
    inner = list(coords)
    inside, padded = within, list[int]()
    for i in range(len(pads) // 2):
        dim = len(shape) - 1 - i
        inner[dim] = shifted(coords[dim], simple(-pads[2 * i]))  # type: ignore[operator]
        now, partial = build.in_range(inner[dim], 0, shape[dim], inside)
        if now is None and partial:
            return build.constant(fill, dtype, op.name)  # type: ignore[arg-type]
        inside, padded = now, [*padded, dim] if partial else padded
    if not padded or inside is None:
        return build.value(source, tuple(inner), inside)
    value = build.value_in_range(source, tuple(inner), padded, inside)
    if exact(fill) in map(exact, (0, 0.0, False)):
        return build.zero_outside(value, inside, dtype, op.name)
    return build.choose(inside, value, build.constant(fill, dtype, "fill"), dtype, op.name)  # type: ignore[arg-type]


def _scatter_slice(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    base, source = op.operand("self"), op.operand("src")
    shape = op.outputs[0].shape
    dim = wrap(layout.argument(op, 2, "dim", 0), len(shape))  # type: ignore[arg-type]
    step = layout.argument(op, 5, "step", 1)
    start = layout.argument(op, 3, "start") or 0
    if isinstance(start, int) and start < 0:  # guards exclude a smaller symbol
        start = start + shape[dim]
        start = max(start, 0) if isinstance(start, int) else start
    length = build.dag.op(source).outputs[0].shape[dim]
    if isinstance(step, int) and step != 1:
        return _overlay_with_steps(build, op, coords, within, dim, start, length, step)  # type: ignore[arg-type]
    return _overlay(build, op, coords, within, base, source, dim, start, length, keep=True)  # type: ignore[arg-type]


def _scatter_select(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    base, source = op.operand("self"), op.operand("src")
    shape = op.outputs[0].shape
    dim = wrap(layout.argument(op, 2, "dim", 0), len(shape))  # type: ignore[arg-type]
    index = layout.argument(op, 3, "index", 0)
    if isinstance(index, int) and index < 0:
        index = index + shape[dim]
    return _overlay(build, op, coords, within, base, source, dim, index, 1, keep=False)  # type: ignore[arg-type]


def _overlay(
    build: Builder,
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
    """Return `source` on the slice [start, start + length) of `dim`, and `base` elsewhere."""
    inside, partial = build.in_range(coords[dim], start, simple(start + length), within)
    if inside is None and partial:
        return build.value(base, coords, within)
    moved = (shifted(coords[dim], simple(-start)),) if keep else ()
    value = build.value(source, (*coords[:dim], *moved, *coords[dim + 1 :]), inside)
    dtype = compute_dtype(op.outputs[0].dtype)
    if not partial or inside is None:
        return build.converted(value, dtype, op.name)
    return build.choose(inside, value, build.value(base, coords, within), dtype, op.name)


def _overlay_with_steps(
    build: Builder,
    op: Op,
    coords: Coords,
    within: int | None,
    dim: int,
    start: Dim,
    length: Dim,
    step: int,
) -> int:
    """Return element i of the written tensor at start + i * step of `dim`, and the base elsewhere."""
    base, source = op.operand("self"), op.operand("src")
    rest = build.value(base, coords, within)
    moved = shifted(coords[dim], simple(-start))
    dtype = compute_dtype(op.outputs[0].dtype)
    number, is_written, never = build.stepped(op, moved, length, step, within)
    if never:
        return rest
    value = build.value(source, (*coords[:dim], number, *coords[dim + 1 :]), is_written)
    if is_written is None or is_written == within:
        return build.converted(value, dtype, op.name)
    return build.choose(is_written, value, rest, dtype, op.name)


def _flip(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    shape = op.outputs[0].shape
    dims = [wrap(d, len(shape)) for d in op.args[1]]  # type: ignore[union-attr]
    turned = tuple(
        shifted(combine([(c, -1)]), simple(shape[d] - 1)) if d in dims else c for d, c in enumerate(coords)
    )
    return build.value(op.first, turned, within)


def _full(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    name = op.target._opname  # type: ignore[union-attr]
    fill = FILLS[name] if name in FILLS else op.args[FILL_ARGUMENTS[name]]
    if isinstance(fill, Ref):
        return build.value(fill.name, (), within)
    if not isinstance(fill, bool | int | float):
        raise Illegal("operand", f"{op.name} is filled with a size that is only known at run time")
    return build.constant(fill, compute_dtype(op.outputs[0].dtype), op.name)


def _iota(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    dtype = compute_dtype(op.outputs[0].dtype)
    start, step = start_and_step(op)
    if not isinstance(start, int | float) or not isinstance(step, int | float):
        raise Illegal("operand", f"{op.name} counts by a size that is only known at run time")
    if not dtype.is_floating_point:  # eager converts both before it counts
        start, step = int(start), int(step)
    if isinstance(start, float) or isinstance(step, float):
        return _in_fractions(build, op, coords[0], start, step)
    return build.emit(Coordinate(shifted(combine([(coords[0], step)]), start), dtype), op.name)


def _in_fractions(build: Builder, op: Op, place: Index, start: float, step: float) -> int:
    """Return start + step * place in floating point."""
    dtype = compute_dtype(op.outputs[0].dtype)
    position = build.emit(Coordinate(place, torch.int64), f"{op.name}_position")
    scaled = (("self", Value(build.converted(position, dtype, op.name))), ("other", step))
    steps = build.emit(Compute(aten.mul.Tensor, scaled, dtype), f"{op.name}_steps")
    moved = (("self", Value(steps)), ("other", start), ("alpha", 1))
    return build.emit(Compute(aten.add.Tensor, moved, dtype), op.name)


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
    rows = op.operand("rows")
    order = layout.argument(op, 1, "order", None)
    each = layout.argument(op, 4, "each", 1)
    first, last = _ends(build, op, coords[:1], within)
    along = build.ragged_axis(first, last)
    turn = build.emit(Coordinate(Index(0, ((~first, 1), (along, 1))), torch.int64), f"{op.name}_turn")
    bounds = (("self", Value(turn)), ("other", Value(last)))
    inside = build.emit(Compute(aten.lt.Tensor, bounds, torch.bool), "inside")
    read = inside if within is None else build.both(within, inside)
    place = turn
    if isinstance(order, Ref):
        count = build.dag.op(order.name).outputs[0].shape[0]
        place = build.value(order.name, (build.indirect(op, turn, count, False),), read)
    if each != 1:
        place = build.integer(op, aten.floor_divide.default, place, each)
    count = build.dag.op(rows).outputs[0].shape[0]
    value = build.value(rows, (build.indirect(op, place, count, False), coords[1]), read)
    axes = axes_of(build.nodes)
    if (axes[value] | axes[inside]) & axes_in(build.axes, (RAGGED,)) - {along}:
        raise Illegal("rows", f"{op.name} would be added up in each turn of another sum of rows")
    dtype = compute_dtype(op.outputs[0].dtype)
    value = build.converted(value, dtype, op.name)
    assert isinstance(op.target, OpOverload)
    return build.emit(Reduce(sum_rows.COMBINES[op.target], value, frozenset({along}), dtype, inside), op.name)


def _ends(build: Builder, op: Op, row: Coords, within: int | None) -> tuple[int, int]:
    """Return the nodes of the first and last row of a segment (see `sum_rows.ends`)."""
    first, last = (layout.argument(op, i, name, None) for i, name in ((2, "first"), (3, "last")))
    unit, block = (layout.argument(op, *of) for of in ((5, "unit", 1), (6, "block", 0)))
    assert isinstance(last, Ref) and isinstance(block, int)

    def round_up(node: int, unit: object) -> int:
        if unit == 1:
            return node
        assert isinstance(unit, int)
        above = build.integer(op, aten.add.Tensor, node, unit - 1)
        return build.integer(op, aten.floor_divide.default, above, unit)

    stops = round_up(build.value(last.name, row, within), unit)
    if isinstance(first, Ref):
        begins = round_up(build.value(first.name, row, within), unit)
        limit = build.integer(op, aten.mul.Tensor, round_up(begins, block), block) if block else None
    else:
        begins = build.emit(Coordinate(combine([(row[0], block)]), torch.int64), f"{op.name}_first")
        limit = build.integer(op, aten.add.Tensor, begins, block)
    if limit is None:
        return begins, stops
    both = (("self", Value(stops)), ("other", Value(limit)))
    return begins, build.emit(Compute(aten.minimum.default, both, torch.int64), f"{op.name}_last")


def _embedding(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    return looked_up(build, op, op.first, (ZERO, coords[-1]), [coords[:-1]], within)


def _along(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    """Lower gather and index_select. The index of index_select has at most one dimension."""
    (lookup,) = lookups(build.dag, op)
    scalar = not build.dag.op(op.first).outputs[0].shape
    at = coords
    if op.target is aten.index_select.default:
        rank = len(build.dag.op(lookup.index).outputs[0].shape)
        at = ((ZERO,) if scalar else coords[lookup.dim : lookup.dim + 1])[:rank]
    return looked_up(build, op, op.first, () if scalar else coords, [at], within)


def _index(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    """Lower index.Tensor with integer indices. If they are not adjacent, their dimensions come first."""
    shape = build.dag.op(op.first).outputs[0].shape
    indices = lookups(build.dag, op)
    inner, at = _indexed(build, op, indices, len(shape), coords)
    return looked_up(build, op, op.first, inner, at, within)


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
    start, shape = indexed(indexed_dims, [meta.shape for meta in metas])
    common = coords[start : start + len(shape)]
    rest = iter((*coords[:start], *coords[start + len(shape) :]))
    inner = tuple(ZERO if i in indexed_dims else next(rest) for i in range(rank))
    return inner, [common[len(shape) - len(meta.shape) :] for meta in metas]


def put_place(
    build: Builder, op: Op, coords: Coords, within: int | None = None
) -> tuple[Index, int | None]:
    """Return where `put_` stores its value at `coords`: the index in its base, and the node of the store's
    mask. An index that may be out of bounds is checked, and its element is not stored."""
    (base, name), inside = (r.name for r in op.args[:2] if isinstance(r, Ref)), within
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


def _same(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    """Lower clone and similar ops: the operand in another memory format."""
    return build.value(op.first, coords, within)


def _copy(build: Builder, op: Op, coords: Coords, within: int | None) -> int:
    """Return the second operand in the first operand's shape and dtype."""
    value = build.operand(op, op.operand("src"), coords, within)
    return build.converted(value, compute_dtype(op.outputs[0].dtype), op.name)


def _special() -> dict[object, Handler]:
    table: dict[object, Handler] = {
        aten.cat.default: _cat,
        aten.stack.default: _stack,
        aten.constant_pad_nd.default: _pad,
        aten.slice_scatter.default: _scatter_slice,
        aten.select_scatter.default: _scatter_select,
        aten.flip.default: _flip,
        aten.embedding.default: _embedding,
        **dict.fromkeys(sum_rows.COMBINES, _sum_rows),
        **windows.HANDLERS,
        aten.gather.default: _along,
        aten.index_select.default: _along,
        aten.index.Tensor: _index,
        aten._unsafe_index.Tensor: _index,
        aten.clone.default: _same,
        aten.copy.default: _copy,
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
