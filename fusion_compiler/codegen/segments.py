"""Reductions over segments of each row, whole ones of which a tile has: those of block-scaled formats, say.

    segment_max = fm.maximum_of(tl.reshape(abs_1, [16, 128]), 1, False)
    div = fm.div(tl.maximum(segment_max, 0.0001, tl.PropagateNan.ALL), 448.0)       # one for each segment
    tl.store(out1_ptr + row * 16 + segment, div)
    per_div = 1.0 / div
    each_per_div = tl.reshape(tl.broadcast_to(per_div[:, None], [16, 128]), [2048])  # for its elements

What is computed from such values alone has one value for each segment as well.
"""

from __future__ import annotations

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import decompose, index_of
from fusion_compiler.codegen.names import own
from fusion_compiler.codegen.tile import Store as StoreStatement
from fusion_compiler.ir.loops import COLS, ROWS, Axis, Store, segment_of
from fusion_compiler.ir.syntax import Expression, every, plus, tl

NARROW = "narrow"  # with a node, the variable that has one value for each segment


def _tile(b: Builder, number: int) -> tuple[list[int], int]:
    """(shape of the tile of such values of a reduction, columns of a segment)."""
    length = segment_of(b.loops, b.a.kept(number))
    assert length is not None
    rows = [] if b.tile.flat else [b.s.block_rows if ROWS in b.a.groups[b.reduction(number).operand] else 1]
    return [*rows, b.tile.lanes // length], length


def reduced(b: Builder, number: int, tile: Expression) -> None:
    """The reduction of each segment of a tile."""
    shape, length = _tile(b, number)
    folded = b.folded(number, tl.reshape(tile, [*shape, length]), len(shape), keep=False)
    b.named[NARROW, number] = b.let(f"segment_{b.reduction(number).combine}", folded, number)


def spread(b: Builder, number: int, what: int | None = None) -> None:
    """A value of segments for each of their elements; what: another that is made of it."""
    shape, length = _tile(b, b.a.narrow[number])
    what = number if what is None else what
    value = b.named[NARROW, what]
    each = tl.broadcast_to(value[*(slice(None) for _ in shape), None], [*shape, length])
    b.env[what] = b.let(f"each_{value.base}", tl.reshape(each, [*shape[:-1], shape[-1] * length]))


def is_stored(b: Builder, store: Store) -> bool:
    """Whether one value for each segment is stored."""
    if store.within is not None or (number := b.a.narrow.get(store.value)) is None:
        return False
    last = b.a.first[COLS] + len(_outer(b, number))
    return all(0 <= k < last for k, _ in store.index.terms)


def store(b: Builder, store: Store) -> None:
    """That store, of a value that is built."""
    number = b.a.narrow[store.value]
    shape, length = _tile(b, number)
    outer = _outer(b, number)
    merged, whole = b.a.merged(store.index)
    start = None if b.tile.start is None else b.tile.start // length
    segment = b.once(("segment", length), "segment", plus(start, b.lanes(shape[-1])))

    def variable(k: int) -> Expression:
        if b.loops.axes[k].group == ROWS:
            return own("row") if k in whole else b.axis(k)
        return decompose(outer, k - b.a.first[COLS], segment)

    mask = every(b.tile.row_mask, segment * length < b.a.size(COLS) if b.tile.col_mask else None)
    pointer = plus(b.pointers[store.buffer], index_of(merged, variable, b.variable))
    b.add(StoreStatement(pointer, b.named[NARROW, store.value], mask, store.value))


def _outer(b: Builder, number: int) -> tuple[Axis, ...]:
    """The axes of the columns of which each point is a segment of a reduction."""
    kept = b.a.kept(number)
    return tuple(axis for k, axis in enumerate(b.loops.axes) if axis.group == COLS and k in kept)
