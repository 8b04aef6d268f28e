"""Tile programs of nests in which reductions read reductions, under placements of any axes.

    sum_1 = ...                                   the reductions of the first pass over c
    for first_c in tl.range(0, 16, 1):
        t = ...                                   for each c, a loop over s
        tl.store(partial_0_ptr + ..., t)          what is complete in this loop is stored in it
        sum_1 += w * t
    for first_c in tl.range(0, 16, 1):            the second pass, in which the first one's results are known
        ...

A loop over an axis is repeated for each reduction over it that reads another one. Everything that has to be
emitted in a loop is a goal. A pass emits the goals whose operands are complete; those that need another loop
inside of this one are goals of that loop. Programs that share a reduction exchange their parts of it behind
the loops (`schedule.shared_reductions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from fusion_compiler.codegen.exchange_rows import messages
from fusion_compiler.codegen.kept_tiles import KeptTiles
from fusion_compiler.codegen.second_stages import Partial, Split
from fusion_compiler.codegen.tile import Combine, Statement
from fusion_compiler.codegen.values import PlacedNest, Tile
from fusion_compiler.ir.dims import Dim, product
from fusion_compiler.ir.loops import Load, Reduce, operands_of, store_operands, with_operands
from fusion_compiler.ops.syntax import Expression, Literal, Var
from fusion_compiler.schedule.carried import Carried
from fusion_compiler.schedule.placed_axes import placed
from fusion_compiler.schedule.placement import Leaf, Place
from fusion_compiler.schedule.shared_reductions import SharedReductions


@dataclass(frozen=True)
class Goal:
    """A statement to emit in some loops.

    loops: those in which it stands. reads: the nodes that have to be complete there.
    """

    loops: frozenset[Leaf]
    reads: tuple[int, ...]
    emit: Callable[[], None]


class ChainEmitter(KeptTiles):
    """Emits a nest in which reductions read reductions.

    sums: the accumulators of the loops that are open. results: of the reductions that others have parts of,
    what the program has before it receives these. passes: for each open loop, whether it is the last one over
    its axis. carried: the reductions that the first pass makes with those that they read.
    """

    def __init__(self, nest: PlacedNest, sharing: SharedReductions) -> None:
        super().__init__(nest)
        self.sharing = sharing
        self.sums: dict[int, Tile] = {}
        self.results: dict[int, Tile] = {}
        self.passes: list[bool] = []
        self.goals: list[Goal] = []
        self.carried: Mapping[int, Carried] = {}

    def program(self, number: Expression, split: Split) -> tuple[list[Statement], tuple[Dim, ...]]:
        """Return the statements of the program with this number, and the grid."""
        self.place_grid(number)
        self.goals = [self.goal_of_partial(n, of) for n, of in split.kept.items()]
        for store in split.stores:
            loops = frozenset(placed(self.where.of_store(store), Place.LOOP))
            self.goals.append(Goal(loops, store_operands(store), partial(self.store, store)))
        self.needed = with_operands(self.loops, (n for goal in self.goals for n in goal.reads))
        self.load_first()
        loops = placed(self.where.of_axes(self.where.leaves), Place.LOOP)
        self.reach(self.goals, loops)
        return self.scopes[0].body, (product(leaf.extent for leaf in self.where.grid),)

    def goal_of_partial(self, number: int, of: Partial) -> Goal:
        loops = frozenset(placed(self.depends[number], Place.LOOP))
        return Goal(loops, (number,), partial(self.store_partial, number, of))

    def reach(self, goals: Sequence[Goal], loops: Sequence[Leaf]) -> None:
        """Emit some goals in the open block. loops: the loops that are not open, the outermost one first."""
        if not goals:
            return
        if not loops:
            for goal in sorted(goals, key=self.level_of):
                for n in self.missing(goal.reads):  # fewer tiles wait for a reduction that comes first
                    self.tile(n)
                goal.emit()
            return
        loop, *inner = loops
        turns = self.turns(loop)
        after = {goal: max((turns[n] for n in goal.reads), default=0) for goal in goals}
        inside = [goal for goal in goals if loop in goal.loops]
        sums = self.sums_over(loop, goals)
        last = max([*(after[goal] for goal in inside), *(turns[n] - 1 for n in sums)], default=-1)
        outside = [goal for goal in goals if goal not in inside]
        self.reach([goal for goal in outside if after[goal] == 0], inner)
        for turn in range(last + 1):
            of_turn = [n for n in sums if turns[n] == turn + 1]
            for n in of_turn:
                self.begin(n)
            goals_of_turn = [self.goal_of_sum(n) for n in of_turn]
            goals_of_turn += [goal for goal in inside if after[goal] == turn]
            self.passes.append(turn == last)
            for _ in self.spans(loop, of_turn, goals_of_turn):
                with self.inside_loops([loop]):
                    self.reach(goals_of_turn, inner)
                    self.turn(of_turn)
            self.passes.pop()
            for n in of_turn:
                self.end(n)
            self.reach([goal for goal in outside if after[goal] == turn + 1], inner)

    def begin(self, number: int) -> None:
        """Start the accumulator of a reduction before its loop."""
        self.sums[number] = self.started(number)

    def spans(self, loop: Leaf, numbers: Sequence[int], goals: Sequence[Goal]) -> Iterator[None]:
        """Yield once for each part of a loop that is emitted by itself. numbers, goals: the reductions that
        the loop makes, and all that it does."""
        yield

    def turn(self, numbers: Iterable[int]) -> None:
        """End a turn of the loop that makes some reductions."""

    def end(self, number: int) -> None:
        """Keep the result of a reduction whose loop has ended."""
        state, key = self.sums.pop(number), self.join_key(number)
        tile = self.folded(number, self.reduction(number), state, join_key=key)
        if number in self.sharing.exchanged:
            self.results[number] = tile
        else:
            self.scopes[self.depth].tiles[self.key(number)] = tile

    def level_of(self, goal: Goal) -> int:
        """Return how many reductions that threads or programs wait for a goal needs."""
        return max((self.sharing.levels[n] for n in goal.reads), default=0)

    def turns(self, loop: Leaf) -> list[int]:
        """Return, by node, how many passes of a loop come before the node is complete in the open block."""
        turns: list[int] = []
        for n, node in enumerate(self.loops.nodes):
            is_complete = n in self.results or self.cached(n) is not None
            read = 0 if is_complete else max((turns[o] for o in self.operands(n)), default=0)
            is_sum = isinstance(node, Reduce) and n not in self.sums and loop in self.where.reduced_by(node)
            is_next = is_sum and not is_complete and not (n in self.carried and read)
            turns.append(read + bool(is_next))
        return turns

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Return the reductions that some nodes need and that the open block has not."""
        received = {n for n in self.reductions if self.cached(n) is not None}
        needed = with_operands(self.loops, numbers, received | self.results.keys())
        return [n for n in sorted(needed & self.reductions - received) if self.is_open(self.depends[n])]

    def sums_over(self, loop: Leaf, goals: Sequence[Goal]) -> list[int]:
        """Return the reductions over a loop that some goals need and that the open block has not added up."""
        missing = self.missing(n for goal in goals for n in goal.reads)
        over_loop = (n for n in missing if loop in self.where.reduced_by(self.reduction(n)))
        return [n for n in over_loop if n not in self.sums and n not in self.results]

    def goal_of_sum(self, number: int) -> Goal:
        """Return the goal to add the terms of a reduction to its accumulator."""
        node, state = self.reduction(number), self.sums[number]
        loops = placed(self.depends[node.operand] | self.where.reduced_by(node), Place.LOOP)
        return Goal(frozenset(loops), (node.operand,), lambda: self.add_terms(number, node, state))

    # -- reductions ------------------------------------------------------------------------------------

    def join_key(self, number: int) -> object:
        """Return what sums have in common that threads exchange at once; None of others."""
        if not self.a.is_sum(number):
            return None
        return self.sharing.levels[number], self.reduction(number).axes, number in self.sharing.exchanged

    def reduced(self, number: int, node: Reduce) -> Tile:
        if number not in self.sharing.exchanged:
            return super().reduced(number, node)
        group = next(group for group in self.sharing.together() if number in group)
        return self.exchange({n: self.results.pop(n, None) or self.part_of(n) for n in group})[number]

    def part_of(self, number: int) -> Tile:
        """Return the program's part of a reduction that others have parts of, too."""
        return super().reduced(number, self.reduction(number))

    def exchange(self, parts: Mapping[int, Tile]) -> Mapping[int, Tile]:
        """Return reductions that programs share. parts: what the program has of each of them."""
        leaves = [leaf for leaf in self.where.grid if leaf.place is Place.SHARED]
        others = [leaf for leaf in self.where.grid if leaf.place is not Place.SHARED]
        sent: dict[int, Var] = {}
        for n, tile in parts.items():
            value = tile.value
            sent[n] = value if isinstance(value, Var) else self.let(self.reduction(n).combine, value, n)
        first, part = self.number_of(others), self.number_of(leaves)
        theirs, received = messages(self, first, self.sharing.programs, part, sent)
        for wait in received:
            self.add(wait)
        tiles: dict[int, Tile] = {}
        for n in sent:
            key = ("received", self.sharing.levels[n]) if self.a.is_sum(n) else None
            combined = Combine(self.reduction(n), (theirs[n],), 0, False, join_key=key)
            tiles[n] = Tile(self.state(self.reduction(n).combine, combined, n))
            self.scopes[self.depth].tiles[self.key(n)] = tiles[n]
        self.compute_again([n for goal in self.goals for n in goal.reads])
        return tiles

    def folded(
        self, number: int, node: Reduce, state: Tile, base: str | None = None, join_key: object = None
    ) -> Tile:
        """Return an accumulator whose lanes are folded. What programs exchange is a number."""
        if number not in self.sharing.exchanged or len(self.lanes) == 1 or not state.is_block:
            return super().folded(number, node, state, base, join_key)
        combined = Combine(node, (state.value,), None, False, number in self.plain_maxima, join_key)
        return Tile(self.let(base or node.combine, combined, number))

    # -- loads -----------------------------------------------------------------------------------------

    def load_first(self) -> None:
        """Load before anything is reduced, as other emitters do. What elements of a tile share needs few
        registers, and is loaded as well."""
        super().load_first()
        if placed(self.where.of_axes(self.where.leaves), Place.LOOP):
            return
        for number in sorted(self.needed):
            node = self.loops.nodes[number]
            if isinstance(node, Load) and not operands_of(node) and not self.is_full(number):
                self.tile(number)

    def options(self, node: Load) -> Mapping[str, Expression]:
        """Return keyword arguments of a load: a pass that is not the last one keeps in the cache what no
        other program loads."""
        leaves = self.where.of_index(node.index)
        is_own = leaves.issuperset(leaf for leaf in self.where.grid if leaf.extent != 1)
        if not self.passes or not placed(leaves, Place.LOOP) or not is_own:
            return self.load_options
        policy = Literal("evict_first" if all(self.passes) else "evict_last")
        return {**self.load_options, "eviction_policy": policy}
