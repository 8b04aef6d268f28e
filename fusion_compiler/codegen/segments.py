"""Tile programs with reductions over some rows and over inner columns (`codegen.second_stages`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from fusion_compiler.codegen.carried import Plain, State
from fusion_compiler.codegen.row_tiles import RowTiles
from fusion_compiler.codegen.rows import RowEmitter
from fusion_compiler.codegen.second_stages import name_of_pieces
from fusion_compiler.codegen.tile import Combine
from fusion_compiler.codegen.tile import Store as StoreStatement
from fusion_compiler.codegen.values import Tile
from fusion_compiler.ir.loops import COLS, ROWS, Load, Node, axes_in
from fusion_compiler.ir.syntax import Literal, Name, Var, every, plus, times, tl
from fusion_compiler.schedule.analysis import Pieces, pieces_of
from fusion_compiler.schedule.placed_axes import placed
from fusion_compiler.schedule.placement import Place


class SegmentEmitter(RowEmitter):
    """Emits a nest with reductions over segments."""

    def accumulated(self) -> list[int]:
        return [*super().accumulated(), *(self.reduction(n).operand for n in self.a.segmented)]

    def partial_results(self, numbers: Sequence[int]) -> None:
        """Store the block's part of segment reductions: one value per piece of each row."""
        for number in numbers:
            node = self.reduction(number)
            term = self.masked(replace(node, axes=self.columns), self.typed(node.operand))
            lanes, pieces = self.lanes[-1].lanes, self._pieces(number)
            count, shape = lanes // pieces.columns, [leaf.lanes for leaf in self.lanes]
            shape = [n if leaf in term.lanes else 1 for n, leaf in zip(shape, self.lanes, strict=True)]
            value, axis, keep = term.value, len(shape) - 1, len(shape) > 1
            if count > 1:
                value = tl.reshape(value, [*shape[:-1], count, pieces.columns])
                axis, keep = len(shape), False
            join_key = (pieces, self.a.groups[node.operand]) if self.a.is_sum(number) else None
            combined = Combine(node, (value,), axis, keep, number in self.plain_maxima, join_key)
            self._store_pieces(number, self.let("segment_sum", combined), pieces, count)

    def states(self, reductions: Sequence[int]) -> list[State]:
        """Return what a pass keeps: a sum that is a multiple of a segment's needs no sum of its own."""
        states = super().states(reductions)
        if placed(self.where.of_axes(self.columns), Place.LOOP):
            return states
        return [self._scaled(state) if isinstance(state, Plain) else state for state in states]

    def _pieces(self, number: int) -> Pieces:
        return pieces_of(self.a, self.lanes[-1].lanes, number)

    def _store_pieces(self, number: int, value: Var, pieces: Pieces, count: int) -> None:
        """Store the values of the pieces in the block. Other sums may reuse the value of a single piece."""
        lanes = tl.arange(0, count) if len(self.lanes) == 1 else tl.arange(0, count)[None, :]
        first = self.first_parts(pieces.columns)
        start = self.sum_of(first) if first else None
        piece = plus(start, lanes if count > 1 else None)
        if not isinstance(piece, Name | Var | Literal):
            piece = self.let("piece", piece)
        if count == 1:
            self.scopes[self.depth].tiles["segment", number] = Tile(value)
        is_row = count == 1 and start is None
        rows, row = self.inside(axes_in(self.loops.axes, (ROWS,))), self.row_number()
        is_cut = self.column_mask() is not None and not is_row
        mask = every(None if rows is None else rows.value, piece < pieces.count if is_cut else None)
        # A pointer to a block's only piece has the block's shape.
        block = None if len(self.lanes) == 1 else tl.zeros([1, 1], torch.int32)
        place = block if row is None else row.value * pieces.count
        self.add(StoreStatement(plus(self.pointers[name_of_pieces(number)], place, piece), value, mask))

    def _scaled(self, state: Plain) -> Plain:
        """Return a sum along the row as a segment sum times values that the block shares: sum(w * x) = w *
        sum(x). The block has to lie in one segment."""
        nodes, factors, number = self.loops.nodes, self.a.factors, state.number
        for segment in self.a.segmented:
            same = self.reduction(segment).combine == self.reduction(number).combine == "sum"
            of_sum, of_segment = (factors[self.reduction(n).operand] for n in (number, segment))
            is_part = same and self.a.level[segment] == self.a.level[number] and of_segment <= of_sum
            if is_part and self._pieces(segment).columns == self.lanes[-1].lanes:
                shared = tuple((of_sum - of_segment).elements())
                if all(self._is_same(nodes[n]) for n in shared):
                    return Scaled(number, segment, shared)
        return state

    def _is_same(self, node: Node) -> bool:
        """True if all lanes of a block load the same element of each row."""
        if not isinstance(node, Load) or node.within is not None or any(k < 0 for k, _ in node.index.terms):
            return False
        return self.a.is_outer(node.index, COLS, self.lanes[-1].lanes)


@dataclass(frozen=True)
class Scaled(Plain):
    """A sum that is a sum over the block's segment, times values that the block shares."""

    segment: int
    shared: tuple[int, ...]

    def reads(self, e: RowTiles) -> tuple[int, ...]:
        return self.shared

    def single(self, e: RowTiles) -> tuple[Var, ...]:
        factors = [e.tile(n).value for n in self.shared]
        return (e.state("row_sum", times(e.scopes[e.depth].tiles["segment", self.segment].value, *factors)),)
