"""Sums over the rows alone: tiles of columns, the rows split over programs, partial sums added at the end."""

from __future__ import annotations

from fusion_compiler.codegen.printer import Analysis, Cols, Schedule
from fusion_compiler.device import DeviceSpec
from fusion_compiler.dims import hint
from fusion_compiler.loops import COLS, ROWS


def fits(a: Analysis) -> bool:
    return bool(a.reductions) and all(a.over(i) == frozenset({ROWS}) for i in a.reductions)


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width, count = hint(a.size(COLS)), hint(a.size(ROWS))
    if width == 1:
        return _one_column(a, device, count)
    out: list[Schedule] = []
    for block, rows, warps in ((128, 32, 8), (256, 16, 8), (64, 64, 8), (128, 16, 4)):
        block = min(block, 1 << max(0, (width - 1).bit_length()))
        rows = min(max(rows, 4096 // block), 1 << max(0, (count - 1).bit_length()))
        tiles = -(-width // block)
        programs = max(1, min(-(-count // rows), 4 * device.sms // tiles))
        out.append(Schedule(rows, block, Cols.GRID, programs=programs, num_warps=warps, num_stages=2))
    return tuple(dict.fromkeys(out))


def _one_column(a: Analysis, device: DeviceSpec, count: int) -> tuple[Schedule, ...]:
    """A sum of everything."""
    block = min(2048, 1 << max(0, (count - 1).bit_length()))
    programs = max(1, min(-(-count // block), 4 * device.sms))
    return (Schedule(block, 1, Cols.WHOLE, programs=programs, num_warps=8),)
