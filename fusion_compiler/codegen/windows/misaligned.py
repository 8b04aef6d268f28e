"""The window of misaligned rows (`schedule/misaligned.py`): tiles begin with the word in which their row
begins.

In a tile of 1024 lanes, for a row of 531 elements:

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

import torch

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import convert
from fusion_compiler.codegen.names import own
from fusion_compiler.codegen.tile import If, Store, Update
from fusion_compiler.ir.dims import Dim
from fusion_compiler.ir.loops import COLS, Index, Load
from fusion_compiler.ir.syntax import Expression, every, fm, plus, tl
from fusion_compiler.schedule.schedule import WORD, Cols


def lead_at(b: Builder, row: Expression) -> None:
    """Define `lead`, which all rows of a program share."""
    lead = row * b.a.size(COLS) % b.s.word
    b.define("lead", lead.to(torch.int32) if b.wide else lead)


def row_begins(b: Builder) -> None:
    """Define `begin`, the word in which the row begins."""
    b.define("begin", own("row") * b.a.size(COLS) // b.s.word * b.s.word)


def cols_at(b: Builder, start: Expression | None, lanes: Expression, inside: bool) -> None:
    """Define `col` for lanes counted from the word in which the row begins. The blocks of a loop follow that
    word. The tile after the loop has that word, and the rest after the blocks."""
    width, word, lead = b.a.size(COLS), b.s.word, own("lead")
    assert isinstance(width, int)
    if inside:
        b.define("col", b.define("lane", plus(start, word, lanes)) - lead)
        return
    looped = b.s.cols is Cols.LOOP
    lane = b.define("lane", lanes if looped else plus(start, lanes))
    if looped:  # both ends of the row
        b.add(Update(lane, "+", tl.where(lane < word, 0, start)))
    col = b.define("col", lane - lead)
    b.define("col_inside", col.to(tl.uint32) < width)  # a negative number is a large unsigned one
    b.define("in_words", lane < (lead + (width + word - 1)) // word * word)
    if any(moves_words(b, s.index, s.within) for s in b.loops.stores):
        first, end = (lead + (word - 1)) // word * word, (lead + width) // word * word
        b.define("whole_words", (lane >= first) & (lane < end))
    b.tile = replace(b.tile, col_mask=own("col_inside"))


def moves_words(b: Builder, index: Index, within: int | None) -> bool:
    """True if an access moves whole words of a misaligned row."""
    return b.s.misaligned and within is None and b.a.lies_in_rows(index)


def load(b: Builder, node: Load) -> Expression:
    """Return whole words, in the dtype of the buffer."""
    return b.loaded(node, _address(b, node.buffer, node.index), _mask(b, own("in_words")))


def needs_shift(b: Builder, node: Load) -> bool:
    """True if a load is shared by all rows, so that its words are not those of a misaligned row.

    If a loop has blocks inside the row, whole words are loaded and shifted by the lead. The same holds for
    tiles of several rows, whose layout would otherwise suit loads of single elements.
    """
    within_row = b.s.word == WORD and b.tile.col_mask is None and b.tile.start is not None
    return (
        (within_row or (b.s.misaligned and not b.tile.flat))
        and node.within is None
        and b.a.lies_along_cols(node.index)
        and b.dtypes[node.buffer].itemsize in (2, 4)
    )


def load_shifted(b: Builder, node: Load) -> Expression:
    """Return such a load, shifted by the lead."""
    pointer = plus(b.pointers[node.buffer], _const(node.index))
    if b.tile.col_mask is None:
        value = fm.load_behind(pointer, plus(b.tile.start, WORD), own("lead"), b.tile.lanes)
    else:
        value = fm.load_behind(pointer, b.tile.start, own("lead"), b.tile.lanes, b.a.size(COLS))[None, :]
    return convert(value, b.dtypes[node.buffer], node.dtype)


def store(b: Builder, buffer: str, index: Index, value: Expression, node: int) -> None:
    """Store whole words, and one by one the row's elements in the words at its ends."""
    target = _address(b, buffer, index)
    if b.tile.col_mask is None:
        b.add(Store(target, value, None, node))
        return
    b.add(Store(target, value, _mask(b, own("whole_words")), node))
    with b.inside(_at_an_end(b)):
        b.add(Store(target, value, _mask(b, own("col_inside") ^ own("whole_words")), node))


def _address(b: Builder, buffer: str, index: Index) -> Expression:
    """Return the addresses of the tile's lanes, counted from the word in which the row begins."""
    return plus(b.pointers[buffer], own("begin"), own("lane"), _const(index))


def _mask(b: Builder, lanes: Expression) -> Expression | None:
    """Return some of a block's lanes in its existing rows; None if every lane is inside the row."""
    return None if b.tile.col_mask is None else every(b.tile.row_mask, lanes)


def _const(index: Index) -> Dim | None:
    """Return the offset of an access from the start of its row."""
    return index.const if index.const else None


def _at_an_end(b: Builder) -> If | None:
    """Return the condition that a tile has an end of its row; None if every tile has one.

    In a loop over rows it is None: Triton puts a branch after the loads of the next rows, and the tile would
    stay in registers until then.
    """
    if b.s.cols is Cols.GRID:
        first = own("first_col")
        return If(first.eq(0) | (first + b.tile.lanes >= b.a.size(COLS)))
    shared = b.s.cols is Cols.WHOLE and b.s.splits > 1 and b.s.programs is None
    return If(own("part").eq(0) | own("part").eq(b.s.splits - 1)) if shared else None
