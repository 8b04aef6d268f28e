"""Row reductions together with sums over the rows: dx and dweight of a norm in one pass.

Each program walks blocks of rows, keeps its share of the sums over rows in registers, and leaves one
partial row; about one program a multiprocessor, loads of the next rows in flight by software pipelining.

A shape is (elements, programs a multiprocessor, warps, stages).
"""

from __future__ import annotations

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule import measured as table
from fusion_compiler.schedule.analysis import Analysis, enough
from fusion_compiler.schedule.measured import Shape
from fusion_compiler.schedule.row_widths import ALONE
from fusion_compiler.schedule.schedule import Cols, Schedule
from fusion_compiler.schedule.shapes import padded, powers, warps_of

HELD = 8192  # elements of a tensor that a multiprocessor works on at a time, 32 a thread


def suits(a: Analysis) -> bool:
    return a.walks_rows


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    width = a.size(COLS)
    if not isinstance(width, int):
        return "sums over rows beside sums along rows of unknown width"
    return f"{width} sums over rows do not fit in registers ({ALONE})" if width > ALONE else None


def measured(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    return made(a, device, table.shapes("persistent", a))


def typical(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    return made(a, device, ((HELD, 1, 8, 3), (HELD // 2, 2, 4, 3)))


def others(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    shapes = [(HELD // share, share, w, 3) for share in (1, 2, 4) for w in powers(8 // share, 16 // share)]
    return made(a, device, tuple(shapes))


def made(a: Analysis, device: DeviceSpec, shapes: tuple[Shape, ...]) -> tuple[Schedule, ...]:
    width, count = a.size(COLS), hint(a.size(ROWS))
    assert isinstance(width, int)
    block, known = padded(width), isinstance(a.size(ROWS), int)

    def programs(rows: int, share: int) -> int:
        """One wave; more where each would add too long."""
        most = share * device.sms
        return enough(max(1, min(most, -(-count // rows))), count, rows) if known else most

    tiles = [(max(1, elements // block), *rest) for elements, *rest in shapes]
    found = (
        Schedule(r, block, Cols.WHOLE, programs(r, share), warps_of(w, device), num_stages=stages)
        for r, share, w, stages in tiles
    )
    return tuple(dict.fromkeys(found))
