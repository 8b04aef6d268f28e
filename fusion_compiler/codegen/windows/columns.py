"""Accesses over other columns than the tile's: twice as many (`interleaved.py`), or one for each run of lanes
(`runs.py`)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import decompose, dim_text, index_text
from fusion_compiler.ir.loops import COLS, ROWS, Axis, Index
from fusion_compiler.schedule.analysis import Analysis


@dataclass(frozen=True)
class Columns:
    """name: of the variable with their numbers. axes: the nest's, with the sizes of these columns. lanes: how
    many of them a tile has. moved: what makes their first number of the tile's first column's, "* 2"."""

    name: str
    axes: tuple[Axis, ...]
    lanes: int
    moved: str


def address(b: Builder, columns: Columns, buffer: str, index: Index) -> tuple[str, str | None]:
    """(addresses, mask) of an access; the index is over these columns."""
    name, axes, first = columns.name, columns.axes, b.a.first[COLS]
    over = Analysis(replace(b.loops, axes=axes))
    merged, whole = over.merged(index)
    several = [i for i in range(first, len(axes)) if axes[i].size != 1]

    def variable(number: int) -> str:
        if number < first:
            return "row" if number in whole and axes[number].group == ROWS else b.axis(number)
        if number in whole or several == [number]:
            return _numbers(b, columns)
        if number not in several:
            return "0"
        own, place = tuple(axes[i] for i in several), several.index(number)
        key = (f"{name} {columns.moved}", number)
        return b.once(key, f"{name}_{number - first}", decompose(own, place, _numbers(b, columns)))

    masks = [b.tile.row_mask if ROWS in b.index_groups(index) else None]
    if b.tile.col_mask:
        inside = f"{_numbers(b, columns)} < {dim_text(over.size(COLS))}"
        masks.append(b.once((f"{name}_inside {columns.moved}", 0), f"{name}_inside", inside))
    pointer = f"{b.pointers[buffer]} + {index_text(merged, variable, b.variable)}"
    return pointer, " & ".join(m for m in masks if m) or None


def _numbers(b: Builder, columns: Columns) -> str:
    lanes = f"tl.arange(0, {columns.lanes})" + ("" if b.tile.flat else "[None, :]")
    start = b.tile.start
    if start is not None:
        lanes = f"{start if start.isidentifier() else f'({start})'} {columns.moved} + {lanes}"
    return b.once((f"{columns.name} {columns.moved}", -1), columns.name, lanes)
