"""Reductions over all rows that every program makes by itself, before its part of a product.

    mean = sum(x) / 1024;  y[col] = sum((x[row] - mean) * w[row, col])

What programs share is complete when all are done: nothing in a kernel may wait for a sum over the rows.
But what has no columns is a vector of a few kilobytes beside the matrix: a program reads all of it while its
part of the matrix is on its way.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

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
    operands_of,
    over_of,
)

MOST_ROWS = 8192  # of a vector, which the threads of a program hold whole
Groups = Sequence[frozenset[str]]
OVER_ROWS = frozenset({ROWS})
NUMBERS = ("sum", "max", "min")
SIMPLE = (Load, Compute, Constant, Coordinate, InRange, Reduce)  # nothing is checked, or drawn


def made_ahead(loops: LoopNest, groups: Groups, products: Collection[int]) -> frozenset[int]:
    """Those of a nest that its products wait for; none where anything else does, or is summed over rows.

    groups: what each node varies over. products: sums over the rows of what vectors weight.
    """
    reductions = {i: n for i, n in enumerate(loops.nodes) if isinstance(n, Reduce)}
    numbers = (i for i, n in reductions.items() if n.combine in NUMBERS and COLS not in groups[n.operand])
    narrow = {i for i in numbers if over_of(loops.axes, reductions[i]) == OVER_ROWS}
    if reductions.keys() - narrow - set(products):
        return frozenset()
    weights = with_operands(loops, (reductions[i].operand for i in products), ())
    found = frozenset(narrow & weights)
    late = with_operands(loops, (s.value for s in loops.stores), products)
    simple = all(isinstance(loops.nodes[n], SIMPLE) for n in with_operands(loops, found, ()))
    return found if simple and late.isdisjoint(narrow) else frozenset()


def with_operands(loops: LoopNest, numbers: Iterable[int], ends: Collection[int]) -> set[int]:
    """Some nodes and all that they are made of, but for what `ends` are made of."""
    found: set[int] = set()
    stack = list(numbers)
    while stack:
        if (number := stack.pop()) not in found:
            found.add(number)
            stack.extend(() if number in ends else operands_of(loops.nodes[number]))
    return found
