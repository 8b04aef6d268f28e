"""Misaligned rows, moved in whole words.

If the length of a row is not a multiple of eight, the addresses of its elements allow accesses of one element
only, and no asynchronous copies. A misaligned tile begins with the word in which its row begins: lane `i` is
column `i - lead`. It is loaded and stored as if it were aligned, except for the words at both ends of the
row. They contain elements of the neighbouring rows. Loads ignore these elements, and stores write the row's
own elements there one by one.

A program that loops over rows has a constant lead, so that each lane keeps its column: the distance between
its rows is a whole number of words. The number of programs is therefore a multiple of eight if the width is
odd, or of four with words of half the size. A block of several rows has rows of its own program, which are
not neighbours: block `k` of program `i` has the rows `i + (k * block_rows + r) * programs`.

A loop over columns handles the word in which the row begins, and the rest at its end, in one additional tile
after the loop. Its blocks are inside the row and have no masks.
"""

from __future__ import annotations

from math import gcd

from fusion_compiler.ir.dims import Dim
from fusion_compiler.ir.loops import COLS, ROWS, Load, Random
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.row_tiles import Cols, RowTile, part_cols, parts_of
from fusion_compiler.schedule.shapes import WORD

WORDS = (WORD, WORD // 2)
NARROWEST = 512  # columns of a tile; narrower ones have several rows with different leads


def fits(a: Analysis) -> bool:
    """True if rows are adjacent in memory and not aligned."""
    width = a.size(COLS)
    if not isinstance(width, int) or width % WORD == 0 or a.tall:
        return False
    if not a.axes[ROWS]:
        return False
    drawn = any(isinstance(n, Random) and COLS in a.groups[i] for i, n in enumerate(a.loops.nodes))
    accesses = [n for n in a.loops.nodes if isinstance(n, Load)]
    return not drawn and any(
        a.lies_in_rows(x.index) for x in (*accesses, *a.loops.stores) if x.within is None
    )


def form_of(a: Analysis, s: RowTile) -> RowTile | None:
    """Return the misaligned form of a schedule, with one row per block; None if it has none.

    The form has the warps of one row. Programs that share a row keep all warps, and if they loop over rows
    with their own parts, their blocks keep all rows.
    """
    width = a.size(COLS)
    if not isinstance(width, int) or s.block_cols < WORD or (a.scans and s.cols is Cols.LOOP):
        return None  # a loop's last tile has both ends of a row, and scans run in order
    warps = s.num_warps if s.splits > 1 else max(1, s.num_warps // s.block_rows)
    loops_over_rows = s.splits > 1 and s.cols is Cols.WHOLE and s.programs is not None
    form = s._replace(block_rows=s.block_rows if loops_over_rows else 1, num_warps=warps, word=WORD)
    if s.cols is Cols.GRID:
        one_row = s.programs is None and not a.across_rows and a.size(ROWS) != 1
        return form if one_row else None
    if s.cols is Cols.LOOP:
        form = _with_room_for_its_ends(a, form)
    if not _covers(a, form, width):
        return None
    if s.programs is None:
        return form
    return _in_step(form, s.programs * (s.num_warps // warps), width)


def _in_step(s: RowTile, programs: int, width: int) -> RowTile | None:
    """Return the form with at most so many programs looping over rows, with a constant lead.

    Their number must be a multiple of the distance between rows with the same lead. If that loses a tenth of
    them, words of half the size may lose fewer.
    """
    in_step = {word: programs // apart * apart for word in WORDS if (apart := word // gcd(width, word))}
    word = next((w for w in WORDS if 10 * in_step[w] >= 9 * programs), max(WORDS, key=in_step.__getitem__))
    return s._replace(programs=in_step[word], word=word) if in_step[word] else None


def _with_room_for_its_ends(a: Analysis, s: RowTile) -> RowTile:
    """Narrow the blocks of a loop over columns until one tile as wide as `s` holds both ends of the row."""
    form = s
    while form.block_cols > WORD and not (inner_cols(a, form) and 0 < end_lanes(a, form) <= s.block_cols):
        form = form._replace(block_cols=form.block_cols // 2)
    return form


def inner_cols(a: Analysis, s: RowTile) -> Dim:
    """Return how many columns a loop covers in whole blocks within the row; a last tile covers the rest.

    A masked loop covers all columns if their number is unknown, if one block has them, or if a scan is
    reversed, since its loop starts with the last block. In misaligned rows the last tile has both ends: the
    rest of the first word, and the columns after the last block.
    """
    size = a.size(COLS)
    if not isinstance(size, int) or size <= s.block_cols or True in a.directions:
        return size
    return (size - s.word) // s.block_cols * s.block_cols


def end_lanes(a: Analysis, s: RowTile) -> int:
    """Return the lanes of the tile that has the rest of a loop's columns, at any lead; 0 if none are left."""
    size, inner = a.size(COLS), inner_cols(a, s)
    if inner == size:
        return 0
    assert isinstance(size, int) and isinstance(inner, int)  # only rows of known size have an end
    return 1 << (size - inner + max(s.word, 1) - 2).bit_length()


def _covers(a: Analysis, s: RowTile, width: int) -> bool:
    """True if the programs of a row cover it at every lead, and each has a column if there is no loop. In a
    loop, the program with the end of the row has its last columns."""
    part, inner = part_cols(a, s), inner_cols(a, s)
    assert isinstance(part, int) and isinstance(inner, int)
    if s.cols is Cols.LOOP:
        is_shared_by_all = s.splits == 1 or parts_of(a, s) == s.splits
        return is_shared_by_all and 0 < inner < width <= (inner // part + 1) * part
    return s.splits * part >= width + s.word - 1 and (s.splits - 1) * part < width


def with_misaligned(a: Analysis, tiles: tuple[RowTile, ...]) -> tuple[RowTile, ...]:
    """Return some tiles and their misaligned forms; forms that loop over rows come first.

    A loop that begins with the row's first word prefetches nothing. The first tile stays first: it serves
    inputs that do not begin with a word. Its own kind comes last.
    """
    if not fits(a):
        return tiles
    # moving single elements takes more registers
    plain = tuple(s._replace(registers=None) for s in tiles)
    candidates = (form_of(a, s) for s in tiles if s.block_cols >= NARROWEST)
    forms = sorted(dict.fromkeys(s for s in candidates if s is not None), key=lambda s: s.programs is None)
    return (plain[0], *forms, *plain[1:])
