"""Products of matrices with many rows and columns on tensor cores (`schedule.matrix_products`).

    products = tl.zeros([128, 256], tl.float32)
    for first_k in tl.range(0, 4096, 64, num_stages=3):
        in0 = tl.load(in0_ptr + m * 4096 + (first_k + k_i))
        in1 = tl.load(in1_ptr + (first_k + k_i_1) * 4096 + n)
        products = tl.dot(in0, in1, products)
    in2 = tl.load(in2_ptr + n).to(tl.float32)
    tl.store(out0_ptr + m * 4096 + n, products + in2)

Tiles of results have the dimensions [rows, columns], and those of the factors [rows, terms] and [terms,
columns]. A factor goes into tensor cores in 16 or 8 bits: as it lies in memory, or computed in float32 and
rounded as the nest says. It is zero where no term is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch

from fusion_compiler.codegen.expression import convert
from fusion_compiler.codegen.placed import Emitter
from fusion_compiler.codegen.second_stages import Split
from fusion_compiler.codegen.tile import Assign, Statement
from fusion_compiler.codegen.values import PlacedNest, Tile
from fusion_compiler.ir.dims import Dim, product, quotient
from fusion_compiler.ir.loops import Load, Reduce, operands_of, source_of
from fusion_compiler.ops.syntax import Expression, Var, fm, lift, tl
from fusion_compiler.schedule.placed_axes import placed
from fusion_compiler.schedule.placement import Leaf, Place
from fusion_compiler.schedule.run import Run
from fusion_compiler.schedule.tile_products import multiplied_as, products_of


def multiplies_matrices(run: Run) -> bool:
    """True if tensor cores multiply matrices of many rows and columns in a run."""
    return any(of.is_wide for of in products_of(run.a.loops, run.placement, run.where).values())


class MatrixEmitter(Emitter):
    """Emits a nest whose products tensor cores make of tiles of two matrices. Raises ValueError where 16
    bits do not represent a factor.

    factors: by product, the factor with the rows, the one with the columns, and the dtype of both.
    sides: the dimensions of the tiles of these factors.
    statistics: by reduction over the terms of one factor, the dimensions of that factor.
    group: the blocks of rows, and their leaves of the grid, where the last group has fewer than the others.
    """

    def __init__(self, nest: PlacedNest) -> None:
        super().__init__(nest)
        products = products_of(self.loops, self.placement, self.where)
        of = next(iter(products.values()))
        rows, cols = sorted((of.rows, of.few), key=lambda leaf: leaf.order)
        self.of_terms = of.terms
        self.sides = (rows, of.terms), (of.terms, cols)
        self.all_lanes = rows, cols
        self.where = replace(self.where, lanes=self.all_lanes)
        self.factors = dict[int, tuple[int, int, torch.dtype]]()
        for number, of in products.items():
            left, right = (of.matrix, of.vectors) if of.rows == rows else (of.vectors, of.matrix)
            dtype = multiplied_as(self.loops, self.dtypes, (left, right))
            if dtype is None:
                raise ValueError(f"16 bits do not represent the factors of {self.loops.names[number]}")
            self.factors[number] = left, right, dtype
        self.statistics = {
            n: self.sides[cols in self.depends[self.reduction(n).operand]]
            for n in self.reductions - self.factors.keys()
            if not self.reduction(n).axes.isdisjoint(of.terms.members)
        }
        self.group = self.where.last_group()
        self.numbers = dict[tuple[Leaf, Expression], Var]()  # of lanes, by their leaf and their shape

    def load_first(self) -> None:
        """Load nothing before the products, whose sums need the registers."""

    # -- the grid ------------------------------------------------------------------------------------------

    def program(self, number: Expression, split: Split) -> tuple[list[Statement], tuple[Dim, ...]]:
        body, grid = super().program(number, split)
        if self.group is not None:
            blocks, outer, inner = self.group
            grid = (product((blocks, *(x.extent for x in self.where.grid if x not in (outer, inner)))),)
        return body, grid

    def place_grid(self, number: Expression) -> None:
        """Assign each axis of the grid its element. Programs go through the columns for a group of blocks of
        rows, and then for the next group. The last group may have fewer blocks."""
        if self.group is None:
            super().place_grid(number)
            return
        blocks, outer, inner = self.group
        grid = [leaf for leaf in self.where.grid if not self.where.is_single(leaf)]
        first = grid.index(outer)
        (between,) = grid[first + 1 : -1]
        if first > 0:
            before, of_each = self.where, lift(product((blocks, between.extent)))
            self.where = replace(before, grid=tuple(grid[:first]))
            super().place_grid(number // of_each)
            self.where, number = before, number % of_each
        number, of_group = (
            number.to(torch.int64) if self.wide else number,
            product((inner.extent, between.extent)),
        )
        group = self.let(self.name_of(outer), number // lift(of_group))
        in_group = self.let("in_group", number % lift(of_group))
        height = self.let("height", tl.minimum(lift(blocks) - group * lift(inner.extent), lift(inner.extent)))
        self.scopes[0].tiles[outer.name] = Tile(group)
        for leaf, value in ((between, in_group // height), (inner, in_group % height)):
            self.scopes[0].tiles[leaf.name] = Tile(self.let(self.name_of(leaf), value))

    def inside(self, axes: frozenset[int]) -> Tile | None:
        if self.group is not None:
            _, _, inner = self.group
            size = self.where.axes[inner.axis].size
            axes = axes if quotient(size, inner.step) is None else axes - inner.members
        return super().inside(axes)

    def numbered(self, leaf: Leaf, lanes: Expression) -> Var:
        """Return the variable of the numbers of lanes, which those of another axis do not share. Where
        offsets need 64 bits, the numbers that a loop adds to them have these too."""
        if (leaf, lanes) not in self.numbers:
            value = lanes.to(torch.int64) if self.wide else lanes
            self.numbers[leaf, lanes] = self.state(self.name_of(leaf), value)
        return self.numbers[leaf, lanes]

    # -- products and reductions ---------------------------------------------------------------------------

    def tile(self, number: int) -> Tile:
        """Return the tile of a node. A statistic of a factor is computed in the dimensions of that factor,
        and has one element along the terms, or along the dimension of the results that takes their place."""
        with self.dimensions(self.statistics.get(number, self.lanes)):
            return super().tile(number)

    def reduced(self, number: int, node: Reduce) -> Tile:
        if number not in self.factors:
            return super().reduced(number, node)
        for n in sorted(self.statistics):
            if n in self.needed:
                self.tile(n)
        if placed(self.where.reduced_by(node), Place.LOOP):
            return super().reduced(number, node)
        zeros = self.started(number)
        self.add_terms(number, node, zeros)
        return zeros

    def sharing_loop(self, number: int, around: list[Leaf]) -> list[int]:
        if number in self.factors:
            return [n for n in sorted(self.factors) if n in self.needed and self.cached(n) is None]
        alike = (n for n in super().sharing_loop(number, around) if n not in self.factors)
        return [n for n in alike if self.statistics.get(n) == self.statistics.get(number)]

    def started(self, number: int) -> Tile:
        if number not in self.factors:
            return super().started(number)
        return self._results(
            self.state("products", tl.zeros(self.shape(frozenset(self.lanes)), torch.float32))
        )

    def add_terms(self, number: int, node: Reduce, state: Tile) -> None:
        if number not in self.factors:
            super().add_terms(number, node, state)
            return
        total = cast(Var, state.value)
        dot = fm.dot_float8 if self.factors[number][2].itemsize == 1 else tl.dot
        self.add(Assign((total,), dot(*self._operands(number), total)))

    def folded(
        self, number: int, node: Reduce, state: Tile, base: str | None = None, join_key: object = None
    ) -> Tile:
        return state if number in self.factors else super().folded(number, node, state, base, join_key)

    def _results(self, value: Expression) -> Tile:
        return Tile(value, frozenset(self.lanes), True)

    # -- factors -------------------------------------------------------------------------------------------

    def _operands(self, number: int) -> tuple[Expression, Expression]:
        left, right, dtype = self.factors[number]
        return self._factor(left, self.sides[0], dtype), self._factor(right, self.sides[1], dtype)

    def _factor(self, number: int, side: tuple[Leaf, Leaf], dtype: torch.dtype) -> Expression:
        """Return the tile of a factor in a dtype that represents it, zero where no term is."""
        nodes, lanes = self.loops.nodes, frozenset(side)
        source = nodes[source_of(nodes, number)]
        with self.dimensions(side):
            if isinstance(source, Load) and self.run_length(source) == 1:
                tile, held = self.loaded_as_held(source), self.dtypes[source.buffer]
            else:  # a number that the nest rounds is rounded by the conversion
                (number,) = (number,) if isinstance(source, Load) else operands_of(source)
                tile, held = self.typed(number), nodes[number].dtype
            axes = (axis for axis in self.of_terms.members if not self.is_zero_outside(number, axis))
            if (mask := self.inside(frozenset(axes))) is not None:
                tile = Tile(tl.where(mask.value, tile.value, 0.0), tile.lanes | mask.lanes, True)
            value = convert(tile.value, held, dtype)
            if tile.lanes != lanes:
                value = tl.broadcast_to(value, self.shape(lanes))
            return value if isinstance(value, Var) else self.let("factor", value)
