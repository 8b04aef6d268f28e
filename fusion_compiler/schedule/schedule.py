"""How a loop nest runs: a schedule is one way of cutting its space into programs and threads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

WORD = 8  # elements of two bytes in the widest access


class Cols(StrEnum):
    WHOLE = "whole"
    GRID = "grid"
    LOOP = "loop"


@dataclass(frozen=True)
class Schedule:
    """How a loop nest runs.

    block_rows, block_cols: tile extents, powers of two. cols: how the columns are covered.
    programs: number of programs that share the rows in a loop; None is one block a program.
    splits: programs that share a block of rows, each with consecutive columns of all of them; they run at the
    same time and exchange what they reduced, in 32 bits a row and once a block. In a loop over rows,
    `programs` counts the groups of them.
    word: elements in which rows that begin anywhere are moved (`schedule.misaligned`): the columns are
    counted from the word in which the row begins; 0 counts them from its first element. One row a block, or
    several of a loop that programs share.
    registers: the most that a thread may take, so that as many programs as are to run at once do.
    last_finishes: of the programs that share the rows of a block of columns, the last to be done computes
    what waits for their sums, in the same launch; else a second kernel does where that is a row.
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
    last_finishes: bool = False
    early: int = 0

    def __str__(self) -> str:
        split = f" of {self.splits} parts" if self.splits > 1 else ""
        loop = f", {self.programs} programs" if self.programs else ""
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        by = f" by {self.word}" if self.word != WORD else ""
        window = f" misaligned{by}" if self.misaligned else ""
        tile = f"{self.block_rows} x {self.block_cols} {self.cols}{window}{split}"
        limit = f", {self.registers} registers" if self.registers else ""
        last = ", the last finishes" if self.last_finishes else ""
        early = f", {self.early} early" if self.early else ""
        return f"{tile}{loop}, {self.num_warps} warps{stages}{limit}{last}{early}"

    @property
    def elements(self) -> int:
        """Return the elements of a tile."""
        return self.block_rows * self.block_cols

    @property
    def misaligned(self) -> bool:
        return self.word > 0

    @property
    def rows_apart(self) -> int:
        """From one row of a block to the next: misaligned ones begin at the same place of a word."""
        if not self.misaligned or self.block_rows == 1:
            return 1
        assert self.programs is not None
        return self.programs

    @property
    def in_passes(self) -> bool:
        """Whether a reduction along the row takes a pass of its own: the tile is not the whole row."""
        return self.cols is Cols.LOOP or self.splits > 1
