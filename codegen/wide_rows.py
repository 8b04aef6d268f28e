"""Rows that registers do not hold, or whose width is only known at run time: passes over column blocks."""

from __future__ import annotations

from fusion_compiler.codegen.printer import Analysis, Cols, Schedule
from fusion_compiler.device import DeviceSpec
from fusion_compiler.dims import hint
from fusion_compiler.loops import COLS, ROWS


def fits(a: Analysis) -> bool:
    """Any row reductions; sums across rows only of row values, one partial a program."""
    return all(COLS not in a.groups[i] for i in a.across_rows) and not (
        a.across_rows and not isinstance(a.size(ROWS), int)
    )


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width = hint(a.size(COLS))
    widest = 1 << max(4, (width - 1).bit_length())
    shapes = ((4096, 8), (4096, 4), (8192, 16), (2048, 4))
    return tuple(Schedule(1, min(block, widest), Cols.LOOP, num_warps=w) for block, w in shapes)
