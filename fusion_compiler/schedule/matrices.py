"""Matrices, one in each tile: reductions over their rows and along them may feed each other.

A tile holds all rows of a matrix, and all its columns if anything is reduced along those; else a program has
a block of them.
"""

from __future__ import annotations

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import BATCH, COLS, LARGEST_TILE, ROWS
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.contractions import SMALLEST, contractions_of
from fusion_compiler.schedule.schedule import Cols, Schedule
from fusion_compiler.schedule.shapes import padded

NARROWEST = 16  # columns of a block of tall matrices: whole sectors
EACH = (32, 16, 64)  # elements that a thread has, best first
MOST_WARPS = 16


def suits(a: Analysis) -> bool:
    return a.matrices


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    rows, cols = a.size(ROWS), a.size(COLS)
    if not isinstance(rows, int) or not isinstance(cols, int):
        return f"matrices of {rows} x {cols} elements are of no known size"
    least = padded(cols) if _is_whole(a) else min(padded(cols), NARROWEST)
    if padded(rows) * least > LARGEST_TILE:
        return f"matrices of {rows} x {cols} elements do not fit in registers ({LARGEST_TILE})"
    return None


def measured(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    """Not a table yet: the same on every device."""
    return typical(a, device)


def typical(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    rows, width = padded(hint(a.size(ROWS))), padded(hint(a.size(COLS)))
    if _is_whole(a):
        fair = min(rows, width) // SMALLEST if contractions_of(a) else LARGEST_TILE
        return tuple(dict.fromkeys(_tile(rows, width, Cols.WHOLE, each, device, fair) for each in EACH))
    blocks = [c for c in (32, 64, 128) if c <= width and rows * c <= LARGEST_TILE] or [min(width, NARROWEST)]
    points = hint(a.size(BATCH))
    blocks.sort(key=lambda c: points * width // c < device.sms)  # enough programs first
    return tuple(dict.fromkeys(_tile(rows, c, Cols.GRID, each, device) for c in blocks for each in EACH[:2]))


def others(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    return ()


def _is_whole(a: Analysis) -> bool:
    """Whether a tile has all columns."""
    return any(COLS in a.over(i) for i in a.reductions)


def _tile(
    rows: int, cols: int, covered: Cols, each: int, device: DeviceSpec, fair: int = LARGEST_TILE
) -> Schedule:
    """fair: warps that have something of their own to multiply; more of them do the same again. The first
    shape has no more, others have as many times that as they have fewer elements a thread."""
    warps = min(MOST_WARPS, rows * cols // (each * device.warp_size), fair * EACH[0] // each)
    return Schedule(rows, cols, covered, num_warps=max(1, warps))
