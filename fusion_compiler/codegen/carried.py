"""Carried reductions: the states that a loop over blocks of a row keeps, for one reduction or two together.

A reduction r2 that reads a reduction r1 over the same axis runs in the same loop if its terms F(x, r1) are a
product g(x) h(r1). Its state is multiplied by h(new) / h(old) whenever r1 changes:

    Plain      sum(x), max(x), ...             an accumulator for each lane of the block
    Softmax    max(x), sum(exp(x - max))       one running maximum per row (Milakov and Gimelshein, 2018)
    Moments    sum(x), sum((x - mean)^2)       one running mean per row (Chan, Golub and LeVeque, 1983)

A state starts before the loop, takes a step in it, and is folded to one value per row after it. `end` adds a
last block, with fewer lanes, to the folded state. `single` returns the state of a row that a tile holds, and
`merge` that of all programs that share a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from fusion_compiler.codegen import monoids
from fusion_compiler.codegen.moments import scale_of
from fusion_compiler.codegen.row_tiles import RowTiles
from fusion_compiler.codegen.tile import Assign, Combine
from fusion_compiler.ir.loops import COLS
from fusion_compiler.ir.moments import is_exact
from fusion_compiler.ops.syntax import MINUS_INFINITY, Expression, Var, fm, tl
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.shapes import WORD

# Least iterations of a block for a state per lane, which costs as much as one element per lane.
LEAST_TURNS = 4


@dataclass(frozen=True)
class Plain:
    """A single reduction."""

    number: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.number,)

    def reads(self, e: RowTiles) -> tuple[int, ...]:
        return (e.reduction(self.number).operand,)

    def start(self, e: RowTiles) -> tuple[Var, ...]:
        return (e.variable_of(e.started(self.number)),)

    def step(self, e: RowTiles, state: Sequence[Var]) -> None:
        e.add(monoids.step(e.reduction(self.number), state[0], e.elements_of(self.number)))

    def fold(self, e: RowTiles, state: Sequence[Var]) -> None:
        combined = Combine(e.reduction(self.number), (state[0],), e.last, e.keeps, join_key=self._key(e))
        e.add(Assign((state[0],), combined))

    def end(self, e: RowTiles, state: Sequence[Var]) -> None:
        reduce = e.reduction(self.number)
        folded = monoids.fold(reduce, e.elements_of(self.number), e.last, e.keeps)
        e.add(monoids.step(reduce, state[0], folded))

    def single(self, e: RowTiles) -> tuple[Var, ...]:
        reduce = e.reduction(self.number)
        combined = Combine(reduce, (e.elements_of(self.number),), e.last, e.keeps, join_key=self._key(e))
        return (e.state(f"row_{reduce.combine}", combined),)

    def merge(self, e: RowTiles, state: Sequence[Var], parts: Sequence[Expression]) -> None:
        combined = Combine(e.reduction(self.number), (parts[0],), 0, False, join_key=self._key(e))
        e.add(Assign((state[0],), combined))

    def results(self, e: RowTiles, state: Sequence[Var]) -> Mapping[int, Expression]:
        return {self.number: state[0]}

    def _key(self, e: RowTiles) -> object:
        """Return the key of sums that may be folded together (`passes.joined`)."""
        return self.shape_key(e) if e.a.is_sum(self.number) else None

    def shape_key(self, e: RowTiles) -> tuple[object, ...]:
        return "state", e.a.level[self.number], e.a.groups[e.reduction(self.number).operand]


@dataclass(frozen=True)
class Softmax:
    """Keep sum(exp(x - max(x))) and its maximum; the sum is rescaled whenever the maximum grows.

    Each lane has its own state if a thread has several of a block's elements for it and the row is read once.
    Then no thread waits for another until the loop ends, which makes long rows 1% to 6% faster. With a second
    pass over the row it gains nothing.
    """

    peak: int
    total: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.peak, self.total)

    def reads(self, e: RowTiles) -> tuple[int, ...]:
        return (e.reduction(self.peak).operand,)

    def start(self, e: RowTiles) -> tuple[Var, ...]:
        lanes = self._lanes(e)
        shape = [lanes] if lanes else e.shape_of_rows(e.reduction(self.peak).operand)
        nodes = (e.reduction(self.peak), e.reduction(self.total))
        return tuple(
            e.state(f"row_{n.combine}", tl.full(shape, monoids.neutral(n), n.dtype)) for n in nodes
        )

    def step(self, e: RowTiles, state: Sequence[Var]) -> None:
        if not (lanes := self._lanes(e)):
            self.end(e, state)
            return
        top, total = state
        x = e.let("x", tl.reshape(e.elements_of(self.peak), [e.lanes[-1].lanes // lanes, lanes]))
        new_max = e.let("new_max", tl.maximum(top, tl.max(x, axis=0)))
        shift = _shift(e, new_max)
        added = tl.sum(tl.exp(x - shift[None, :]), axis=0)
        e.add(Assign((total,), total * tl.exp(top - shift) + added))
        e.add(Assign((top,), new_max))

    def single(self, e: RowTiles) -> tuple[Var, ...]:
        x = e.elements_of(self.peak)
        top = e.state("row_max", e.along(tl.max, x))
        return top, e.state("row_sum", e.along(tl.sum, tl.exp(x - _shift(e, top))))

    def fold(self, e: RowTiles, state: Sequence[Var]) -> None:
        if self._lanes(e):
            self.merge(e, state, (e.state("tops", state[0]), state[1]))

    def end(self, e: RowTiles, state: Sequence[Var]) -> None:
        top, total = state
        x = e.elements_of(self.peak)
        new_max = e.let("new_max", tl.maximum(top, e.along(tl.max, x)))
        shift = _shift(e, new_max)
        e.add(Assign((total,), total * tl.exp(top - shift) + e.along(tl.sum, tl.exp(x - shift))))
        e.add(Assign((top,), new_max))

    def merge(self, e: RowTiles, state: Sequence[Var], parts: Sequence[Expression]) -> None:
        """Assign the state of all parts. Each part has the elements of one program or lane."""
        top, total = state
        tops, totals = parts
        e.add(Assign((top,), e.along(tl.max, tops)))
        e.add(Assign((total,), e.along(tl.sum, totals * tl.exp(tops - _shift(e, top)))))

    def results(self, e: RowTiles, state: Sequence[Var]) -> Mapping[int, Expression]:
        top, total = state
        e.add(Assign((total,), tl.where(top.eq(MINUS_INFINITY), math.nan, total)))
        return {self.peak: top, self.total: total}

    def _lanes(self, e: RowTiles) -> int:
        """Return how many columns a program's threads access at once; 0 if lanes have no states of their
        own."""
        columns = WORD * 32 * e.placement.num_warps
        is_read_once = not e.keeps and e.is_last_pass and e.lanes[-1].lanes >= LEAST_TURNS * columns
        return columns if is_read_once else 0


def _shift(e: RowTiles, top: Expression) -> Expression:
    """Return the value subtracted from a row's elements: its maximum, or 0 if all elements are -inf."""
    return e.state("shift", tl.where(top.eq(MINUS_INFINITY), 0.0, top))


