"""Reductions that tensor cores make: products of two tiles, under a placement (`unit(r, TENSOR_CORE)`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fusion_compiler.ir.loops import Compute, Load, LoopNest, Reduce, operands_of
from fusion_compiler.schedule.analysis import rounding_of
from fusion_compiler.schedule.placed_axes import PlacedAxes
from fusion_compiler.schedule.placement import Leaf, On, Place, Placement

MUL = torch.ops.aten.mul.Tensor
CONVERSIONS = (torch.ops.aten._to_copy.default, torch.ops.prims.convert_element_type.default)
SMALLEST = 16  # rows and terms of a product that tensor cores take
# What one bfloat16 number holds exactly.
ONE = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool)
HALF = 2  # bytes of an element that tensor cores take as one or two numbers


@dataclass(frozen=True)
class Product:
    """A reduction that is a product of a matrix [rows, terms] and vectors [few, terms]: nodes, and the leaves
    in LANES that are their dimensions."""

    matrix: int
    vectors: int
    rows: Leaf
    few: Leaf
    terms: Leaf


@dataclass(frozen=True)
class Terms:
    """The bfloat16 numbers that represent an element of a product's matrix, and one of its vectors."""

    matrix: int
    vectors: int

    @classmethod
    def of(cls, matrix: torch.dtype | None, vectors: Iterable[torch.dtype | None], is_exact: bool) -> Terms:
        """Return the terms of factors. matrix, vectors: the dtypes that hold them, as `held` says. is_exact:
        the sum needs all digits of float32."""
        of_vectors = 1 if all(dtype in ONE for dtype in vectors) else 3 if is_exact else 2
        return cls(1 if matrix in ONE else 2, of_vectors)

    @property
    def parts(self) -> int:
        """Return the parts of the sums: one per term of the vectors, and at least one for the rest of the
        matrix."""
        return 4 if self.vectors > 2 else max(self.matrix, self.vectors)


def product_of(loops: LoopNest, number: int, where: PlacedAxes) -> Product | None:
    """Return the product of tiles that a reduction is, or None if it is none. where: the nest's axes."""
    node = loops.nodes[number]
    term = loops.nodes[node.operand] if isinstance(node, Reduce) else None
    if not isinstance(node, Reduce) or node.combine != "sum" or node.dtype is not torch.float32:
        return None
    factors = operands_of(term) if isinstance(term, Compute) and term.target is MUL else ()
    if len(set(factors)) != 2:
        return None
    tiles = [where.depends[factor].intersection(where.lanes) for factor in factors]
    terms, sides = tiles[0] & tiles[1], [tiles[0] - tiles[1], tiles[1] - tiles[0]]
    apart = where.of_axes(node.axes) - terms  # the rest of the terms, which a loop may go over
    if not terms <= where.of_axes(node.axes) or any(leaf.place is not Place.LOOP for leaf in apart):
        return None
    if [len(terms), *map(len, sides)] != [1, 1, 1]:
        return None
    (few, vectors), (rows, matrix) = sorted(
        ((next(iter(leaf)), factor) for leaf, factor in zip(sides, factors, strict=True)),
        key=lambda side: side[0].lanes,
    )
    terms_leaf = next(iter(terms))
    if min(rows.lanes, terms_leaf.lanes) < SMALLEST:
        return None
    return Product(matrix, vectors, rows, few, terms_leaf)


def products_of(
    loops: LoopNest, placement: Placement, where: PlacedAxes | None = None
) -> dict[int, Product]:
    """Return the reductions that tensor cores make under a placement. where: the nest's axes, if they are
    known."""
    names = {d.reduction for d in placement.directives if isinstance(d, On)}
    if not names:
        return {}
    where = where or PlacedAxes.of(loops, placement)
    products = ((n, product_of(loops, n, where)) for n, name in enumerate(loops.names) if name in names)
    return {n: product for n, product in products if product is not None}


def with_short_products(
    loops: LoopNest, placements: tuple[Placement, ...], itemsizes: Mapping[str, int]
) -> tuple[Placement, ...]:
    """Return the placements in which tensor cores make only products whose matrix has at most two bytes an
    element: it is rounded to bfloat16, or comes from such a buffer. itemsizes: of buffers, in bytes."""

    def is_short(number: int) -> bool:
        node = loops.nodes[source(loops, number)]
        is_rounded = rounding_of(node) == str(torch.bfloat16)
        return is_rounded or (isinstance(node, Load) and itemsizes[node.buffer] <= HALF)

    return tuple(p for p in placements if all(is_short(of.matrix) for of in products_of(loops, p).values()))


def source(loops: LoopNest, number: int) -> int:
    """Return the node whose number this one is, in another dtype."""
    node = loops.nodes[number]
    while isinstance(node, Compute) and node.target in CONVERSIONS and rounding_of(node) is None:
        (number,) = operands_of(node)
        node = loops.nodes[number]
    return number


def held(loops: LoopNest, dtypes: Mapping[str, torch.dtype], number: int) -> torch.dtype | None:
    """Return the dtype in which a value lies in memory or to which it is rounded; None of others.

    dtypes: those of the buffers.
    """
    node = loops.nodes[source(loops, number)]
    if rounding_of(node) == str(torch.bfloat16):
        return torch.bfloat16
    return dtypes[node.buffer] if isinstance(node, Load) else None
