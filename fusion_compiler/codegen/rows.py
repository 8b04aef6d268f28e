"""Tile programs of nests of rows and columns under a placement: one block of rows, or a loop over blocks.

Whole rows lie in the lanes, or a loop goes over blocks of their columns. A program of several blocks of rows
keeps the sums over rows in accumulators. Where several programs share such a sum, each stores its part for
the second stage (`codegen.finishing`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from fusion_compiler.codegen import monoids
from fusion_compiler.codegen.carried import State, states_of
from fusion_compiler.codegen.exchange_rows import exchange
from fusion_compiler.codegen.expression import computed, convert
from fusion_compiler.codegen.finishing import SecondStage
from fusion_compiler.codegen.moments import is_exact, operands, scale_of
from fusion_compiler.codegen.placed import Emitter, Scope, Tile
from fusion_compiler.codegen.split_reductions import Partial
from fusion_compiler.codegen.tile import Assign, If, Statement
from fusion_compiler.codegen.tile import Store as StoreStatement
from fusion_compiler.ir.dims import Dim, hint, product
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Compute,
    Constant,
    Index,
    Load,
    Node,
    Reduce,
    Scan,
    Store,
    Value,
    axes_in,
    operands_of,
    right_neighbours,
    store_operands,
)
from fusion_compiler.ir.ops import spec_of
from fusion_compiler.ir.syntax import Expression, Items, Literal, Name, Var, fm, lift, tl
from fusion_compiler.schedule.analysis import Analysis, waiting
from fusion_compiler.schedule.placement import Leaf, Place, Placement
from fusion_compiler.schedule.shapes import padded

aten = torch.ops.aten
KEPT = (torch.float16, torch.bfloat16, torch.float32)  # dtypes of tiles that may stay as they were loaded


class RowEmitter(Emitter):
    """Emits a nest of rows and columns. load_options: keyword arguments of every load."""

    def __init__(
        self,
        analysis: Analysis,
        placement: Placement,
        pointers: Mapping[str, Name],
        dtypes: Mapping[str, torch.dtype],
        empty: frozenset[str],
        load_options: Mapping[str, Expression],
    ) -> None:
        super().__init__(analysis, placement, pointers, dtypes, empty)
        self.load_options, self.plain_maxima = load_options, analysis.nan_safe_max
        self.means = {mean: total for total, mean in analysis.moments.values()}
        self.scaled: dict[int, float] = {}  # sum -> the number that its terms were multiplied by
        self.columns = axes_in(self.loops.axes, (COLS,))
        self.shared = next((leaf for leaf in self.grid if leaf.place is Place.SHARED), None)
        self.sums: dict[int, Tile] = {}  # over rows: their accumulators
        self.pending: list[int] = []  # sums over rows to which the open block is not added yet
        self.kept: dict[int, Var] = {}  # load -> its tile in the dtype of the buffer
        self.in_one_row = False  # values of a row are scalars, whatever tiles are
        self.carried: dict[int, Var] = {}  # scan -> its value after the blocks of a loop so far
        self.is_last_pass = True
        self.is_whole = False  # the open block lies within the row
        self.rest = 0  # columns of the last block
        self.hidden: Leaf | None = None  # the innermost lanes of all blocks but the last, which is open

    def rows_program(
        self, number: Expression, second: SecondStage | None
    ) -> tuple[list[Statement], tuple[Dim, ...]]:
        """Return the statements of the program with this number, and the grid. second: the stage that adds up
        the partial results of programs."""
        self.place_grid(number)
        main = [store for store in self.loops.stores if store.value not in self.a.finish]
        stored = (o for store in self.loops.stores for o in store_operands(store))
        self.wanted = [*self.a.across_rows, *stored]
        rows = self.of_axes(axes_in(self.loops.axes, (ROWS,)))
        sums = {n: self.reduction(n) for n in self.a.across_rows}
        if loops := self.loops_of(rows):
            self.sums = {n: self.started(n) for n in sums}
            with self.inside_loops(loops):
                self.pending = list(sums)
                self.block(main)
                self.add_block(len(self.loops.nodes))
            for n, node in sums.items():
                self.scopes[0].tiles[self.key(n)] = self.folded(n, node, self.sums[n])
        else:
            self.block(main)
        if second is None:
            self.finish()
        else:
            leaves = tuple(leaf for leaf in self.placed(rows, Place.GRID) if leaf.extent != 1)
            columns = tuple(sorted(self.columns))
            for n, buffer in zip(sums, second.partials, strict=True):
                axes = columns if COLS in self.a.groups[n] else ()
                self.store_partial(n, Partial(buffer, axes, leaves))
        return self.scopes[0].body, (product(leaf.extent for leaf in self.grid),)

    def compute(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.tile(number)

    def reduction(self, number: int) -> Reduce:
        node = self.loops.nodes[number]
        assert isinstance(node, Reduce)
        return node

    def lanes_of_state(self, node: Reduce) -> frozenset[Leaf]:
        """Return the lanes of an accumulator. Where programs share rows, the columns alone occupy all
        threads: it has none for rows, and the sum of each block is added to it."""
        lanes = super().lanes_of_state(node)
        is_over_rows = bool(node.axes - self.columns)
        return lanes & {self.lanes[-1]} if self.shared is not None and is_over_rows else lanes

    def add_block(self, level: int) -> None:
        """Add the open block to the sums over rows whose terms are complete after so many passes."""
        for n in [n for n in self.pending if self.a.level[n] <= level]:
            self.pending.remove(n)
            node, state = self.reduction(n), self.sums[n].value
            term = self.term(n, node)
            assert isinstance(state, Var)
            if term is not None:
                value = term.value
                if self.shared is not None and self.keeps:
                    value = monoids.fold(node, value, 0, keep=True)
                    value = value.to(torch.int32) if monoids.is_logical(node) else value
                self.add(monoids.step(node, state, value))

    def block(self, stores: Sequence[Store]) -> None:
        """Emit one block of rows: the values and stores, and the terms of sums over rows."""
        loops = self.loops_of(self.of_axes(self.columns))
        if loops or self.shared is not None:
            self.passes(stores, loops[0] if loops else None)
            return
        terms = [self.reduction(n).operand for n in self.a.across_rows]
        needed = self.needed_by([*(o for store in stores for o in self.read_by(store)), *terms])
        of_rows = (n for n in needed if not self.depends[n] & {*self.lanes[-1:]} and not self.a.level[n])
        first = sorted(of_rows) if self.placement.num_stages == 1 else ()
        in_pairs = {n for pair in self.pairs.items() for n in pair}
        if in_pairs:  # Triton computes in the layout of the last load: others go through shared memory
            nodes = self.loops.nodes
            plain = (n for n in needed if isinstance(nodes[n], Load) and not operands_of(nodes[n]))
            first = (*first, *sorted(n for n in plain if n not in in_pairs))
        self.compute((*first, *sorted(needed)))
        self.store_all(stores)

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

    # -- neighbours ----------------------------------------------------------------------------------------
    #
    # Separate accesses to every other element of a row, and then to those between, would touch each sector
    # twice and move two bytes at a time. One access to twice the columns moves whole words:
    #
    #     x, y = tl.split(tl.load(in0_ptr + pair).reshape(1024, 2))
    #     tl.store(out0_ptr + pair, tl.interleave(x, y))

    @contextmanager
    def doubled(self) -> Generator[None]:
        """Emit accesses to twice as many columns."""
        axes, lanes, leaves = self.axes, self.lanes, self.leaves
        last = len(self.loops.axes) - 1
        whole = {last, self.fused.get(last, last)}
        self.axes = tuple(
            replace(axis, name="pair", size=product((axis.size, 2))) if k in whole else axis
            for k, axis in enumerate(axes)
        )
        wide = {leaf: replace(leaf, step=2 * leaf.step) for leaf in leaves[self.fused.get(last, last)]}
        wide[lanes[-1]] = replace(lanes[-1], name="pair_i", extent=2 * lanes[-1].lanes)
        self.lanes = [wide.get(leaf, leaf) for leaf in lanes]
        self.leaves = {k: [wide.get(leaf, leaf) for leaf in of_axis] for k, of_axis in leaves.items()}
        yield
        self.axes, self.lanes, self.leaves = axes, lanes, leaves

    def index_of_pair(self, index: Index) -> Index:
        last = len(self.loops.axes) - 1
        return Index(index.const, tuple((k, 1 if k == last else c) for k, c in index.terms))

    def load_pair(self, left: int, right: int) -> None:
        """Emit two loads as one of twice the columns."""
        node, lanes = self.loops.nodes[left], frozenset(self.lanes) & self.depends[left]
        assert isinstance(node, Load)
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
        lanes, values = self.of_index(left.index) & {*self.lanes}, list[Expression]()
        for number in (left.value, right.value):
            tile, node = self.tile(number), self.loops.nodes[number]
            value = tl.full([], tile.value, node.dtype) if isinstance(node, Constant) else tile.value
            value = convert(value, node.dtype, self.dtypes[left.buffer])
            values.append(value if tile.lanes >= lanes else tl.broadcast_to(value, self.shape(lanes)))
        with self.doubled():
            axes = frozenset(k for k, _ in left.index.terms if k >= 0)
            place = self.index(self.index_of_pair(left.index))
            pointer, mask = self.access(left.buffer, place, axes, ())
        self.add(StoreStatement(pointer.value, tl.interleave(*values), None if mask is None else mask.value))

    # -- what programs that wait for each other keep ---------------------------------------------------

    def is_kept(self, number: int, node: Load) -> bool:
        """True if a tile stays in registers as it was loaded, while programs wait for each other. What was
        computed from it is computed again, which leaves room for more programs."""
        in_tile = self.shared is not None and not self.loops_of(self.of_axes(self.columns))
        is_full = self.a.groups[number] == frozenset({ROWS, COLS})
        return in_tile and is_full and self.dtypes[node.buffer] in KEPT and node.buffer not in self.empty

    def compute_again(self, wanted: Sequence[int]) -> None:
        """Forget tiles before `wanted` is computed, so that they are computed from loaded ones again. Tiles
        that it reads and that took special functions are kept."""
        if not self.kept:
            return
        terms = [self.reduction(n).operand for n in self.pending]
        read = {o for n in self.needed_by([*wanted, *terms]) for o in operands_of(self.loops.nodes[n])}
        tiles = self.scopes[self.depth].tiles
        for n, node in enumerate(self.loops.nodes):
            tile = tiles.get(self.key(n))
            if tile is not None and n in self.kept and isinstance(node, Load):
                value = convert(fm.again(self.kept[n]), self.dtypes[node.buffer], node.dtype)
                tiles[self.key(n)] = replace(tile, value=self.state(self.called(node.buffer), value, n))
            elif tile is not None and isinstance(node, Compute) and self.is_full(n):
                if n not in read or not self.takes_long(n):
                    del tiles[self.key(n)]

    def is_full(self, number: int) -> bool:
        return self.a.groups[number] == frozenset({ROWS, COLS})

    def takes_long(self, number: int) -> bool:
        """True if computing a tile from loaded values takes special functions."""
        node = self.loops.nodes[number]
        if not isinstance(node, Compute) or not self.is_full(number):
            return False
        spec = spec_of(node.target)
        return spec is None or spec.special > 0 or any(map(self.takes_long, operands_of(node)))

    def made(self, number: int) -> Tile:
        node = self.loops.nodes[number]
        if isinstance(node, Load) and self.is_kept(number, node):
            tile = self.loaded(node, as_held=True)
            self.kept[number] = self.let(f"{self.called(node.buffer)}_loaded", tile.value)
            value = convert(self.kept[number], self.dtypes[node.buffer], node.dtype)
            base = self.called(node.buffer)
            return replace(tile, value=value if isinstance(value, Var) else self.let(base, value, number))
        pair = next((pair for pair in self.pairs.items() if number in pair), None)
        if isinstance(node, Load) and pair is not None and node.buffer not in self.empty:
            self.load_pair(*pair)
            return self.scopes[self.depth].tiles[self.key(number)]
        return self.scanned(number, node) if isinstance(node, Scan) else super().made(number)

    def scanned(self, number: int, node: Scan) -> Tile:
        """Return a scan of the tile. In a loop it continues the scan of the block before."""
        source, tile = self.loops.nodes[node.operand], self.tile(node.operand)
        value = convert(tile.value, source.dtype, node.dtype)
        lanes, mask = tile.lanes | {self.lanes[-1]}, self.inside(self.columns)
        if tile.lanes != lanes or isinstance(source, Constant):
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

    def passes(self, stores: Sequence[Store], loop: Leaf | None) -> None:
        """Emit one block of rows in passes over its columns. Each level of reductions that depend on each
        other takes one, and a store is made as soon as its value is complete."""
        level, reductions = self.a.level, [n for n in self.a.reductions if n not in self.a.finish]
        full = [s for s in stores if self.of_index(s.index) & self.of_axes(self.columns)]
        of_row = [s for s in stores if s not in full]
        if self.placement.num_stages == 1:
            needed = sorted(self.needed_by(o for s in of_row for o in self.read_by(s)))
            self.compute(n for n in needed if not level[n] and COLS not in self.a.groups[n])
        last = max([*(level[n] for n in reductions), *(level[s.value] + 1 for s in full)], default=0) - 1
        for number in range(last + 1):
            self.is_last_pass = number == last
            states = states_of(self, [n for n in reductions if level[n] == number + 1])
            writes = [s for s in full if level[s.value] == number]
            if not states and not writes:
                continue
            values = self.one_tile(states, writes) if loop is None else self.one_pass(states, writes, loop)
            if states and self.shared is not None:
                exchange(self, self.shared, states, values)
                self.compute_again([o for s in stores for o in self.read_by(s)])
            for state, variables in zip(states, values, strict=True):
                for n, value in state.results(self, variables).items():
                    tile = Tile(value, self.depends[n] & {*self.lanes}, self.keeps)
                    self.scopes[self.depth].tiles[self.key(n)] = tile
        self.store_all(of_row)

    def needed_in_pass(self, states: Sequence[State], stores: Sequence[Store]) -> list[int]:
        """Return the nodes that a pass needs, those of rows computed."""
        wanted = [self.reduction(state.numbers[0]).operand for state in states]
        needed = sorted(self.needed_by([*wanted, *(o for s in stores for o in self.read_by(s))]))
        columns = self.of_axes(self.columns)
        self.compute(n for n in needed if not self.depends[n] & columns)
        return needed

    def one_tile(self, states: Sequence[State], stores: Sequence[Store]) -> list[tuple[Var, ...]]:
        """Emit a pass over a tile that holds the program's part of the rows; return the states."""
        self.compute(self.needed_in_pass(states, stores))
        self.add_block(max((self.a.level[n] for state in states for n in state.numbers), default=1) - 1)
        values = [state.single(self) for state in states]
        self.store_all(stores)
        return values

    def one_pass(
        self, states: Sequence[State], stores: Sequence[Store], loop: Leaf
    ) -> list[tuple[Var, ...]]:
        """Emit a loop over whole blocks of columns, then the rest in a block of as few lanes as it needs;
        return the states."""
        needed = self.needed_in_pass(states, stores)
        size, lanes = self.a.size(COLS), self.lanes[-1].lanes
        is_reverse = True in self.a.directions
        blocks, self.rest, rest_lanes = loop.extent, 0, 0
        is_cut = isinstance(size, int) and size > lanes and not is_reverse
        if is_reverse:  # the last block comes first
            self.fixed_numbers[loop.name] = lift(blocks) - 1 - self.number_in(loop)
        if is_cut:
            blocks, self.rest, rest_lanes = self.cut(loop)
        values = [state.start(self) for state in states]
        for n in needed:
            if isinstance(node := self.loops.nodes[n], Scan):
                shape = self.shape_of_rows(node.operand)
                self.carried[n] = self.state("carried", tl.full(shape, monoids.neutral(node), node.dtype))

        def block(add: Callable[[State, Sequence[Var]], None]) -> None:
            self.compute(needed)
            for state, variables in zip(states, values, strict=True):
                add(state, variables)
            self.store_all(stores)

        self.ends[loop.name], self.is_whole = self.end_of(loop, blocks), is_cut
        with self.inside_loops([loop]):
            block(lambda state, variables: state.step(self, variables))
        self.is_whole = False
        for state, variables in zip(states, values, strict=True):
            state.fold(self, variables)
        if rest_lanes:
            with self.last_block(loop, blocks, padded(rest_lanes)):
                block(lambda state, variables: state.end(self, variables))
        return values

    def end_of(self, loop: Leaf, blocks: Dim) -> Dim | Expression:
        """Return where a loop over columns ends. blocks: of all programs that share the row."""
        if self.shared is None or blocks == product((self.shared.extent, loop.extent)):
            return loop.extent if self.shared is not None else blocks
        return tl.minimum(loop.extent, blocks - self.element(self.shared).value * loop.extent)

    def cut(self, loop: Leaf) -> tuple[int, int, int]:
        """Return the whole blocks of a loop over columns, and the columns and lanes that its last block
        needs."""
        blocks, rest = divmod(hint(self.a.size(COLS)), self.lanes[-1].lanes)
        return blocks, rest, rest

    @contextmanager
    def last_block(self, loop: Leaf, number: Dim, lanes: int) -> Generator[None]:
        """Emit the block of a loop with this number, which has fewer lanes, behind the loop."""
        all_lanes, all_leaves, scopes, depth = self.lanes, self.leaves, self.scopes, self.depth
        self.hidden = all_lanes[-1]
        narrow = replace(self.hidden, name=f"{self.hidden.name}_rest", extent=lanes)
        self.lanes = [*all_lanes[:-1], narrow]
        self.leaves = {
            k: [narrow if leaf == all_lanes[-1] else leaf for leaf in leaves]
            for k, leaves in all_leaves.items()
        }
        body, part = scopes[depth].body, 0
        if self.shared is not None:  # one of the programs has it
            part, number = divmod(hint(number), hint(loop.extent))
            body = []
        self.fixed_numbers[loop.name] = lift(number)
        self.scopes, self.depth = [*scopes[: depth + 1], Scope(body, loop)], depth + 1
        yield
        self.lanes, self.leaves, self.scopes, self.depth = all_lanes, all_leaves, scopes, depth
        if self.shared is not None:
            scopes[depth].body.append(If(self.element(self.shared).value.eq(part), body))
        self.hidden = None
        del self.fixed_numbers[loop.name]

    def home(self, leaves: Iterable[Leaf]) -> int:
        return super().home(leaves) if self.hidden is None else self.depth

    def known(self, number: int) -> Tile | None:
        """Return a tile that is there; in a last block none that has the lanes of the others."""
        key = self.key(number)
        tiles = (scope.tiles[key] for scope in self.scopes[: self.depth + 1] if key in scope.tiles)
        return next((tile for tile in tiles if self.hidden not in tile.lanes), None)

    def inside(self, axes: frozenset[int]) -> Tile | None:
        return super().inside(axes - self.columns if self.is_whole else axes)

    def options(self, node: Load) -> Mapping[str, Expression]:
        """Return keyword arguments of a load: a pass that is not the last one keeps the row in the cache."""
        varies, columns = self.of_index(node.index), self.of_axes(self.columns)
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
        loops = self.loops_of(self.of_axes(self.columns))
        return self.element(loops[0]).value * loops[0].step if loops else lift(0)

    def first_column(self) -> Expression:
        """Return the first column of the block."""
        return self.seen() if self.shared is None else self.first_of_part() + self.seen()

    def first_of_part(self) -> Expression:
        assert self.shared is not None
        return self.element(self.shared).value * self.shared.step

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

    def finish(self) -> None:
        """Emit the stores that wait for sums over rows, all of which the program has. Compilers move no load
        over a sum that threads wait for."""
        late = [store for store in self.loops.stores if store.value in self.a.finish]
        needed = self.needed_by(o for store in late for o in self.read_by(store))
        rows = self.of_axes(axes_in(self.loops.axes, (ROWS,)))
        for n in sorted(needed):
            if n not in self.a.finish and not self.depends[n] & rows:
                self.tile(n)
        self.store_all(late)

    def needed_by(self, numbers: Iterable[int]) -> set[int]:
        """Return some nodes and all of which they are computed."""
        needed, stack = set[int](), list(numbers)
        while stack:
            number = stack.pop()
            if number not in needed and self.known(number) is None:
                needed.add(number)
                stack += self.read_by(self.loops.nodes[number])
        return needed

    def read_by(self, access: Node | Store) -> Iterable[int]:
        """Return the nodes that a node or a store reads: of a condition those that are its parts."""
        operands = store_operands(access) if isinstance(access, Store) else operands_of(access)
        if not isinstance(access, Store | Load) or access.within is None:
            return operands
        return (*(n for n in operands if n != access.within), *self.parts(access.within))

    def reduced(self, number: int, node: Reduce) -> Tile:
        """Return a reduction of a tile that has whole rows or all rows (see `codegen.moments`)."""
        if ROWS in self.a.over(number):
            term = self.term(number, node)
            join_key = ("rows", self.a.groups[node.operand]) if self.a.is_sum(number) else None
            return self.folded(number, node, term or self.started(number), f"col_{node.combine}", join_key)
        moment, width = self.a.moments.get(number), self.a.size(COLS)
        if moment is not None and not is_exact(self.loops, self.dtypes, moment[0], width):
            return self.squares(number, node, moment[1])
        term = self.term(number, node)
        if term is None:
            return self.folded(number, node, self.started(number))
        value, mean = term.value, next((m for m, total in self.means.items() if total == number), None)
        base, scale = f"row_{node.combine}", 1.0
        if mean is not None and isinstance(width, int) and width > 1:
            scale = self.scaled[number] = scale_of(width)
            value, base = value * scale, "row_mean" if scale * width == 1 else base
        join_key = (self.a.level[number], self.a.groups[number]) if number in self.a.sums_along else None
        tile = self.folded(number, node, replace(term, value=value), base, join_key)
        if mean is not None and base == "row_mean":
            self.scopes[self.depth].tiles[self.key(mean)] = tile
        return tile

    def squares(self, number: int, node: Reduce, mean: int) -> Tile:
        """Return the sum of squares around a mean, and correct both."""
        middle, scope = self.loops.nodes[mean], self.scopes[self.depth]
        assert isinstance(middle, Compute)
        difference, square = operands(self.loops, number)
        terms = [self.term(number, replace(node, operand=n)) for n in (square, difference)]
        tiles = [term.value for term in terms if term is not None]
        before, axis = self.tile(mean), len(self.lanes) - 1
        squares, rest, corrected = Var("row_sum"), Var("rest"), Var(str(middle.target._opname).lstrip("_"))
        self.add(Assign((squares, rest), fm.sums(*tiles, axis, len(self.lanes) > 1)))
        self.add(Assign((corrected, squares), fm.corrected(before.value, squares, rest, self.a.size(COLS))))
        for dependent in waiting(self.loops, (mean,)):
            scope.tiles.pop(self.key(dependent), None)
        scope.tiles[self.key(mean)] = replace(before, value=corrected)
        return replace(before, value=squares)

    def computed(self, number: int, node: Compute) -> Tile:
        total = self.means.get(number)
        if total not in self.scaled:
            return super().computed(number, node)
        count = self.scaled[total] * hint(self.a.size(COLS))  # float32 represents this fraction exactly
        divisor = count if node.target is aten.div.Tensor else 1 / count
        node = replace(node, operands=(("self", Value(total)), ("other", divisor)))
        tile = self.tile(total)
        return replace(tile, value=computed(node, lambda n: (tile.value, self.loops.nodes[n].dtype)))
