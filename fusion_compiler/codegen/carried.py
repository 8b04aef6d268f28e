"""Carried reductions: the states that a loop over blocks of a row keeps, for one reduction or two together.

A reduction r2 that reads a reduction r1 over the same axis runs in the same loop if the law of carried
reductions (`schedule.carried`) says how its state changes whenever r1 does:

    Plain      sum(x), max(x), ...             an accumulator for each lane of the block
    Rescaled   max(x), sum(exp(x - max))       one running maximum per row (Milakov and Gimelshein, 2018)
    Moments    sum(x), sum((x - mean)^2)       one running mean per row (Chan, Golub and LeVeque, 1983)

A state starts before the loop, takes a step in it, and is folded to one value per row after it. `end` adds a
last block, with fewer lanes, to the folded state. `single` returns the state of a row that a tile holds, and
`merge` that of all programs that share a row. numbers: its reductions; a pass computes the operand of the
first one for them.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch._ops import OpOverload

from fusion_compiler.codegen import monoids
from fusion_compiler.codegen.expression import computed
from fusion_compiler.codegen.moments import scale_of
from fusion_compiler.codegen.placed import Emitter
from fusion_compiler.codegen.row_tiles import RowTiles
from fusion_compiler.codegen.tile import Assign, Combine
from fusion_compiler.ir.loops import COLS, Compute, is_applied, operands_of
from fusion_compiler.ir.moments import is_exact
from fusion_compiler.ops.arithmetic import ADD, EXP, MUL, SUB
from fusion_compiler.ops.syntax import MINUS_INFINITY, Expression, Literal, Var, fm, lift, tl
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.carried import (
    PEAKS,
    Carried,
    Values,
    growth_of,
    rescaled,
    squares_of,
    step_of,
    value_at,
)
from fusion_compiler.schedule.shapes import WORD

Function = Callable[..., Expression]
Along = Callable[[Function, Expression], Expression]  # apply a reduction to a tile

# Least iterations of a block for a state per lane, which costs as much as one element per lane.
LEAST_TURNS = 4
SIGNED = {ADD: operator.add, SUB: operator.sub, MUL: operator.mul}


@dataclass(frozen=True)
class Plain:
    """A single reduction."""

    numbers: tuple[int, ...]

    def start(self, e: RowTiles) -> tuple[Var, ...]:
        return (e.variable_of(e.started(self.numbers[0])),)

    def step(self, e: RowTiles, state: Sequence[Var]) -> None:
        (number,) = self.numbers
        e.add(monoids.step(e.reduction(number), state[0], e.elements_of(number)))

    def fold(self, e: RowTiles, state: Sequence[Var]) -> None:
        e.add(Assign((state[0],), self._combined(e, state[0], e.last, e.keeps)))

    def end(self, e: RowTiles, state: Sequence[Var]) -> None:
        reduce = e.reduction(self.numbers[0])
        folded = monoids.fold(reduce, e.elements_of(self.numbers[0]), e.last, e.keeps)
        e.add(monoids.step(reduce, state[0], folded))

    def single(self, e: RowTiles) -> tuple[Var, ...]:
        combined = self._combined(e, e.elements_of(self.numbers[0]), e.last, e.keeps)
        return (e.state(f"row_{combined.reduce.combine}", combined),)

    def merge(self, e: RowTiles, state: Sequence[Var], parts: Sequence[Expression]) -> None:
        e.add(Assign((state[0],), self._combined(e, parts[0], 0, False)))

    def results(self, e: RowTiles, state: Sequence[Var]) -> Mapping[int, Expression]:
        return {self.numbers[0]: state[0]}

    def _combined(self, e: RowTiles, value: Expression, axis: int, keep: bool) -> Combine:
        """Return a fold of the reduction. Sums with the same key may be folded together (`passes.joined`)."""
        (number,) = self.numbers
        reduce = e.reduction(number)
        key = ("state", e.a.level[number], e.a.groups[reduce.operand]) if e.a.is_sum(number) else None
        return Combine(reduce, (value,), axis, keep, join_key=key)


@dataclass(frozen=True)
class Rescaled:
    """Keep a maximum or minimum, and a sum of terms that read it, which is rescaled whenever it moves.

    Each lane has its own state if a thread has several of a block's elements for it and the row is read once.
    Then no thread waits for another until the loop ends, which makes long rows 1% to 6% faster. With a second
    pass over the row it gains nothing.
    """

    numbers: tuple[int, ...]
    law: Carried

    def start(self, e: RowTiles) -> tuple[Var, ...]:
        lanes, nodes = self._lanes(e), [e.reduction(n) for n in self.numbers]
        shape = [lanes] if lanes else e.shape_of_rows(nodes[0].operand)
        return tuple(
            e.state(f"row_{n.combine}", tl.full(shape, monoids.neutral(n), n.dtype)) for n in nodes
        )

    def step(self, e: RowTiles, state: Sequence[Var]) -> None:
        if not (lanes := self._lanes(e)):
            self.end(e, state)
            return
        x = e.let("x", tl.reshape(e.elements_of(self.numbers[0]), [e.lanes[-1].lanes // lanes, lanes]))
        self._add(e, state, x, lambda function, value: function(value, axis=0), lambda shift: shift[None, :])

    def single(self, e: RowTiles) -> tuple[Var, ...]:
        x, peak = e.elements_of(self.numbers[0]), e.reduction(self.numbers[0])
        top = e.state(f"row_{peak.combine}", e.along(monoids.MONOIDS[peak.combine].fold, x))
        return top, e.state("row_sum", e.along(tl.sum, self._terms(e, x, self._shift(e, top))))

    def fold(self, e: RowTiles, state: Sequence[Var]) -> None:
        if self._lanes(e):
            self.merge(e, state, (e.state("tops", state[0]), state[1]))

    def end(self, e: RowTiles, state: Sequence[Var]) -> None:
        self._add(e, state, e.elements_of(self.numbers[0]), e.along, lambda shift: shift)

    def merge(self, e: RowTiles, state: Sequence[Var], parts: Sequence[Expression]) -> None:
        """Assign the state of all parts, each of which has the elements of one program or lane."""
        (top, total), (tops, totals) = state, parts
        e.add(Assign((top,), e.along(monoids.MONOIDS[e.reduction(self.numbers[0]).combine].fold, tops)))
        e.add(Assign((total,), e.along(tl.sum, self._moved(e, totals, tops, self._shift(e, top)))))

    def results(self, e: RowTiles, state: Sequence[Var]) -> Mapping[int, Expression]:
        (peak, number), (top, total) = self.numbers, state
        if self.law.empty:
            is_empty = top.eq(lift(PEAKS[e.reduction(peak).combine]))
            e.add(Assign((total,), tl.where(is_empty, math.nan, total)))
        return {peak: top, number: total}

    def _add(
        self, e: RowTiles, state: Sequence[Var], x: Expression, along: Along, spread: Function
    ) -> None:
        """Add a block's elements x to a state. along: reduces x to the state's dimensions. spread: gives
        values of a state the dimensions of x."""
        (top, total), combine = state, e.reduction(self.numbers[0]).combine
        monoid = monoids.MONOIDS[combine]
        assert not isinstance(monoid.step, str)
        now = e.let(f"new_{combine}", monoid.step(top, along(monoid.fold, x)))
        shift = self._shift(e, now)
        before = self._moved(e, total, top, shift)
        e.add(Assign((total,), before + along(tl.sum, self._terms(e, x, spread(shift)))))
        e.add(Assign((top,), now))

    def _shift(self, e: RowTiles, top: Expression) -> Expression:
        """Return the maximum that terms read, or zero if it is one of nothing."""
        return e.state("shift", BlockValues(e).finite(self.numbers[0], top))

    def _terms(self, e: RowTiles, x: Expression, shift: Expression) -> Expression:
        peak, total = (e.reduction(n) for n in self.numbers)
        at = {peak.operand: x, self.numbers[0]: shift}
        return value_at(e.loops, total.operand, at, BlockValues(e, is_fast=True))

    def _moved(self, e: RowTiles, total: Expression, top: Expression, now: Expression) -> Expression:
        """Return a sum that was added up with one maximum as it is with another."""
        peak = self.numbers[0]
        values = BlockValues(e, e.reduction(peak).axes, is_fast=True)
        step = functools.partial(step_of, e.loops, before={peak: top}, now={peak: now}, values=values)
        return rescaled(self.law, total, None, step, values)

    def _lanes(self, e: RowTiles) -> int:
        """Return how many columns a program's threads access at once; 0 if lanes have no states of their
        own."""
        columns = WORD * 32 * e.placement.num_warps
        is_read_once = not e.keeps and e.is_last_pass and e.lanes[-1].lanes >= LEAST_TURNS * columns
        return columns if is_read_once else 0


@dataclass(frozen=True)
class BlockValues(Values[Expression]):
    """Values that are expressions of the open block.

    axes: those along which x varies. is_fast: exponentials are terms of sums, which round as much.
    """

    emitter: Emitter
    axes: frozenset[int] = frozenset()
    is_fast: bool = False

    def computed(self, node: Compute, operands: Mapping[int, Expression]) -> Expression:
        if self.is_fast and is_applied(node, EXP):
            return tl.exp(operands[operands_of(node)[0]])
        nodes = self.emitter.loops.nodes
        return computed(node, lambda n: (operands[n], nodes[n].dtype))

    def fixed(self, number: int) -> Expression:
        is_fixed = self.emitter.node_axes[number].isdisjoint(self.axes)
        return self.emitter.tile(number).value if is_fixed else Literal(0.0)

    def finite(self, number: int, value: Expression) -> Expression:
        return tl.where(value.eq(lift(PEAKS[self.emitter.reduction(number).combine])), 0.0, value)

    def combined(self, operator: OpOverload, left: Expression, right: Expression) -> Expression:
        return SIGNED[operator](left, right)


@dataclass(frozen=True)
class Moments:
    """The sum of squares around the mean, and the mean itself; the sum of the elements has no other use."""

    numbers: tuple[int, ...]
    mean: int

    def start(self, e: RowTiles) -> tuple[Var, ...]:
        total, squares = (e.reduction(n) for n in self.numbers)
        zero = tl.full(e.shape_of_rows(total.operand), 0.0, squares.dtype)
        return e.state("mean", zero), e.state("squares", zero)

    def step(self, e: RowTiles, state: Sequence[Var]) -> None:
        block, count = self._block(e), e.count()
        e.add(Assign(tuple(state), fm.merge_moments(*state, e.seen(), *block, count)))

    def single(self, e: RowTiles) -> tuple[Var, ...]:
        return self._block(e)

    def merge(self, e: RowTiles, state: Sequence[Var], parts: Sequence[Expression]) -> None:
        """Assign the moments of all parts. Means differ by less than their magnitude, which rounds less."""
        means, others = parts
        counts = e.state("counts", e.counts_of_parts())
        top = e.state("top", e.along(tl.max, tl.where(counts > 0, means, MINUS_INFINITY)))
        distance = e.state("apart", means - top)
        move = e.state("move", e.along(tl.sum, counts / e.a.size(COLS) * distance))
        law, values = squares_of(e.loops, *self.numbers), BlockValues(e)
        step = functools.partial(
            growth_of, e.loops, before={self.mean: distance}, now={self.mean: move}, values=values
        )
        squares = rescaled(law, others, counts, step, values)
        e.add(Assign((state[0],), top + move))
        e.add(Assign((state[1],), e.along(tl.sum, squares)))

    def _block(self, e: RowTiles) -> tuple[Var, Var]:
        """Return the mean of a block's elements, and the sum of squares around it."""
        x, scale, mask = e.elements_of(self.numbers[0]), scale_of(e.lanes[-1].lanes), e.column_mask()
        scaled = e.along(tl.sum, x * scale)
        mean = e.state("block_mean", scaled if mask is None else scaled / (e.count() * scale))
        delta = e.state("off", x - mean if mask is None else tl.where(mask, x - mean, 0.0))
        if is_exact(e.loops, self.numbers[0], e.lanes[-1].lanes, e.halves):
            return mean, e.state("block_squares", e.along(tl.sum, delta * delta))
        squares, left = Var("block_squares"), Var("left")
        e.add(Assign((squares, left), fm.sums(delta * delta, delta, e.last, e.keeps)))
        e.add(Assign((mean, squares), fm.corrected(mean, squares, left, e.count())))
        return mean, squares

    def fold(self, e: RowTiles, state: Sequence[Var]) -> None:
        """Do nothing: the state already is one value per row."""

    def end(self, e: RowTiles, state: Sequence[Var]) -> None:
        self.step(e, state)

    def results(self, e: RowTiles, state: Sequence[Var]) -> Mapping[int, Expression]:
        return {self.mean: state[0], self.numbers[1]: state[1]}


State = Plain | Rescaled | Moments


def states_of(a: Analysis, reductions: Sequence[int]) -> list[State]:
    """Return the states of one pass over the columns, in the order of the reductions."""
    of_two: dict[int, State] = {n: Rescaled((*of.reads, n), of) for n, of in a.rescaled.items()}
    of_two |= {squares: Moments((total, squares), mean) for squares, (total, mean) in a.moments.items()}
    inner = {n for state in of_two.values() for n in state.numbers} - of_two.keys()
    return [of_two.get(n, Plain((n,))) for n in reductions if n not in inner]
