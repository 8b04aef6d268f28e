"""Sums over the rows alone: tiles of columns, the rows split over programs, partial sums added at the end."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule.analysis import Analysis, Cols, Schedule, enough

WARPS = 16  # of a multiprocessor: with 32 elements a thread, three times, enough in flight
SQUARE = ((64, 64, 8), (128, 32, 8), (32, 128, 8))  # both memory orders touch whole sectors


def fits(a: Analysis) -> bool:
    return bool(a.reductions) and all(a.over(i) == frozenset({ROWS}) for i in a.reductions)


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width, count = max(1, hint(a.size(COLS))), hint(a.size(ROWS))
    if width == 1:
        return _one_column(a, device, count)
    out: list[Schedule] = []
    whole, tallest = (1 << max(0, (n - 1).bit_length()) for n in (width, count))
    stores = any(s.value not in a.finish for s in a.loops.stores)
    if stores and not a.mixed and isinstance(a.size(COLS), int) and 1024 <= whole <= 8192:
        out.append(
            Schedule(1, whole, Cols.WHOLE, _programs(count, 1, 2 * device.sms), num_warps=8, num_stages=3)
        )
    for block, rows, warps in SQUARE if a.mixed else _tiles(width, count, device):
        block, rows = min(block, whole), min(rows, tallest)
        warps = max(1, min(warps, rows * block // (16 * device.warp_size)))
        programs = _programs(count, rows, 2 * device.sms // -(-width // block))
        if isinstance(a.size(ROWS), int) and rows >= count:  # all loads at once
            out.append(Schedule(rows, block, Cols.GRID, num_warps=warps))
        else:
            out.append(Schedule(rows, block, Cols.GRID, programs, num_warps=warps, num_stages=3))
    return tuple(dict.fromkeys(out))


def _tiles(width: int, count: int, device: DeviceSpec) -> Iterator[tuple[int, int, int]]:
    """(columns, rows, warps) with 32 elements a thread, and as many warps as give a multiprocessor WARPS.

    A tile of the few rows that there are has half of that, and no loop. Where there are so many columns that
    one warp for 128 of them is more than that, it takes more columns; to add up what few warps hold is
    quicker, and a program of one warp does not wait for others.
    """
    if count <= 4:
        rows, share = (1 << max(0, n - 1).bit_length() for n in (count, width // device.sms))
        yield max(128, min(2048 // rows, share)), rows, 4
    across = -(-width // 128)
    warps = 1 << max(0, min(8, WARPS * device.sms // max(across, 2 * device.sms)).bit_length() - 1)
    block = 128
    while block < 1024 and -(-width // block) > WARPS * device.sms:
        block *= 2
    for cols, w in ((block, warps), (block, max(1, warps // 2)), (block // 2, warps), (2 * block, 2 * warps)):
        yield cols, max(1, 1024 * w // cols), w


def _programs(count: int, rows: int, most: int) -> int:
    """Programs along the rows: one wave of them at most unless they would add too long, each with a block."""
    return enough(max(1, min(-(-count // rows), most)), count, rows)


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
