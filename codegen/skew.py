"""Rows that begin anywhere, moved in whole words.

Where a row's length is no multiple of eight, its elements lie at addresses that allow one element an access
and no asynchronous copy. A skewed tile begins with the word in which its row begins: lane `i` is column
`i - skew`. It is loaded and stored as if it were aligned, but for the words at both ends of the row, which
hold elements of its neighbours: what is loaded of them counts nowhere, and the row's own elements there are
stored one by one.

A program that goes through rows keeps its skew, and so the column that each lane is: from one of its rows to
the next is a whole number of words.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from math import gcd

from fusion_compiler.codegen.analysis import WORD, Analysis, Cols, Schedule, part_cols
from fusion_compiler.loops import COLS, ROWS, Load, Random

NARROWEST = 512  # columns of a tile; narrower ones have several rows, each with a skew of its own


def fits(a: Analysis) -> bool:
    """Whether rows lie in memory one after the other and are not aligned."""
    width = a.size(COLS)
    if not isinstance(width, int) or width % WORD == 0 or a.tall or a.segmented or not a.axes[ROWS]:
        return False
    drawn = any(isinstance(n, Random) and COLS in a.groups[i] for i, n in enumerate(a.loops.nodes))
    accesses = [n for n in a.loops.nodes if isinstance(n, Load)]
    return not drawn and any(
        a.lies_in_rows(x.index) for x in (*accesses, *a.loops.stores) if x.within is None
    )


def skewed(a: Analysis, s: Schedule) -> Schedule | None:
    """The skewed form of a schedule, one row a block; None if it has none."""
    width = a.size(COLS)
    if s.cols is Cols.GRID or not isinstance(width, int) or s.block_cols < WORD:
        return None
    if (s.cols is Cols.WHOLE or s.splits > 1) and not _covers(a, s, width):
        return None
    warps = max(1, s.num_warps // s.block_rows)
    if s.programs is None:
        return replace(s, block_rows=1, num_warps=warps, skewed=True)
    words_apart = WORD // gcd(width, WORD)
    programs = s.programs * (s.num_warps // warps) // words_apart * words_apart
    return replace(s, block_rows=1, num_warps=warps, programs=programs, skewed=True) if programs else None


def _covers(a: Analysis, s: Schedule, width: int) -> bool:
    """Whether the programs of a row have room for it at every skew, and each without a loop has a column."""
    part = part_cols(a, s)
    assert isinstance(part, int)
    return s.splits * part >= width + WORD - 1 and (s.cols is Cols.LOOP or (s.splits - 1) * part < width)


def with_skewed(a: Analysis, schedules: tuple[Schedule, ...]) -> tuple[Schedule, ...]:
    """Schedules in turn with skewed forms of them, those that loop over rows before the others.

    The first stays the first: it serves inputs that do not begin with a word.
    """
    if not fits(a):
        return schedules
    forms = (skewed(a, s) for s in schedules if s.block_cols >= NARROWEST)
    known = dict.fromkeys(s for s in forms if s is not None)
    in_turn = zip_longest(schedules, sorted(known, key=lambda s: s.programs is None))
    return tuple(s for pair in in_turn for s in pair if s is not None)
