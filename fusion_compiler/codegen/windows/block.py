"""The window of a load that varies only over outer columns or only over outer rows: one element serves all
lanes of the block, or one row of elements all its rows."""

from __future__ import annotations

from collections.abc import Callable

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import convert, decompose
from fusion_compiler.ir.loops import COLS, ROWS, Load
from fusion_compiler.ir.syntax import Expression, Variable, every, plus


def is_same(b: Builder, node: Load) -> bool:
    """True if all lanes of the block load the same element of each row."""
    is_plain = _is_plain(b, node) and b.tile.start is not None
    return is_plain and b.a.is_outer(node.index, COLS, b.tile.lanes)


def is_same_in_rows(b: Builder, node: Load) -> bool:
    """True if all rows of the block load the same elements, one per column."""
    is_plain = _is_plain(b, node) and b.tile.first_row is not None
    varies_over_both = b.index_groups(node.index) == frozenset({ROWS, COLS})
    return is_plain and varies_over_both and b.a.is_outer(node.index, ROWS, b.s.block_rows)


def _is_plain(b: Builder, node: Load) -> bool:
    """True for a load at an affine index, without a mask, in an aligned tile."""
    direct = all(key >= 0 for key, _ in node.index.terms)
    return direct and node.within is None


def loaded_once(b: Builder, number: int, node: Load) -> Variable:
    """Return the variable of the element that a row of the block shares. A load per lane would be slower."""
    rows = b.tile.row_mask if ROWS in b.a.groups[number] else None
    inside = None
    if b.tile.col_mask is not None and b.tile.start is not None:
        inside = b.tile.start < b.a.size(COLS)
    return _once(b, number, node, every(rows, inside), lambda k: _axis(b, k))


def row_loaded_once(b: Builder, number: int, node: Load) -> Variable:
    """Return the variable of the row of elements that all rows of the block share."""
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
    """Return the variable of an axis; for outer columns that of the block's first lane."""
    axes, first = b.a.axes[COLS], b.a.first[COLS]
    if number < first:
        return b.axis(number)
    value = decompose(axes, number - first, b.tile.start or 0)
    return b.once(("block", number), f"block_{b.loops.axes[number].name}", value)


def _row_axis(b: Builder, number: int) -> Variable:
    """Return the variable of an axis; for outer rows that of the block's first row."""
    if b.loops.axes[number].group == COLS:
        return b.axis(number)
    axes, first = b.a.axes[ROWS], b.a.first[ROWS]
    value = decompose(axes, number - first, b.tile.first_row or 0)
    return b.once(("block", number), f"block_{b.loops.axes[number].name}", value)
