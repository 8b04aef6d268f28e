"""Row reductions together with sums over the rows: dx and dweight of a norm in one pass.

Each program walks blocks of rows, keeps its share of the sums over rows in registers, and leaves one
partial row; about one program a multiprocessor, loads of the next rows in flight by software pipelining.
"""

from __future__ import annotations

from fusion_compiler.codegen.analysis import Analysis, Cols, Schedule
from fusion_compiler.device import DeviceSpec
from fusion_compiler.dims import hint
from fusion_compiler.loops import COLS, ROWS

WIDEST = 16384


def fits(a: Analysis) -> bool:
    width = a.size(COLS)
    unknown = bool(a.across_rows) and not isinstance(a.size(ROWS), int)
    return isinstance(width, int) and width <= WIDEST and (a.ends_in_a_row or unknown)


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width, count = a.size(COLS), hint(a.size(ROWS))
    assert isinstance(width, int)
    block = 1 << max(0, (width - 1).bit_length())
    if block <= 256:
        shapes = (
            (4096 // block, 4, 4, 3),
            (2048 // block, 8, 4, 3),
            (8192 // block, 2, 8, 3),
            (2048 // block, 4, 4, 2),
        )
    elif block <= 1024:
        shapes = ((4, 2, 4, 3), (2, 4, 4, 3), (8, 1, 8, 3), (4, 1, 8, 2))
    else:
        rows = max(1, 8192 // block)
        shapes = (
            (rows, 1, 8, 3),
            (max(1, rows // 2), 2, 8, 3),
            (max(1, rows // 2), 1, 8, 3),
            (rows, 1, 16, 2),
        )
    if not isinstance(a.size(ROWS), int):
        count = 1 << 30
    return tuple(
        Schedule(
            r,
            block,
            Cols.WHOLE,
            programs=max(1, min(share * device.sms, -(-count // r))),
            num_warps=w,
            num_stages=s,
        )
        for r, share, w, s in dict.fromkeys(shapes)
    )
