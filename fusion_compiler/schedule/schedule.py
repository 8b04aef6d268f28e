"""Schedules: how a loop nest is divided into programs and threads."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

WORD = 8  # elements of two bytes in the widest access


class Cols(StrEnum):
    WHOLE = "whole"
    GRID = "grid"
    LOOP = "loop"


@dataclass(frozen=True)
class Schedule:
    """A schedule says how a loop nest runs.

    block_rows, block_cols: extents of a tile, powers of two.
    cols: how the columns are covered.
    programs: how many programs share the rows in a loop; None means one block per program.
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
    early: ClassVar[int] = 0  # what a `Placement` says besides

    def __str__(self) -> str:
        split = f" of {self.splits} parts" if self.splits > 1 else ""
        loop = f", {self.programs} programs" if self.programs else ""
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

    @property
    def in_passes(self) -> bool:
        """True if a reduction along the row takes a pass of its own, because a tile is not the whole row."""
        return self.cols is Cols.LOOP or self.splits > 1
