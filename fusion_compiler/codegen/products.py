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

from collections.abc import Sequence
from typing import cast

import torch

from fusion_compiler.codegen.tile import Assign
from fusion_compiler.codegen.values import PlacedNest, Tile
from fusion_compiler.codegen.words import WordEmitter
from fusion_compiler.ir.loops import Load, Reduce, source_of, with_operands
from fusion_compiler.ops.syntax import Expression, Items, Literal, Var, fm, tl
from fusion_compiler.schedule.placement import Leaf, Place
from fusion_compiler.schedule.tile_products import (
    ONE,
    Product,
    Terms,
    held,
    parts_of_terms,
    products_of,
)


class ProductEmitter(WordEmitter):
    """Emits a nest in which tensor cores may make sums of products.

    products: these sums, with their factors.
    factors: by the node of its load, each factor whose numbers bfloat16 holds, with its axes.
    flat: the matrices whose tiles have no other dimensions.
    call: that of a function which computes what is `ready` (`codegen.replicated`).
    """

    def __init__(self, nest: PlacedNest) -> None:
        super().__init__(nest)
        self.products = products_of(self.loops, self.placement, self.where)
        self.factors: dict[int, tuple[int, Leaf, Leaf]] = {}
        self.call: Expression | None = None
        self.rests: dict[object, Var] = {}  # by product, the sums of what bfloat16 leaves out
        self.flat = frozenset(of.matrix for of in self.products.values() if not self._is_reduced(of.matrix))
        for of in self.products.values():
            for factor, side in ((of.matrix, of.rows), (of.vectors, of.few)):
                if self._load(factor) is not None:
                    self.factors[source_of(self.loops.nodes, factor)] = factor, side, of.terms

    # -- sums, as reductions -------------------------------------------------------------------------------

    def reduced(self, number: int, node: Reduce) -> Tile:
        if number in self.products and not self._loops_over(number):
            product = self._multiplied(number, (self._zeros(number),))
            return self._product(number, self.let("products", product))
        return super().reduced(number, node)

    def started(self, number: int) -> Tile:
        if number not in self.products:
            return super().started(number)
        zeros = self._zeros(number, self._split(number))
        if self._is_apart(number):
            self.rests[self.key(number)] = self.state("rest", zeros)
        return Tile(self.state("products", zeros), is_block=True)

    def add_terms(self, number: int, node: Reduce, state: Tile) -> None:
        if number not in self.products:
            super().add_terms(number, node, state)
            return
        total = cast(Var, state.value)
        totals = (total, self.rests[self.key(number)]) if self._is_apart(number) else (total,)
        self.add(Assign(totals, self._multiplied(number, totals, self._split(number))))

    def folded(
        self, number: int, node: Reduce, state: Tile, base: str | None = None, join_key: object = None
    ) -> Tile:
        if number not in self.products:
            return super().folded(number, node, state, base, join_key)
        values = [state.value, self.rests[self.key(number)]] if self._is_apart(number) else [state.value]
        if self._split(number) > 1:
            values = [tl.sum(value, axis=0) for value in values]
        value = values[0] if len(values) == 1 else fm.both(*values)
        return self._product(number, value if isinstance(value, Var) else self.let("products", value))

    def _loops_over(self, number: int) -> bool:
        """True if a loop goes over parts of a product's terms."""
        axis = self.products[number].terms.axis
        return any(leaf.place is Place.LOOP for leaf in self.where.leaves[axis])

    def _is_apart(self, number: int) -> bool:
        """True if the rests of a matrix' elements have sums of their own. A loop adds these up by themselves:
        beside the others, the other half of each product would be one with zeros."""
        return self._loops_over(number) and self._terms(number).matrix > 1

    def _multiplied(self, number: int, totals: Sequence[Expression], split: int = 1) -> Expression:
        """Return the sums with the products of the open block added to `totals`."""
        of = self.products[number]
        matrix, vectors = self.factor(of.matrix, of.rows, of.terms), self.factor(of.vectors, of.few, of.terms)
        terms, split_by = self._terms(number), [split] if split > 1 else []
        if self._is_apart(number):
            return fm.contract_apart(matrix, vectors, *totals, terms.matrix, terms.vectors, *split_by)
        return fm.contract(matrix, vectors, *totals, terms.matrix, terms.vectors, terms.parts, *split_by)

    def _terms(self, number: int) -> Terms:
        matrix, vectors = self._held(self.products[number].matrix), self._held(self.products[number].vectors)
        return Terms.of(matrix, vectors, number not in self.fp16)

    def _parts(self, number: int) -> int:
        """Return the parts that each sum adds up."""
        return 1 if self._is_apart(number) else self._terms(number).parts

    def _split(self, number: int) -> int:
        """Return the parts of a block's terms that a loop adds up apart, one for each warp."""
        of = self.products[number]
        return parts_of_terms(of.rows.lanes, of.terms.lanes, self.placement.num_warps)

    def _zeros(self, number: int, split: int = 1) -> Expression:
        of = self.products[number]
        shape = [of.rows.lanes, of.few.lanes * self._parts(number)]
        return tl.zeros([split, *shape] if split > 1 else shape, torch.float32)

    def _product(self, number: int, value: Expression) -> Tile:
        """Return a sum of its parts, in the order of the tile's dimensions."""
        of, parts = self.products[number], self._parts(number)
        if parts > 1:
            value = self.let("products", fm.contracted(value, parts))
        if of.few.order < of.rows.order:
            value = tl.trans(value)
        lanes = frozenset({of.rows, of.few})
        return Tile(self.let("product", tl.reshape(value, self.shape(lanes)), number), lanes, True)

    def load_first(self) -> None:
        """Load as other emitters do, but before a program makes reductions by itself, for which its threads
        wait: all that its products are made of."""
        if self.call is None:
            super().load_first()
        else:
            terms = frozenset[int]().union(*(self.reduction(n).axes for n in self.reductions))
            self.load_plain(n for n in self.needed if not self.node_axes[n].isdisjoint(terms))
            self.add(Assign(tuple(self.ready.values()), self.call))
            self.scopes[0].tiles |= {self.key(n): Tile(result) for n, result in self.ready.items()}

    # -- factors -------------------------------------------------------------------------------------------

    def load_whole(self, number: int) -> None:
        if number in self.factors:
            self.factor(*self.factors[number])
            return
        of = next((of for of in self.products.values() if self._is_flat(number, of)), None)
        with self.dimensions(self.lanes if of is None else self._dimensions(of.rows, of.terms)):
            super().load_whole(number)

    def _is_flat(self, number: int, of: Product) -> bool:
        """True if a matrix without other dimensions is computed of a node."""
        return of.matrix in self.flat and number in with_operands(self.loops, (of.matrix,))

    def _dimensions(self, side: Leaf, terms: Leaf) -> tuple[Leaf, Leaf]:
        """Return the dimensions of a factor's tile, in the order of all dimensions."""
        return (side, terms) if side.order < terms.order else (terms, side)

    def factor(self, number: int, side: Leaf, terms: Leaf) -> Expression:
        """Return a factor's tile [side, terms], zero where no term is. What bfloat16 holds stays as it is.
        A factor that is loaded has no other dimensions, and neither has a matrix: tensor cores read it from
        where loads put it, and loads ahead of a loop are copies to there."""
        (first, last), load = self._dimensions(side, terms), self._load(number)
        axes, leaves = frozenset({side.axis, terms.axis}), frozenset({side, terms})
        axes -= {axis for axis in axes if self.is_zero_outside(number, axis)}
        is_flat = load is not None or number in self.flat
        with self.dimensions((first, last) if is_flat else self.lanes):
            tile = self.tile(number) if load is None else self.loaded_as_held(load)
            value, mask = tile.value, self.inside(axes)
            if mask is not None:
                value = tl.where(mask.value, value, 0.0)
            if tile.lanes != leaves:
                value = tl.broadcast_to(value, self.shape(leaves))
        if not is_flat:
            value = tl.reshape(value, Items((Literal(first.lanes), Literal(last.lanes))))
        return value if first is side else tl.trans(value)

    def _is_reduced(self, number: int) -> bool:
        return not self.reductions.isdisjoint(with_operands(self.loops, (number,)))

    def _load(self, number: int) -> Load | None:
        """Return the load of a factor if bfloat16 holds the buffer's numbers."""
        node = self.loops.nodes[source_of(self.loops.nodes, number)]
        return node if isinstance(node, Load) and self._held(number) in ONE else None

    def _held(self, number: int) -> torch.dtype | None:
        return held(self.loops, self.dtypes, number)
