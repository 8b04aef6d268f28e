"""Whole rows in registers: one read, one write, any number of reductions along the row.

A shape is (rows, columns, warps) or (rows, columns, warps, programs a multiprocessor): -n rows are as many as
have n elements; of no columns the tile is the whole row, else there is a loop over blocks of so many; with
programs that go through the rows in turn, the next ones are loaded ahead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule import measured as table
from fusion_compiler.schedule.analysis import Analysis, enough
from fusion_compiler.schedule.measured import Shape
from fusion_compiler.schedule.row_widths import ALONE
from fusion_compiler.schedule.schedule import Cols, Schedule
from fusion_compiler.schedule.shapes import padded, powers, warps_of

WARPS = 64  # that a multiprocessor holds
MOST_PARTIALS = 16384  # of a sum over rows: one program reads them all when the others are done


def suits(a: Analysis) -> bool:
    return a.reads_rows and not a.ends_in_a_row


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    width = a.size(COLS)
    if not isinstance(width, int) or width > ALONE:
        return f"rows of {width} columns do not fit in registers ({ALONE})"
    unknown = bool(a.across_rows) and not isinstance(a.size(ROWS), int)
    return "an unknown number of wide rows is summed" if unknown else None


def measured(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    return made(a, device, table.shapes("rows", a))


def typical(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    block = padded(hint(a.size(COLS)))
    shapes: list[Shape] = [(-max(1024, block), 0, max(1, block // 512)), (1, 0, max(1, block // 1024))]
    return made(a, device, tuple(shapes))


def others(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    return made(a, device, tuple(_tiles(padded(hint(a.size(COLS))))))


def _tiles(block: int) -> Iterator[Shape]:
    """Of 8 to 64 elements a thread, no more than two thousand where there are several rows."""
    for rows in powers(1, max(1, 2048 // block)):
        elements = rows * block
        yield from ((rows, 0, w) for w in powers(max(1, elements // 2048), min(32, max(1, elements // 256))))


def made(a: Analysis, device: DeviceSpec, shapes: tuple[Shape, ...]) -> tuple[Schedule, ...]:
    width, count = a.size(COLS), hint(a.size(ROWS))
    assert isinstance(width, int)
    if a.scans:
        shapes = tuple(shape for shape in shapes if not shape[1])  # the whole row
    found = [
        _schedule(shape, padded(width), count, isinstance(a.size(ROWS), int), device) for shape in shapes
    ]
    if a.across_rows:
        found = [_in_turn(s, count, device) for s in found if s.programs is None]
    return tuple(dict.fromkeys(found))


def _schedule(shape: Shape, block: int, count: int, known: bool, device: DeviceSpec) -> Schedule:
    rows, cols, warps, *share = shape
    if rows < 0:
        rows = max(1, -rows // block)
    if share:
        programs = max(1, min(share[0] * device.sms, -(-(count if known else 1 << 30) // rows)))
        return Schedule(rows, block, Cols.WHOLE, programs, warps_of(warps, device), num_stages=3)
    rows = min(rows, padded(count))
    if not cols:
        return Schedule(rows, block, Cols.WHOLE, num_warps=warps_of(warps, device))
    return Schedule(rows, min(cols, block), Cols.LOOP, num_warps=warps_of(warps, device))


def _in_turn(s: Schedule, count: int, device: DeviceSpec) -> Schedule:
    """No more programs than leave the last one few partial sums to add up."""
    if -(-count // s.block_rows) <= MOST_PARTIALS:
        return s
    programs = min(enough(device.sms * WARPS // s.num_warps, count, s.block_rows), MOST_PARTIALS)
    return replace(s, programs=programs)
