"""The window of rows that begin anywhere (`schedule/misaligned.py`): tiles begin with the word in which their
row begins.

Of a row of 531 elements, in a tile of 1024 lanes:

    lead = group * 531 % 8                                            # of every row of the program
    lane = tl.arange(0, 1024)
    col = lane - lead
    col_inside = col.to(tl.uint32) < 531                              # the row's own elements
    in_words = lane < (lead + 538) // 8 * 8                           # and the words in which they lie
    whole_words = (lane >= (lead + 7) // 8 * 8) & (lane < (lead + 531) // 8 * 8)
    begin = row * 531 // 8 * 8                                        # the word in which the row begins
    x = tl.load(in0_ptr + begin + lane, mask=in_words, other=0)
"""

from __future__ import annotations

from dataclasses import replace

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import convert, dim_text
from fusion_compiler.codegen.tile import Expression, If, Store
from fusion_compiler.ir.loops import COLS, Index, Load
from fusion_compiler.schedule.schedule import WORD, Cols


def lead_at(b: Builder, row: str) -> None:
    """Define `lead`, which is that of every row of a program."""
    lead = f"{row} * {dim_text(b.a.size(COLS))} % {b.s.word}"
    b.define("lead", f"({lead}).to(tl.int32)" if b.wide else lead)


def row_begins(b: Builder) -> None:
    """Define `begin`, the word in which the row begins."""
    b.define("begin", f"row * {dim_text(b.a.size(COLS))} // {b.s.word} * {b.s.word}")


def cols_at(b: Builder, start: str | None, lanes: str, inside: bool) -> None:
    """Define `col` for lanes that are counted from the word in which the row begins.

    A loop's blocks follow that word; the tile after it has the word, and what follows the blocks.
    """
    width, word = b.a.size(COLS), b.s.word
    assert isinstance(width, int)
    if inside:
        b.define("lane", f"{start} + {word} + {lanes}")
        b.define("col", "lane - lead")
        return
    looped = b.s.cols is Cols.LOOP
    b.define("lane", lanes if start is None or looped else f"{start} + {lanes}")
    if looped:  # both ends of the row
        b.line(f"lane += tl.where(lane < {word}, 0, {start})")
    b.define("col", "lane - lead")
    b.define("col_inside", f"col.to(tl.uint32) < {width}")  # what is below zero is far beyond
    b.define("in_words", f"lane < (lead + {width + word - 1}) // {word} * {word}")
    if any(moves_words(b, s.index, s.within) for s in b.loops.stores):
        first, end = f"(lead + {word - 1}) // {word} * {word}", f"(lead + {width}) // {word} * {word}"
        b.define("whole_words", f"(lane >= {first}) & (lane < {end})")
    b.tile = replace(b.tile, col_mask="col_inside")


def moves_words(b: Builder, index: Index, within: int | None) -> bool:
    """Whether an access moves whole words of a row that may begin anywhere."""
    return b.s.misaligned and within is None and b.a.lies_in_rows(index)


def load(b: Builder, node: Load, then: str) -> Expression:
    """Whole words."""
    return b.loaded(node, _address(b, node.buffer, node.index), _mask(b, "in_words"), then)


def is_behind(b: Builder, node: Load) -> bool:
    """Whether a load is of what serves all rows, the words of which are not those of a misaligned row.

    Where a loop has blocks within the row, whole words of it are loaded and moved by the lead; so it is for
    tiles of several rows, which Triton would else lay out as it does a load of single elements.
    """
    within_row = b.s.word == WORD and b.tile.col_mask is None and b.tile.start is not None
    return (
        (within_row or (b.s.misaligned and not b.tile.flat))
        and node.within is None
        and b.a.lies_along_cols(node.index)
        and b.dtypes[node.buffer].itemsize in (2, 4)
    )


def load_behind(b: Builder, node: Load) -> Expression:
    """That load."""
    pointer = f"{b.pointers[node.buffer]}{_plus(node.index)}"
    if b.tile.col_mask is None:
        text = f"fm.load_behind({pointer}, {b.tile.start} + {WORD}, lead, {b.tile.lanes})"
    else:
        width = dim_text(b.a.size(COLS))
        text = f"fm.load_behind({pointer}, {b.tile.start}, lead, {b.tile.lanes}, {width})[None, :]"
    return convert(text, b.dtypes[node.buffer], node.dtype)


def store(b: Builder, buffer: str, index: Index, value: str, node: int) -> None:
    """Whole words, and one by one the row's elements in the words at its ends."""
    target = _address(b, buffer, index)
    if b.tile.col_mask is None:
        b.add(Store(target, value, None, node))
        return
    at_ends = "col_inside ^ whole_words"
    b.add(Store(target, value, _mask(b, "whole_words"), node))
    with b.inside(_at_an_end(b)):
        b.add(Store(target, value, _mask(b, f"({at_ends})" if b.tile.row_mask else at_ends), node))


def _address(b: Builder, buffer: str, index: Index) -> str:
    """The addresses of the tile's lanes, from the word in which the row begins."""
    return f"{b.pointers[buffer]} + begin + lane{_plus(index)}"


def _mask(b: Builder, lanes: str) -> str | None:
    """Some of a block's lanes in those of its rows that exist; None where every lane lies within the row."""
    if b.tile.col_mask is None:
        return None
    return f"{b.tile.row_mask} & {lanes}" if b.tile.row_mask else lanes


def _plus(index: Index) -> str:
    """What an access adds to where its row begins."""
    return f" + {index.const}" if index.const else ""


def _at_an_end(b: Builder) -> If | None:
    """What only tiles with an end of their row do; None where every tile has one.

    In a loop over rows all do it: Triton puts a branch behind the loads of the next rows, and the tile would
    stay in registers until then.
    """
    if b.s.cols is Cols.GRID:
        last = f"first_col + {b.tile.lanes} >= {dim_text(b.a.size(COLS))}"
        return If(f"(first_col == 0) | ({last})")
    shared = b.s.cols is Cols.WHOLE and b.s.splits > 1 and b.s.programs is None
    return If(f"(part == 0) | (part == {b.s.splits - 1})") if shared else None
