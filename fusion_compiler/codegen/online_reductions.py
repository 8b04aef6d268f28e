"""The states that a pass over the columns of a row keeps: one per reduction, or one for two together.

A state is updated by each block and folded to one value per row. If several programs share the row, their
states are merged:

    Plain      sum(x), max(x), ...             an accumulator for each lane of the block
    Scaled     sum(w x) = w sum(x)             from a segment sum that the block computes anyway
    Softmax    max(x), sum(exp(x - max))       one running maximum per row (Milakov and Gimelshein, 2018)
    Moments    sum(x), sum((x - mean)^2)       one running mean per row (Chan, Golub and LeVeque, 1983)
    Contracted sum(w x0), sum(w x1), ...       tiles of products (`contractions.py`)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fusion_compiler.codegen.builder import ALONG, Builder
from fusion_compiler.codegen.moments import is_exact, scale_of
from fusion_compiler.codegen.monoids import neutral, step
from fusion_compiler.codegen.names import own
from fusion_compiler.codegen.nodes import elements
from fusion_compiler.codegen.partial_reductions import scaled_sum
from fusion_compiler.codegen.tile import Assign, Combine
from fusion_compiler.codegen.windows import block
from fusion_compiler.ir.loops import COLS, ROWS, Load
from fusion_compiler.ir.syntax import MINUS_INFINITY, Expression, Literal, Name, Variable, fm, lift, times, tl
from fusion_compiler.schedule.analysis import Analysis, accumulator_dtype, part_cols
from fusion_compiler.schedule.contractions import Contraction
from fusion_compiler.schedule.schedule import WORD, Cols

BLOCK = own("block_mean"), own("block_squares")
NONE: Mapping[int, Contraction] = {}
NO_PIECES: Mapping[int, tuple[int, ...]] = {}
# least iterations of a block for a state per lane, which costs as much as one element per lane
LEAST_TURNS = 4


@dataclass(frozen=True)
class Plain:
    """A single reduction."""

    total: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.total,)

    def wanted(self, b: Builder) -> tuple[int, ...]:
        """Return the nodes that a pass computes for it."""
        return b.operands(self.total)

    def start(self, b: Builder) -> tuple[Variable, ...]:
        word = 1
        return (accumulator(b, self.total, b.a.groups[b.reduction(self.total).operand] | ALONG, word),)

    def step(self, b: Builder, names: Sequence[Variable]) -> None:
        tile = self._elements(b)
        b.add(step(b.reduction(self.total), names[0], tile))

    def single(self, b: Builder, names: Sequence[Variable]) -> None:
        b.set(names[0], self._elements(b))

    def fold(self, b: Builder, names: Sequence[Variable]) -> None:
        b.set(names[0], self._folded(b, names[0]))

    def end(self, b: Builder, names: Sequence[Variable]) -> None:
        reduce = b.reduction(self.total)
        b.add(step(reduce, names[0], b.fold_cols(reduce, self._elements(b))))

    def merge(self, b: Builder, names: Sequence[Variable], parts: Sequence[Variable]) -> None:
        b.set(names[0], self._folded(b, parts[0]))

    def bind(self, b: Builder, names: Sequence[Variable]) -> None:
        b.env[self.total] = names[0]

    def _elements(self, b: Builder) -> Expression:
        return elements(b, b.reduction(self.total), ALONG)

    def _folded(self, b: Builder, tile: Expression) -> Combine:
        """Return a tile folded along the row. Two float32 sums are computed together (`passes.joined`)."""
        adds = type(self) is Plain and b.a.is_sum(self.total)
        form = (b.a.groups[b.reduction(self.total).operand], 1)  # shape of the tile
        join_key = ("state", b.a.level[self.total], *form) if adds else None
        return Combine(b.reduction(self.total), (tile,), b.col_axis, not b.tile.flat, join_key=join_key)


@dataclass(frozen=True)
class Scaled(Plain):
    """A sum that is a sum over the block's segment, times values that the block shares."""

    segment: int
    shared: tuple[int, ...]

    def wanted(self, b: Builder) -> tuple[int, ...]:
        return ()

    def single(self, b: Builder, names: Sequence[Variable]) -> None:
        loads = [(i, b.loops.nodes[i]) for i in self.shared]
        factors = [block.loaded_once(b, i, node) for i, node in loads if isinstance(node, Load)]
        b.set(names[0], times(b.named["sum", self.segment], *factors))

    def fold(self, b: Builder, names: Sequence[Variable]) -> None:
        """The state already is one value per row."""


