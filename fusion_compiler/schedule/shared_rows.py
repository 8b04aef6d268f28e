"""Row reductions together with sums over the rows, where a program's registers hold only a part of a row.

A norm's gradients in wide rows: groups of programs walk the rows, each program with its columns of every one.
They exchange what they reduced once a row or once for several, keep their share of the sums over rows in
registers, and leave one partial row a group. While they wait for each other, their loads of the next rows are
under way.
"""

from __future__ import annotations

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.ir.row_widths import MOST_AT_ONCE, MOST_PARTS, PART
from fusion_compiler.schedule.analysis import WORD, Analysis, Cols, Schedule
from fusion_compiler.schedule.wide_rows import can_be_shared

# (rows, columns of a program, programs a multiprocessor, warps, stages). With two rows an exchange programs
# wait half as often; of programs that wait in turn, three have room where one sum over the rows is kept.
TWO, NARROW, WIDE = (2, 4096, 2, 8, 3), (2, 2048, 4, 4, 3), (2, 8192, 1, 16, 3)
ONE, THREE, WIDEST_PART = (1, 4096, 2, 8, 3), (1, 4096, 3, 8, 3), (1, 16384, 1, 16, 3)
# Left alone the compiler takes more registers than a program's share of a multiprocessor's, and half of the
# programs run when the others are done; it allocates them by eights.
BY = 8


def fits(a: Analysis) -> bool:
    width = a.size(COLS)
    return isinstance(width, int) and width <= MOST_AT_ONCE * PART and a.ends_in_a_row and can_be_shared(a)


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width, count = a.size(COLS), hint(a.size(ROWS))
    assert isinstance(width, int)
    if not isinstance(a.size(ROWS), int):
        count = 1 << 30
    found: list[Schedule] = []
    for rows, block, share, warps, stages in _shapes(width, len(a.across_rows)):
        parts, slots = -(-width // block), share * device.sms
        if 1 < parts <= min(slots, MOST_AT_ONCE if slots // parts == 1 else MOST_PARTS):
            groups = max(1, min(slots // parts, -(-count // rows)))
            limit = device.registers_per_sm // (device.warp_size * warps * share) // BY * BY
            found.append(Schedule(rows, block, Cols.WHOLE, groups, warps, stages, parts, registers=limit))
    return tuple(found)


def _shapes(width: int, sums: int) -> tuple[tuple[int, int, int, int, int], ...]:
    """Best guess first: the wider the row, the longer its programs wait, and the more each has to hold.

    Skewed tiles need registers for masks: programs with few columns have more of them.
    """
    if width <= 16384:
        return NARROW, TWO, WIDE, ONE
    if width > MOST_PARTS * 8192:
        return WIDE, WIDEST_PART
    several = THREE if sums == 1 else TWO
    if width % WORD and sums > 1 and width <= 32768:
        return TWO, ONE, WIDE, NARROW
    if width % WORD:
        return (NARROW, several, ONE, WIDE) if width <= MOST_PARTS * 2048 else (several, ONE, TWO, WIDE)
    if width <= 32768:
        return TWO, NARROW, WIDE, ONE
    if sums == 1:
        return THREE, TWO, WIDE, ONE
    return (TWO, WIDE, ONE, NARROW) if width <= 65536 else (WIDE, TWO, ONE, NARROW)
