"""Rows that registers do not hold, or whose width is only known at run time: passes over column blocks.

What a later pass reads again should still be in L2: few columns at a time, each program with much in flight.
So several programs share a row, each with a part that its registers or a few blocks hold, and exchange what
they reduced; rows that are only reduced are shared where there are too few of them to fill the device.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS, Load, Reduce
from fusion_compiler.ir.row_widths import MOST_AT_ONCE, MOST_PARTS
from fusion_compiler.schedule.analysis import Analysis, Cols, Schedule, accumulator_dtype

WIDEST_ALONE = 32768  # columns of a row that one program reads again from L2 as fast as several do
FEW = 16  # parts of a row: to wait for each other costs nothing yet; for twice as many, a little
WARPS = 32  # of a multiprocessor: with fewer, rows that are only reduced are shared
KEPT = 64  # registers of a thread that keeps 32 elements of two tensors
LEAST_PART = 8192  # elements that are worth a program of their own, where programs only reduce


def fits(a: Analysis) -> bool:
    """Any row reductions; sums across rows only where they end in one element, one partial a program."""
    known = isinstance(a.size(ROWS), int)
    return not a.ends_in_a_row and (known or not a.across_rows)


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width, rows = hint(a.size(COLS)), max(1, hint(a.size(ROWS)))
    if any(COLS in a.groups[s.value] for s in a.loops.stores):
        found = _reading_twice(a, width, rows, device)
    else:
        found = _reading_once(a, width, rows, device)
    return tuple(dict.fromkeys(s for s in found if s.splits == 1 or can_be_shared(a)))


def _reading_twice(a: Analysis, width: int, rows: int, device: DeviceSpec) -> tuple[Schedule, ...]:
    """Where a row is read, reduced and read again: from L2 or L1 if it is one tensor; of several,
    registers keep what was read."""
    most = min(MOST_PARTS, device.sms)
    simple = not (a.online or a.moments)  # an element is added and forgotten: registers for more warps
    if _full_loads(a) > 1:
        alone, shared = ((16384, 16), (8192, 16)), _kept(width, most)
    elif width <= FEW * 8192:
        alone = ((16384, 32 if simple else 8), (16384, 16), (8192, 16))
        warps = (8, 4) if simple else (4, 8)
        parts = ((8192, 4096, warps[0]), (16384, 8192, 8), (8192, 4096, warps[1]))
        shared = [_shared(width, *shape, most) for shape in parts]
    else:
        alone = ((16384, 8), (8192, 16))
        warps = (4, 8) if not simple and width <= 2 * FEW * 8192 else (8, 4)
        parts = ((16384, 8192, warps[0]), (16384, 4096, 8), (32768, 4096, 16), (16384, 8192, warps[1]))
        if simple and width > 2 * FEW * 16384:
            parts = ((32768, 16384, 16), (16384, 4096, 16), (16384, 8192, 16), (16384, 8192, 8))
            if rows * width // 32768 * 16 < WARPS * device.sms:  # half as wide, or the device is not filled
                parts = ((16384, 4096, 8), *parts[1:])
        shared = [_shared(width, *shape, most) for shape in parts]
    loops = [_alone(width, *shape) for shape in alone]
    first = loops[:1] if width <= WIDEST_ALONE and _full_loads(a) == 1 else []
    return (*first, *(s for s in shared if s.splits > 1), *loops)


def _kept(width: int, most: int) -> list[Schedule]:
    """Registers keep the parts of rows, as small as they can be while they are few.

    Where much is computed of what is kept, more programs run if their registers are limited.
    """
    small, part = _shared(width, 4096, 4096, 4, most), _shared(width, 8192, 8192, 8, most)
    if width < FEW * 4096:
        return [small, part, replace(small, registers=KEPT), replace(small, num_warps=8)]
    if width <= 2 * FEW * 4096:
        return [part, small, replace(part, registers=KEPT), replace(small, num_warps=8)]
    if width <= most * 8192:
        wide = _shared(width, 16384, 4096, 16, most)
        return [replace(part, registers=KEPT), part, replace(part, num_warps=16), wide]
    shapes = ((16384, 8192, 8), (16384, 4096, 16), (16384, 8192, 16), (32768, 8192, 16))
    return [_shared(width, *shape, most) for shape in shapes]


def _reading_once(a: Analysis, width: int, rows: int, device: DeviceSpec) -> tuple[Schedule, ...]:
    """Where rows are only reduced: much in flight, and programs that end together."""
    slots = WARPS * device.sms
    most = MOST_AT_ONCE if rows * MOST_AT_ONCE <= device.sms else min(MOST_PARTS, device.sms)
    most = max(1, min(most, _full_loads(a) * width // LEAST_PART)) if can_be_shared(a) else 1
    shapes = [(16384, 16), (8192, 8), (4096, 4), (4096, 8)]
    if rows * 16 <= slots and most > 1:  # shared even by programs of eight warps
        shapes = [(8192, 8), (16384, 16), (4096, 8), (4096, 4)]
    elif a.online:  # exponentials need registers: no more warps than run at once
        warps = 8 if rows * 8 <= slots else 4
        shapes.insert(0, (1024 * warps, warps))
    parts = [max(1, min(most, slots // (warps * rows))) for _, warps in shapes]
    found = [
        _shared(width, -(-width // n), *shape, most) if n > 1 else _alone(width, *shape)
        for n, shape in zip(parts, shapes, strict=True)
    ]
    return tuple(sorted(found, key=lambda s: -_busy(rows * s.splits * s.num_warps / slots)))


def _busy(waves: float) -> float:
    """The share of the device that has work, in tenths: the last wave of programs is as long as any."""
    return round(waves / ceil(waves), 1)


def _alone(width: int, block: int, warps: int) -> Schedule:
    return Schedule(1, min(block, 1 << max(4, (width - 1).bit_length())), Cols.LOOP, num_warps=warps)


def _shared(width: int, part: int, block: int, warps: int, most: int) -> Schedule:
    """At most `most` programs with at least `part` columns each, in whole blocks."""
    part = max(-(-part // block), -(-width // (most * block))) * block
    splits = -(-width // part)
    cols = Cols.WHOLE if part == block and splits > 1 else Cols.LOOP
    return Schedule(1, block, cols, num_warps=warps, splits=splits)


def _full_loads(a: Analysis) -> int:
    """How many tensors are read whole."""
    loads = [n for n in a.loops.nodes if isinstance(n, Load)]
    return len({n.buffer for n in loads if len(n.index.terms) >= len(a.loops.axes)})


def can_be_shared(a: Analysis) -> bool:
    """Whether programs can exchange what they reduce along the row: numbers of 32 bits."""
    along = (n for n in a.loops.nodes if isinstance(n, Reduce) and COLS in n.over)
    return isinstance(a.size(COLS), int) and all(accumulator_dtype(n).itemsize == 4 for n in along)
