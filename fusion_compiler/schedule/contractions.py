"""Sums that tensor units make: of one matrix, weighted by several vectors along its rows or its columns.

    r[0] = sum(w * x[0]),  r[1] = sum(w * x[1]),  ...      r = w @ x, for a matrix w of the nest

The rows of a product of few rows, and the queries of a head of keys, are pieces of their loop nest, each with
a sum of its own. Where there are several of them a tile of the matrix is multiplied by all vectors at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from fusion_compiler.ir.loops import COLS, ROWS, Compute, LoopNest, Reduce, Value, operands_of
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.schedule import Cols, Schedule

LEAST = 3  # vectors: one or two are multiplied as fast as a matrix is read
# Matrices side by side in a loop: each has tiles in shared memory, and those of sixteen need more than there
# is. Six of 8192 x 2048 took 27.6 us each, where a copy takes 7.8.
MOST_MATRICES = 3
TALL = 64  # rows of a tile that the warps of a program multiply together
SMALLEST = 16  # rows and columns of a tile that tensor units take
PARTS = 64  # columns of what a warp multiplies by itself, at least


@dataclass(frozen=True)
class Contraction:
    """sums[i] adds up matrix * vectors[i] along a group; all are nodes of the nest."""

    matrix: int
    vectors: tuple[int, ...]
    sums: tuple[int, ...]
    along: str


def contractions_of(a: Analysis) -> tuple[Contraction, ...]:
    """None of a contraction's vectors is made of one of its sums."""
    depths = _depths(a.loops)
    found: dict[tuple[int, str, int], dict[int, int]] = {}
    for i in a.reductions:
        for matrix, vector, along in _factors(a, i):
            found.setdefault((matrix, along, depths[i]), {})[i] = vector
    return tuple(
        Contraction(matrix, tuple(by_sum.values()), tuple(by_sum), along)
        for (matrix, along, _), by_sum in found.items()
        if len(by_sum) >= LEAST
    )


def _factors(a: Analysis, number: int) -> Iterator[tuple[int, int, str]]:
    """(matrix, vector, the group along which their product is summed), where a reduction is such a sum."""
    weighted = number in a.weighted or number in a.weighted_columns
    if not weighted:
        return
    over = a.over(number)
    (operand,) = operands_of(a.loops.nodes[number])
    term = a.loops.nodes[operand]
    if not isinstance(term, Compute) or term.target is not torch.ops.aten.mul.Tensor or len(over) != 1:
        return
    factors = [value.node for _, value in term.operands if isinstance(value, Value)]
    whole = [n for n in factors if a.groups[n] == frozenset({ROWS, COLS})]
    along = [n for n in factors if a.groups[n] == over]
    if len(whole) == len(along) == 1:
        yield whole[0], along[0], next(iter(over))


def _depths(loops: LoopNest) -> list[int]:
    """How many reductions a node waits for, one after the other."""
    depths: list[int] = []
    for node in loops.nodes:
        depths.append(max((depths[o] for o in operands_of(node)), default=0) + isinstance(node, Reduce))
    return depths


def contracts(a: Analysis, s: Schedule) -> bool:
    """Whether a schedule's tiles are those of tensor units, where there are contractions."""
    if not takes_tiles(s):
        return False
    if a.weighted_columns:  # in a loop a thread adds up what it has by itself, and waits for no other
        return s.programs is None
    size = a.size(COLS)
    return s.cols is Cols.LOOP and isinstance(size, int) and size % s.block_cols == 0


def takes_tiles(s: Schedule) -> bool:
    """Whether a schedule's tiles are large enough for tensor units, and each a program's own."""
    return min(s.block_rows, s.block_cols) >= SMALLEST and s.splits == 1


def parts_of(s: Schedule) -> int:
    """Of a loop's tile: of about as many rows as one warp multiplies each warp has some columns."""
    if s.cols is not Cols.LOOP or s.block_rows >= TALL:
        return 1
    return max(1, min(s.num_warps, s.block_cols // PARTS))
