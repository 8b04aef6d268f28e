"""Tile programs of nests of rows and columns under a placement: one block of rows, or a loop over blocks.

Whole rows lie in the lanes, or a loop goes over blocks of their columns. A program of several blocks of rows
keeps the sums over rows in accumulators. Where several programs share such a sum, each stores its part for
the second stage (`codegen.second_stages`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from fusion_compiler.codegen import monoids
from fusion_compiler.codegen.carried import State, states_of
from fusion_compiler.codegen.exchange_rows import exchange
from fusion_compiler.codegen.moments import operands, scale_of
from fusion_compiler.codegen.row_tiles import RowTiles
from fusion_compiler.codegen.second_stages import Split
from fusion_compiler.codegen.tile import Assign, For, If, Range, Statement
from fusion_compiler.codegen.values import Scope, Tile
from fusion_compiler.ir.dims import Dim, hint, product
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Compute,
    Coordinate,
    Load,
    Node,
    Reduce,
    Scan,
    Store,
    axes_in,
    operands_of,
    store_operands,
    with_readers,
)
from fusion_compiler.ir.moments import is_exact
from fusion_compiler.ops.syntax import Expression, Items, Var, fm, lift, tl
from fusion_compiler.schedule.placed_axes import placed
from fusion_compiler.schedule.placement import Leaf, Place
from fusion_compiler.schedule.shapes import padded

AHEAD = 3  # elements in flight along a ragged axis of a single row
AT_ONCE = 4  # elements along a ragged axis of many rows that load together
FEW = 2  # most ragged reductions for which that pays: with 28 in four nests, ptxas took 28 s instead of four


class RowEmitter(RowTiles):
    """Emits a nest of rows and columns."""

    def program(self, number: Expression, split: Split) -> tuple[list[Statement], tuple[Dim, ...]]:
        """Return the statements of the program with this number, and the grid."""
        self.place_grid(number)
        main = [store for store in self.loops.stores if store.value not in self.a.after_rows]
        rows = self.where.of_axes(axes_in(self.loops.axes, (ROWS,)))
        sums = {n: self.reduction(n) for n in self.a.across_rows}
        if loops := placed(rows, Place.LOOP):
            self.sums = {n: self.started(n) for n in sums}
            with self.inside_loops(loops):
                self.pending = list(sums)
                self.block(main)
                self.add_block(len(self.loops.nodes))
            for n, node in sums.items():
                self.scopes[0].tiles[self.key(n)] = self.folded(n, node, self.sums[n])
        else:
            self.block(main)
        for n, partial in split.kept.items():
            self.store_partial(n, partial)
        if not split.kept:
            self.finish()
        return self.scopes[0].body, (product(leaf.extent for leaf in self.where.grid),)

    def add_block(self, level: int) -> None:
        """Add the open block to the sums over rows whose terms are complete after so many passes."""
        for n in [n for n in self.pending if self.a.level[n] <= level]:
            self.pending.remove(n)
            node, state = self.reduction(n), self.sums[n].value
            term = self.term(n, node)
            assert isinstance(state, Var)
            if term is not None:
                value = term.value
                if self.adds_blocks(node) and self.keeps:
                    value = monoids.fold(node, value, 0, keep=True)
                    value = value.to(torch.int32) if monoids.is_logical(node) else value
                self.add(monoids.step(node, state, value))

    def block(self, stores: Sequence[Store]) -> None:
        """Emit one block of rows: the values and stores, and the terms of sums over rows."""
        loops = placed(self.where.of_axes(self.columns), Place.LOOP)
        if loops or self.shared is not None:
            self.passes(stores, loops[0] if loops else None)
            return
        reads = [o for store in stores for o in self.read_by(store)]
        needed = self.needed_by([*reads, *self.accumulated()])
        of_rows = (n for n in needed if not self.depends[n] & {*self.lanes[-1:]} and not self.a.level[n])
        first = sorted(of_rows) if self.placement.num_stages == 1 else ()
        in_pairs = {n for pair in self.pairs.items() for n in pair}
        if in_pairs:  # Triton computes in the layout of the last load: others go through shared memory
            nodes = self.loops.nodes
            plain = (n for n in needed if isinstance(nodes[n], Load) and not operands_of(nodes[n]))
            first = (*first, *sorted(n for n in plain if n not in in_pairs))
        self.compute(first)
        self.compute(sorted(needed))
        self.store_all(stores)

    def passes(self, stores: Sequence[Store], loop: Leaf | None) -> None:
        """Emit one block of rows in passes over its columns. Each level of reductions that depend on each
        other takes one, and a store is made as soon as its value is complete."""
        self.block_depth = self.depth
        level, reductions = self.a.level, [n for n in self.a.reductions if n not in self.a.after_rows]
        full = [s for s in stores if self.where.of_store(s) & self.where.of_axes(self.columns)]
        of_row = [s for s in stores if s not in full]
        if self.placement.num_stages == 1:
            needed = sorted(self.needed_by(o for s in of_row for o in self.read_by(s)))
            self.compute(n for n in needed if not level[n] and COLS not in self.a.groups[n])
        complete = {s: max(level[o] for o in store_operands(s)) for s in full}
        levels = [level[n] for n in reductions] + [n + 1 for n in complete.values()]
        last = max(levels, default=0) - 1
        for number in range(last + 1):
            self.is_last_pass = number == last
            states = states_of(self.a, [n for n in reductions if level[n] == number + 1])
            writes = [s for s in full if complete[s] == number]
            if not states and not writes:
                continue
            pass_over = self.one_tile if loop is None else functools.partial(self.one_pass, loop)
            values = pass_over(states, writes)
            if states and self.shared is not None:
                exchange(self, self.shared, states, values)
                self.compute_again([o for s in stores for o in self.read_by(s)])
            for state, variables in zip(states, values, strict=True):
                for n, value in state.results(self, variables).items():
                    tile = Tile(value, self.depends[n] & {*self.lanes}, self.keeps)
                    self.scopes[self.depth].tiles[self.key(n)] = tile
        self.store_all(of_row)

    def accumulated(self) -> list[int]:
        """Return the operands of sums over rows."""
        return [self.reduction(n).operand for n in self.a.across_rows]

    def needed_in_pass(self, states: Sequence[State], stores: Sequence[Store]) -> list[int]:
        """Return the nodes that a pass needs, those of rows computed."""
        wanted = [self.reduction(state.numbers[0]).operand for state in states]
        needed = sorted(self.needed_by([*wanted, *(o for s in stores for o in self.read_by(s))]))
        columns = self.where.of_axes(self.columns)
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
        self, loop: Leaf, states: Sequence[State], stores: Sequence[Store]
    ) -> list[tuple[Var, ...]]:
        """Emit a loop over whole blocks of columns, then the rest in a block of as few lanes as it needs;
        return the states."""
        needed = self.needed_in_pass(states, stores)
        size, lanes = self.a.size(COLS), self.lanes[-1].lanes
        is_reverse = True in self.a.directions
        blocks, self.rest, rest_lanes = loop.extent, 0, 0
        is_cut = isinstance(size, int) and size > lanes and not is_reverse
        if is_reverse:  # the last block comes first
            last = product((blocks, loop.step)) - loop.step
            self.fixed_numbers[loop.name] = lift(last) - self.loop_variables[loop.name]
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
        before, scopes, depth = self.where, self.scopes, self.depth
        hidden = self.hidden = self.lanes[-1]
        narrow = hidden._replace(name=f"{hidden.name}_rest", extent=lanes)
        self.where = before.with_leaves({hidden: narrow})
        body, part = scopes[depth].body, 0
        if self.shared is not None:  # one of the programs has it
            part, number = divmod(hint(number), hint(loop.extent))
            body = []
        self.fixed_numbers[loop.name] = lift(product((number, loop.step)))
        self.scopes, self.depth = [*scopes[: depth + 1], Scope(body, loop)], depth + 1
        yield
        self.where, self.scopes, self.depth = before, scopes, depth
        if self.shared is not None:
            scopes[depth].body.append(If(self.element(self.shared).value.eq(part), body))
        self.hidden = None
        del self.fixed_numbers[loop.name]

    def finish(self) -> None:
        """Emit the stores that wait for sums over rows, all of which the program has. Compilers move no load
        over a sum that threads wait for."""
        late = [store for store in self.loops.stores if store.value in self.a.after_rows]
        needed = self.needed_by(o for store in late for o in self.read_by(store))
        rows = self.where.of_axes(axes_in(self.loops.axes, (ROWS,)))
        for n in sorted(needed):
            if n not in self.a.after_rows and not self.depends[n] & rows:
                self.tile(n)
        self.store_all(late)

    def reduced(self, number: int, node: Reduce) -> Tile:
        """Return a reduction of a tile that has whole rows or all rows (see `codegen.moments`)."""
        if number in self.a.invariants:
            return self.reduced_ragged(number, node)
        if ROWS in self.a.reduced_groups(number):
            term = self.term(number, node)
            join_key = ("rows", self.a.groups[node.operand]) if self.a.is_sum(number) else None
            return self.folded(number, node, term or self.started(number), f"col_{node.combine}", join_key)
        moment, width = self.a.moments.get(number), self.a.size(COLS)
        if moment is not None and not is_exact(self.loops, moment[0], width, self.halves):
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

    def reduced_ragged(self, number: int, node: Reduce) -> Tile:
        """Return a reduction over a ragged axis, which has a loop of its own.

            for turn in tl.range(first, last, num_stages=3):
                place = tl.load(order_ptr + turn)
                total += tl.load(rows_ptr + place * 2048 + col).to(tl.float32)

        The loop of a tile of several rows ends with the longest one. Prefetching would need a barrier in each
        turn, so four turns load together instead: tl.range(0, most, num_stages=1, loop_unroll_factor=4).
        """
        (axis,) = node.axes
        (leaf,), within = self.where.leaves[axis], node.within
        assert within is not None
        first, last = (self.tile(n) for n in self.loops.axes[axis].bounds)
        coordinates = (i for i, n in enumerate(self.loops.nodes) if isinstance(n, Coordinate))
        (place,) = (i for i in coordinates if axis in _keys(self.loops.nodes[i]))
        lanes = self.lanes_of(number)
        shape = self.shape(lanes) if lanes or self.keeps else Items(())
        total = self.state("total", tl.full(shape, monoids.neutral(node), node.dtype))
        is_single_row = not self.keeps and not self.lanes_of(within)
        turn = self.loop_variables[leaf.name]
        if is_single_row:
            turns, here = Range(first.value, last.value, stages=AHEAD), Tile(turn)
            self.true |= {within}
        else:
            counts = last.value - first.value
            most = self.let("most", tl.max(counts) if first.is_block or last.is_block else counts)
            unroll = AT_ONCE if len(self.a.invariants) <= FEW else None
            turns, here = Range(lift(0), most, stages=1, unroll=unroll), None
        scopes, depth, body = self.scopes, self.depth, list[Statement]()
        self.scopes, self.depth = [*scopes[: depth + 1], Scope(body, leaf)], depth + 1
        here = here or self.joined(self.let("here", first.value + turn), first)
        self.scopes[-1].tiles[self.key(place)] = here
        term = self.tile(node.operand).value
        if not is_single_row:
            term = tl.where(self.tile(within).value, term, monoids.neutral(node))
        self.add(monoids.step(node, total, term))
        self.scopes, self.depth, self.true = scopes, depth, self.true - {within}
        self.add(For(turn, turns, body))
        return Tile(total, lanes, bool(lanes) or self.keeps)

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
        for n in with_readers(self.loops, (mean,)):
            scope.tiles.pop(self.key(n), None)
        scope.tiles[self.key(mean)] = replace(before, value=corrected)
        return replace(before, value=squares)


def _keys(node: Node) -> frozenset[int]:
    return frozenset(key for key, _ in node.index.terms) if isinstance(node, Coordinate) else frozenset()
