"""Rows that registers do not hold, or whose width is only known at run time: passes over column blocks.

What a later pass reads again should still be in L2: few programs at a time, each with much in flight.
Rows that are only reduced take one pass and want the opposite.
"""

from __future__ import annotations

from fusion_compiler.codegen.printer import Analysis, Cols, Schedule
from fusion_compiler.device import DeviceSpec
from fusion_compiler.dims import hint
from fusion_compiler.loops import COLS, ROWS

WIDEST_WHOLE = 32768


def fits(a: Analysis) -> bool:
    """Any row reductions; sums across rows only of row values, one partial a program."""
    known = isinstance(a.size(ROWS), int)
    return all(COLS not in a.groups[i] for i in a.across_rows) and not (a.across_rows and not known)


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width = hint(a.size(COLS))
    widest = 1 << max(4, (width - 1).bit_length())
    reread = any(COLS in a.groups[s.value] for s in a.loops.stores)
    shapes = ((16384, 8), (8192, 16), (4096, 16), (2048, 4)) if reread else ((2048, 2), (8192, 8), (4096, 4))
    out = [Schedule(1, min(block, widest), Cols.LOOP, num_warps=w) for block, w in shapes]
    if isinstance(a.size(COLS), int) and widest <= WIDEST_WHOLE and reread:
        out.insert(1, Schedule(1, widest, Cols.WHOLE, num_warps=min(32, max(4, widest // 1024))))
    return tuple(dict.fromkeys(out))
