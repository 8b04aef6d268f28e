"""Where a program's tiles lie: each group of axes over the grid, over a loop, and over lanes.

    batch     := one point a program, which is a matrix
    rows      := one block of rows a program, or a loop over blocks by a fixed number of programs
    cols      := the whole row in the tile, a grid over column blocks, or a loop over them; the last by
                 one program, or, as the first, by several that share the row

With one row a block, tiles are vectors over the columns and row values are scalars; with several, tiles are
[rows, cols].
"""

from __future__ import annotations

from dataclasses import replace

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import dim_text
from fusion_compiler.codegen.tile import For, If
from fusion_compiler.codegen.windows import misaligned
from fusion_compiler.ir.dims import Dim, product, quotient
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule.analysis import ceil_div, part_cols
from fusion_compiler.schedule.schedule import Cols


def place_cols(b: Builder, program: str, share: Dim) -> tuple[str, tuple[Dim, ...]]:
    """Define `col` but for a loop over columns; (the program's number along the rows, the grid).

    program: its number in the grid, or 0 of a matrix that has one. share: programs along the rows.
    """
    number = program + (".to(tl.int64)" if b.wide and program != "0" else "")
    if b.s.splits > 1:
        return _place_part(b, number, share)
    if b.s.cols is Cols.GRID:
        return _place_block(b, number, share)
    if b.s.misaligned:
        misaligned.lead_at(b, number)
    if b.s.cols is Cols.WHOLE:
        cols_at(b, None)
    return number, (share,)


def place_batch(b: Builder, program: str) -> str:
    """Define `batch`; the program's number among those of the matrix."""
    blocks = ceil_div(b.a.size(COLS), b.s.block_cols) if b.s.cols is Cols.GRID else 1
    number = program + (".to(tl.int64)" if b.wide else "")
    b.define("batch", number if blocks == 1 else f"{number} // {dim_text(blocks)}")
    return "0" if blocks == 1 else f"({program} % {dim_text(blocks)})"


def _place_part(b: Builder, program: str, share: Dim) -> tuple[str, tuple[Dim, ...]]:
    """Of programs that share a row, or a group of rows, each has a part of its columns."""
    shared = "row" if b.tile.flat and b.s.programs is None else "group"
    b.define(shared, f"{program} // {b.s.splits}")
    b.define("part", f"{program} % {b.s.splits}")
    b.define("first_col", f"part * {dim_text(part_cols(b.a, b.s))}")
    if b.s.misaligned:
        misaligned.lead_at(b, shared)
    if b.s.cols is Cols.WHOLE:
        cols_at(b, "first_col")
    return shared, (product((share, b.s.splits)),)


def _place_block(b: Builder, program: str, share: Dim) -> tuple[str, tuple[Dim, ...]]:
    """A grid over blocks of columns, and of rows."""
    blocks = ceil_div(b.a.size(COLS) + max(b.s.word - 1, 0), b.s.block_cols)
    if share == 1:
        b.define("first_col", f"{program} * {b.s.block_cols}")
        cols_at(b, "first_col")
        return program, (blocks,)
    if blocks == 1:
        b.define("first_col", "0")
    else:
        b.define("first_col", f"{program} % {dim_text(blocks)} * {b.s.block_cols}")
        program = f"({program} // {dim_text(blocks)})"
    if b.s.misaligned:
        misaligned.lead_at(b, program)
    cols_at(b, "first_col")
    return program, (product((blocks, share)),)


def rows_at(b: Builder, start: str) -> None:
    """Define `row` for the block that starts at row `start`."""
    if b.tile.flat:
        if start != "row":
            b.define("row", start)
    else:
        _rows_from(b, start)
    if b.s.misaligned:
        misaligned.row_begins(b)


def _rows_from(b: Builder, start: str) -> None:
    size, rows, apart = b.a.size(ROWS), b.s.block_rows, b.s.rows_apart
    if b.s.splits > 1 and start != "first_row":  # which the exchange asks for
        b.define("first_row", start)
        start = "first_row"
    if apart == 1:
        b.tile = replace(b.tile, first_row=start if start.isidentifier() else f"({start})")
    first = "" if start == "0" else f"{start} + "
    b.define("row", f"{first}tl.arange(0, {rows})[:, None]{f' * {apart}' if apart > 1 else ''}")
    if size == 0 or quotient(size, rows * apart) is None:
        b.define("row_inside", f"row < {dim_text(size)}")
        b.tile = replace(b.tile, row_mask="row_inside")


def cols_at(b: Builder, start: str | None, inside: bool = False) -> None:
    """Define `col` for the block of columns that starts at `start` (None: the only one).

    inside: the whole block is known to lie within the row.
    """
    b.tile = replace(b.tile, start=start)
    lanes = f"tl.arange(0, {b.tile.lanes})" + ("" if b.tile.flat else "[None, :]")
    if b.s.misaligned:
        misaligned.cols_at(b, start, lanes, inside)
        return
    b.define("col", lanes if start is None else f"{start} + {lanes}")
    size = b.a.size(COLS)
    covered = b.tile.lanes * (b.s.splits if b.s.cols is Cols.WHOLE else 1)
    if not inside and (size == 0 or quotient(size, covered) is None):
        b.define("col_inside", f"col < {dim_text(size)}")
        b.tile = replace(b.tile, col_mask="col_inside")


def row_loop(b: Builder, program: str, programs: int) -> For:
    """The loop over blocks of rows that programs take in turn."""
    step = programs * b.s.block_rows
    alone = program == "0" or b.s.block_rows == 1 or b.s.misaligned  # its first block begins there
    start = program if alone else f"{program} * {b.s.block_rows}"
    return b.loop("first_row", f"tl.range({start}, {dim_text(b.a.size(ROWS))}, {step}{b.stages()})")


def col_loop(b: Builder, inner: Dim) -> For:
    """The loop over this program's columns, `inner` of all programs together."""
    size, lanes, stages = b.a.size(COLS), b.s.block_cols, b.stages()
    if b.s.splits == 1:
        return b.loop("start", f"tl.range(0, {dim_text(inner)}, {lanes}{stages})")
    part = part_cols(b.a, b.s)
    last = f"first_col + {dim_text(part)}"
    if quotient(size, product((part, b.s.splits))) is None:
        last = f"tl.minimum({last}, {dim_text(inner)})"
    return b.loop("start", f"tl.range(first_col, {last}, {lanes}{stages})")


def start_of_turn(b: Builder) -> str:
    """Where the block of a turn of that loop begins: from the last one back where something is scanned so."""
    if True not in b.a.directions:
        return "start"
    lanes, size = b.s.block_cols, b.a.size(COLS)
    last = max(0, size - 1) // lanes * lanes if isinstance(size, int) else None
    return f"({dim_text(product((ceil_div(size, lanes), lanes)) - lanes) if last is None else last} - start)"


def col_end(b: Builder, inner: Dim, lanes: int) -> For | If:
    """What follows that loop: one of the programs that share a row has it.

    Where no other has the row it is a loop as well, of one turn: its tiles are not the next loop's.
    """
    part = part_cols(b.a, b.s)
    assert isinstance(inner, int) and isinstance(part, int)
    if b.s.splits > 1:
        return If(f"part == {inner // part}")
    return b.loop("start", f"tl.range({inner}, {dim_text(b.a.size(COLS))}, {lanes})")
