"""Whole rows in registers: one read, one write, any number of reductions along the row."""

from __future__ import annotations

from dataclasses import replace

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS, Load, Random
from fusion_compiler.ir.row_widths import ALONE
from fusion_compiler.schedule.analysis import WORD, Analysis, Cols, Schedule, enough
from fusion_compiler.schedule.registers import tile_registers

WARPS = 64  # that a multiprocessor holds
MOST_PARTIALS = 16384  # of a sum over rows: one program reads them all when the others are done
# (elements, warps) of short rows of which nothing is stored: four times as many, by loads of a loop, which do
# not stay in the caches; and of those with sums of exponentials, which take registers.
ONLY_REDUCED = ((4096, 4), (2048, 4), (8192, 8), (16384, 32))
WITH_EXPONENTIALS = ((4096, 2), (8192, 4), (2048, 1), (8192, 8))
CROWDED = 128  # registers of a thread for tiles: with more, more threads are faster
SKEWED_LOOP = 4096  # columns of a block, in rows that begin anywhere: within the row it has no masks
LOOPED = 2048  # columns: rows that are longer and only reduced are gone through by threads of 64 elements


def fits(a: Analysis) -> bool:
    width = a.size(COLS)
    partial = bool(a.across_rows)
    known = isinstance(width, int) and width <= ALONE
    return known and not (partial and not isinstance(a.size(ROWS), int))


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width, count = a.size(COLS), hint(a.size(ROWS))
    assert isinstance(width, int)
    block = 1 << max(0, (width - 1).bit_length())
    most = 1 << max(0, (count - 1).bit_length())
    only_reduced = not a.tall and not any(COLS in a.groups[s.value] for s in a.loops.stores)
    if block <= 256 and only_reduced and a.online:
        shapes, cols = [(n // block, w) for n, w in WITH_EXPONENTIALS], Cols.WHOLE
    elif block <= 256 and only_reduced:
        shapes, cols = [(n // block, w) for n, w in ONLY_REDUCED], Cols.LOOP
    else:
        shapes, cols = _shapes(a, width, block), Cols.WHOLE
    found = [
        Schedule(r, block, cols, num_warps=w) for r, w in dict.fromkeys((min(r, most), w) for r, w in shapes)
    ]
    if only_reduced and block > LOOPED:
        blocks = dict.fromkeys((block, 4096) if block <= 8192 else (4096, 8192))
        found = [Schedule(1, b, Cols.LOOP, num_warps=b // LOOPED) for b in blocks] + found
    if a.across_rows:
        return tuple(_in_turn(s, count, device) for s in found)
    if width % WORD and block > SKEWED_LOOP and not only_reduced:
        found.insert(1, Schedule(1, SKEWED_LOOP, Cols.LOOP, num_warps=4))
    if _same_for_all_rows(a) and (width % WORD or block > 2048):
        known = isinstance(a.size(ROWS), int)
        found.insert(1 if width % WORD else 3, _looped(block, count if known else 1 << 30, device))
    return tuple(found)


def _in_turn(s: Schedule, count: int, device: DeviceSpec) -> Schedule:
    """No more programs than leave the last one few partial sums to add up."""
    programs = min(enough(device.sms * WARPS // s.num_warps, count, s.block_rows), MOST_PARTIALS)
    return s if -(-count // s.block_rows) <= MOST_PARTIALS else replace(s, programs=programs)


def _same_for_all_rows(a: Analysis) -> bool:
    """Whether a weight or a bias is read for each element of every row."""
    return any(isinstance(n, Load) and a.groups[i] == frozenset({COLS}) for i, n in enumerate(a.loops.nodes))


def _looped(block: int, count: int, device: DeviceSpec) -> Schedule:
    """Few programs that keep weights in registers from row to row, and load the next rows ahead.

    To read weights again for each row takes as many accesses as the row, more where it is not aligned.
    """
    rows = max(1, 4096 // block)
    programs = max(1, min(2 * device.sms, -(-count // rows)))
    return Schedule(rows, block, Cols.WHOLE, programs, num_warps=8, num_stages=3)


def _shapes(a: Analysis, width: int, block: int) -> tuple[tuple[int, int], ...]:
    """(rows, warps), best guess first."""
    if a.tall and block <= 4096:  # neighbours in memory are rows: a sector of them at least
        return tuple((r, w) for r, w in ((16, 16), (32, 16), (8, 8)) if r * block <= 2 * ALONE) or ((1, 8),)
    if block <= 256:
        rows = 1024 // block
        return ((rows, 4), (max(1, rows // 2), 2), (max(1, rows // 4), 1), (2 * rows, 4))
    if block <= 1024:
        return ((1, 1), (4, 2), (4, 4), (1, 4))
    if block <= 2048:
        return ((1, 4), (1, 2), (2, 4), (1, 8))
    if block <= 4096:
        if any(isinstance(n, Random) for n in a.loops.nodes):  # its integers need registers beside the row
            return ((1, 8), (1, 4), (1, 16))
        return ((1, 4), (1, 8), (1, 16))
    if block <= 8192:
        crowded = tile_registers(a, Schedule(1, block, Cols.WHOLE, num_warps=8)) > CROWDED
        return ((1, 16), (1, 32), (1, 8), (1, 4)) if crowded else ((1, 8), (1, 32), (1, 16), (1, 4))
    if width % WORD:  # skewed: masks take issue slots, of which fewer threads need fewer
        return ((1, 8), (1, 16), (1, 32))
    return ((1, 16), (1, 32), (1, 8))
