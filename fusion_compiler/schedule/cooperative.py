"""Schedules of row reductions with sums over the rows, if registers hold only a part of a row.

A norm's gradients in wide rows: groups of programs loop over the rows, each program with its part of the
columns. They exchange the results of their reductions once per row or once per several rows, keep their part
of the sums over rows in registers, and leave one partial row per group. While they wait for each other, their
loads of the next rows are in flight.

A shape is (rows, columns of a program, programs per multiprocessor, warps, stages). With two rows per
exchange programs wait half as often. Three programs per multiprocessor fit if there is one sum over the rows.
"""

from __future__ import annotations

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule import measured as table
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.measured import Shape
from fusion_compiler.schedule.row_tiles import Cols, RowTile
from fusion_compiler.schedule.row_widths import ALONE, MOST_AT_ONCE, MOST_PARTS, widest_shared
from fusion_compiler.schedule.shapes import WARP, warps_of

SHAPES = (
    (2, 4096, 2, 8, 3),
    (2, 8192, 1, 16, 3),
    (1, 4096, 2, 8, 3),
    (2, 2048, 4, 4, 3),
    (1, 16384, 1, 16, 3),
)
TYPICAL = (*SHAPES[:2], SHAPES[-1])
# Without a limit, the compiler uses more registers than a program's share of a multiprocessor, and half of
# the programs run after the others. Registers are allocated in multiples of this.
REGISTER_UNIT = 8


def suits(a: Analysis) -> bool:
    return a.walks_rows


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    width = a.size(COLS)
    if not isinstance(width, int):
        return "sums over rows beside sums along rows of unknown width"
    if not a.ends_in_a_row and width > ALONE:
        return "an unknown number of wide rows is summed"
    widest = widest_shared(device) if a.shareable else ALONE
    if a.shareable and width <= widest and any(_parts(width, shape, device) for shape in SHAPES):
        return None
    return f"{width} sums over rows do not fit in registers ({widest})"


def _parts(width: int, shape: Shape, device: DeviceSpec) -> int:
    """Return how many programs share a row; 0 if the row needs one program, or too many."""
    _, block, share, _, _ = shape
    parts, slots = -(-width // block), share * device.sms
    if parts < 2:
        return 0
    most = MOST_AT_ONCE if slots // parts == 1 else MOST_PARTS
    return parts if parts <= min(slots, most) else 0


def measured(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    return from_shapes(a, device, table.shapes("cooperative", a, device.target))


def typical(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    return from_shapes(a, device, TYPICAL)


def others(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    return from_shapes(a, device, SHAPES)


def from_shapes(a: Analysis, device: DeviceSpec, shapes: tuple[Shape, ...]) -> tuple[RowTile, ...]:
    width, rows_known = a.size(COLS), isinstance(a.size(ROWS), int)
    assert isinstance(width, int)
    count = hint(a.size(ROWS)) if rows_known else 1 << 30
    schedules: list[RowTile] = []
    for shape in shapes:
        rows, block, share, warps, stages = shape
        parts = _parts(width, shape, device)
        if parts:
            groups = max(1, min(share * device.sms // parts, -(-count // rows)))
            limit = device.registers_per_sm // (WARP * warps * share) // REGISTER_UNIT * REGISTER_UNIT
            schedules.append(
                RowTile(
                    rows, block, Cols.WHOLE, groups, warps_of(warps, device), stages, parts, registers=limit
                )
            )
    return tuple(dict.fromkeys(schedules))