@dataclass(frozen=True)
class Moments:
    """The sum of squares around the mean, and the mean itself; the sum of the elements has no other use."""

    total: int
    mean: int
    squares: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.total, self.squares)

    def reads(self, e: RowTiles) -> tuple[int, ...]:
        return (e.reduction(self.total).operand,)

    def start(self, e: RowTiles) -> tuple[Var, ...]:
        shape = e.shape_of_rows(e.reduction(self.total).operand)
        zero = tl.full(shape, 0.0, e.reduction(self.squares).dtype)
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
        squares = others + counts * (distance - move) * (distance - move)
        e.add(Assign((state[0],), top + move))
        e.add(Assign((state[1],), e.along(tl.sum, squares)))

    def _block(self, e: RowTiles) -> tuple[Var, Var]:
        """Return the mean of a block's elements, and the sum of squares around it."""
        x, scale, mask = e.elements_of(self.total), scale_of(e.lanes[-1].lanes), e.column_mask()
        scaled = e.along(tl.sum, x * scale)
        mean = e.state("block_mean", scaled if mask is None else scaled / (e.count() * scale))
        delta = e.state("off", x - mean if mask is None else tl.where(mask, x - mean, 0.0))
        if is_exact(e.loops, self.total, e.lanes[-1].lanes, e.halves):
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
        return {self.mean: state[0], self.squares: state[1]}


class State(Protocol):
    """A state holds what a pass has computed so far of some reductions, `numbers`."""

    @property
    def numbers(self) -> tuple[int, ...]: ...

    def reads(self, e: RowTiles) -> tuple[int, ...]:
        """Return the nodes that a pass computes for it."""
        ...

    def start(self, e: RowTiles) -> tuple[Var, ...]: ...
    def step(self, e: RowTiles, state: Sequence[Var]) -> None: ...
    def fold(self, e: RowTiles, state: Sequence[Var]) -> None: ...
    def end(self, e: RowTiles, state: Sequence[Var]) -> None: ...
    def single(self, e: RowTiles) -> tuple[Var, ...]: ...
    def merge(self, e: RowTiles, state: Sequence[Var], parts: Sequence[Expression]) -> None: ...
    def results(self, e: RowTiles, state: Sequence[Var]) -> Mapping[int, Expression]: ...


def states_of(a: Analysis, reductions: Sequence[int]) -> list[State]:
    """Return the states of one pass over the columns, in the order of the reductions."""
    of_two: dict[int, State] = {total: Softmax(peak, total) for total, peak in a.online.items()}
    of_two |= {squares: Moments(total, mean, squares) for squares, (total, mean) in a.moments.items()}
    inner = {n for state in of_two.values() for n in state.numbers} - of_two.keys()
    return [of_two.get(n, Plain(n)) for n in reductions if n not in inner]
