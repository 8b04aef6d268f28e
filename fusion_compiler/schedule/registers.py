"""Predict the registers that a thread needs under a schedule."""

from __future__ import annotations

from fusion_compiler.ir.loops import COLS, ROWS, operands_of
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.schedule import Cols, Schedule

# Registers of a thread for tiles. Addresses, masks and temporaries take the rest of the 255. Measured on the
# golden kernels: those above the limit spill, the others do not.
MOST = 200


def tile_registers(a: Analysis, s: Schedule) -> float:
    """Return the largest number of 32-bit registers of a thread that are live at the same time.

    A loop over columns keeps a tile for each reduction of its pass, and two more.
    """
    if s.cols is Cols.LOOP:
        return (_reductions_in_a_pass(a) + 2) * _registers(a, s, frozenset({ROWS, COLS}), 4)
    most = max((sum(_registers(a, s, g, size) for g, size in live.items()) for live in a.live), default=0.0)
    tile_groups = frozenset({ROWS, COLS})  # without a loop, the sums follow all loads
    return most + sum(_registers(a, s, a.groups[i] if s.programs else tile_groups, 4) for i in a.across_rows)


def _registers(a: Analysis, s: Schedule, groups: frozenset[str], size: int) -> float:
    """Return a thread's share of a tile of elements of `size` bytes. Values smaller than a warp are
    replicated."""
    rows = s.block_rows if ROWS in groups and a.axes[ROWS] else 1
    cols = s.block_cols if COLS in groups and a.axes[COLS] else 1
    return max(1.0, rows * cols / (32 * s.num_warps)) * size / 4


def _reductions_in_a_pass(a: Analysis) -> int:
    """Return the most reductions along the row that are independent of each other."""
    passes: list[int] = []
    counts: dict[int, int] = {}
    per_row = {*a.online, *a.online.values(), *a.moments, *(total for total, _ in a.moments.values())}
    for i, node in enumerate(a.loops.nodes):
        level = max((passes[o] for o in operands_of(node)), default=0)
        if i in a.reductions and COLS in a.reduced_groups(i) and i not in a.segmented:
            counts[level] = counts.get(level, 0) + (i not in per_row)  # reductions with one number per row
            level += 1
        passes.append(level)
    return max(counts.values(), default=0)
