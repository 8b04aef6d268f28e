"""How many registers a thread needs under a schedule: what a loop nest holds at once, predicted."""

from __future__ import annotations

import torch

from fusion_compiler.ir.loops import COLS, ROWS, Checked, Constant, operands_of
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.contractions import contractions_of, contracts
from fusion_compiler.schedule.schedule import Cols, Schedule

# Of the 255 that a thread can have, those that hold tiles: addresses, masks and what is computed between
# take the others. Measured on the golden kernels, of which the ones above it spill and the others do not.
MOST = 200
WORD_SUMS = 4  # elements of a product's terms that a loop adds up at once, at least


def tile_registers(a: Analysis, s: Schedule) -> float:
    """32-bit registers of a thread for the values that exist at the same time, at their most.

    What contracts keeps the tiles that are multiplied, but for a matrix that is loaded ahead. A loop over
    columns keeps a tile for every reduction that its pass makes, of products a word's sums alone, and two
    beside them.
    """
    if made := contractions_of(a) if contracts(a, s) else ():
        matrices = {c.matrix for c in made} if s.num_stages == 1 else set[int]()  # as they were loaded
        return (len(matrices) + 2) * _registers(a, s, frozenset({ROWS, COLS}), 2)
    if s.cols is Cols.LOOP:
        tiles = len(a.weighted) / WORD_SUMS if a.weighted else _reductions_in_a_pass(a)
        return (tiles + 2) * _registers(a, s, frozenset({ROWS, COLS}), 4)
    last: dict[int, int] = {}
    for i, node in enumerate(a.loops.nodes):
        last.update(dict.fromkeys(operands_of(node), i))
    for i, node in reversed(list(enumerate(a.loops.nodes))):
        if isinstance(node, Checked):  # is its operand
            last[node.operand] = max(last[node.operand], last.get(i, i))
    if not a.reductions:  # all is stored in the end
        last |= dict.fromkeys((store.value for store in a.loops.stores), len(a.loops.nodes))
    held: dict[int, float] = {}
    most = 0.0
    for i, node in enumerate(a.loops.nodes):
        if i in a.finish:
            continue
        if not isinstance(node, Constant | Checked):
            size = 1 if node.dtype is torch.bool else node.dtype.itemsize
            held[i] = _registers(a, s, a.groups[i], size)
        most = max(most, sum(held.values()))
        held = {n: r for n, r in held.items() if last.get(n, -1) > i}
    sums = [i for i in a.across_rows if s.programs or i not in a.products]
    whole = frozenset({ROWS, COLS})  # of one turn: its sums are made when all is loaded
    return most + sum(_registers(a, s, a.groups[i] if s.programs else whole, 4) for i in sums)


def _registers(a: Analysis, s: Schedule, groups: frozenset[str], size: int) -> float:
    """A thread's share of a tile of elements of `size` bytes; what is smaller than a warp is repeated."""
    rows = s.block_rows if ROWS in groups and a.axes[ROWS] else 1
    cols = s.block_cols if COLS in groups and a.axes[COLS] else 1
    return max(1.0, rows * cols / (32 * s.num_warps)) * size / 4


def _reductions_in_a_pass(a: Analysis) -> int:
    """The most reductions along the row that do not wait for each other."""
    passes: list[int] = []
    counts: dict[int, int] = {}
    by_row = {*a.online, *a.online.values(), *a.moments, *(total for total, _ in a.moments.values())}
    for i, node in enumerate(a.loops.nodes):
        level = max((passes[o] for o in operands_of(node)), default=0)
        if i in a.reductions and COLS in a.over(i) and i not in a.segmented:
            counts[level] = counts.get(level, 0) + (i not in by_row)  # which keep a number a row
            level += 1
        passes.append(level)
    return max(counts.values(), default=0)
