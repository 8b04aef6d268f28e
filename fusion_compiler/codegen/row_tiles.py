"""Tiles of a nest of rows and columns under a placement: what a block holds, loads and stores."""


from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from fusion_compiler.codegen import monoids
from fusion_compiler.codegen.expression import computed, convert
from fusion_compiler.codegen.kept_tiles import KEPT, KeptTiles
from fusion_compiler.codegen.tile import Assign
from fusion_compiler.codegen.tile import Store as StoreStatement
from fusion_compiler.codegen.values import PlacedNest, Tile
from fusion_compiler.ir.dims import hint, product
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Compute,
    Index,
    Load,
    Reduce,
    Scan,
    Store,
    Value,
    axes_in,
    is_applied,
    right_neighbours,
)
from fusion_compiler.ir.moments import HALVES
from fusion_compiler.ops.arithmetic import DIV
from fusion_compiler.ops.syntax import Expression, Items, Literal, Name, Var, lift, tl
from fusion_compiler.schedule.placed_axes import placed
from fusion_compiler.schedule.placement import Leaf, Place


class RowTiles(KeptTiles):
    """Tiles of a nest of rows and columns."""

    def __init__(self, nest: PlacedNest) -> None:
        super().__init__(nest)
        self.plain_maxima = self.a.nan_safe_max
        self.halves = {name for name, dtype in self.dtypes.items() if str(dtype) in HALVES}
        self.means = {mean: total for total, mean in self.a.moments.values()}
        self.scaled: dict[int, float] = {}  # sum -> the number that its terms were multiplied by
        self.columns = axes_in(self.loops.axes, (COLS,))
        self.shared = next((leaf for leaf in self.where.grid if leaf.place is Place.SHARED), None)
        self.sums: dict[int, Tile] = {}  # over rows: their accumulators
        self.pending: list[int] = []  # sums over rows to which the open block is not added yet
        self.true = frozenset[int]()  # conditions that hold in the open block
        self.in_one_row = False  # values of a row are scalars, whatever tiles are
        self.carried: dict[int, Var] = {}  # scan -> its value after the blocks of a loop so far
        self.block_depth = 0  # of the block of rows that passes compute
        self.is_last_pass = True
        self.is_whole = False  # the open block lies within the row
        self.rest = 0  # columns of the last block
        self.hidden: Leaf | None = None  # the innermost lanes of all blocks but the last, which is open

    def lanes_of_state(self, node: Reduce) -> frozenset[Leaf]:
        """Return the lanes of an accumulator. It has none for rows if the columns alone occupy all threads,
        as where programs share rows: the sum of each block is added to it."""
        lanes = super().lanes_of_state(node)
        return lanes & {self.lanes[-1]} if self.adds_blocks(node) else lanes

    def adds_blocks(self, node: Reduce) -> bool:
        """True if the sum of each block is added to an accumulator without lanes for rows."""
        is_over_rows = bool(node.axes - self.columns)
        return is_over_rows and self.shared is not None

    def lanes_of(self, number: int) -> frozenset[Leaf]:
        """Return the lanes that a node's tile has in the open block."""
        lanes = (self.lanes[-1] if leaf == self.hidden else leaf for leaf in self.depends[number])
        return frozenset(lanes) & {*self.lanes}

    def home(self, leaves: Collection[Leaf]) -> int:
        return super().home(leaves) if self.hidden is None else self.depth

    def block_of(self, number: int) -> int:
        least = min(self.block_depth, self.depth) if self.a.level[number] else 0
        return max(super().block_of(number), least)

    def cached(self, number: int) -> Tile | None:
        """Return a tile that is there; in a last block none that has the lanes of the others."""
        key = self.key(number)
        for scope in self.scopes[: self.depth + 1]:
            tile = scope.tiles.get(key)
            if tile is not None and self.hidden not in tile.lanes:
                return tile
        return None

    def inside(self, axes: frozenset[int]) -> Tile | None:
        return super().inside(axes - self.columns if self.is_whole else axes)

    def literal(self, number: int) -> float | bool | None:
        return True if number in self.true else super().literal(number)

    def options(self, node: Load) -> Mapping[str, Expression]:
        """Return keyword arguments of a load: a pass that is not the last one keeps the row in the cache."""
        varies, columns = self.where.of_index(node.index), self.where.of_axes(self.columns)
        if not self.ends or not varies & columns or not varies - columns:
            return self.load_options
        policy = Literal("evict_first" if self.is_last_pass else "evict_last")
        return {**self.load_options, "eviction_policy": policy}

    # -- what carried reductions ask -------------------------------------------------------------------

    @property
    def last(self) -> int:
        """Return the dimension of a tile along the columns."""
        return 0 if self.in_one_row else len(self.lanes) - 1

    @property
    def keeps(self) -> bool:
        """True if tiles have several dimensions, which reductions keep."""
        return len(self.lanes) > 1 and not self.in_one_row

    def along(self, function: Callable[..., Expression], value: Expression) -> Expression:
        """Apply a reduction along the columns."""
        return function(value, axis=self.last, keep_dims=True) if self.keeps else function(value, axis=0)

    def elements_of(self, number: int) -> Expression:
        """Return the operand of a reduction along the columns, neutral where there is none."""
        term = self.term(number, self.reduction(number))
        if term is None:
            return tl.full(self.shape(frozenset({self.lanes[-1]})), 0, self.reduction(number).dtype)
        return term.value if isinstance(term.value, Var) else self.let("x", term.value)

    def row_number(self) -> Tile | None:
        """Return the numbers of the block's rows, or None if there is just one."""
        rows = {self.where.fused.get(k, k) for k in axes_in(self.loops.axes, (ROWS,))}
        return self.coordinate(rows.pop())[0] if rows else None

    def variable_of(self, tile: Tile) -> Var:
        assert isinstance(tile.value, Var)
        return tile.value

    def shape_of_rows(self, operand: int) -> Items:
        """Return the shape of one value for each row of a node's tile."""
        rows = frozenset(leaf for leaf in self.lanes[:-1] if leaf in self.depends[operand])
        return self.shape(rows) if self.keeps else Items(())

    def column_mask(self) -> Expression | None:
        """Return which of a block's columns exist, or None if all do."""
        mask = self.inside(self.columns)
        return None if mask is None else mask.value

    def seen(self) -> Expression:
        """Return the number of columns in the program's blocks before this one."""
        loops = placed(self.where.of_axes(self.columns), Place.LOOP)
        return self.sum_of([(self.element(leaf), self.where.step_of(leaf)) for leaf in loops])

    def first_column(self) -> Expression:
        """Return the first column of the block."""
        return self.sum_of(self.first_parts())

    def first_parts(self, unit: int = 1) -> list[tuple[Tile, int]]:
        """Return the parts of the block's first column, as `part` does."""
        loops = placed(self.where.of_axes(self.columns), Place.LOOP)
        return [self.part(leaf, unit) for leaf in (self.shared, *loops) if leaf is not None]

    def counts_of_parts(self) -> Expression:
        """Return the number of columns of each program's part of a row, as float32."""
        assert self.shared is not None
        first = Name("parts") * self.shared.step
        return self.columns_between(first, first + self.shared.step).to(torch.float32)

    def columns_between(self, first: Expression, end: Expression) -> Expression:
        return tl.maximum(tl.minimum(end, self.a.size(COLS)) - first, 0)

    def count(self) -> Expression:
        """Return the number of columns of this block."""
        lanes, size = self.lanes[-1].lanes, self.a.size(COLS)
        if self.column_mask() is None:
            return lift(lanes)
        if self.hidden is not None:
            return lift(self.rest)
        return tl.minimum(self.first_column() + lanes, size) - self.first_column()

    # -- values ----------------------------------------------------------------------------------------

    def emitted(self, number: int) -> Tile:
        node = self.loops.nodes[number]
        if isinstance(node, Load) and self.is_kept(number, node):
            return super().emitted(number)
        pair = next((pair for pair in self.pairs.items() if number in pair), None)
        if isinstance(node, Load) and pair is not None and node.buffer not in self.empty:
            self.load_pair(*pair)
            return self.scopes[self.depth].tiles[self.key(number)]
        return self.scanned(number, node) if isinstance(node, Scan) else super().emitted(number)

    def computed(self, number: int, node: Compute) -> Tile:
        total = self.means.get(number)
        if total not in self.scaled:
            return super().computed(number, node)
        count = self.scaled[total] * hint(self.a.size(COLS))  # float32 represents this fraction exactly
        divisor = count if is_applied(node, DIV) else 1 / count
        node = replace(node, operands=(("self", Value(total)), ("other", divisor)))
        tile = self.tile(total)
        return replace(tile, value=computed(node, lambda n: (tile.value, self.loops.nodes[n].dtype)))

    def scanned(self, number: int, node: Scan) -> Tile:
        """Return a scan of the tile. In a loop it continues the scan of the block before."""
        source, tile = self.loops.nodes[node.operand], self.typed(node.operand)
        value = convert(tile.value, source.dtype, node.dtype)
        lanes, mask = tile.lanes | {self.lanes[-1]}, self.inside(self.columns)
        if tile.lanes != lanes:
            value = tl.broadcast_to(value, self.shape(lanes))
        if mask is not None:
            value = tl.where(mask.value, value, monoids.neutral(node))
        value = monoids.scan(node, value, self.last)
        carried = self.carried.get(number)
        if carried is not None:
            value = monoids.carry(node, carried, value)
        running = self.let(f"running_{node.combine}", value, number)
        if carried is not None:
            last = 0 if node.reverse else self.lanes[-1].lanes - 1
            is_last = self.element(self.lanes[-1]).value.eq(last)
            self.add(Assign((carried,), self.along(tl.sum, tl.where(is_last, running, 0))))
        return Tile(running, lanes, True)

    # -- neighbours ----------------------------------------------------------------------------------------
    #
    # Separate accesses to every other element of a row, and then to those between, would touch each sector
    # twice and move two bytes at a time. One access to twice the columns moves whole words:
    #
    #     x, y = tl.split(tl.load(in0_ptr + pair).reshape(1024, 2))
    #     tl.store(out0_ptr + pair, tl.interleave(x, y))

    @property
    def pairs(self) -> Mapping[int, int]:
        """Return the loads of every other element, each with the load of the elements between."""
        return self.a.pairs

    def store_all(self, stores: Sequence[Store]) -> None:
        """Emit stores, of neighbours together."""
        pairs = right_neighbours(self.loops.axes, enumerate(stores)) if not self.placement.word else {}
        pairs = {n: m for n, m in pairs.items() if self.dtypes[stores[n].buffer] is not torch.bool}
        for n, store in enumerate(stores):
            if n in pairs:
                self.store_pair(store, stores[pairs[n]])
            elif n not in pairs.values():
                self.store(store)

    @contextmanager
    def doubled(self) -> Generator[None]:
        """Emit accesses to twice as many columns."""
        before, lanes, last = self.where, self.lanes[-1], max(self.columns)
        names = {last, before.fused.get(last, last)}
        axes = tuple(
            replace(axis, name="pair", size=product((axis.size, 2))) if k in names else axis
            for k, axis in enumerate(before.axes)
        )
        wide = {leaf: leaf._replace(step=2 * leaf.step) for leaf in before.outermost(last)}
        name = "pair_i" if self.hidden is None else "pair_rest"
        wide[lanes] = lanes._replace(name=name, extent=2 * lanes.lanes)
        self.where = replace(before.with_leaves(wide), axes=axes)
        yield
        self.where = before

    def index_of_pair(self, index: Index) -> Index:
        last = max(self.columns)
        return Index(index.const, tuple((k, 1 if k == last else c) for k, c in index.terms))

    def load_pair(self, left: int, right: int) -> None:
        """Emit two loads as one of twice the columns."""
        node = self.loops.nodes[left]
        assert isinstance(node, Load)
        lanes = self.where.of_index(node.index) & {*self.lanes}
        shape = self.shape(lanes).items
        with self.doubled():
            tile = self.loaded(replace(node, index=self.index_of_pair(node.index)), as_held=True)
        value = convert(tile.value.reshape(*shape, 2), self.dtypes[node.buffer], node.dtype)
        variables = Var(self.called(node.buffer)), Var(self.called(node.buffer))
        self.add(Assign(variables, tl.split(value), left))
        for n, variable in zip((left, right), variables, strict=True):
            self.scopes[self.depth].tiles[self.key(n)] = Tile(variable, lanes, True)

    def store_pair(self, left: Store, right: Store) -> None:
        """Emit two stores as one."""
        lanes, values = self.where.of_index(left.index) & {*self.lanes}, list[Expression]()
        for number in (left.value, right.value):
            tile = self.typed(number)
            value = convert(tile.value, self.loops.nodes[number].dtype, self.dtypes[left.buffer])
            values.append(value if tile.lanes >= lanes else tl.broadcast_to(value, self.shape(lanes)))
        with self.doubled():
            axes = frozenset(k for k, _ in left.index.terms if k >= 0)
            place = self.index(self.index_of_pair(left.index))
            pointer, mask = self.access(left.buffer, place, axes, ())
        self.add(StoreStatement(pointer.value, tl.interleave(*values), None if mask is None else mask.value))

    # -- what programs that wait for each other keep ---------------------------------------------------

    def is_kept(self, number: int, node: Load) -> bool:
        """True if a tile of a row stays in registers as it was loaded."""
        in_tile = self.shared is not None and not placed(self.where.of_axes(self.columns), Place.LOOP)
        is_full = self.is_full(number) and self.lanes[-1] in self.depends[number]
        return in_tile and is_full and self.dtypes[node.buffer] in KEPT and node.buffer not in self.empty

    def compute_again(self, wanted: Sequence[int]) -> None:
        super().compute_again([*wanted, *(self.reduction(n).operand for n in self.pending)])

    def is_full(self, number: int) -> bool:
        return self.a.groups[number] == frozenset({ROWS, COLS})
