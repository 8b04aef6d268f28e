"""Placements of the tiles of rows and columns that `Schedule` describes."""

from __future__ import annotations

from dataclasses import replace

from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, GROUPS, RAGGED, ROWS
from fusion_compiler.schedule.analysis import Analysis, ceil_div, part_cols, parts_of
from fusion_compiler.schedule.placement import (
    Align,
    At,
    Directive,
    Fuse,
    In,
    Place,
    Placement,
    Split,
    Stage,
)
from fusion_compiler.schedule.schedule import Cols, Schedule
from fusion_compiler.schedule.shapes import padded

# Most programs that increment a counter. Each waits until its results have arrived, and one program, with as
# many warps as the others, reads them all. With 16384, that takes 8 us on an H200, and a second kernel 2.
MOST_TICKETS = 4096
NAMES = {ROWS: "row", COLS: "col"}  # of the axes that a group's axes are fused to


def without_idle_programs(a: Analysis, s: Schedule) -> Schedule:
    """Return a schedule in which every program that shares a row has columns."""
    return s if s.splits == 1 else replace(s, splits=hint(parts_of(a, s)))


def placement_of(a: Analysis, s: Schedule) -> Placement:
    """Return the placement of a schedule, in which every program that shares a row has columns."""
    directives: list[Directive] = []
    for group in GROUPS:
        axes = a.axes[group]
        if not axes:
            continue
        name = axes[0].name
        if len(axes) > 1:
            name = NAMES[group]
            directives.append(Fuse(tuple(axis.name for axis in axes), name))
        if group == COLS and s.misaligned:
            directives.append(Align(name, s.word))
        directives += _rows(name, a, s) if group == ROWS else _cols(name, a, s)
    ragged = (axis.name for axis in a.loops.axes if axis.group == RAGGED)
    directives += [At(name, Place.LOOP) for name in ragged]
    grid = [d for d in directives if isinstance(d, At) and d.place is not Place.LANES]
    last: list[Directive] = [d for d in directives if isinstance(d, At) and d.place is Place.LANES]
    others = [d for d in directives if not isinstance(d, At)]
    programs = s.programs or ceil_div(a.size(ROWS), s.block_rows)
    if not a.ends_in_a_row and isinstance(programs, int) and 1 < programs <= MOST_TICKETS:
        last += [In(name, Stage.LAST) for name in dict.fromkeys(a.loops.names[n] for n in a.across_rows)]
    return Placement((*others, *grid, *last), s.num_warps, s.num_stages, s.registers)


def _rows(name: str, a: Analysis, s: Schedule) -> list[Directive]:
    directives: list[Directive] = []
    size = a.size(ROWS)
    if s.programs is None and isinstance(size, int) and padded(size) == s.block_rows > 1:
        return [At(name, Place.LANES)]
    if s.rows_apart > 1:  # the rows of a block begin at the same place of a word
        places = At(f"{name}.i", Place.GRID), At(f"{name}.o.o", Place.LOOP), At(f"{name}.o.i", Place.LANES)
        return [Split(name, s.rows_apart), Split(f"{name}.o", s.block_rows), *places]
    if s.block_rows > 1:
        directives += [Split(name, s.block_rows), At(f"{name}.i", Place.LANES)]
        name = f"{name}.o"
    if s.programs is None:
        return [*directives, At(name, Place.GRID)]
    if s.programs == 1:
        return [*directives, At(name, Place.LOOP)]
    return [
        *directives,
        Split(name, s.programs),
        At(f"{name}.i", Place.GRID),
        At(f"{name}.o", Place.LOOP),
    ]


def _cols(name: str, a: Analysis, s: Schedule) -> list[Directive]:
    directives: list[Directive] = []
    if s.splits > 1:
        directives += [Split(name, hint(part_cols(a, s))), At(f"{name}.o", Place.SHARED)]
        name = f"{name}.i"
    if s.cols is Cols.WHOLE:
        return [*directives, At(name, Place.LANES)]
    outer = Place.GRID if s.cols is Cols.GRID else Place.LOOP
    return [*directives, Split(name, s.block_cols), At(f"{name}.o", outer), At(f"{name}.i", Place.LANES)]
