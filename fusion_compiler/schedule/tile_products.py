"""Reductions that tensor cores make: products of two tiles, under a placement (`unit(r, TENSOR_CORE)`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fusion_compiler.ir.dag import FEW_ROWS
from fusion_compiler.ir.loops import Load, LoopNest, Reduce, rounding_of, source_of
from fusion_compiler.ops.schema import HALVES
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placed_axes import PlacedAxes
from fusion_compiler.schedule.placement import At, Leaf, On, Place, Placement
from fusion_compiler.schedule.products import factors_of
from fusion_compiler.schedule.shapes import WARP

SMALLEST = 16  # rows and terms of a product that tensor cores take
TALL = 64  # rows of a tile that all warps of a program multiply together
PARTS = 64  # least terms of a tile that one warp multiplies
APART = (Place.LOOP, Place.GRID)  # where the terms may lie that a tile has not
# What one bfloat16 number holds exactly.
ONE = (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8, torch.bool)
TWO = (torch.float16, torch.int16)  # what two bfloat16 numbers hold exactly
FLOAT8_SUMS = 64  # of a thread in float8: the last terms have sums of their own, which are added to float32


@dataclass(frozen=True)
class Product:
    """A reduction that is a product of a matrix [rows, terms] and vectors [few, terms]: nodes, and the leaves
    in LANES that are their dimensions."""

    matrix: int
    vectors: int
    rows: Leaf
    few: Leaf
    terms: Leaf

    @property
    def is_wide(self) -> bool:
        """True if both factors have many rows, so that they go into tensor cores as they are."""
        return self.few.lanes > FEW_ROWS


@dataclass(frozen=True)
class Terms:
    """The bfloat16 numbers that represent an element of a product's matrix, and one of its vectors."""

    matrix: int
    vectors: int

    @classmethod
    def of(cls, matrix: torch.dtype | None, vectors: torch.dtype | None, is_exact: bool) -> Terms:
        """Return the terms of factors. matrix, vectors: the dtypes that hold them, as `held` says. is_exact:
        the sum needs all digits of float32."""
        of_vectors = 1 if vectors in ONE else 3 if is_exact else 2
        return cls(1 if matrix in ONE else 2, of_vectors)

    @property
    def parts(self) -> int:
        """Return the parts of the sums: one per term of the vectors, and at least one for the rest of the
        matrix."""
        return 4 if self.vectors > 2 else max(self.matrix, self.vectors)


def product_of(loops: LoopNest, number: int, where: PlacedAxes) -> Product | None:
    """Return the product of tiles that a reduction is, or None if it is none. where: the nest's axes."""
    node, factors = loops.nodes[number], factors_of(loops, number)
    if not isinstance(node, Reduce) or not factors or node.dtype is not torch.float32:
        return None
    tiles = [where.depends[factor].intersection(where.lanes) for factor in factors]
    terms, sides = tiles[0] & tiles[1], [tiles[0] - tiles[1], tiles[1] - tiles[0]]
    apart = where.of_axes(node.axes) - terms  # the rest of the terms: of other turns or programs
    if not terms <= where.of_axes(node.axes) or any(leaf.place not in APART for leaf in apart):
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


def is_chained(a: Analysis, placement: Placement) -> bool:
    """True if programs go through the axis of a chain of products in a loop, or store what they compute of
    the first products."""
    if a.chain is None:
        return False
    if a.chain.loop is None:
        return any(isinstance(directive, On) for directive in placement.directives)
    name = a.loops.axes[a.chain.loop].name
    in_loops = (d for d in placement.directives if isinstance(d, At) and d.place is Place.LOOP)
    return any(d.axis.split(".")[0] == name for d in in_loops)


def with_exact_products(
    loops: LoopNest, placements: tuple[Placement, ...], dtypes: Mapping[str, torch.dtype]
) -> tuple[Placement, ...]:
    """Return the placements in which tensor cores make no product whose result needs more digits of the
    matrix than they take, or more sums than registers hold. dtypes: of the buffers."""
    if not any(isinstance(directive, On) for placement in placements for directive in placement.directives):
        return placements
    a = Analysis(loops)
    if any(is_chained(a, placement) for placement in placements):
        return placements  # factors that are computed are rounded as a library's attention rounds them
    short = a.fp16_values(dtypes)

    def suits(number: int, of: Product, warps: int) -> bool:
        if of.is_wide:
            dtype = multiplied_as(loops, dtypes, (of.matrix, of.vectors))
            is_few = of.rows.lanes * of.few.lanes <= FLOAT8_SUMS * WARP * warps
            return dtype is not None and (dtype.itemsize > 1 or is_few)
        matrix, vectors = held(loops, dtypes, of.matrix), held(loops, dtypes, of.vectors)
        terms = Terms.of(matrix, vectors, number not in short)
        return terms.matrix == 1 or number in short or matrix in TWO

    return tuple(
        p for p in placements if all(suits(n, of, p.num_warps) for n, of in products_of(loops, p).items())
    )


def parts_of_terms(rows: int, terms: int, warps: int) -> int:
    """Return into how many parts a loop's tile is split along its terms, one per warp, if it has few rows for
    several warps."""
    return 1 if rows >= TALL else max(1, min(warps, terms // PARTS))


def held(loops: LoopNest, dtypes: Mapping[str, torch.dtype], number: int) -> torch.dtype | None:
    """Return the dtype in which a value lies in memory or to which it is rounded; None of others.

    dtypes: those of the buffers.
    """
    node = loops.nodes[source_of(loops.nodes, number)]
    if rounding_of(node) == str(torch.bfloat16):
        return torch.bfloat16
    return dtypes[node.buffer] if isinstance(node, Load) else None


def multiplied_as(
    loops: LoopNest, dtypes: Mapping[str, torch.dtype], factors: tuple[int, int]
) -> torch.dtype | None:
    """Return the dtype that represents all numbers of two factors and that tensor cores multiply, or None.

    dtypes: of the buffers. A factor is exact where it is loaded in 8 or 16 bits or rounded to them, as eager
    rounds what it multiplies in 16 bits. What eager multiplies in float32 has no such dtype.
    """
    first, second = (_rounded_to(loops, n) or held(loops, dtypes, n) for n in factors)
    if first == second and first in (*HALVES, torch.float8_e4m3fn):
        return first
    half, other = (first, second) if first in HALVES else (second, first)
    if half in HALVES and other in ONE and other is not torch.bfloat16:
        return half
    return torch.bfloat16 if first in ONE and second in ONE else None


def _rounded_to(loops: LoopNest, number: int) -> torch.dtype | None:
    """Return the 16-bit dtype to which a node rounds; None for all others."""
    rounding = rounding_of(loops.nodes[source_of(loops.nodes, number)])
    return next((dtype for dtype in HALVES if rounding == str(dtype)), None)
