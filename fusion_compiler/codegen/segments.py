"""Compute reductions over segments of each row, as block-scaled formats need them. A tile has whole segments.

    segment_max = fm.maximum_of(tl.reshape(abs_1, [16, 128]), 1, False)
    div = fm.div(tl.maximum(segment_max, 0.0001, tl.PropagateNan.ALL), 448.0)       # one for each segment
    tl.store(out1_ptr + row * 16 + segment, div)
    per_div = 1.0 / div
    each_per_div = tl.reshape(tl.broadcast_to(per_div[:, None], [16, 128]), [2048])  # for its elements

A node whose operands have one value for each segment has one value for each segment as well.
"""

from __future__ import annotations

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import decompose, index_of
from fusion_compiler.codegen.names import own
from fusion_compiler.codegen.tile import Store as StoreStatement
from fusion_compiler.ir.loops import COLS, ROWS, Axis, Store, segment_of
from fusion_compiler.ir.syntax import Expression, every, plus, tl

NARROW = "narrow"  # (NARROW, node) is the key of the variable that has one value for each segment


def _tile(b: Builder, number: int) -> tuple[list[int], int]:
    """Return (shape of the tile with one value for each segment of a reduction, columns of a segment)."""
    length = segment_of(b.loops, b.a.kept(number))
    assert length is not None
    rows = [] if b.tile.flat else [b.s.block_rows if ROWS in b.a.groups[b.reduction(number).operand] else 1]
    return [*rows, b.tile.lanes // length], length


def reduced(b: Builder, number: int, tile: Expression) -> None:
    """Reduce each segment of a tile."""
    shape, length = _tile(b, number)
    folded = b.folded(number, tl.reshape(tile, [*shape, length]), len(shape), keep=False)
    b.named[NARROW, number] = b.let(f"segment_{b.reduction(number).combine}", folded, number)


def spread(b: Builder, number: int, key: int | None = None) -> None:
    """Give each element the value of its segment. key: another value of it, such as ~number."""
    shape, length = _tile(b, b.a.narrow[number])
    key = number if key is None else key
    value = b.named[NARROW, key]
    each = tl.broadcast_to(value[*(slice(None) for _ in shape), None], [*shape, length])
    b.env[key] = b.let(f"each_{value.base}", tl.reshape(each, [*shape[:-1], shape[-1] * length]))


def is_stored(b: Builder, store: Store) -> bool:
    """True if a store writes one value for each segment."""
    if store.within is not None or (number := b.a.narrow.get(store.value)) is None:
        return False
    last = b.a.first[COLS] + len(_outer(b, number))
    return all(0 <= k < last for k, _ in store.index.terms)


def store(b: Builder, store: Store) -> None:
    """Store one value for each segment; the value is built already."""
    number = b.a.narrow[store.value]
    shape, length = _tile(b, number)
    outer = _outer(b, number)
    merged, merged_axes = b.a.merged(store.index)
    start = None if b.tile.start is None else b.tile.start // length
    segment = b.once(("segment", length), "segment", plus(start, b.lanes(shape[-1])))

    def variable(k: int) -> Expression:
        if b.loops.axes[k].group == ROWS:
            return own("row") if k in merged_axes else b.axis(k)
        return decompose(outer, k - b.a.first[COLS], segment)

    mask = every(b.tile.row_mask, segment * length < b.a.size(COLS) if b.tile.col_mask else None)
    pointer = plus(b.pointers[store.buffer], index_of(merged, variable, b.variable))
    b.add(StoreStatement(pointer, b.named[NARROW, store.value], mask, store.value))


def _outer(b: Builder, number: int) -> tuple[Axis, ...]:
    """Return the axes of columns that number the segments of a reduction."""
    kept = b.a.kept(number)
    return tuple(axis for k, axis in enumerate(b.loops.axes) if axis.group == COLS and k in kept)
