"""Row reductions together with sums over the rows: dx and dweight of a norm in one pass.

Each program walks blocks of rows, keeps its share of the sums over rows in registers, and leaves one
partial row; about one program a multiprocessor, loads of the next rows in flight by software pipelining.
"""

from __future__ import annotations

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.ir.row_widths import ALONE
from fusion_compiler.schedule import shared_rows
from fusion_compiler.schedule.analysis import Analysis, Cols, Schedule, enough
from fusion_compiler.schedule.wide_rows import can_be_shared

HELD = 8192  # elements of a tensor that a multiprocessor works on at a time, 32 a thread


def fits(a: Analysis) -> bool:
    width = a.size(COLS)
    unknown = bool(a.across_rows) and not isinstance(a.size(ROWS), int)
    return isinstance(width, int) and width <= ALONE and (a.ends_in_a_row or unknown)


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width, count = a.size(COLS), hint(a.size(ROWS))
    assert isinstance(width, int)
    block = 1 << max(0, (width - 1).bit_length())
    rows = max(1, HELD // block)
    if block <= 256:  # one program a multiprocessor: several rows a thread, and few partial rows to add up
        shapes = ((rows, 1, 16, 3), (rows, 1, 8, 3), (rows, 2, 16, 3), (rows // 8, 4, 4, 3))
    elif block <= 1024:  # as many as hold it: fewer warps wait for each other
        shapes = ((rows // 4, 4, 2, 3), (rows // 2, 2, 4, 3), (rows, 1, 8, 3), (rows // 4, 4, 4, 3))
    else:
        share = min(2, rows)
        shapes = (
            (rows // share, share, 8 // share, 3),
            (rows, 1, 8, 3),
            (rows // share, 2, 8, 3),
            (rows, 1, 16, 2),
        )
    known = isinstance(a.size(ROWS), int)

    def programs(rows: int, share: int) -> int:
        """One wave; more where each would add too long."""
        most = share * device.sms
        return enough(max(1, min(most, -(-count // rows))), count, rows) if known else most

    alone = tuple(
        Schedule(r, block, Cols.WHOLE, programs(r, share), num_warps=w, num_stages=s)
        for r, share, w, s in dict.fromkeys(shapes)
    )
    if block <= HELD or not can_be_shared(a):
        return alone
    shared = shared_rows.schedules(a, device)  # a program that has such a row alone may spill
    return (*shared[:3], alone[-1], *shared[3:], *alone[:-1])
