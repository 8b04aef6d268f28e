"""Schedules of rows that do not fit in registers, or whose width is known only at run time: passes over
blocks of columns.

A later pass should still find its columns in L2. So few columns are in flight at a time, and each program has
many loads in flight. Several programs share a row, each with a part that its registers or a few blocks hold,
and exchange what they reduced. Rows that are only reduced are shared if they are too few to fill the device.

A shape is (columns of a program, columns of a block, warps), optionally followed by the registers of a
thread. Zero columns of a program mean that it has the row alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule import measured as table
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.measured import Shape
from fusion_compiler.schedule.row_tiles import Cols, RowTile
from fusion_compiler.schedule.row_widths import ALONE, MOST_AT_ONCE, MOST_PARTS
from fusion_compiler.schedule.shapes import padded, powers, warps_of

WARPS = 32  # warps per multiprocessor; with fewer, rows that are only reduced are shared
LEAST_PART = 8192  # elements that are worth a program of their own, if programs only reduce
SECTOR = 16  # rows of a block if rows are adjacent in memory and each scan must run in order
SHORT = 4096  # columns that always fit in a program's registers
# Rows of a program, if their length is known only at run time. A turn reads a sector of each of 256 rows.
SEVERAL = (4, 32, 256)
TYPICAL = ((0, 16384, 8), (0, 4096, 4), (8192, 8192, 8), (16384, 8192, 8))


def suits(a: Analysis) -> bool:
    return a.reads_rows and not a.ends_in_a_row


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    """Return why the kind does not apply. Sums across rows must end in one element, with one partial
    result per program."""
    if len(a.directions) > 1:
        return "wide rows are scanned from the first column and from the last"
    unknown = bool(a.across_rows) and not isinstance(a.size(ROWS), int)
    return "an unknown number of wide rows is summed" if unknown else None


def measured(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    width = a.size(COLS)
    if a.stores_rows or (isinstance(width, int) and width <= ALONE):
        return from_shapes(a, device, table.shapes("looped", a, device.target))
    return _reading_once(a, device)


def typical(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    width = a.size(COLS)
    if isinstance(width, int):
        return () if width <= SHORT else from_shapes(a, device, TYPICAL)
    return (*from_shapes(a, device, TYPICAL), *_several_rows(a, device))


def others(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    return (*from_shapes(a, device, (*TYPICAL, *_blocks())), *_several_rows(a, device))


def _several_rows(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    """Return schedules for a width that is known only at run time, and may be that of short rows: programs of
    several rows each, in turns if a row is longer than expected."""
    if isinstance(a.size(COLS), int) or a.across_rows or a.scans:
        return ()
    warps = warps_of(SHORT // 1024, device)
    return tuple(RowTile(n, SHORT // n, Cols.LOOP, num_warps=warps) for n in SEVERAL)


def _blocks() -> Iterator[Shape]:
    for block in powers(4096, 16384):
        yield from ((part, block, block // 1024) for part in (0, block, 2 * block))


def from_shapes(a: Analysis, device: DeviceSpec, shapes: tuple[Shape, ...]) -> tuple[RowTile, ...]:
    width, most = hint(a.size(COLS)), min(MOST_PARTS, device.sms)
    rows = min(SECTOR, padded(hint(a.size(ROWS)))) if a.scans and a.tall else 1
    schedules: list[RowTile] = []
    for part, block, warps, *registers in shapes:
        warps = warps_of(warps, device)
        if not part:
            schedules.append(_unshared(width, block, warps, rows))
        elif a.shareable:
            s = _shared(width, part, block, warps, most, *registers)
            schedules += [s] if s.splits > 1 else []
    return tuple(dict.fromkeys(schedules))


def _reading_once(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    """Return schedules of rows that are only reduced: many loads in flight, and programs that end together.

    They come from a formula, because the number of programs per row depends on the number of rows on the
    device.
    """
    width, rows = hint(a.size(COLS)), max(1, hint(a.size(ROWS)))
    slots = WARPS * device.sms
    most = MOST_AT_ONCE if rows * MOST_AT_ONCE <= device.sms else min(MOST_PARTS, device.sms)
    most = max(1, min(most, a.full_loads * width // LEAST_PART)) if a.shareable else 1
    shapes = [(16384, 16), (8192, 8), (4096, 4), (4096, 8)]
    if rows * 16 <= slots and most > 1:  # shared even by programs of eight warps
        shapes = [(8192, 8), (16384, 16), (4096, 8), (4096, 4)]
    elif a.rescaled:  # exponentials need registers: no more warps than run at once
        warps = 8 if rows * 8 <= slots else 4
        shapes.insert(0, (1024 * warps, warps))
    parts = [max(1, min(most, slots // (warps * rows))) for _, warps in shapes]
    schedules: list[RowTile] = []
    for n, (block, warps) in zip(parts, shapes, strict=True):
        warps = warps_of(warps, device)
        shared = _shared(width, -(-width // n), block, warps, most) if n > 1 else None
        schedules.append(shared or _unshared(width, block, warps))
    schedules.sort(key=lambda s: -_busy(rows * s.splits * s.num_warps / slots))
    return tuple(dict.fromkeys(s for s in schedules if s.splits == 1 or a.shareable))


def _busy(waves: float) -> float:
    """Return the share of the device that has work, in tenths: the last wave takes as long as any other."""
    return round(waves / ceil(waves), 1)


def _unshared(width: int, block: int, warps: int, rows: int = 1) -> RowTile:
    return RowTile(rows, min(block // rows, max(16, padded(width))), Cols.LOOP, num_warps=warps)


def _shared(
    width: int, part: int, block: int, warps: int, most: int, registers: int | None = None
) -> RowTile:
    """Return the schedule with at most `most` programs of at least `part` columns each, in whole blocks."""
    part = max(-(-part // block), -(-width // (most * block))) * block
    splits = -(-width // part)
    cols = Cols.WHOLE if part == block and splits > 1 else Cols.LOOP
    return RowTile(1, block, cols, num_warps=warps, splits=splits, registers=registers)