@dataclass(frozen=True)
class Softmax:
    """sum(exp(x - max(x))) and its maximum; the sum is rescaled whenever the maximum grows.

    Each lane has its own state if a thread has several of a block's elements for it and the row is read once.
    Then no thread waits for another until the loop ends, which makes long rows 1% to 6% faster. With a second
    pass over the row it gains nothing.
    """

    peak: int
    total: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.peak, self.total)

    def wanted(self, b: Builder) -> tuple[int, ...]:
        return b.operands(self.peak)

    def start(self, b: Builder) -> tuple[Variable, ...]:
        lanes = _lanes(b)
        if not lanes:
            return tuple(accumulator(b, n, frozenset({ROWS})) for n in self.numbers)
        return tuple(
            b.let(b.base_of(n), tl.full([lanes], neutral(node), node.dtype))
            for n, node in ((n, b.reduction(n)) for n in self.numbers)
        )

    def step(self, b: Builder, names: Sequence[Variable]) -> None:
        lanes = _lanes(b)
        if not lanes:
            self.end(b, names)
            return
        top, total = names
        tile = elements(b, b.reduction(self.peak), ALONG)
        x = b.define("x", tl.reshape(tile, [b.tile.lanes // lanes, lanes]))
        new_max = b.define("new_max", tl.maximum(top, tl.max(x, axis=0)))
        shift = _shift(b, new_max)
        added = tl.sum(tl.exp(x - shift[None, :]), axis=0)
        b.set(total, total * tl.exp(top - shift) + added)
        b.set(top, new_max)

    def single(self, b: Builder, names: Sequence[Variable]) -> None:
        top, total = names
        x = b.define("x", elements(b, b.reduction(self.peak), ALONG))
        b.set(top, b.along(tl.max, x))
        b.set(total, b.along(tl.sum, tl.exp(x - _shift(b, top))))

    def fold(self, b: Builder, names: Sequence[Variable]) -> None:
        if b.s.cols is Cols.LOOP and _lanes(b):
            self.merge(b, names, (b.define("tops", names[0]), names[1]))

    def end(self, b: Builder, names: Sequence[Variable]) -> None:
        top, total = names
        x = b.define("x", elements(b, b.reduction(self.peak), ALONG))
        new_max = b.define("new_max", tl.maximum(top, b.along(tl.max, x)))
        shift = _shift(b, new_max)
        b.set(total, total * tl.exp(top - shift) + b.along(tl.sum, tl.exp(x - shift)))
        b.set(top, new_max)

    def merge(self, b: Builder, names: Sequence[Variable], parts: Sequence[Variable]) -> None:
        top, total = names
        tops, totals = parts
        b.set(top, b.along(tl.max, tops))
        b.set(total, b.along(tl.sum, totals * tl.exp(tops - _shift(b, top))))

    def bind(self, b: Builder, names: Sequence[Variable]) -> None:
        top, total = names
        b.set(total, tl.where(top.eq(MINUS_INFINITY), math.nan, total))
        b.env[self.peak], b.env[self.total] = names


def _shift(b: Builder, top: Expression) -> Name:
    """Return the value subtracted from a row's elements: its maximum, or 0 if all elements are -inf."""
    return b.define("shift", tl.where(top.eq(MINUS_INFINITY), 0.0, top))


@dataclass(frozen=True)
class Moments:
    """The sum of squares around the mean, and the mean itself; the sum of the elements has no other use."""

    total: int
    mean: int
    squares: int

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.total, self.squares)

    def wanted(self, b: Builder) -> tuple[int, ...]:
        return b.operands(self.total)

    def start(self, b: Builder) -> tuple[Variable, ...]:
        zero = tl.full(b.shape(b.a.groups[self.squares]), 0.0, b.reduction(self.squares).dtype)
        return (b.let("mean", zero), b.let("squares", zero))

    def step(self, b: Builder, names: Sequence[Variable]) -> None:
        mean, squares = names
        self.block(b, *BLOCK)
        b.add(Assign((mean, squares), fm.merge_moments(mean, squares, _seen(b), *BLOCK, _count(b))))

    def single(self, b: Builder, names: Sequence[Variable]) -> None:
        self.block(b, names[0], names[1])

    def block(self, b: Builder, mean: Variable, squares: Variable) -> None:
        x = b.define("x", elements(b, b.reduction(self.total), ALONG))
        scale = scale_of(b.tile.lanes)
        scaled_mean = b.along(tl.sum, x * scale)
        b.set(mean, scaled_mean if b.tile.col_mask is None else scaled_mean / (_count(b) * scale))
        mask = b.mask(ALONG, None)
        delta = b.define("off", x - mean if mask is None else tl.where(mask, x - mean, 0.0))
        if is_exact(b.loops, b.dtypes, self.total, b.tile.lanes):
            b.set(squares, b.along(tl.sum, delta * delta))
            return
        rest = own("left")
        b.add(Assign((squares, rest), fm.sums(delta * delta, delta, b.col_axis, not b.tile.flat)))
        b.add(Assign((mean, squares), fm.corrected(mean, squares, rest, _count(b))))

    def fold(self, b: Builder, names: Sequence[Variable]) -> None:
        """The state already is one value per row."""

    def end(self, b: Builder, names: Sequence[Variable]) -> None:
        self.step(b, names)

    def merge(self, b: Builder, names: Sequence[Variable], parts: Sequence[Variable]) -> None:
        mean, squares = names
        means, others = parts
        counts = b.define("counts", _part_counts(b))
        tops = tl.where(counts > 0, means, MINUS_INFINITY)
        # means differ by less than their magnitude, which rounds less
        top = b.define("top", b.along(tl.max, tops))
        distance = b.define("apart", means - top)
        move = b.define("move", b.along(tl.sum, counts / b.a.size(COLS) * distance))
        b.set(mean, top + move)
        b.set(squares, b.along(tl.sum, others + counts * (distance - move) * (distance - move)))

    def bind(self, b: Builder, names: Sequence[Variable]) -> None:
        b.env[self.mean], b.env[self.squares] = names


Running = Plain | Softmax | Moments


def accumulator(b: Builder, number: int, groups: frozenset[str], word: int = 1) -> Variable:
    """Return the variable that accumulates a reduction over a tile of these groups, with a lane per `word`
    columns."""
    reduce = b.reduction(number)
    with b.inside(None, b.tile.lanes // word):
        shape = b.shape(groups)
    return b.let(b.base_of(number), tl.full(shape, neutral(reduce), accumulator_dtype(reduce)))


def _lanes(b: Builder) -> int:
    """Return how many columns a program's threads access at once; 0 if lanes do not have states of their
    own."""
    columns = WORD * 32 * b.s.num_warps
    return columns if b.tile.flat and b.tile.last_pass and b.tile.lanes >= LEAST_TURNS * columns else 0


def states_of(
    a: Analysis,
    reductions: Sequence[int],
    contracted: Mapping[int, Contraction] = NONE,
    packed: Mapping[int, tuple[int, ...]] = NO_PIECES,
) -> list[Running]:
    """Return the states of one pass over the columns, in the order of the reductions."""
    together: Mapping[int, Running] = {
        **{total: Softmax(peak, total) for total, peak in a.online.items()},
        **{squares: Moments(total, mean, squares) for squares, (total, mean) in a.moments.items()},
    }
    inner = {n for state in together.values() for n in state.numbers} - set(together)
    return [together.get(n, Plain(n)) for n in reductions if n not in inner]


def scaled(b: Builder, state: Running) -> Running:
    """Return a state as a multiple of a segment sum that the block computes anyway, if possible."""
    if not isinstance(state, Plain) or b.s.cols is not Cols.WHOLE:
        return state
    segment_sum = scaled_sum(b, state.total)
    return state if segment_sum is None else Scaled(state.total, *segment_sum)


def complete_after(a: Analysis, level: int) -> list[int]:
    """Return the reductions along the row that so many passes complete."""
    return [i for i in a.reductions if i not in a.finish and a.level[i] == level]


def _seen(b: Builder) -> Expression:
    """Return how many columns of its part a program has processed before the current block."""
    assert b.tile.start is not None  # a pass begins somewhere
    return b.tile.start if b.s.splits == 1 else b.tile.start - own("first_col")


def _count(b: Builder) -> Expression:
    """Return the number of columns of the current block."""
    start, size = b.tile.start, b.a.size(COLS)
    if b.tile.col_mask is None:
        return lift(b.tile.lanes)
    assert start is not None and isinstance(size, int)  # a pass begins somewhere
    if isinstance(start, Literal) and isinstance(start.value, int):  # after the loop
        return lift(size - start.value)
    return tl.minimum(start + b.tile.lanes, size) - start


def _part_counts(b: Builder) -> Expression:
    """Return the number of columns of each part of a row, as float32."""
    first, part = own("parts") * part_cols(b.a, b.s), part_cols(b.a, b.s)
    count = tl.minimum(first + part, b.a.size(COLS)) - first
    return tl.maximum(count, 0).to(torch.float32)
