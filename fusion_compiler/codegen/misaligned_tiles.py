"""What is printed of tiles that begin with the word in which their row begins (`schedule.misaligned`).

Of a row of 531 elements, in a tile of 1024 lanes:

    skew = group * 531 % 8                                            # of every row of the program
    lane = tl.arange(0, 1024)
    col = lane - skew
    col_inside = col.to(tl.uint32) < 531                              # the row's own elements
    in_words = lane < (skew + 538) // 8 * 8                           # and the words in which they lie
    whole_words = (lane >= (skew + 7) // 8 * 8) & (lane < (skew + 531) // 8 * 8)
    begin = row * 531 // 8 * 8                                        # the word in which the row begins
    x = tl.load(in0_ptr + begin + lane, mask=in_words, other=0)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fusion_compiler.codegen.expression import dim_text
from fusion_compiler.ir.loops import COLS, Index, Load
from fusion_compiler.schedule.analysis import WORD, Cols

if TYPE_CHECKING:
    from fusion_compiler.codegen.printer import Printer


def skew_at(p: Printer, row: str) -> None:
    """Define `skew`, which is that of every row of a program."""
    skew = f"{row} * {dim_text(p.a.size(COLS))} % {p.s.word}"
    p.define("skew", f"({skew}).to(tl.int32)" if p.wide else skew)


def row_begins(p: Printer) -> None:
    """Define `begin`, the word in which the row begins."""
    p.define("begin", f"row * {dim_text(p.a.size(COLS))} // {p.s.word} * {p.s.word}")


def cols_at(p: Printer, start: str | None, lanes: str, inside: bool) -> None:
    """Define `col` for lanes that are counted from the word in which the row begins.

    A loop's blocks follow that word; the tile after it has the word, and what follows the blocks.
    """
    width, word = p.a.size(COLS), p.s.word
    assert isinstance(width, int)
    if inside:
        p.define("lane", f"{start} + {word} + {lanes}")
        p.define("col", "lane - skew")
        return
    looped = p.s.cols is Cols.LOOP
    p.define("lane", lanes if start is None or looped else f"{start} + {lanes}")
    if looped:  # both ends of the row
        p.line(f"lane += tl.where(lane < {word}, 0, {start})")
    p.define("col", "lane - skew")
    p.define("col_inside", f"col.to(tl.uint32) < {width}")  # what is below zero is far beyond
    p.define("in_words", f"lane < (skew + {width + word - 1}) // {word} * {word}")
    if any(in_words(p, s.index, s.within) for s in p.loops.stores):
        first, end = f"(skew + {word - 1}) // {word} * {word}", f"(skew + {width}) // {word} * {word}"
        p.define("whole_words", f"(lane >= {first}) & (lane < {end})")
    p.col_mask = "col_inside"


def in_words(p: Printer, index: Index, within: int | None) -> bool:
    """Whether an access moves whole words of a row that may begin anywhere."""
    return p.s.skewed and within is None and p.a.lies_in_rows(index)


def address(p: Printer, buffer: str, index: Index) -> str:
    """The addresses of the tile's lanes, from the word in which the row begins."""
    return f"{p.pointers[buffer]} + begin + lane{_plus(index)}"


def mask(p: Printer, lanes: str) -> str | None:
    """Some of a block's lanes in those of its rows that exist; None where every lane lies within the row."""
    if p.col_mask is None:
        return None
    return f"{p.row_mask} & {lanes}" if p.row_mask else lanes


def is_behind(p: Printer, node: Load) -> bool:
    """Whether a load is of what serves all rows, the words of which are not those of a skewed row.

    Where a loop has blocks within the row, whole words of it are loaded and moved by the skew; so it is for
    tiles of several rows, which Triton would else lay out as it does a load of single elements.
    """
    within_row = p.s.word == WORD and p.col_mask is None and p.col_start is not None
    return (
        (within_row or (p.s.skewed and not p.flat))
        and node.within is None
        and p.a.lies_along_cols(node.index)
        and p.dtypes[node.buffer].itemsize in (2, 4)
    )


def load_behind(p: Printer, node: Load) -> str:
    """That load, in the dtype of the buffer."""
    pointer = f"{p.pointers[node.buffer]}{_plus(node.index)}"
    if p.col_mask is None:
        return f"fm.load_behind({pointer}, {p.col_start} + {WORD}, skew, {p.s.block_cols})"
    width = dim_text(p.a.size(COLS))
    return f"fm.load_behind({pointer}, {p.col_start}, skew, {p.s.block_cols}, {width})[None, :]"


def _plus(index: Index) -> str:
    """What an access adds to where its row begins."""
    return f" + {index.const}" if index.const else ""


def store(p: Printer, buffer: str, index: Index, value: str) -> None:
    """Print a store of whole words, and one of the row's elements in the words at its ends."""
    target = address(p, buffer, index)
    if p.col_mask is None:
        p.line(f"tl.store({target}, {value})")
        return
    at_ends = "col_inside ^ whole_words"
    p.line(f"tl.store({target}, {value}, mask={mask(p, 'whole_words')})")
    with p.scope(_at_an_end(p)):
        p.line(f"tl.store({target}, {value}, mask={mask(p, f'({at_ends})' if p.row_mask else at_ends)})")


def _at_an_end(p: Printer) -> str | None:
    """The header of what only tiles with an end of their row do; None where every tile has one.

    In a loop over rows all do it: Triton puts a branch behind the loads of the next rows, and the tile would
    stay in registers until then.
    """
    if p.s.cols is Cols.GRID:
        last = f"first_col + {p.s.block_cols} >= {dim_text(p.a.size(COLS))}"
        return f"if (first_col == 0) | ({last}):"
    shared = p.s.cols is Cols.WHOLE and p.s.splits > 1 and p.s.programs is None
    return f"if (part == 0) | (part == {p.s.splits - 1}):" if shared else None
