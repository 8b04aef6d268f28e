"""Whole rows in registers: one read, one write, any number of reductions along the row."""

from __future__ import annotations

from fusion_compiler.codegen.analysis import Analysis, Cols, Schedule
from fusion_compiler.device import DeviceSpec
from fusion_compiler.dims import hint
from fusion_compiler.loops import COLS, ROWS

WIDEST = 16384


def fits(a: Analysis) -> bool:
    width = a.size(COLS)
    partial = bool(a.across_rows)
    known = isinstance(width, int) and width <= WIDEST
    return known and not (partial and not isinstance(a.size(ROWS), int))


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width, count = a.size(COLS), hint(a.size(ROWS))
    assert isinstance(width, int)
    block = 1 << max(0, (width - 1).bit_length())
    most = 1 << max(0, (count - 1).bit_length())
    shapes = [(min(r, most), w) for r, w in _shapes(a, block)]
    return tuple(Schedule(r, block, Cols.WHOLE, num_warps=w) for r, w in dict.fromkeys(shapes))


def _shapes(a: Analysis, block: int) -> tuple[tuple[int, int], ...]:
    """(rows, warps), best guess first."""
    if a.tall and block <= 4096:  # neighbours in memory are rows: a sector of them at least
        return tuple((r, w) for r, w in ((16, 16), (32, 16), (8, 8)) if r * block <= 2 * WIDEST) or ((1, 8),)
    if block <= 256:
        rows = 1024 // block
        return ((rows, 4), (max(1, rows // 2), 2), (max(1, rows // 4), 1), (2 * rows, 4))
    if block <= 1024:
        return ((1, 1), (4, 2), (4, 4), (1, 4))
    if block <= 2048:
        return ((1, 4), (1, 2), (2, 4), (1, 8))
    if block <= 8192:
        return ((1, 8), (1, 4), (1, 16))
    return ((1, 16), (1, 32), (1, 8))
