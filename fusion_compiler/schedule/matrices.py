"""Matrix products in a loop nest: sums of the products of two factors that both have many rows.

    y[m, n] = sum(a[m, k] * b[k, n], {k})

A product of which one factor has few rows takes as long as the other factor is read (`schedule.products`).
This one reads each element of both many times, and is bound by the arithmetic of tensor cores.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from fusion_compiler.ir.dag import FEW_ROWS
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import RAGGED, LoopNest, Reduce, Scan, axes_in, with_operands
from fusion_compiler.schedule.products import sums_of_products


@dataclass(frozen=True)
class Matrices:
    """The products of a nest, which have the same axes.

    factors: by product, the nodes of the factor with the rows and of the one with the columns.
    rows: the axes that only the first factors have. cols: those that only the others have, along which
    neighbours in a result lie. terms: the axes that the products reduce. batch: all other axes, each of
    whose elements has matrices of its own.
    """

    factors: Mapping[int, tuple[int, int]]
    rows: tuple[int, ...]
    cols: tuple[int, ...]
    terms: tuple[int, ...]
    batch: tuple[int, ...]

    @classmethod
    def of(cls, loops: LoopNest) -> Matrices | None:
        """Return the products of a nest; None if it has none, or computes what their programs do not."""
        sums = sums_of_products(loops)
        if not sums or axes_in(loops.axes, (RAGGED,)) or any(isinstance(node, Scan) for node in loops.nodes):
            return None
        varies, number = loops.node_axes, min(sums)
        left, right = (varies[factor] for factor in sums[number])
        terms = loops.reduction(number).axes
        rows, cols = left - right, right - left
        steps = (term for store in loops.stores for term in store.index.terms)
        if any(k in rows and step == 1 for k, step in steps):
            rows, cols = cols, rows
        factors = dict[int, tuple[int, int]]()
        for n, (first, second) in sums.items():
            apart = varies[first] - varies[second], varies[second] - varies[first]
            if loops.reduction(n).axes != terms or apart not in ((rows, cols), (cols, rows)):
                return None
            factors[n] = (first, second) if apart == (rows, cols) else (second, first)
        of_factors = with_operands(loops, itertools.chain.from_iterable(factors.values()))
        if not of_factors.isdisjoint(sums) or not all(_are_many(loops, side) for side in (rows, cols)):
            return None
        if any(not varies[store.value].isdisjoint(terms) for store in loops.stores):
            return None
        for n, node in enumerate(loops.nodes):
            if isinstance(node, Reduce) and n not in sums:
                is_of_factor = n in of_factors and node.axes == terms
                is_late = n not in of_factors and node.axes.isdisjoint(terms)
                if not is_late and not (is_of_factor and not (varies[n] & rows and varies[n] & cols)):
                    return None
        of_rows, of_cols, of_terms = (_without_ones(loops, axes) for axes in (rows, cols, terms))
        used = {*of_rows, *of_cols, *of_terms}
        batch = tuple(k for k in range(len(loops.axes)) if k not in used)
        return cls(factors, of_rows, of_cols, of_terms, batch)


def _are_many(loops: LoopNest, axes: Iterable[int]) -> bool:
    """True if some axes may have more elements than products of few rows."""
    most = [loops.axes[k].most for k in axes if not isinstance(loops.axes[k].size, int)]
    known = prod(hint(loops.axes[k].size) for k in axes if isinstance(loops.axes[k].size, int))
    return None in most or known * prod(n for n in most if n is not None) > FEW_ROWS


def _without_ones(loops: LoopNest, axes: Iterable[int]) -> tuple[int, ...]:
    return tuple(k for k in sorted(axes) if loops.axes[k].size != 1)
