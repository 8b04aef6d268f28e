"""Accesses over other columns than the tile's: twice as many (`interleaved.py`), or one per run of lanes
(`runs.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import decompose, index_of
from fusion_compiler.codegen.names import own
from fusion_compiler.ir.loops import COLS, ROWS, Axis, Index
from fusion_compiler.ir.syntax import Expression, Variable, every, plus
from fusion_compiler.schedule.analysis import Analysis


@dataclass(frozen=True)
class Columns:
    """Columns other than those of the tile.

    name: the variable with their numbers.
    axes: the nest's axes, with the sizes of these columns.
    lanes: how many of them a tile has.
    moved: computes their first number in the tile from the tile's first column.
    key: distinguishes columns with the same name.
    """

    name: str
    axes: tuple[Axis, ...]
    lanes: int
    moved: Callable[[Expression], Expression]
    key: str


def address(b: Builder, columns: Columns, buffer: str, index: Index) -> tuple[Expression, Expression | None]:
    """Return (addresses, mask) of an access with an index over these columns."""
    name, axes, first = columns.name, columns.axes, b.a.first[COLS]
    analysis = Analysis(replace(b.loops, axes=axes, nodes=()))
    merged, merged_axes = analysis.merged(index)
    nontrivial = [i for i in range(first, len(axes)) if axes[i].size != 1]

    def variable(number: int) -> Variable | int:
        if number < first:
            return own("row") if number in merged_axes and axes[number].group == ROWS else b.axis(number)
        if number in merged_axes or nontrivial == [number]:
            return _numbers(b, columns)
        if number not in nontrivial:
            return 0
        outer, position = tuple(axes[i] for i in nontrivial), nontrivial.index(number)
        value = decompose(outer, position, _numbers(b, columns))
        return b.once((columns.key, number), f"{name}_{number - first}", value)

    rows, inside = b.tile.row_mask if ROWS in b.index_groups(index) else None, None
    if b.tile.col_mask is not None:
        value = _numbers(b, columns) < analysis.size(COLS)
        inside = b.once((f"inside {columns.key}", 0), f"{name}_inside", value)
    pointer = plus(b.pointers[buffer], index_of(merged, variable, b.variable))
    return pointer, every(rows, inside)


def _numbers(b: Builder, columns: Columns) -> Variable:
    start = None if b.tile.start is None else columns.moved(b.tile.start)
    return b.once((columns.key, -1), columns.name, plus(start, b.lanes(columns.lanes)))
