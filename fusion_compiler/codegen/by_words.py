"""Sum a product's terms by words (the columns that a thread loads together), so that registers hold the sums
of many products of one matrix.

    row_sum += tl.sum(tl.reshape(in0 * in1, [4, 256, 8]), axis=2)

A factor that all terms of a word share, such as the scale of a group of weights, multiplies their sum:

    of_words = fm.repeated(tl.load(in2_ptr + row * 16 + col_o * 16 + col_i_by_128), 16)
    row_sum += tl.sum(tl.reshape(in0 * sub, [4, 256, 8]), axis=2) * of_words

A thread would load sixteen elements of a matrix of bytes together, but eight of a vector of two bytes. Triton
would then move the products between threads. Thus the matrix is loaded by words of eight elements as well:

    in1 = tl.load(in1_ptr + tl.max_contiguous(row * 2048 + col, [1, 8]))
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fusion_compiler.codegen import monoids
from fusion_compiler.codegen.carried import Plain, State
from fusion_compiler.codegen.row_tiles import RowTiles
from fusion_compiler.ir.loops import Load, operands_of
from fusion_compiler.ir.syntax import Expression, Items, Literal, Var, times, tl
from fusion_compiler.schedule.analysis import accumulator_dtype
from fusion_compiler.schedule.schedule import WORD


@dataclass(frozen=True)
class ByWords(Plain):
    """A sum of products along the row, with one accumulator for each word of a block."""

    word: int

    def reads(self, e: RowTiles) -> tuple[int, ...]:
        return self._varying(e, e.reduction(self.number).operand, self._shared(e))

    def start(self, e: RowTiles) -> tuple[Var, ...]:
        node = e.reduction(self.number)
        shape = Items(self._shape(e)[:-1])
        return (e.state("row_sum", tl.full(shape, monoids.neutral(node), accumulator_dtype(node))),)

    def step(self, e: RowTiles, state: Sequence[Var]) -> None:
        node, shared = e.reduction(self.number), self._shared(e)
        tiles = [e.tile(n) for n in self._varying(e, node.operand, shared)]
        term = e.masked(node, e.joined(times(*(tile.value for tile in tiles)), *tiles))
        shape = self._shape(e)
        total = tl.sum(tl.reshape(term.value, Items(shape)), axis=len(shape) - 1)
        e.add(monoids.step(node, state[0], times(total, *(self._factor(e, n) for n in shared))))

    def _shape(self, e: RowTiles) -> tuple[Literal, ...]:
        """Return the shape of a block, in which a word is a dimension of its own."""
        *rows, lanes = (leaf.lanes for leaf in e.lanes)
        return tuple(map(Literal, (*rows, lanes // self.word, self.word)))

    def _shared(self, e: RowTiles) -> tuple[int, ...]:
        """Return the factors of the terms that have one value per word, and are loaded once per word."""
        factors = tuple(e.a.factors[e.reduction(self.number).operand].elements())
        shared = tuple(n for n in factors if self._is_shared(e, n))
        return shared if len(shared) < len(factors) else ()

    def _is_shared(self, e: RowTiles, number: int) -> bool:
        node = e.loops.nodes[number]
        return isinstance(node, Load) and node.within is None and e.run_length(node) % self.word == 0

    def _varying(self, e: RowTiles, number: int, shared: Collection[int]) -> tuple[int, ...]:
        """Return the largest subexpressions without shared factors; the terms are their product times the
        shared factors."""
        if number in shared:
            return ()
        if e.a.factors[number].keys().isdisjoint(shared):
            return (number,)
        operands = operands_of(e.loops.nodes[number])
        return tuple(n for operand in operands for n in self._varying(e, operand, shared))

    def _factor(self, e: RowTiles, number: int) -> Expression:
        """Return a shared factor, loaded once per word."""
        node = e.loops.nodes[number]
        assert isinstance(node, Load)
        length = e.run_length(node)
        return e.let("of_words", e.repeated(node, length, length // self.word).value)

    def _key(self, e: RowTiles) -> object:
        return *self.shape_key(e), self.word


def by_words(e: RowTiles, states: Sequence[State]) -> list[State]:
    """Return the states with which a loop keeps reductions: by words those that are sums of products."""
    widest = max((e.dtypes[load.buffer].itemsize for load in _matrices(e)), default=4)
    word = min(2 * WORD // widest, WORD, e.lanes[-1].lanes)

    def kept(state: State) -> State:
        if word > 1 and isinstance(state, Plain) and state.number in e.a.weighted:
            return ByWords(state.number, word)
        return state

    result = [kept(state) for state in states]
    if any(isinstance(state, ByWords) for state in result):
        e.by_words = dict.fromkeys(_bytes_beside_words(e), word)
    return result


def _matrices(e: RowTiles) -> list[Load]:
    """Return the loads that vary over rows and columns."""
    return [n for i, n in enumerate(e.loops.nodes) if isinstance(n, Load) and e.is_full(i)]


def _bytes_beside_words(e: RowTiles) -> list[Load]:
    """Return the matrices of bytes, if elements of two bytes are loaded along their rows."""
    lane = {e.lanes[-1]}
    along = (n for n in e.loops.nodes if isinstance(n, Load) and e.where.of_index(n.index) & lane)
    if all(e.dtypes[load.buffer].itemsize != 2 for load in along):
        return []
    return [m for m in _matrices(e) if e.dtypes[m.buffer].itemsize == 1 and _is_contiguous(e, m)]


def _is_contiguous(e: RowTiles, load: Load) -> bool:
    """True if neighbouring columns of a tile are neighbours in memory."""
    leaf, terms = e.lanes[-1], e.where.merged(load.index).terms
    along = [(k, step) for k, step in terms if k < 0 or leaf in e.where.of_axes((k,))]
    return along == [(leaf.axis, 1)] and leaf.step == 1
