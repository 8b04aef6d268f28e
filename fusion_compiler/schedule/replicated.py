"""Replicated reductions: every program computes a reduction over all rows by itself, before its part of a
product.

    mean = sum(x) / 1024;  y[col] = sum((x[row] - mean) * w[row, col])

A kernel cannot wait for a sum over rows that its programs share, which is complete only when all of them are.
But an operand without columns is a vector of a few kilobytes next to the matrix: a program reads all of it
while its part of the matrix is in flight.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Compute,
    Constant,
    Coordinate,
    InRange,
    Load,
    LoopNest,
    Reduce,
    reduced_groups,
    with_operands,
)

MOST_ROWS = 8192  # most elements of a vector that the threads of a program hold
Groups = Sequence[frozenset[str]]
OVER_ROWS = frozenset({ROWS})
NUMBERS = ("sum", "max", "min")
SIMPLE = (Load, Compute, Constant, Coordinate, InRange, Reduce)  # no checks and no random numbers


def replicated_reductions(loops: LoopNest, groups: Groups, products: Collection[int]) -> frozenset[int]:
    """Return the reductions over rows on which the products of a nest depend.

    The result is empty if another value depends on them, or other reductions exist.
    groups: the groups that each node varies over. products: sums over the rows weighted by vectors.
    """
    reductions = {i: n for i, n in enumerate(loops.nodes) if isinstance(n, Reduce)}
    numbers = (i for i, n in reductions.items() if n.combine in NUMBERS and COLS not in groups[n.operand])
    narrow = {i for i in numbers if reduced_groups(loops.axes, reductions[i]) == OVER_ROWS}
    if reductions.keys() - narrow - set(products):
        return frozenset()
    weights = with_operands(loops, (reductions[i].operand for i in products))
    replicated = frozenset(narrow & weights)
    late = with_operands(loops, (s.value for s in loops.stores), products)
    simple = all(isinstance(loops.nodes[n], SIMPLE) for n in with_operands(loops, replicated))
    return replicated if simple and late.isdisjoint(narrow) else frozenset()
