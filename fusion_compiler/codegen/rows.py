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
from fusion_compiler.codegen.expression import computed, convert
from fusion_compiler.codegen.finishing import SecondStage
from fusion_compiler.codegen.moments import is_exact, operands, scale_of
from fusion_compiler.codegen.placed import Emitter, Scope, Tile
from fusion_compiler.codegen.split_reductions import Partial
from fusion_compiler.codegen.tile import Assign, Statement
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
from fusion_compiler.ir.syntax import Expression, Items, Literal, Name, Var, fm, lift, tl
from fusion_compiler.schedule.analysis import Analysis, waiting
from fusion_compiler.schedule.placement import Leaf, Place, Placement
from fusion_compiler.schedule.shapes import padded

aten = torch.ops.aten


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
            states = {n: self.started(n) for n in sums}
            with self.inside_loops(loops):
                self.block(main)
                for n, node in sums.items():
                    self.add_to(states[n], n, node)
            for n, node in sums.items():
                self.scopes[0].tiles[self.key(n)] = self.folded(n, node, states[n])
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

    def add_to(self, state: Tile, number: int, node: Reduce) -> None:
        term = self.term(number, node)
        if term is not None:
            assert isinstance(state.value, Var)
            self.add(monoids.step(node, state.value, term.value))

    def block(self, stores: Sequence[Store]) -> None:
        """Emit one block of rows: the values and stores, and the terms of sums over rows."""
        if loops := self.loops_of(self.of_axes(self.columns)):
            self.passes(stores, loops[0])
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

    def made(self, number: int) -> Tile:
        node = self.loops.nodes[number]
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

    def passes(self, stores: Sequence[Store], loop: Leaf) -> None:
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
            self.one_pass(states, [s for s in full if level[s.value] == number], loop)
        self.store_all(of_row)

    def one_pass(self, states: Sequence[State], stores: Sequence[Store], loop: Leaf) -> None:
        """Emit a loop over whole blocks of columns, then the rest in a block of as few lanes as it needs."""
        if not states and not stores:
            return
        wanted = [self.reduction(state.numbers[0]).operand for state in states]
        needed = sorted(self.needed_by([*wanted, *(o for s in stores for o in self.read_by(s))]))
        columns = self.of_axes(self.columns)
        self.compute(n for n in needed if not self.depends[n] & columns)
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

        self.ends[loop], self.is_whole = blocks, is_cut
        with self.inside_loops([loop]):
            block(lambda state, variables: state.step(self, variables))
        self.is_whole = False
        for state, variables in zip(states, values, strict=True):
            state.fold(self, variables)
        if rest_lanes:
            with self.last_block(loop, blocks, padded(rest_lanes)):
                block(lambda state, variables: state.end(self, variables))
        for state, variables in zip(states, values, strict=True):
            for n, value in state.results(self, variables).items():
                tile = Tile(value, self.depends[n] & {*self.lanes}, self.keeps)
                self.scopes[self.depth].tiles[self.key(n)] = tile

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
        self.fixed_numbers[loop.name] = lift(number)
        self.scopes, self.depth = [*scopes[: depth + 1], Scope(scopes[depth].body, loop)], depth + 1
        yield
        self.lanes, self.leaves, self.scopes, self.depth = all_lanes, all_leaves, scopes, depth
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
        return len(self.lanes) - 1

    @property
    def keeps(self) -> bool:
        """True if tiles have several dimensions, which reductions keep."""
        return len(self.lanes) > 1

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
        """Return the number of columns in the blocks before this one."""
        (loop,) = self.loops_of(self.of_axes(self.columns))
        return self.element(loop).value * loop.step

    def count(self) -> Expression:
        """Return the number of columns of this block."""
        lanes, size = self.lanes[-1].lanes, self.a.size(COLS)
        if self.column_mask() is None:
            return lift(lanes)
        if self.hidden is not None:
            return lift(self.rest)
        return tl.minimum(self.seen() + lanes, size) - self.seen()

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
