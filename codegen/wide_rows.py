"""Rows that registers do not hold, or whose width is only known at run time: passes over column blocks.

What a later pass reads again should still be in L2: few columns at a time, each program with much in flight.
So several programs share a row, each with a part that its registers or a few blocks hold, and exchange what
they reduced; rows that are only reduced are shared where there are too few of them to fill the device.
"""

from __future__ import annotations

from fusion_compiler.codegen.analysis import Analysis, Cols, Schedule, accumulator_dtype
from fusion_compiler.device import DeviceSpec
from fusion_compiler.dims import hint
from fusion_compiler.loops import COLS, ROWS, Load, Reduce

WIDEST_ALONE = 32768  # columns of a row that one program reads again from L2 as fast as several do
MOST_PARTS = 64  # of a row, far fewer than the programs that run at once: they wait for each other
MOST_AT_ONCE = 128  # the same where all programs of all rows run at once
WARPS = 32  # of a multiprocessor: with fewer, rows that are only reduced are shared


def fits(a: Analysis) -> bool:
    """Any row reductions; sums across rows only where they end in one element, one partial a program."""
    known = isinstance(a.size(ROWS), int)
    return not a.ends_in_a_row and (known or not a.across_rows)


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width = hint(a.size(COLS))
    widest = 1 << max(4, (width - 1).bit_length())
    if any(COLS in a.groups[s.value] for s in a.loops.stores):
        alone, shared = _reading_twice(a, width)
    else:
        alone, shared = _reading_once(a, width, device)
    if not can_be_shared(a):
        shared = ()
    loops = tuple(Schedule(1, min(block, widest), Cols.LOOP, num_warps=w) for block, w in alone)
    if width <= WIDEST_ALONE and _full_loads(a) == 1:
        return tuple(dict.fromkeys((*loops[:1], *shared, *loops[1:])))
    return tuple(dict.fromkeys((*shared, *loops)))


def _reading_twice(a: Analysis, width: int) -> tuple[tuple[tuple[int, int], ...], tuple[Schedule, ...]]:
    """((block, warps) of programs that have a row alone, schedules that share it).

    One tensor is read again, from L2 or L1; of several, registers keep what was computed.
    """
    whole = [_shared(width, block, block, w) for block, w in ((8192, 8), (4096, 4), (2048, 4), (16384, 16))]
    if _full_loads(a) == 1:
        loops = [_shared(width, part, block, w) for part, block, w in ((8192, 4096, 4), (16384, 8192, 8))]
        return ((16384, 8), (8192, 16)), tuple(s for s in (*loops, *whole[:1]) if s is not None)
    return ((16384, 16), (8192, 16)), tuple(s for s in whole if s is not None)


def _reading_once(
    a: Analysis, width: int, device: DeviceSpec
) -> tuple[tuple[tuple[int, int], ...], tuple[Schedule, ...]]:
    """The same where rows are only reduced: much in flight, and programs enough."""
    rows = max(1, hint(a.size(ROWS)))
    alone = ((4096, 4), (4096, 8), (2048, 2), (16384, 16))
    if rows * 4 < WARPS * device.sms:  # too few to fill it with four warps each
        alone = ((16384, 16), (8192, 16), (8192, 8), (4096, 4))
    most = MOST_AT_ONCE if rows * MOST_AT_ONCE <= device.sms else MOST_PARTS
    few: list[Schedule | None] = []
    for block, warps in ((8192, 8), (16384, 16), (4096, 4)):
        parts = min(most, WARPS // warps * device.sms // rows)
        few.append(_shared(width, -(-width // parts), block, warps, most) if parts > 1 else None)
    return alone, tuple(s for s in few if s is not None)


def _shared(width: int, part: int, block: int, warps: int, most: int = MOST_PARTS) -> Schedule | None:
    """At most `most` programs with about `part` columns each; None where one of them would have the row."""
    part = max(block, part // block * block, -(-width // most // block) * block)
    splits = -(-width // part)
    cols = Cols.WHOLE if part == block else Cols.LOOP
    if splits == 1:
        return None
    return Schedule(1, block, cols, num_warps=warps, splits=splits)


def _full_loads(a: Analysis) -> int:
    """How many tensors are read whole."""
    loads = [n for n in a.loops.nodes if isinstance(n, Load)]
    return len({n.buffer for n in loads if len(n.index.terms) >= len(a.loops.axes)})


def can_be_shared(a: Analysis) -> bool:
    """Whether programs can exchange what they reduce, and nothing is summed over the rows besides."""
    reduces = (n for n in a.loops.nodes if isinstance(n, Reduce))
    small = all(accumulator_dtype(n).itemsize == 4 for n in reduces)
    return small and not a.across_rows and isinstance(a.size(COLS), int)
