"""Schedules of row reductions with sums over the rows: dx and dweight of a norm in one pass.

Each program loops over blocks of rows, keeps its part of the sums over rows in registers, and leaves one
partial row. There is about one program per multiprocessor, and loads of the next rows are pipelined.

A shape is (elements, programs per multiprocessor, warps, stages).
"""

from __future__ import annotations

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule import measured as table
from fusion_compiler.schedule.analysis import Analysis, enough
from fusion_compiler.schedule.measured import Shape
from fusion_compiler.schedule.row_tiles import Cols, RowTile
from fusion_compiler.schedule.row_widths import ALONE
from fusion_compiler.schedule.shapes import padded, powers, warps_of

TILE = 8192  # elements of a tensor in flight per multiprocessor, 32 per thread


def suits(a: Analysis) -> bool:
    return a.walks_rows


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    width = a.size(COLS)
    if not isinstance(width, int):
        return "sums over rows beside sums along rows of unknown width"
    return f"{width} sums over rows do not fit in registers ({ALONE})" if width > ALONE else None


def measured(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    return from_shapes(a, device, table.shapes("persistent", a, device.target))


def typical(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    return from_shapes(a, device, ((TILE, 1, 8, 3), (TILE // 2, 2, 4, 3)))


def others(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    shapes = [(TILE // share, share, w, 3) for share in (1, 2, 4) for w in powers(8 // share, 16 // share)]
    return from_shapes(a, device, tuple(shapes))


def from_shapes(a: Analysis, device: DeviceSpec, shapes: tuple[Shape, ...]) -> tuple[RowTile, ...]:
    width, count = a.size(COLS), hint(a.size(ROWS))
    assert isinstance(width, int)
    block, is_static = padded(width), isinstance(a.size(ROWS), int)

    def programs(rows: int, share: int) -> int:
        """Return at most one wave of programs, or more if a program would have to add too many rows."""
        most = share * device.sms
        return enough(max(1, min(most, -(-count // rows))), count, rows) if is_static else most

    tiles = [(max(1, elements // block), *rest) for elements, *rest in shapes]
    schedules = (
        RowTile(r, block, Cols.WHOLE, programs(r, share), warps_of(w, device), num_stages=stages)
        for r, share, w, stages in tiles
    )
    return tuple(dict.fromkeys(schedules))
