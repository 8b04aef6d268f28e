"""Row reductions together with sums over the rows, where a program's registers hold only a part of a row.

A norm's gradients in wide rows: groups of programs walk the rows, each program with its columns of every one.
They exchange what they reduced once a row or once for several, keep their share of the sums over rows in
registers, and leave one partial row a group. While they wait for each other, their loads of the next rows are
under way.
"""

from __future__ import annotations

from dataclasses import replace

from fusion_compiler.codegen.analysis import Analysis, Cols, Schedule
from fusion_compiler.codegen.registers import tile_registers
from fusion_compiler.codegen.wide_rows import MOST_PARTS, can_be_shared
from fusion_compiler.device import DeviceSpec
from fusion_compiler.dims import hint
from fusion_compiler.loops import COLS, ROWS

# (rows, columns of a program, programs a multiprocessor, warps, stages): with fewer elements a program waits
# longer than it works, with more its registers hold no sums beside them: those of ONE_SUM hold a single one.
ONE_SUM = ((2, 4096, 2, 8, 3), (2, 8192, 1, 16, 3))
SHAPES = ((1, 4096, 2, 8, 3), (4, 4096, 1, 16, 3), (1, 8192, 1, 16, 3), (1, 4096, 2, 4, 3))
WIDEST = MOST_PARTS * 8192
# Left alone the compiler takes more registers than a program's share of a multiprocessor's, and half of the
# programs run when the others are done; ROOM of a share is for tiles.
ROOM = 0.8


def fits(a: Analysis) -> bool:
    width = a.size(COLS)
    return isinstance(width, int) and width <= WIDEST and a.ends_in_a_row and can_be_shared(a)


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width, count = a.size(COLS), hint(a.size(ROWS))
    assert isinstance(width, int)
    if not isinstance(a.size(ROWS), int):
        count = 1 << 30
    found: list[Schedule] = []
    shapes = (*ONE_SUM, *SHAPES) if len(a.across_rows) == 1 else SHAPES
    for rows, block, share, warps, stages in shapes:
        parts = -(-width // block)
        if 1 < parts <= MOST_PARTS:
            groups = max(1, min(share * device.sms // parts, -(-count // rows)))
            s = Schedule(rows, block, Cols.WHOLE, groups, warps, stages, parts)
            limit = device.registers_per_sm // (device.warp_size * warps * share)
            fits_in = limit < 255 and (rows > 1 or tile_registers(a, s) <= ROOM * limit)
            found.append(replace(s, registers=limit) if fits_in else s)
    return tuple(found)
