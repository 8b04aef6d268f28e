"""Reductions over rows: accumulators over the blocks of a program, folded at the end to one partial
result."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.monoids import fold, is_logical, step
from fusion_compiler.codegen.nodes import build_nodes, elements
from fusion_compiler.codegen.online_reductions import accumulator
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.ir.syntax import Expression, Variable
from fusion_compiler.schedule.analysis import accumulated_groups


class Sums:
    """The reductions over rows of a program, by the variables that hold them. pending: reductions to which
    the current block is not added yet."""

    def __init__(self, variables: Mapping[int, Variable] | None = None) -> None:
        self.variables = dict(variables or {})
        self.pending: set[int] = set()

    @classmethod
    def of_blocks(cls, b: Builder) -> Sums:
        """Return accumulators, initialized before a loop over blocks of rows."""
        groups = {i: accumulated_groups(b.a, b.s, i) for i in b.a.across_rows}
        return cls({i: accumulator(b, i, g) for i, g in groups.items()})

    @classmethod
    def of_tile(cls, b: Builder) -> Sums:
        """Return the tiles themselves as accumulators, or their sums for products, if there is no loop."""
        build_nodes(b, (i for i in b.a.across_rows if i in b.contracted))

        def accumulator_of(i: int) -> Variable:
            if i in b.contracted:
                return b.env.pop(i)
            if i in b.a.weighted_columns:
                return b.let("col_sum", _block(b, i))
            return b.let("tile", elements(b, b.reduction(i), b.a.over(i)))

        return cls({i: accumulator_of(i) for i in b.a.across_rows})

    def begin_block(self) -> None:
        self.pending = set(self.variables)

    def add_block(self, b: Builder, level: int) -> None:
        """Add the current block to the reductions whose operands are complete after `level` passes."""
        for number in [n for n in self.variables if n in self.pending and b.a.level[n] <= level]:
            self.pending.remove(number)
            b.add(step(b.reduction(number), self.variables[number], _block(b, number)))

    def folded(self, b: Builder, number: int) -> Expression:
        """Return an accumulator folded to this program's result: [1, cols], or one element."""
        reduce, tile, over = b.reduction(number), self.variables[number], b.a.over(number)
        if b.tile.flat:
            return fold(reduce, tile, 0, keep=False) if COLS in over else tile
        if number in b.a.weighted_columns:  # it has no lanes for rows
            return tile
        if COLS in over:
            return fold(reduce, fold(reduce, tile, 1, keep=True), 0, keep=True)
        return fold(reduce, tile, 0, keep=True)


def _block(b: Builder, number: int) -> Expression:
    """Return what a block adds to a sum over rows: its tile, or the tile's sum if rows have no lanes."""
    reduce = b.reduction(number)
    tile = elements(b, reduce, b.a.over(number))
    if b.tile.flat or ROWS in accumulated_groups(b.a, b.s, number):
        return tile
    tile = fold(reduce, tile, 0, keep=True)
    return tile.to(torch.int32) if is_logical(reduce) else tile
