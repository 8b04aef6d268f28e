"""The window of a load that moves with outer columns alone, or with outer rows: one element serves all lanes
of the block, or one of each column all its rows."""

from __future__ import annotations

from collections.abc import Callable

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import convert, decompose
from fusion_compiler.ir.loops import COLS, ROWS, Load
from fusion_compiler.ir.syntax import Expression, Variable, every, plus


def is_same(b: Builder, node: Load) -> bool:
    """Whether all lanes of the block load the same element of each row."""
    alone = _is_alone(b, node) and b.tile.start is not None
    return alone and b.a.is_outer(node.index, COLS, b.tile.lanes)


def is_same_in_rows(b: Builder, node: Load) -> bool:
    """Whether all rows of the block load the same elements, one for each column."""
    alone = _is_alone(b, node) and b.tile.first_row is not None
    both = b.index_groups(node.index) == frozenset({ROWS, COLS})
    return alone and both and b.a.is_outer(node.index, ROWS, b.s.block_rows)


def _is_alone(b: Builder, node: Load) -> bool:
    direct = all(key >= 0 for key, _ in node.index.terms)
    return direct and node.within is None and not b.s.misaligned


def loaded_once(b: Builder, number: int, node: Load) -> Variable:
    """The variable of the one element that each row of the block has: for each lane it were a load."""
    rows = b.tile.row_mask if ROWS in b.a.groups[number] else None
    inside = None
    if b.tile.col_mask is not None and b.tile.start is not None:
        inside = b.tile.start < b.a.size(COLS)
    return _once(b, number, node, every(rows, inside), lambda k: _axis(b, k))


def row_loaded_once(b: Builder, number: int, node: Load) -> Variable:
    """The variable of the one row of elements that all rows of the block have."""
    return _once(b, number, node, b.tile.col_mask, lambda k: _row_axis(b, k))


def _once(
    b: Builder, number: int, node: Load, mask: Expression | None, axis: Callable[[int], Expression]
) -> Variable:
    key = ("once", number)
    if key not in b.named:
        value = b.load_from(plus(b.pointers[node.buffer], b.index(node.index, axis)), mask)
        value = convert(value, b.dtypes[node.buffer], node.dtype)
        b.named[key] = b.let(f"block_{b.called(node.buffer)}", value)
    return b.named[key]


def _axis(b: Builder, number: int) -> Variable:
    """The variable of an axis, for outer columns that of the block's first lane."""
    axes, first = b.a.axes[COLS], b.a.first[COLS]
    if number < first:
        return b.axis(number)
    value = decompose(axes, number - first, b.tile.start or 0)
    return b.once(("block", number), f"block_{b.loops.axes[number].name}", value)


def _row_axis(b: Builder, number: int) -> Variable:
    """The variable of an axis, for outer rows that of the block's first row."""
    if b.loops.axes[number].group == COLS:
        return b.axis(number)
    axes, first = b.a.axes[ROWS], b.a.first[ROWS]
    value = decompose(axes, number - first, b.tile.first_row or 0)
    return b.once(("block", number), f"block_{b.loops.axes[number].name}", value)
