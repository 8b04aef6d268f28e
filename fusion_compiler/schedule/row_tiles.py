"""Tiles of rows and columns, and their placements.

The kinds of schedules describe how programs go through a nest of rows and columns by a `RowTile`;
`placement_of` gives its directives.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from fusion_compiler.ir.dims import Dim, hint, product
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule.analysis import Analysis, ceil_div
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
from fusion_compiler.schedule.shapes import WORD, padded

# Most programs that increment a counter. Each waits until its results have arrived, and one program, with as
# many warps as the others, reads them all. With 16384, that takes 8 us on an H200, and a second kernel 2.
MOST_TICKETS = 4096
NAMES = {ROWS: "row", COLS: "col"}  # of the axes that a group's axes are fused to


class Cols(StrEnum):
    WHOLE = "whole"
    GRID = "grid"
    LOOP = "loop"


class RowTile(NamedTuple):
    """A tile of rows and columns, and how programs go through a nest by it.

    block_rows, block_cols: extents of a tile, powers of two.
    cols: how the columns are covered.
    programs: how many programs share the rows in a loop; None means one block per program.
    turns: blocks of consecutive rows that each program goes through in a loop, if not 0. There are as many
        programs then as the rows need, however many these are at run time. `programs` is None.
    splits: programs that share a block of rows, each with consecutive columns. They run at the same time and
        exchange the results of their reductions, as 32 bits per row, once per block. In a loop over rows,
        `programs` counts groups of them.
    word: elements per word if rows begin at any address (`schedule.misaligned`). Columns are then counted
        from the word in which the row begins. 0 counts them from the row's first element. A block has one
        row, or several in a loop that programs share.
    registers: most registers of a thread, so that the intended number of programs runs at the same time.
    """

    block_rows: int
    block_cols: int
    cols: Cols
    programs: int | None = None
    num_warps: int = 4
    num_stages: int = 1
    splits: int = 1
    word: int = 0
    registers: int | None = None
    turns: int = 0

    def __str__(self) -> str:
        split = f" of {self.splits} parts" if self.splits > 1 else ""
        loop = f", {self.programs} programs" if self.programs else ""
        loop += f", {self.turns} turns" if self.turns else ""
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        by = f" by {self.word}" if self.word != WORD else ""
        window = f" misaligned{by}" if self.misaligned else ""
        tile = f"{self.block_rows} x {self.block_cols} {self.cols}{window}{split}"
        limit = f", {self.registers} registers" if self.registers else ""
        return f"{tile}{loop}, {self.num_warps} warps{stages}{limit}"

    @property
    def elements(self) -> int:
        """Return the elements of a tile."""
        return self.block_rows * self.block_cols

    @property
    def misaligned(self) -> bool:
        return self.word > 0

    @property
    def rows_apart(self) -> int:
        """Return the distance between the rows of a block. Misaligned rows must begin at the same place of
        a word."""
        if not self.misaligned or self.block_rows == 1:
            return 1
        assert self.programs is not None
        return self.programs


def part_cols(a: Analysis, s: RowTile) -> Dim:
    """Return how many columns each program that shares a row has, a multiple of the block."""
    return product((ceil_div(a.size(COLS), s.splits * s.block_cols), s.block_cols))


def parts_of(a: Analysis, s: RowTile) -> Dim:
    """Return how many of the programs that share a row have at least one column."""
    return ceil_div(a.size(COLS) + max(s.word - 1, 0), hint(part_cols(a, s)))


def placement_of(a: Analysis, s: RowTile) -> Placement:
    """Return the placement of a tile. Where programs share a row, each of them has columns."""
    cuts: list[Directive] = []
    outer: list[Directive] = []
    lanes: list[Directive] = []
    for group, directives_of in ((ROWS, _of_rows), (COLS, _of_cols)):
        if axes := a.axes[group]:
            name = axes[0].name
            if len(axes) > 1:
                name = NAMES[group]
                cuts.append(Fuse(tuple(axis.name for axis in axes), name))
            for directives, more in zip((cuts, outer, lanes), directives_of(name, a, s), strict=True):
                directives += more
    outer += [At(a.loops.axes[axis].name, Place.LOOP) for axis in sorted(a.ragged)]
    if a.across_rows and not a.ends_in_a_row:
        programs = s.programs or ceil_div(a.size(ROWS), s.block_rows * max(1, s.turns))
        if isinstance(programs, int) and 1 < programs <= MOST_TICKETS:
            names = dict.fromkeys(a.loops.names[n] for n in a.across_rows)
            lanes += [In(name, Stage.LAST) for name in names]
    return Placement((*cuts, *outer, *lanes), s.num_warps, s.num_stages, s.registers)


# The directives that cut an axis, those that place its parts outside of a tile, and those inside of one.
Directives = tuple[list[Directive], list[Directive], list[Directive]]


def _of_rows(name: str, a: Analysis, s: RowTile) -> Directives:
    size = a.size(ROWS)
    if s.block_rows > 1 and s.programs is None and isinstance(size, int) and padded(size) == s.block_rows:
        return [], [], [At(name, Place.LANES)]
    if s.word and s.rows_apart > 1:  # the rows of a block begin at the same place of a word
        return (
            [Split(name, s.rows_apart), Split(f"{name}.o", s.block_rows)],
            [At(f"{name}.i", Place.GRID), At(f"{name}.o.o", Place.LOOP)],
            [At(f"{name}.o.i", Place.LANES)],
        )
    block: list[Directive] = []
    lanes: list[Directive] = []
    if s.block_rows > 1:
        block, lanes, name = [Split(name, s.block_rows)], [At(f"{name}.i", Place.LANES)], f"{name}.o"
    if s.turns:
        in_turns: list[Directive] = [At(f"{name}.o", Place.GRID), At(f"{name}.i", Place.LOOP)]
        return [*block, Split(name, s.turns)], in_turns, lanes
    if s.programs is None:
        return block, [At(name, Place.GRID)], lanes
    if s.programs == 1:
        return block, [At(name, Place.LOOP)], lanes
    turns: list[Directive] = [At(f"{name}.i", Place.GRID), At(f"{name}.o", Place.LOOP)]
    return [*block, Split(name, s.programs)], turns, lanes


def _of_cols(name: str, a: Analysis, s: RowTile) -> Directives:
    cuts: list[Directive] = [Align(name, s.word)] if s.word else []
    shared: list[Directive] = []
    if s.splits > 1 and parts_of(a, s) != 1:
        cuts.append(Split(name, hint(part_cols(a, s))))
        shared, name = [At(f"{name}.o", Place.SHARED)], f"{name}.i"
    if s.cols is Cols.WHOLE:
        return cuts, shared, [At(name, Place.LANES)]
    outer = At(f"{name}.o", Place.GRID if s.cols is Cols.GRID else Place.LOOP)
    return [*cuts, Split(name, s.block_cols)], [*shared, outer], [At(f"{name}.i", Place.LANES)]
