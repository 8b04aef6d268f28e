"""Products of few rows in a loop nest: sums of the products of two factors, where one has axes that the
other lacks.

    y[m, n] = sum(x[m, k] * w[n, k], {k})

The factor with few rows is a vector, or a few of them. The other one is the matrix, whose size decides the
time.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import sympy

from fusion_compiler.ir.dag import FEW_ROWS
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import (
    INNER,
    RAGGED,
    Compute,
    Constant,
    Coordinate,
    Index,
    InRange,
    Load,
    LoopNest,
    Node,
    Reduce,
    Scan,
    axes_in,
    operands_of,
    pair_of,
    store_operands,
    with_operands,
)
from fusion_compiler.ops.arithmetic import MUL
from fusion_compiler.schedule.shapes import WARP, are_apart, padded

MOST_REPLICATED, REPLICATED = 8192, 32  # elements of a vector that each program reduces: of all, of a thread
NUMBERS = ("sum", "max", "min")  # what such a reduction may be, and what it may be made of
SIMPLE = (Load, Compute, Constant, Coordinate, InRange, Reduce)


def factors_of(loops: LoopNest, number: int) -> tuple[int, ...]:
    """Return the two factors of the terms that a reduction sums, or an empty tuple if it sums no products."""
    node = loops.nodes[number]
    if not isinstance(node, Reduce) or node.combine != "sum":
        return ()
    factors = pair_of(loops.nodes[node.operand], MUL)
    return factors if len(set(factors)) == 2 else ()


def sums_of_products(loops: LoopNest) -> dict[int, tuple[int, int]]:
    """Return the sums of the products of two factors, one of which has axes that the other lacks: sum ->
    factors."""
    varies, sums = loops.node_axes, dict[int, tuple[int, int]]()
    for number, node in enumerate(loops.nodes):
        factors = factors_of(loops, number)
        if isinstance(node, Reduce) and factors:
            left, right = factors
            if varies[left] != varies[right] and node.axes <= varies[left] & varies[right]:
                sums[number] = left, right
    return sums


@dataclass(frozen=True)
class Products:
    """The products of a nest, which have the same axes.

    sums: their numbers. matrices: those of their matrices. buffers: the names of what holds the elements of
    matrices.
    few: the axes that only the factors with few rows have. wide: an axis that only the matrices have: the
    one along which neighbours in memory lie, or the longest one. terms: the axes that the products reduce.
    is_turned: neighbours in memory lie along `wide`, and not along `terms`.
    replicated: the names of the reductions that each program makes by itself, since its part of a turned
    matrix is multiplied by what waits for all terms of a vector.
    sizes: the sizes of all axes; some are estimates.
    """

    sums: tuple[int, ...]
    matrices: frozenset[int]
    buffers: frozenset[str]
    few: tuple[int, ...]
    wide: int
    terms: tuple[int, ...]
    is_turned: bool
    replicated: frozenset[str]
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, loops: LoopNest, hints: Mapping[sympy.Symbol, int]) -> Products | None:
        """Return the products of a nest.

        Return None if the nest has none, stores or reduces what programs of products do not have, or
        multiplies a turned matrix by what waits for more terms than a program holds.
        """
        sums = sums_of_products(loops)
        if not sums or axes_in(loops.axes, (RAGGED,)) or any(isinstance(node, Scan) for node in loops.nodes):
            return None
        varies, sizes = loops.node_axes, [max(0, hint(axis.size, hints)) for axis in loops.axes]
        axes = _axes_of(loops, sums, varies, sizes)
        if axes is None:
            return None
        few, wide, terms = axes
        matrices = {n: left if wide <= varies[left] else right for n, (left, right) in sums.items()}
        read = (loops.nodes[n] for n in with_operands(loops, matrices.values()))
        loads = [n for n in read if isinstance(n, Load) and _has_both(n.index, varies, wide, terms)]
        if not loads:  # the matrix is computed, and lies nowhere in memory
            return None
        steps = {term for load in loads for term in load.index.terms}
        adjacent = {k for k, step in steps if k >= 0 and step == 1 and sizes[k] != 1}
        longest = max(wide, key=lambda k: (k in adjacent, sizes[k]))
        is_turned = longest in adjacent and adjacent.isdisjoint(terms)
        factors = with_operands(loops, (o for n in matrices for o in operands_of(loops.nodes[n])))
        waits = sorted(n for n in factors if is_over(loops.nodes[n], terms)) if is_turned else []
        if waits and not _fit_a_program(loops, waits, matrices, varies, prod(sizes[k] for k in terms)):
            return None
        return cls(
            tuple(matrices),
            frozenset(matrices.values()),
            frozenset(load.buffer for load in loads),
            tuple(k for k in sorted(few) if sizes[k] != 1),
            longest,
            tuple(k for k in sorted(terms) if sizes[k] != 1),
            is_turned,
            frozenset(loops.names[n] for n in waits),
            tuple(FEW_ROWS if k in few and not _is_static(loops, (k,)) else n for k, n in enumerate(sizes)),
        )

    def size(self, axes: Iterable[int]) -> int:
        return prod(self.sizes[k] for k in axes)

    @property
    def rows(self) -> int:
        """Return the rows of all matrices."""
        others = {*self.few, *self.terms}
        return self.size(k for k in range(len(self.sizes)) if k not in others)

    @property
    def least_warps(self) -> int:
        """Return the warps, of 32 threads, that hold a vector which each program reduces by itself."""
        return padded(self.width) // (REPLICATED * WARP) if self.replicated else 1

    @property
    def width(self) -> int:
        """Return the terms of a product."""
        return self.size(self.terms)


def _axes_of(
    loops: LoopNest,
    sums: Mapping[int, tuple[int, int]],
    varies: Sequence[frozenset[int]],
    sizes: Sequence[int],
) -> tuple[frozenset[int], frozenset[int], frozenset[int]] | None:
    """Return the axes of the few rows, those of the matrices, and the terms of some products. Return None if
    the products differ in them, or if the nest reduces or stores along others. sums: as `sums_of_products`
    returns them. varies: the axes of each node."""

    def rank(axes: frozenset[int]) -> tuple[bool, bool, int]:
        """Return a number that is the less, the likelier these are the axes of few rows. A number of rows
        that is only known at run time has an upper bound, which the planner has checked."""
        size, is_static = prod(sizes[k] for k in axes), _is_static(loops, axes)
        return not (is_static and size <= FEW_ROWS), is_static, size

    inner = axes_in(loops.axes, (INNER,))
    forms: set[tuple[frozenset[int], frozenset[int], frozenset[int]]] = set()
    for number, (left, right) in sums.items():
        first, second, terms = varies[left], varies[right], loops.reduction(number).axes
        few, wide = sorted((first - second, second - first), key=rank)
        if not inner and first & second != terms:
            return None  # each of several vectors has a matrix of its own
        forms.add((few, wide, terms))
    if len(forms) != 1:
        return None
    ((few, wide, terms),) = forms
    is_one_row = prod(sizes[k] for k in few) == 1
    if bool(inner) == is_one_row or not inner <= few | terms:  # one row is lowered to rows and columns
        return None
    if any(not varies[store.value].isdisjoint(terms) for store in loops.stores):
        return None
    for node in loops.nodes:
        is_late = not with_operands(loops, operands_of(node)).isdisjoint(sums)
        if isinstance(node, Reduce) and not node.axes <= (few if is_late else few | terms):
            return None
    return few, wide, terms


def _is_static(loops: LoopNest, axes: Iterable[int]) -> bool:
    return all(isinstance(loops.axes[k].size, int) for k in axes)


def _has_both(
    index: Index, varies: Sequence[frozenset[int]], wide: frozenset[int], terms: frozenset[int]
) -> bool:
    """True if an index goes along rows of a matrix and along terms, also by the values of nodes."""
    axes = frozenset[int]().union(*({key} if key >= 0 else varies[~key] for key, _ in index.terms))
    return not axes.isdisjoint(wide) and not axes.isdisjoint(terms)


def _fit_a_program(
    loops: LoopNest,
    waits: Sequence[int],
    sums: Collection[int],
    varies: Sequence[frozenset[int]],
    width: int,
) -> bool:
    """True if each program can make some reductions of vectors by itself, for its products and nothing else.
    sums: the products. varies: the axes of each node. width: the elements of a vector."""
    names = {loops.names[n] for n in waits}
    others = (n for n, node in enumerate(loops.nodes) if isinstance(node, Reduce) and n not in waits)
    late = with_operands(loops, (o for store in loops.stores for o in store_operands(store)), sums)
    nodes = [loops.nodes[n] for n in with_operands(loops, waits)]
    reduced = frozenset[int]().union(*(node.axes for node in nodes if isinstance(node, Reduce)))
    return (
        width <= MOST_REPLICATED
        and _is_static(loops, reduced)
        and late.isdisjoint(waits)
        and names.isdisjoint(loops.names[n] for n in others)
        and not any(varies[n] for n in waits)
        and all(isinstance(node, SIMPLE) for node in nodes)
        and all(node.combine in NUMBERS for node in nodes if isinstance(node, Reduce))
    )


def is_product(loops: LoopNest, products: Products | None) -> bool:
    """True if a nest, which makes some products, multiplies few rows by a matrix. A filter is multiplied by
    windows, which overlap."""
    if products is None:
        return False
    loads = (node for node in loops.nodes if isinstance(node, Load))
    return all(
        are_apart((abs(hint(step)), products.sizes[k]) for k, step in load.index.terms if k >= 0)
        for load in loads
    )


def is_over(node: Node, axes: Iterable[int]) -> bool:
    """True if a node reduces one of some axes."""
    return isinstance(node, Reduce) and not node.axes.isdisjoint(axes)
