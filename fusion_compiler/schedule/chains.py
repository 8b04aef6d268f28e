"""Chains of products in a loop nest: products that read products, as those of attention do.

    t = sum(q[i, d] * k[j, d], {d});  p = exp(t - m) ...;  o = sum(p[i, j] * v[j, e], {j})
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion_compiler.ir.loops import MOST_FEATURES, LoopNest, Reduce, with_operands
from fusion_compiler.schedule.carried import Carried, carried_of
from fusion_compiler.schedule.products import sums_of_products

MOST_APART = 2  # axes that one factor of the first products has and the other has not: rows and columns


@dataclass(frozen=True)
class Chain:
    """A chain of products.

    loop: the axis over which the last products reduce, or sums of products' rows; None if the nest stores
    what is computed of the first products, element by element. rows: the other axis of what these make.
    features: the axes of a row. products: all products.
    carried: the reductions over the loop's axis that the law of carried reductions allows the loop to make
    together with those that they read. has_parts: there are no others, and parts of the loop can be merged.
    across: another axis of what the first products make, if the loop is over neither: programs share both of
    them, as for the gradient of a bias, which may be the same for a whole batch.
    """

    loop: int | None
    rows: int
    features: frozenset[int]
    products: tuple[int, ...]
    carried: tuple[int, ...]
    has_parts: bool
    across: tuple[int, ...] = ()

    @classmethod
    def of(cls, loops: LoopNest) -> Chain | None:
        """Return the chain of a nest, or None if it has none, or one whose axes a tile does not hold."""
        sums, varies = sums_of_products(loops), loops.node_axes
        reads = {n: with_operands(loops, factors) & sums.keys() for n, factors in sums.items()}
        last = [n for n in sums if reads[n]]
        others = ((n, node.operand) for n, node in enumerate(loops.nodes) if isinstance(node, Reduce))
        ends = last or [n for n, o in others if n not in sums and with_operands(loops, (o,)) & sums.keys()]
        if len({loops.reduction(n).axes for n in ends}) > 1:
            return None
        reduced = loops.reduction(ends[0]).axes if ends else frozenset[int]()
        apart, features = set[int](), set[int]()
        for n in last:
            left, right = sums[n]
            computed = left if not sums.keys().isdisjoint(with_operands(loops, (left,))) else right
            other = right if computed is left else left
            features |= varies[other] - varies[computed]
        for n in sums.keys() - set(last):
            left, right = sums[n]
            features |= loops.reduction(n).axes
            apart |= varies[left] ^ varies[right]
        rows = apart - reduced
        if len(reduced) > 1 or not rows or len(apart) > MOST_APART or features & (reduced | rows):
            return None
        of_terms = {loops.reduction(n).axes for n in sums}
        if not ends and (len(of_terms) < 2 or len(apart) < MOST_APART):  # one kernel of matrices makes others
            return None
        sizes = [loops.axes[k].size for k in features]
        if not all(isinstance(size, int) and size <= MOST_FEATURES for size in sizes):
            return None
        nodes = enumerate(loops.nodes)
        over_loop = [n for n, node in nodes if isinstance(node, Reduce) and node.axes & reduced]
        laws = {n: carried_of(loops, n) for n in over_loop}
        carried = {n: of for n, of in laws.items() if isinstance(of, Carried)}
        merged = carried.keys() | {n for of in carried.values() for n in of.reads}
        has_parts = merged == set(over_loop)
        first, *across = sorted(rows)
        called = min(reduced, default=None), first, frozenset(features), tuple(sums), tuple(carried)
        return cls(*called, has_parts and not across, tuple(across))
