"""Place a program's tiles: each group of axes lies over the grid, over a loop, or over lanes.

    rows      := one block of rows a program, or a loop over blocks by a fixed number of programs
    cols      := the whole row in the tile, a grid over blocks of columns, or a loop over blocks of columns;
                 several programs may share a row, except on a grid

If a block has one row, tiles are vectors over the columns and the values of a row are scalars; otherwise
tiles are [rows, cols].
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.names import own
from fusion_compiler.codegen.tile import For, If, Range
from fusion_compiler.ir.dims import Dim, product, quotient
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.ir.syntax import Expression, Literal, lift, plus, tl
from fusion_compiler.schedule.analysis import ceil_div, part_cols
from fusion_compiler.schedule.schedule import Cols

FIRST = Literal(0)  # the number of the only program


def place_cols(b: Builder, program: Expression, share: Dim) -> tuple[Expression, tuple[Dim, ...]]:
    """Return (the program's number along the rows, the grid); define `col`, unless columns are in a loop.

    program: the program's number in the grid. share: the number of programs along the rows.
    """
    number = program.to(torch.int64) if b.wide else program
    if b.s.splits > 1:
        return _place_part(b, number, share)
    if b.s.cols is Cols.GRID:
        return _place_block(b, number, share)
    if b.s.cols is Cols.WHOLE:
        cols_at(b, None)
    return number, (share,)


def _place_part(b: Builder, program: Expression, share: Dim) -> tuple[Expression, tuple[Dim, ...]]:
    """Give each program that shares a row, or a group of rows, a part of the columns."""
    shared = b.define("row" if b.tile.flat and b.s.programs is None else "group", program // b.s.splits)
    part = b.define("part", program % b.s.splits)
    first_col = b.define("first_col", part * part_cols(b.a, b.s))
    if b.s.cols is Cols.WHOLE:
        cols_at(b, first_col)
    return shared, (product((share, b.s.splits)),)


def _place_block(b: Builder, program: Expression, share: Dim) -> tuple[Expression, tuple[Dim, ...]]:
    """Lay the grid over blocks of columns and blocks of rows."""
    blocks = ceil_div(b.a.size(COLS), b.s.block_cols)
    if share == 1:
        cols_at(b, b.define("first_col", program * b.s.block_cols))
        return program, (blocks,)
    if blocks == 1:
        first_col = b.define("first_col", 0)
    else:
        first_col = b.define("first_col", program % blocks * b.s.block_cols)
        program = program // blocks
    cols_at(b, first_col)
    return program, (product((blocks, share)),)


def rows_at(b: Builder, start: Expression) -> None:
    """Define `row` for the block that starts at row `start`."""
    if b.tile.flat:
        if start != own("row"):
            b.define("row", start)
    else:
        _rows_from(b, start)


def _rows_from(b: Builder, start: Expression) -> None:
    size, rows, apart = b.a.size(ROWS), b.s.block_rows, b.s.rows_apart
    if b.s.splits > 1 and start != own("first_row"):  # the exchange reads this name
        start = b.define("first_row", start)
    if apart == 1:
        b.tile = replace(b.tile, first_row=start)
    lanes = tl.arange(0, rows)[:, None]
    row = b.define("row", plus(None if start == FIRST else start, lanes * apart if apart > 1 else lanes))
    if size == 0 or quotient(size, rows * apart) is None:
        b.tile = replace(b.tile, row_mask=b.define("row_inside", row < size))


def cols_at(b: Builder, start: Expression | None, inside: bool = False) -> None:
    """Define `col` for the block of columns that starts at `start` (None: the only one).

    inside: the whole block is known to lie within the row.
    """
    b.tile = replace(b.tile, start=start)
    lanes = b.lanes(b.tile.lanes)
    col = b.define("col", plus(start, lanes))
    size = b.a.size(COLS)
    covered = b.tile.lanes * (b.s.splits if b.s.cols is Cols.WHOLE else 1)
    if not inside and (size == 0 or quotient(size, covered) is None):
        b.tile = replace(b.tile, col_mask=b.define("col_inside", col < size))


def row_loop(b: Builder, program: Expression, programs: int) -> For:
    """Return the loop over blocks of rows that programs take in turn."""
    step = programs * b.s.block_rows
    is_first_row = program == FIRST or b.s.block_rows == 1  # of the program's first block
    start = program if is_first_row else program * b.s.block_rows
    return b.loop("first_row", start, b.a.size(ROWS), step)


def col_loop(b: Builder, inner: Dim) -> For:
    """Return the loop over this program's columns. inner: the columns in the loops of all programs."""
    size, lanes = b.a.size(COLS), b.s.block_cols
    if b.s.splits == 1:
        return b.loop("start", 0, inner, lanes)
    part, first = part_cols(b.a, b.s), own("first_col")
    last = first + part
    if quotient(size, product((part, b.s.splits))) is None:
        last = tl.minimum(last, inner)
    return b.loop("start", first, last, lanes)


def col_end(b: Builder, inner: Dim, lanes: int) -> For | If:
    """Return the block for the columns after `col_loop`, which one of the programs that share a row computes.

    If programs do not share rows, it is a loop of one iteration, so that its tiles are not the next loop's.
    """
    part = part_cols(b.a, b.s)
    assert isinstance(inner, int) and isinstance(part, int)
    if b.s.splits > 1:
        return If(own("part").eq(inner // part))
    return For(own("start"), Range(lift(inner), lift(b.a.size(COLS)), lanes))
