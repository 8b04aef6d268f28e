"""Rows that begin anywhere, moved in whole words.

Where a row's length is no multiple of eight, its elements lie at addresses that allow one element an access
and no asynchronous copy. A misaligned tile begins with the word in which its row begins: lane `i` is column
`i - lead`. It is loaded and stored as if it were aligned, but for the words at both ends of the row, which
hold elements of its neighbours: what is loaded of them counts nowhere, and the row's own elements there are
stored one by one.

A program that goes through rows keeps its lead, and so the column that each lane is: from one of its rows to
the next is a whole number of words. So their number is a multiple of eight where the width is odd, or of four
in words of half the size. A block of several rows has as many of the program's own, no neighbours: block `k`
of program `i` the rows `i + (k * block_rows + r) * programs`.

A loop over columns has the word in which the row begins, and what is left at its end, in one tile behind it:
its blocks lie within the row and have no masks.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from fusion_compiler.ir.loops import COLS, ROWS, Load, Random
from fusion_compiler.schedule.analysis import Analysis, end_lanes, inner_cols, part_cols
from fusion_compiler.schedule.schedule import WORD, Cols, Schedule

WORDS = (WORD, WORD // 2)
NARROWEST = 512  # columns of a tile; narrower ones have several rows, each with a lead of its own


def fits(a: Analysis) -> bool:
    """Whether rows lie in memory one after the other and are not aligned."""
    width = a.size(COLS)
    if not isinstance(width, int) or width % WORD == 0 or a.tall or a.segmented:
        return False
    if not a.axes[ROWS]:
        return False
    drawn = any(isinstance(n, Random) and COLS in a.groups[i] for i, n in enumerate(a.loops.nodes))
    accesses = [n for n in a.loops.nodes if isinstance(n, Load)]
    return not drawn and any(
        a.lies_in_rows(x.index) for x in (*accesses, *a.loops.stores) if x.within is None
    )


def form_of(a: Analysis, s: Schedule) -> Schedule | None:
    """The misaligned form of a schedule, one row a block; None if it has none.

    Of several rows each keeps its warps, but where programs share rows, which then have half as much to do;
    where these walk the rows with their own parts, they keep several rows a block.
    """
    width = a.size(COLS)
    if not isinstance(width, int) or s.block_cols < WORD or (a.scans and s.cols is Cols.LOOP):
        return None  # a loop's last tile has both ends of a row, and scans go in order
    warps = s.num_warps if s.splits > 1 else max(1, s.num_warps // s.block_rows)
    walked = s.splits > 1 and s.cols is Cols.WHOLE and s.programs is not None
    form = replace(s, block_rows=s.block_rows if walked else 1, num_warps=warps, word=WORD)
    if s.cols is Cols.GRID:
        row_each = s.programs is None and not a.across_rows and a.size(ROWS) != 1
        return form if row_each else None
    if s.cols is Cols.LOOP:
        form = _with_room_for_its_ends(a, form)
    if not _covers(a, form, width):
        return None
    if s.programs is None:
        return form
    return _in_step(form, s.programs * (s.num_warps // warps), width)


def _in_step(s: Schedule, programs: int, width: int) -> Schedule | None:
    """The form for at most so many programs that go through rows: a multiple of the rows from one to the next
    with its lead. Where a tenth of them is lost so, words of half the size may lose fewer."""
    in_step = {word: programs // apart * apart for word in WORDS if (apart := word // gcd(width, word))}
    word = next((w for w in WORDS if 10 * in_step[w] >= 9 * programs), max(WORDS, key=in_step.__getitem__))
    return replace(s, programs=in_step[word], word=word) if in_step[word] else None


def _with_room_for_its_ends(a: Analysis, s: Schedule) -> Schedule:
    """A loop over blocks so narrow that one as wide as `s` has both ends of the row."""
    form = s
    while form.block_cols > WORD and not (inner_cols(a, form) and 0 < end_lanes(a, form) <= s.block_cols):
        form = replace(form, block_cols=form.block_cols // 2)
    return form


def _covers(a: Analysis, s: Schedule, width: int) -> bool:
    """Whether the programs of a row have room for it at every lead, and each without a loop has a column.

    In a loop the program with the row's end has the last of its columns.
    """
    part, inner = part_cols(a, s), inner_cols(a, s)
    assert isinstance(part, int) and isinstance(inner, int)
    if s.cols is Cols.LOOP:
        return 0 < inner < width <= (inner // part + 1) * part
    return s.splits * part >= width + s.word - 1 and (s.splits - 1) * part < width


def with_misaligned(a: Analysis, schedules: tuple[Schedule, ...]) -> tuple[Schedule, ...]:
    """Schedules with misaligned forms of them, those that loop over rows before the others. In a loop that
    begins with the row's first word nothing is early.

    The first stays the first: it serves inputs that do not begin with a word. Its own kind comes last.
    """
    if not fits(a):
        return schedules
    plain = tuple(replace(s, registers=None) for s in schedules)  # to move single elements takes more
    found = (form_of(a, s) for s in schedules if s.block_cols >= NARROWEST and not s.early)
    forms = sorted(dict.fromkeys(s for s in found if s is not None), key=lambda s: s.programs is None)
    return (plain[0], *forms, *plain[1:])
