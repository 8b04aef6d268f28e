"""Reductions that tensor cores make: products of two tiles, under a placement (`unit(r, TENSOR_CORE)`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fusion_compiler.ir.loops import Compute, LoopNest, Reduce, axes_of, operands_of
from fusion_compiler.schedule.placement import Leaf, On, Place, Placement

MUL = torch.ops.aten.mul.Tensor
SMALLEST = 16  # rows and terms of a product that tensor cores take


@dataclass(frozen=True)
class Product:
    """A reduction that is a product of a matrix [rows, terms] and vectors [few, terms]: nodes, and the leaves
    in LANES that are their dimensions."""

    matrix: int
    vectors: int
    rows: Leaf
    few: Leaf
    terms: Leaf


def product_of(loops: LoopNest, number: int, leaves: tuple[Leaf, ...]) -> Product | None:
    """Return the product of tiles that a reduction is, or None if it is none."""
    node = loops.nodes[number]
    term = loops.nodes[node.operand] if isinstance(node, Reduce) else None
    if not isinstance(node, Reduce) or node.combine != "sum" or node.dtype is not torch.float32:
        return None
    factors = operands_of(term) if isinstance(term, Compute) and term.target is MUL else ()
    if len(set(factors)) != 2:
        return None
    axes, lanes = axes_of(loops), [leaf for leaf in leaves if leaf.place is Place.LANES]
    tiles = [{leaf for leaf in lanes if leaf.axis in axes[factor]} for factor in factors]
    terms, own = tiles[0] & tiles[1], [tiles[0] - tiles[1], tiles[1] - tiles[0]]
    reduced = {leaf for leaf in leaves if leaf.axis in node.axes}
    if reduced != terms or [len(terms), *map(len, own)] != [1, 1, 1]:
        return None
    (few, vectors), (rows, matrix) = sorted(
        ((next(iter(leaf)), factor) for leaf, factor in zip(own, factors, strict=True)),
        key=lambda side: side[0].lanes,
    )
    terms_leaf = next(iter(terms))
    if min(rows.lanes, terms_leaf.lanes) < SMALLEST:
        return None
    return Product(matrix, vectors, rows, few, terms_leaf)


def products_of(loops: LoopNest, placement: Placement) -> dict[int, Product]:
    """Return the reductions that tensor cores make under a placement."""
    names = {d.reduction for d in placement.directives if isinstance(d, On)}
    if not names:
        return {}
    leaves = placement.leaves(loops.axes)
    products = ((n, product_of(loops, n, leaves)) for n, name in enumerate(loops.names) if name in names)
    return {n: product for n, product in products if product is not None}
