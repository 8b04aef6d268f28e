"""All schedules within reason of a loop nest: what an exhaustive search goes through.

The kinds of schedules choose a handful of them; `python -m benchmarks schedules` measures how good these
are. A schedule is within reason where a thread has a few elements of the tile to do and the
registers to hold them, and where there is a block for each program that shares the rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule import misaligned, rows, wide_rows
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.registers import tile_registers
from fusion_compiler.schedule.schedule import Cols, Schedule
from fusion_compiler.schedule.shapes import padded, powers

WARPS = (1, 2, 4, 8, 16, 32)
STAGES = (1, 3)  # of loads in flight, in loops
SHARES = (1, 2, 4)  # programs a multiprocessor that go through the rows in turn
THREAD_ELEMENTS = (2, 64)
WIDEST_WHOLE, WIDEST_BLOCK, MOST_ROWS = 1 << 17, 1 << 14, 1 << 10
MOST_SPLITS, LEAST_PART = 64, 1024  # programs that share a row, and columns that each has
MOST_SHARED_ROWS = 4  # that they take at once
REGISTERS = 255  # that a thread can have


def grid(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    """Every combination of extents, warps, programs and stages that `a` allows, in no order of merit."""
    found: dict[Schedule, None] = {}
    width, count = padded(hint(a.size(COLS))), padded(hint(a.size(ROWS)))
    for cols, block_cols, splits in _coverings(a, width, device):
        for block_rows in powers(1, min(count, MOST_ROWS if splits == 1 else MOST_SHARED_ROWS)):
            for warps in WARPS:
                tile = Schedule(block_rows, block_cols, cols, num_warps=warps, splits=splits)
                if _fits_threads(tile, width * count, device) and tile_registers(a, tile) <= REGISTERS:
                    found.update(dict.fromkeys(_loops(a, tile, device)))
    if misaligned.fits(a):
        forms = [(s, misaligned.form_of(a, s)) for s in found]
        found.update((form, None) for s, form in forms if form and form.block_rows == s.block_rows)
    return tuple(s for s in found if tile_registers(a, s) <= REGISTERS)


def neighbours(s: Schedule, schedules: tuple[Schedule, ...]) -> tuple[Schedule, ...]:
    """Those that differ in one field, by the next value that the others have in it.

    Halving the tile and the warps together counts as one step: threads keep what they have to do.
    """
    near: dict[Schedule, None] = {}
    for name in (f.name for f in fields(Schedule)):
        value = getattr(s, name)
        alike = [o for o in schedules if o != s and replace(o, **{name: value}) == s]
        for side in (-1, 1):
            beyond = [o for o in alike if (_order(getattr(o, name)) - _order(value)) * side > 0]
            nearest = min(beyond, key=lambda o: abs(_order(getattr(o, name)) - _order(value)), default=None)
            if nearest is not None:
                near[nearest] = None
    known = set(schedules)
    for factor in (0.5, 2):
        for name in ("block_rows", "block_cols"):
            scaled = {n: int(getattr(s, n) * factor) for n in (name, "num_warps")}
            if (both := replace(s, **scaled)) in known:
                near[both] = None
    return tuple(near)


def _order(value: object) -> float:
    """Where a field's value stands among others; no programs at all are the most of them."""
    if value is None:
        return float(1 << 40)
    return float(list(Cols).index(value)) if isinstance(value, Cols) else float(value)  # type: ignore[arg-type]


def _coverings(a: Analysis, width: int, device: DeviceSpec) -> Iterator[tuple[Cols, int, int]]:
    """(how the columns are covered, block of columns, programs that share a row)."""
    along = any(COLS in a.over(i) for i in a.reductions)
    if isinstance(a.size(COLS), int) and width <= WIDEST_WHOLE and a.reductions:
        yield Cols.WHOLE, width, 1
    if not along:
        least = max(16, a.least_cols)
        yield from ((Cols.GRID, block, 1) for block in powers(least, min(width, WIDEST_BLOCK)))
        return
    looped = wide_rows.suits(a) and wide_rows.refuses(a, device) is None
    if looped:
        yield from ((Cols.LOOP, block, 1) for block in powers(128, min(width, WIDEST_BLOCK)))
    if a.shareable:
        yield from (s for s in _shared(width) if looped or s[0] is Cols.WHOLE)


def _shared(width: int) -> Iterator[tuple[Cols, int, int]]:
    """Rows shared by programs, each with a part that it holds or goes through."""
    most = min(MOST_SPLITS, width // LEAST_PART)
    for splits in powers(2, most) if most > 1 else ():
        part = width // splits
        if part <= WIDEST_BLOCK:
            yield Cols.WHOLE, part, splits
        yield from ((Cols.LOOP, block, splits) for block in powers(LEAST_PART, min(part // 2, WIDEST_BLOCK)))


def _loops(a: Analysis, tile: Schedule, device: DeviceSpec) -> Iterator[Schedule]:
    """One block of rows a program, and programs that go through blocks in turn."""
    blocks = -(-hint(a.size(ROWS)) // tile.block_rows)
    across = -(-hint(a.size(COLS)) // tile.block_cols) if tile.cols is Cols.GRID else 1
    if not a.across_rows or blocks == 1 or (blocks <= rows.MOST_PARTIALS and not a.ends_in_a_row):
        stages = STAGES if tile.cols is Cols.LOOP else STAGES[:1]
        yield from (replace(tile, num_stages=s) for s in stages)
    if not isinstance(a.size(ROWS), int) or (tile.splits > 1 and tile.cols is Cols.LOOP):
        return
    for share in SHARES:
        programs = max(1, share * device.sms // (across * tile.splits))
        if 1 <= programs < blocks or (a.across_rows and programs <= blocks):
            yield from (replace(tile, programs=programs, num_stages=s) for s in STAGES)


def _fits_threads(tile: Schedule, elements: int, device: DeviceSpec) -> bool:
    """Few elements for each thread; fewer than the least only where the tensor has no more."""
    least, most = THREAD_ELEMENTS
    held = tile.block_rows * tile.block_cols
    each = held / (device.warp_size * tile.num_warps)
    return (least <= each or (held >= elements and tile.num_warps == 1)) and each <= most
