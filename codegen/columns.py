"""Sums over the rows alone: tiles of columns, the rows split over programs, partial sums added at the end."""

from __future__ import annotations

from fusion_compiler.codegen.analysis import Analysis, Cols, Schedule
from fusion_compiler.device import DeviceSpec
from fusion_compiler.dims import hint
from fusion_compiler.loops import COLS, ROWS


def fits(a: Analysis) -> bool:
    return bool(a.reductions) and all(a.over(i) == frozenset({ROWS}) for i in a.reductions)


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width, count = max(1, hint(a.size(COLS))), hint(a.size(ROWS))
    if width == 1:
        return _one_column(a, device, count)
    out: list[Schedule] = []
    whole = 1 << max(0, (width - 1).bit_length())
    stores = any(s.value not in a.finish for s in a.loops.stores)
    if stores and not a.mixed and isinstance(a.size(COLS), int) and 1024 <= whole <= 8192:
        out.append(
            Schedule(1, whole, Cols.WHOLE, _programs(count, 1, 2 * device.sms), num_warps=8, num_stages=3)
        )
    tiles = ((128, 32, 8), (64, 64, 8), (256, 16, 8))
    if a.mixed:  # square, so that both memory orders touch whole sectors
        tiles = ((64, 64, 8), (128, 32, 8), (32, 128, 8))
    for block, rows, warps in tiles:
        block = min(block, whole)
        rows = min(max(rows, 4096 // block), 1 << max(0, (count - 1).bit_length()))
        share = 2 * device.sms // -(-width // block)
        out.append(
            Schedule(rows, block, Cols.GRID, _programs(count, rows, share), num_warps=warps, num_stages=3)
        )
    return tuple(dict.fromkeys(out))


def _programs(count: int, rows: int, most: int) -> int:
    """Programs along the rows: no more than one wave of them, none without a block."""
    return max(1, min(-(-count // rows), most))


def _one_column(a: Analysis, device: DeviceSpec, count: int) -> tuple[Schedule, ...]:
    """A sum of everything."""
    widest = 1 << max(0, (count - 1).bit_length())
    shapes = ((8192, 4, 8), (4096, 8, 4), (2048, 8, 4), (16384, 2, 16))
    return tuple(
        Schedule(
            min(block, widest), 1, Cols.WHOLE, _programs(count, min(block, widest), share * device.sms), w
        )
        for block, share, w in shapes
    )
