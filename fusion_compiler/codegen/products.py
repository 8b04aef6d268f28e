"""Sums of products that tensor cores make, under a placement (`unit(r, TENSOR_CORE)`).

    products = tl.zeros([16, 4], tl.float32)
    for first_k in tl.range(0, 2048, 512, num_stages=3):
        k = first_k + k_i
        in1 = tl.load(in1_ptr + n * 2048 + k)
        in0 = tl.load(in0_ptr + m * 2048 + k)
        products = fm.contract(in1, in0, products, 1, 1, 1)
    product = tl.reshape(tl.trans(products), [4, 16, 1])

Tensor cores multiply bfloat16. A float32 goes in as the sum of two or three of them, so that what is left out
is less than eager's own roundings; what a matrix holds in fewer bits goes in as it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch

from fusion_compiler.codegen.tile import Assign
from fusion_compiler.codegen.values import Tile
from fusion_compiler.ir.loops import Load
from fusion_compiler.ir.syntax import Expression, Items, Literal, Var, fm, tl
from fusion_compiler.schedule.contractions import column_parts
from fusion_compiler.schedule.placement import Leaf, Place
from fusion_compiler.schedule.tile_products import ONE, held, products_of, source

if TYPE_CHECKING:
    from fusion_compiler.codegen.placed import Emitter


class ProductSums:
    """The sums of a nest that tensor cores make.

    of: each with its factors. streamed: the loads of matrices that a loop reads once, unlike their vectors.
    """

    def __init__(self, e: Emitter) -> None:
        self.e, self.of = e, products_of(e.loops, e.placement, e.where)
        looped = {leaf.axis for leaf in e.where.of_axes(e.where.leaves) if leaf.place is Place.LOOP}
        matrices = (of.matrix for of in self.of.values() if of.terms.axis in looped)
        self.streamed = frozenset(e.loops.nodes[source(e.loops, matrix)] for matrix in matrices)

    # -- the sums, as reductions ---------------------------------------------------------------------------

    def at_once(self, number: int) -> Tile:
        """Return a sum whose terms all are in the tile."""
        return self._product(number, self.e.let("products", self._multiplied(number, self._zeros(number))))

    def start(self, number: int) -> Tile:
        """Return the sum of no terms, to which a loop adds."""
        return Tile(self.e.state("products", self._zeros(number, self._split(number))), is_block=True)

    def step(self, number: int, state: Tile) -> None:
        """Add the terms of the open block."""
        total = cast(Var, state.value)
        self.e.add(Assign((total,), self._multiplied(number, total, self._split(number))))

    def fold(self, number: int, state: Tile) -> Tile:
        """Return the sum behind a loop."""
        is_split = self._split(number) > 1
        total = self.e.let("products", tl.sum(state.value, axis=0)) if is_split else state.value
        return self._product(number, total)

    def _multiplied(self, number: int, total: Expression, split: int = 1) -> Expression:
        of = self.of[number]
        matrix, vectors = self.factor(of.matrix, of.rows, of.terms), self.factor(of.vectors, of.few, of.terms)
        return fm.contract(matrix, vectors, total, *self._counts(number), *([split] if split > 1 else []))

    def _counts(self, number: int) -> tuple[int, int, int]:
        """Return the bfloat16 numbers that represent an element of the matrix, those of an element of the
        vectors, and the parts of the sums."""
        of = self.of[number]
        of_matrix = 1 if self._held(of.matrix) in ONE else 2
        of_vectors = 1 if self._held(of.vectors) in ONE else 2 if number in self.e.fp16 else 3
        return of_matrix, of_vectors, 4 if of_vectors > 2 else max(of_matrix, of_vectors)

    def _split(self, number: int) -> int:
        """Return the parts of a block's terms that a loop adds up apart, one for each warp."""
        of = self.of[number]
        return column_parts(of.rows.lanes, of.terms.lanes, self.e.placement.num_warps)

    def _zeros(self, number: int, split: int = 1) -> Expression:
        of = self.of[number]
        shape = [of.rows.lanes, of.few.lanes * self._counts(number)[-1]]
        return tl.zeros([split, *shape] if split > 1 else shape, torch.float32)

    def _product(self, number: int, value: Expression) -> Tile:
        """Return a sum of its parts, in the order of the tile's dimensions."""
        e, of, (*_, parts) = self.e, self.of[number], self._counts(number)
        if parts > 1:
            value = e.let("products", fm.contracted(value, parts))
        if of.few.order < of.rows.order:
            value = tl.trans(value)
        lanes = frozenset({of.rows, of.few})
        return Tile(e.let("product", tl.reshape(value, e.shape(lanes)), number), lanes, True)

    # -- factors -------------------------------------------------------------------------------------------

    def factor(self, number: int, side: Leaf, terms: Leaf) -> Expression:
        """Return a factor's tile [side, terms], zero where no term is. What bfloat16 holds stays as it is,
        and its tile has no other dimensions: tensor cores read it from where loads put it."""
        e, (first, last) = self.e, sorted((side, terms), key=lambda leaf: leaf.order)
        load = self._load(number)
        axes, leaves = frozenset({side.axis, terms.axis}), frozenset({side, terms})
        axes -= {axis for axis in axes if e.is_zero_outside(number, axis)}
        with e.dimensions(e.lanes if load is None else (first, last)):
            tile = e.tile(number) if load is None else e.loaded_as_held(load)
            value, mask = tile.value, e.inside(axes)
            if mask is not None:
                value = tl.where(mask.value, value, 0.0)
            if tile.lanes != leaves:
                value = tl.broadcast_to(value, e.shape(leaves))
        if load is None:
            value = tl.reshape(value, Items((Literal(first.lanes), Literal(last.lanes))))
        return value if first is side else tl.trans(value)

    def as_held(self) -> dict[int, tuple[int, Leaf, Leaf]]:
        """Return each factor that is loaded from numbers which bfloat16 holds, with its axes, by the node of
        its load."""
        pairs = ((of, (of.matrix, of.rows), (of.vectors, of.few)) for of in self.of.values())
        factors = [(*side, of.terms) for of, *sides in pairs for side in sides]
        return {source(self.e.loops, f[0]): f for f in factors if self._load(f[0]) is not None}

    def _load(self, number: int) -> Load | None:
        """Return the load of a factor if bfloat16 holds the buffer's numbers."""
        node = self.e.loops.nodes[source(self.e.loops, number)]
        return node if isinstance(node, Load) and self._held(number) in ONE else None

    def _held(self, number: int) -> torch.dtype | None:
        return held(self.e.loops, self.e.dtypes, number)
