"""Whole rows in registers: one read, one write, any number of reductions along the row."""

from __future__ import annotations

from fusion_compiler.codegen.printer import Analysis, Cols, Schedule
from fusion_compiler.device import DeviceSpec
from fusion_compiler.dims import hint
from fusion_compiler.loops import COLS, ROWS

WIDEST = 32768


def fits(a: Analysis) -> bool:
    width = a.size(COLS)
    partial = bool(a.across_rows)
    return isinstance(width, int) and width <= WIDEST and not (partial and not isinstance(a.size(ROWS), int))


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width, count = a.size(COLS), hint(a.size(ROWS))
    assert isinstance(width, int)
    block = 1 << max(0, (width - 1).bit_length())
    if a.tall and block <= 4096:
        shapes = ((16, 16), (32, 16), (8, 8))
        fitting = [(r, w) for r, w in shapes if r * block <= WIDEST and r <= count] or [(1, 8)]
        return tuple(Schedule(r, block, Cols.WHOLE, num_warps=w) for r, w in fitting)
    if block <= 256:
        fill = min(1 << max(0, (count - 1).bit_length()), max(1, 1024 // block))
        return tuple(
            Schedule(max(1, r), block, Cols.WHOLE, num_warps=w)
            for r, w in ((fill, 4), (fill // 2, 2), (fill // 4, 1))
        )
    if block <= 1024:
        shapes = ((1, 1), (1, 4), (4, 4), (2, 2))
    elif block <= 2048:
        shapes = ((1, 4), (1, 2), (1, 8))
    elif block <= 8192:
        shapes = ((1, 8), (1, 4), (1, 16))
    else:
        shapes = ((1, 16), (1, 32), (1, 8))
    return tuple(
        Schedule(min(r, 1 << (count - 1).bit_length()) if count > 1 else 1, block, Cols.WHOLE, num_warps=w)
        for r, w in shapes
    )
