"""Rows that begin at any address, moved in whole words (`schedule.misaligned`).

Tiles begin with the word in which their row begins. In a tile of 1024 lanes, for a row of 531 elements:

    lead = row * 531 % 8                                              # of every row of the program
    lane = tl.arange(0, 1024)
    col = lane - lead
    col_inside = col.to(tl.uint32) < 531                              # the row's own elements
    in_words = lane < (lead + 538) // 8 * 8                           # and the words in which they lie
    whole_words = (lane >= (lead + 7) // 8 * 8) & (lane < (lead + 531) // 8 * 8)
    begin = row * 531 // 8 * 8                                        # the word in which the row begins
    x = tl.load(in0_ptr + begin + lane, mask=in_words, other=0)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from fusion_compiler.codegen.expression import convert
from fusion_compiler.codegen.rows import RowEmitter
from fusion_compiler.codegen.tile import If, Statement
from fusion_compiler.codegen.tile import Store as StoreStatement
from fusion_compiler.codegen.values import Tile
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS, Index, Load, Store, axes_in
from fusion_compiler.ops.syntax import Expression, fm, lift, plus, tl
from fusion_compiler.schedule.placed_axes import placed
from fusion_compiler.schedule.placement import Leaf, Place
from fusion_compiler.schedule.shapes import WORD


class AlignedRowEmitter(RowEmitter):
    """Emits a nest whose placement aligns the columns."""

    @property
    def width(self) -> int:
        size = self.a.size(COLS)
        assert isinstance(size, int)
        return size

    @property
    def word(self) -> int:
        return self.placement.word

    @property
    def pairs(self) -> Mapping[int, int]:
        return {}

    def run_length(self, node: Load) -> int:
        return 1

    def cut(self, loop: Leaf) -> tuple[int, int, int]:
        """Return the blocks of a loop that lie inside the row behind its first word, the columns of the last
        block, which has both ends of the row, and the lanes that it needs."""
        lanes = self.lanes[-1].lanes
        blocks = (self.width - self.word) // lanes
        rest = self.width - blocks * lanes
        return blocks, rest, rest + self.word - 1

    # -- lanes ---------------------------------------------------------------------------------------------

    def lead(self) -> Expression:
        """Return how many elements of a word lie before the row. It is the same for all rows of a program,
        and nothing if one program has all rows, each of which is whole words."""
        leaves = placed(self.where.of_axes(axes_in(self.loops.axes, (ROWS,))), Place.GRID)
        if not leaves:
            return lift(0)
        with self.in_scope(0):
            lead = self.element(leaves[0]).value * self.width % self.word
            return self.let("lead", lead.to(torch.int32) if self.wide else lead)

    def name_of(self, lanes: Leaf) -> str:
        """Return the name of the variable that numbers lanes: those of a whole row begin with its word."""
        is_whole_row = lanes == self.lanes[-1] and not placed(self.where.of_axes(self.columns), Place.LOOP)
        return "lane" if is_whole_row else super().name_of(lanes)

    def lane(self) -> Tile:
        """Return the numbers of lanes, counted from the word in which the row begins."""
        leaves = self.where.outermost(max(self.columns))
        loops = placed(leaves, Place.LOOP)
        if not loops:
            lane = super().position("lane", leaves)
            assert lane is not None
            return lane
        start, lanes = self.first_column(), self.element(self.lanes[-1])
        value = plus(start, self.word, lanes.value)
        if self.hidden is not None:  # both ends of the row
            value = lanes.value + tl.where(lanes.value < self.word, 0, start)
        with self.in_scope(self.home(leaves)):
            return self.joined(self.let("lane", value), lanes)

    def position(self, name: str, leaves: Iterable[Leaf], unit: int = 1) -> Tile | None:
        leaves = list(leaves)
        if not leaves or not leaves[0].members & self.columns:
            return super().position(name, leaves, unit)
        lane, lead = self.lane(), self.lead()
        with self.in_scope(self.home(leaves)):
            return self.joined(self.let(name, lane.value - lead), lane)

    def inside(self, axes: frozenset[int]) -> Tile | None:
        rest = super().inside(axes - self.columns)
        if self.is_whole or not axes & self.columns:
            return rest
        (axis,) = {self.where.fused.get(k, k) for k in self.columns}
        col = self.position(self.where.axes[axis].name, self.where.leaves[axis])
        assert col is not None
        value = col.value.to(tl.uint32) < self.width  # a negative number is a large unsigned one
        inside = self.joined(self.let("col_inside", value), col)
        return inside if rest is None else self.joined(rest.value & inside.value, rest, inside)

    def masks(self, load: Load, axis: int) -> bool:
        """True if a load is zero outside of an axis: words have elements of what lies beside."""
        moves_words = self.moves_words(load.index, load.within) or self.shifts(load)
        return not (axis in self.columns and moves_words) and super().masks(load, axis)

    # -- accesses ------------------------------------------------------------------------------------------

    def moves_words(self, index: Index, within: int | None) -> bool:
        """True if an access moves whole words of a row."""
        return within is None and self.a.lies_in_rows(index)

    def address(self, buffer: str, index: Index) -> Tile:
        """Return the addresses of the lanes' elements of a row."""
        number, begin, lane = self.row_number(), None, self.lane()
        if number is not None:
            with self.in_scope(self.home(self.where.of_axes(axes_in(self.loops.axes, (ROWS,))))):
                begin = self.let("begin", number.value * self.width // self.word * self.word)
        return self.joined(plus(self.pointers[buffer], begin, lane.value, index.const or None), lane)

    def loaded(self, node: Load, as_held: bool = False) -> Tile:
        held = self.dtypes[node.buffer]
        if node.buffer in self.empty or not (self.moves_words(node.index, node.within) or self.shifts(node)):
            return super().loaded(node, as_held)
        if self.shifts(node):
            pointer = plus(self.pointers[node.buffer], node.index.const or None)
            first, lanes, lead = self.first_column(), self.lanes[-1].lanes, self.lead()
            if self.is_whole:
                value = fm.load_behind(pointer, plus(first, WORD), lead, lanes)
            else:
                value = fm.load_behind(pointer, first, lead, lanes, self.width)[None, :]
            tile = Tile(value, frozenset({self.lanes[-1]}), True)
        else:
            tile = self.address(node.buffer, node.index)
            mask = None
            if not self.is_whole:
                end = (self.lead() + (self.width + self.word - 1)) // self.word * self.word
                mask = self.of_rows(self.let("in_words", self.lane().value < end))
            tile = self.joined(self.load_at(node, tile.value, mask), tile)
        return tile if as_held else self.joined(convert(tile.value, held, node.dtype), tile)

    def shifts(self, node: Load) -> bool:
        """True if a load is shared by all rows, so that its words are not those of a row.

        If the block lies inside the row, whole words are loaded and shifted by the lead. The same holds for
        tiles of several rows, whose layout would otherwise suit loads of single elements.
        """
        is_plain = node.within is None and self.a.lies_along_cols(node.index)
        suits = (self.is_whole and self.word == WORD) or self.keeps
        return is_plain and suits and self.dtypes[node.buffer].itemsize in (2, 4)

    def columns_between(self, first: Expression, end: Expression) -> Expression:
        if placed(self.where.of_axes(self.columns), Place.LOOP):
            return super().columns_between(first, end)
        count = tl.minimum(end - self.lead(), self.width) - tl.maximum(first - self.lead(), 0)
        return tl.maximum(count, 0)

    def count(self) -> Expression:
        if self.is_whole or self.hidden is not None:
            return super().count()
        first, lanes, lead = self.first_column(), self.lanes[-1].lanes, self.lead()
        return tl.minimum(first + lanes - lead, self.width) - tl.maximum(first - lead, 0)

    def store(self, store: Store) -> None:
        """Store whole words, and one by one the row's elements in the words at its ends."""
        if not self.moves_words(store.index, store.within):
            super().store(store)
            return
        value, target, number = self.tile(store.value), self.address(store.buffer, store.index), store.value
        if self.is_whole:
            self.add(StoreStatement(target.value, value.value, None, number))
            return
        lane, lead, word = self.lane().value, self.lead(), self.word
        first, end = (lead + (word - 1)) // word * word, (lead + self.width) // word * word
        whole_words = self.let("whole_words", (lane >= first) & (lane < end))
        inside = self.inside(self.columns)
        assert inside is not None
        self.add(StoreStatement(target.value, value.value, self.of_rows(whole_words), number))
        mask = self.of_rows(inside.value ^ whole_words)
        ends: Statement = StoreStatement(target.value, value.value, mask, number)
        if (at_an_end := self.is_at_an_end()) is not None:
            ends = If(at_an_end, [ends])
        self.add(ends)

    def of_rows(self, mask: Expression) -> Expression:
        """Return a mask of lanes, for the rows that exist."""
        rows = super().inside(axes_in(self.loops.axes, (ROWS,)))
        return mask if rows is None else rows.value & mask

    def is_at_an_end(self) -> Expression | None:
        """Return the condition that a block has an end of its row; None if every block has one.

        In a loop over rows it is None: Triton puts a branch after the loads of the next rows, and the tile
        would stay in registers until then.
        """
        if self.shared is not None:
            rows = placed(self.where.of_axes(axes_in(self.loops.axes, (ROWS,))), Place.LOOP)
            part, last = self.element(self.shared).value, hint(self.shared.extent) - 1
            return None if rows or self.ends else part.eq(0) | part.eq(last)
        leaves = self.where.outermost(max(self.columns))
        grid = [leaf for leaf in placed(leaves, Place.GRID) if leaf.extent != 1]
        if not grid:
            return None
        first = self.element(grid[0]).value * grid[0].step
        return first.eq(0) | (first + self.lanes[-1].lanes >= self.width)
