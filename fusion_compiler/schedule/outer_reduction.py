"""Schedules of nests whose only reductions are sums over rows: tiles of columns, with the rows split over
programs and the partial sums added at the end.

A shape is (rows, columns, warps, programs per multiprocessor); zero columns mean whole rows. Where the number
of rows is known only at run time, each program has a fixed number of consecutive rows, and there are as many
programs as the rows need.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule.analysis import Analysis, enough
from fusion_compiler.schedule.measured import Shape
from fusion_compiler.schedule.row_tiles import Cols, RowTile
from fusion_compiler.schedule.shapes import padded, powers, warps_of

# warps per multiprocessor: enough in flight with 32 elements per thread in three stages
WARPS = 16
TALL = ((4096, 1, 4, 2), (2048, 1, 4, 2), (8192, 1, 8, 2))  # rows are contiguous in memory, columns are not
SQUARE = ((64, 64, 8, 2), (32, 128, 8, 2), (128, 32, 8, 2))  # both memory orders touch whole sectors
# sums of one column: (elements, programs per multiprocessor, warps)
ALL = ((8192, 4, 8), (4096, 8, 4), (2048, 8, 4), (16384, 2, 16))
WHOLE = (1, 0, 8, 2)  # for nests that also store elements, row by row
UNKNOWN = 1 << 30  # what stands for a number of rows that is known only at run time
TURNS = 4  # blocks of one column that each program sums up, where the number of elements is unknown
ROWS_EACH = 1024  # rows of each program where their number is unknown; TURNS blocks if these are as tall


def suits(a: Analysis) -> bool:
    return bool(a.reductions) and not a.reads_rows


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    return None


def measured(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    """Return the best tiles as a formula, because they depend on the number of columns per multiprocessor."""
    width, count = max(1, hint(a.size(COLS))), _count(a)
    if a.size(COLS) == 1:
        return _one_column(device, count)
    stored = any(s.value not in a.after_rows for s in a.loops.stores)
    by_row = stored and not a.mixed and isinstance(a.size(COLS), int) and 1024 <= padded(width) <= 8192
    is_tall = a.only_tall and count == UNKNOWN
    tiles = SQUARE if a.mixed else TALL if is_tall else tuple(_tiles(width, count, device))
    return from_shapes(a, device, ((WHOLE,) if by_row else ()) + tiles)


def typical(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    return measured(a, device)[:3]


def others(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    if hint(a.size(COLS)) <= 1:
        return ()
    shapes = ((32 * w * 32 // cols, cols, w, 2) for cols in powers(32, 1024) for w in powers(1, 16))
    return from_shapes(a, device, tuple(s for s in shapes if s[0]))


def from_shapes(a: Analysis, device: DeviceSpec, shapes: tuple[Shape, ...]) -> tuple[RowTile, ...]:
    width, count = max(1, hint(a.size(COLS))), _count(a)
    width_padded, tallest = padded(width), padded(count)
    schedules: dict[RowTile, None] = {}
    for rows, cols, warps, share in shapes:
        if not cols:
            programs = _programs(count, 1, share * device.sms)
            schedules[_staged(1, width_padded, Cols.WHOLE, programs, warps_of(warps, device))] = None
            continue
        block, rows = min(cols, width_padded), min(rows, tallest)
        warps = max(1, min(warps_of(warps, device), rows * block // (16 * device.warp_size)))
        if count == UNKNOWN:
            turns = ROWS_EACH // rows or TURNS
            schedules[RowTile(rows, block, Cols.GRID, num_warps=warps, num_stages=3, turns=turns)] = None
        elif rows >= count:  # all loads at once
            schedules[RowTile(rows, block, Cols.GRID, num_warps=warps)] = None
        else:
            programs = _programs(count, rows, share * device.sms // -(-width // block))
            schedules[_staged(rows, block, Cols.GRID, programs, warps)] = None
    return tuple(schedules)


def _staged(rows: int, block: int, cols: Cols, programs: int, warps: int) -> RowTile:
    return RowTile(rows, block, cols, programs, num_warps=warps, num_stages=3)


def _tiles(width: int, count: int, device: DeviceSpec) -> Iterator[Shape]:
    """Yield tiles with 32 elements per thread and as many warps as give a multiprocessor WARPS.

    A tile of very few rows has half of the elements, and no loop. If there are more than WARPS * 128 columns
    per multiprocessor, tiles get wider: few warps add up their results faster, and a program of one warp does
    not wait for others.
    """
    if count <= 4:
        rows, share = padded(count), padded(width // device.sms)
        yield rows, max(128, min(2048 // rows, share)), 4, 2
    across = -(-width // 128)
    warps = 1 << max(0, min(8, WARPS * device.sms // max(across, 2 * device.sms)).bit_length() - 1)
    block = 128
    while block < 1024 and -(-width // block) > WARPS * device.sms:
        block *= 2
    for cols, w in ((block, warps), (block, max(1, warps // 2)), (block // 2, warps), (2 * block, 2 * warps)):
        yield max(1, 1024 * w // cols), cols, w, 2


def _count(a: Analysis) -> int:
    """Return the number of rows, or UNKNOWN."""
    size = a.size(ROWS)
    return size if isinstance(size, int) else UNKNOWN


def _programs(count: int, rows: int, most: int) -> int:
    """Return the number of programs along the rows: at most one wave, or more if one would add too many
    rows."""
    if count == UNKNOWN:
        return max(1, most)
    return enough(max(1, min(-(-count // rows), most)), count, rows)


def _one_column(device: DeviceSpec, count: int) -> tuple[RowTile, ...]:
    """Return schedules of a sum over everything."""
    schedules: dict[RowTile, None] = {}
    for elements, share, warps in ALL:
        rows = min(elements, padded(count))
        if count == UNKNOWN:
            schedules[RowTile(rows, 1, Cols.WHOLE, num_warps=warps_of(warps, device), turns=TURNS)] = None
            continue
        programs = _programs(count, rows, share * device.sms)
        schedules[RowTile(rows, 1, Cols.WHOLE, programs, warps_of(warps, device))] = None
    return tuple(schedules)
