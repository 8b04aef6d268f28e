"""Rows that registers do not hold, or whose width is only known at run time: passes over column blocks.

What a later pass reads again should still be in L2: few columns at a time, each program with much in flight.
So several programs share a row, each with a part that its registers or a few blocks hold, and exchange what
they reduced; rows that are only reduced are shared where there are too few of them to fill the device.

A shape is (columns of a program, columns of a block, warps) or with registers of a thread behind these; of no
columns, a program has the row alone.
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
from fusion_compiler.schedule.row_widths import ALONE, MOST_AT_ONCE, MOST_PARTS
from fusion_compiler.schedule.schedule import Cols, Schedule
from fusion_compiler.schedule.shapes import padded, powers, warps_of

WARPS = 32  # of a multiprocessor: with fewer, rows that are only reduced are shared
LEAST_PART = 8192  # elements that are worth a program of their own, where programs only reduce
SECTOR = 16  # rows of a block where these lie side by side in memory, and each scan has to be in order
SHORT = 4096  # columns that a program's registers hold at once in any case
TYPICAL = ((0, 16384, 8), (0, 4096, 4), (8192, 8192, 8), (16384, 8192, 8))


def suits(a: Analysis) -> bool:
    return a.reads_rows and not a.ends_in_a_row


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    """Any row reductions; sums across rows only where they end in one element, one partial a program."""
    if len(a.directions) > 1:
        return "wide rows are scanned from the first column and from the last"
    unknown = bool(a.across_rows) and not isinstance(a.size(ROWS), int)
    return "an unknown number of wide rows is summed" if unknown else None


def measured(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width = a.size(COLS)
    if a.stores_rows or (isinstance(width, int) and width <= ALONE):
        return made(a, device, table.shapes("wide", a))
    return _reading_once(a, device)


def typical(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width = a.size(COLS)
    return () if isinstance(width, int) and width <= SHORT else made(a, device, TYPICAL)


def others(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    return made(a, device, (*TYPICAL, *_blocks()))


def _blocks() -> Iterator[Shape]:
    for block in powers(4096, 16384):
        yield from ((part, block, block // 1024) for part in (0, block, 2 * block))


def made(a: Analysis, device: DeviceSpec, shapes: tuple[Shape, ...]) -> tuple[Schedule, ...]:
    width, most = hint(a.size(COLS)), min(MOST_PARTS, device.sms)
    rows = min(SECTOR, padded(hint(a.size(ROWS)))) if a.scans and a.tall else 1
    found: list[Schedule] = []
    for part, block, warps, *registers in shapes:
        warps = warps_of(warps, device)
        if not part:
            found.append(_alone(width, block, warps, rows))
        elif a.shareable:
            s = _shared(width, part, block, warps, most, *registers)
            found += [s] if s.splits > 1 else []
    return tuple(dict.fromkeys(found))


def _reading_once(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    """Where rows are only reduced: much in flight, and programs that end together.

    Not a table: how many share a row depends on how many rows there are for the device.
    """
    width, rows = hint(a.size(COLS)), max(1, hint(a.size(ROWS)))
    slots = WARPS * device.sms
    most = MOST_AT_ONCE if rows * MOST_AT_ONCE <= device.sms else min(MOST_PARTS, device.sms)
    most = max(1, min(most, a.full_loads * width // LEAST_PART)) if a.shareable else 1
    shapes = [(16384, 16), (8192, 8), (4096, 4), (4096, 8)]
    if rows * 16 <= slots and most > 1:  # shared even by programs of eight warps
        shapes = [(8192, 8), (16384, 16), (4096, 8), (4096, 4)]
    elif a.online:  # exponentials need registers: no more warps than run at once
        warps = 8 if rows * 8 <= slots else 4
        shapes.insert(0, (1024 * warps, warps))
    parts = [max(1, min(most, slots // (warps * rows))) for _, warps in shapes]
    found: list[Schedule] = []
    for n, (block, warps) in zip(parts, shapes, strict=True):
        warps = warps_of(warps, device)
        shared = _shared(width, -(-width // n), block, warps, most) if n > 1 else None
        found.append(shared or _alone(width, block, warps))
    found.sort(key=lambda s: -_busy(rows * s.splits * s.num_warps / slots))
    return tuple(dict.fromkeys(s for s in found if s.splits == 1 or a.shareable))


def _busy(waves: float) -> float:
    """The share of the device that has work, in tenths: the last wave of programs is as long as any."""
    return round(waves / ceil(waves), 1)


def _alone(width: int, block: int, warps: int, rows: int = 1) -> Schedule:
    return Schedule(rows, min(block // rows, max(16, padded(width))), Cols.LOOP, num_warps=warps)


def _shared(
    width: int, part: int, block: int, warps: int, most: int, registers: int | None = None
) -> Schedule:
    """At most `most` programs with at least `part` columns each, in whole blocks."""
    part = max(-(-part // block), -(-width // (most * block))) * block
    splits = -(-width // part)
    cols = Cols.WHOLE if part == block and splits > 1 else Cols.LOOP
    return Schedule(1, block, cols, num_warps=warps, splits=splits, registers=registers)
