"""Schedules with whole rows in registers: one read, one write, and any number of reductions along the row.

A shape is (rows, columns, warps) or (rows, columns, warps, programs per multiprocessor). -n rows mean as many
as have n elements together. Zero columns mean the whole row; else the program loops over blocks of so many
columns. With a number of programs, these loop over the rows and prefetch the next ones.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule import measured as table
from fusion_compiler.schedule.analysis import Analysis, enough
from fusion_compiler.schedule.measured import Shape
from fusion_compiler.schedule.row_tiles import Cols, RowTile
from fusion_compiler.schedule.row_widths import ALONE
from fusion_compiler.schedule.shapes import padded, powers, warps_of

WARPS = 64  # warps that a multiprocessor holds
TALLEST = 2048  # columns of a tile of several rows that are adjacent in memory
MOST_PARTIALS = 16384  # partial results of a sum over rows; one program reads them all at the end


def suits(a: Analysis) -> bool:
    return a.reads_rows and not a.ends_in_a_row


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    width = a.size(COLS)
    if not isinstance(width, int) or width > ALONE:
        return f"rows of {width} columns do not fit in registers ({ALONE})"
    unknown = bool(a.across_rows) and not isinstance(a.size(ROWS), int)
    return "an unknown number of wide rows is summed" if unknown else None


def measured(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    return from_shapes(a, device, table.shapes("inner_reduction", a, device.target))


def typical(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    block = padded(hint(a.size(COLS)))
    shapes: list[Shape] = [(-max(1024, block), 0, max(1, block // 512)), (1, 0, max(1, block // 1024))]
    if a.tall and block <= TALLEST:
        shapes.append((16, 0, 16))  # whole sectors
    return from_shapes(a, device, tuple(shapes))


def others(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    return from_shapes(a, device, tuple(_tiles(padded(hint(a.size(COLS))))))


def _tiles(block: int) -> Iterator[Shape]:
    """Yield tiles with 8 to 64 elements per thread, and at most 2048 elements if they have several rows."""
    for rows in powers(1, max(1, 2048 // block)):
        elements = rows * block
        yield from ((rows, 0, w) for w in powers(max(1, elements // 2048), min(32, max(1, elements // 256))))


def from_shapes(a: Analysis, device: DeviceSpec, shapes: tuple[Shape, ...]) -> tuple[RowTile, ...]:
    width, count = a.size(COLS), hint(a.size(ROWS))
    assert isinstance(width, int)
    if a.scans:
        shapes = tuple(shape for shape in shapes if not shape[1])  # the whole row
    schedules = [
        _schedule(shape, padded(width), count, isinstance(a.size(ROWS), int), device) for shape in shapes
    ]
    if a.across_rows:
        schedules = [_limit_partials(s, count, device) for s in schedules if s.programs is None]
    return tuple(dict.fromkeys(schedules))


def _schedule(shape: Shape, block: int, count: int, is_static: bool, device: DeviceSpec) -> RowTile:
    rows, cols, warps, *share = shape
    if rows < 0:
        rows = max(1, -rows // block)
    if share:
        programs = max(1, min(share[0] * device.sms, -(-(count if is_static else 1 << 30) // rows)))
        return RowTile(rows, block, Cols.WHOLE, programs, warps_of(warps, device), num_stages=3)
    rows = min(rows, padded(count))
    if not cols:
        return RowTile(rows, block, Cols.WHOLE, num_warps=warps_of(warps, device))
    return RowTile(rows, min(cols, block), Cols.LOOP, num_warps=warps_of(warps, device))


def _limit_partials(s: RowTile, count: int, device: DeviceSpec) -> RowTile:
    """Return the schedule with few enough programs that the last one has few partial sums to add up."""
    if -(-count // s.block_rows) <= MOST_PARTIALS:
        return s
    programs = min(enough(device.sms * WARPS // s.num_warps, count, s.block_rows), MOST_PARTIALS)
    return s._replace(programs=programs)
