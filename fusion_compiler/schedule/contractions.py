"""Contractions: sums that tensor units compute, of one matrix weighted by several vectors along its rows or
columns.

    r[0] = sum(w * x[0]),  r[1] = sum(w * x[1]),  ...      r = w @ x, for a matrix w of the nest

The rows of a product of few rows, and the queries of a head of keys, are pieces of one loop nest, each with
its own sum. If there are several, a tile of the matrix is multiplied by all vectors at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fusion_compiler.ir.loops import COLS, ROWS, Compute, LoopNest, Reduce, Value, operands_of
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.schedule import Cols, Schedule
from fusion_compiler.schedule.tile_products import SMALLEST

LEAST = 3  # vectors; one or two are multiplied as fast as a matrix is read
# Matrices side by side in a loop. Each has tiles in shared memory, and sixteen need more than there is. Six
# of 8192 x 2048 took 27.6 us each, where a copy takes 7.8.
MOST_MATRICES = 3
TALL = 64  # rows of a tile that all warps of a program multiply together
PARTS = 64  # least columns of a tile that one warp multiplies


@dataclass(frozen=True)
class Contraction:
    """sums[i] is the sum of matrix * vectors[i] along a group. All are nodes of the nest."""

    matrix: int
    vectors: tuple[int, ...]
    sums: tuple[int, ...]
    along: str


def contractions_of(a: Analysis) -> tuple[Contraction, ...]:
    """Return the contractions of a nest. No vector of a contraction depends on one of its sums."""
    depths = _depths(a.loops)
    vector_of: dict[tuple[int, str, int], dict[int, int]] = {}
    for i in a.reductions:
        for matrix, vector, along in _factors(a, i):
            vector_of.setdefault((matrix, along, depths[i]), {})[i] = vector
    return tuple(
        Contraction(matrix, tuple(by_sum.values()), tuple(by_sum), along)
        for (matrix, along, _), by_sum in vector_of.items()
        if len(by_sum) >= LEAST
    )


def _factors(a: Analysis, number: int) -> Iterator[tuple[int, int, str]]:
    """Yield (matrix, vector, the group along which their product is summed) if a reduction is such a sum."""
    weighted = number in a.weighted or number in a.weighted_columns
    if not weighted:
        return
    reduced = a.reduced_groups(number)
    (operand,) = operands_of(a.loops.nodes[number])
    term = a.loops.nodes[operand]
    if not isinstance(term, Compute) or term.target is not torch.ops.aten.mul.Tensor or len(reduced) != 1:
        return
    factors = [value.node for _, value in term.operands if isinstance(value, Value)]
    matrices = [n for n in factors if a.groups[n] == frozenset({ROWS, COLS})]
    vectors = [n for n in factors if a.groups[n] == reduced]
    if len(matrices) == len(vectors) == 1:
        yield matrices[0], vectors[0], next(iter(reduced))


def _depths(loops: LoopNest) -> list[int]:
    """Return the length of the chain of reductions up to each node."""
    depths: list[int] = []
    for node in loops.nodes:
        depths.append(max((depths[o] for o in operands_of(node)), default=0) + isinstance(node, Reduce))
    return depths


def contracts(a: Analysis, s: Schedule) -> bool:
    """True if a schedule's tiles suit tensor units, provided that there are contractions."""
    if not takes_tiles(s):
        return False
    if a.weighted_columns:  # in a loop, threads add up their own elements without waiting for others
        return s.programs is None
    size = a.size(COLS)
    return s.cols is Cols.LOOP and isinstance(size, int) and size % s.block_cols == 0


def takes_tiles(s: Schedule) -> bool:
    """True if a schedule's tiles are large enough for tensor units and not shared by programs."""
    return min(s.block_rows, s.block_cols) >= SMALLEST and s.splits == 1


def column_parts(rows: int, cols: int, warps: int) -> int:
    """Return into how many column parts a loop's tile is split, one per warp, if it has few rows for
    several warps."""
    return 1 if rows >= TALL else max(1, min(warps, cols // PARTS))
