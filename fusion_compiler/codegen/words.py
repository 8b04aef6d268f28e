"""Reductions that combine in each turn of a loop what a thread loads (`combine(r, TURN)`), so that registers
hold the sums of many products of one matrix.

    sum += tl.sum(tl.reshape(in0 * in1, [4, 256, 8]), axis=2)

Along the innermost axis of a tile, that is a word: the neighbours that a thread loads together. Along another
axis it is everything that the tile has.

A factor that all terms of a word share, such as the scale of a group of weights, multiplies their sum:

    of_words = fm.repeated(tl.load(in2_ptr + row * 16 + col_o * 16 + col_i_by_128), 16)
    sum += tl.sum(tl.reshape(in0 * sub, [4, 256, 8]), axis=2) * of_words

A thread would load sixteen elements of a matrix of bytes together, but eight of a vector of two bytes. Triton
would then move the products between threads. Thus the matrix is loaded by words of eight elements as well:

    in1 = tl.load(in1_ptr + tl.max_contiguous(row * 2048 + col, [1, 8]))
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import cast

from fusion_compiler.codegen import monoids
from fusion_compiler.codegen.placed import Emitter
from fusion_compiler.codegen.values import PlacedNest, Tile
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import Load, Reduce, operands_of
from fusion_compiler.ops.syntax import Expression, Items, Literal, Var, times, tl
from fusion_compiler.schedule.placed_axes import placed
from fusion_compiler.schedule.placement import Leaf, On, Place, Stage
from fusion_compiler.schedule.shapes import WORD, are_apart


class WordEmitter(Emitter):
    """Emits a nest in which turns of a loop may reduce what threads load.

    in_turns: the names of these reductions. word: the elements that a thread loads together. of_bytes: the
    loads of matrices that say so.
    """

    def __init__(self, nest: PlacedNest) -> None:
        super().__init__(nest)
        self.in_turns = self.placement.combined(Stage.TURN)
        self.of_bytes, self.word = frozenset[Load](), 1
        if not self.lanes or not any(map(self.combines_in_turns, self.reductions)):
            return
        loads = [node for node in self.loops.nodes if isinstance(node, Load)]
        matrices = [load for load in loads if self.is_streamed(load)]
        widest = max((self.dtypes[load.buffer].itemsize for load in matrices), default=4)
        self.word = min(2 * WORD // widest, WORD, self.lanes[-1].lanes)
        along = (load for load in loads if self.lanes[-1] in self.where.of_index(load.index))
        if any(self.dtypes[load.buffer].itemsize == 2 for load in along):
            bytes_ = (m for m in matrices if self.dtypes[m.buffer].itemsize == 1)
            self.of_bytes = frozenset(m for m in bytes_ if self._is_contiguous(m))

    def combines_in_turns(self, number: int) -> bool:
        """True if the placement has `combine(r, TURN)` for a reduction."""
        return self.loops.names[number] in self.in_turns

    def in_turn(self, number: int) -> Sequence[Leaf]:
        """Return the lanes over which each turn of a loop reduces: those of other axes than the innermost,
        of which it reduces words. Without a loop there are none."""
        reduced = self.where.reduced_by(self.reduction(number))
        if not self.combines_in_turns(number) or not placed(reduced, Place.LOOP):
            return ()
        return [leaf for leaf in placed(reduced, Place.LANES) if leaf != self.lanes[-1]]

    def join_key(self, number: int) -> object:
        return self.reduction(number).axes if self.combines_in_turns(number) else super().join_key(number)

    def started(self, number: int) -> Tile:
        with self._in_words(number):
            return super().started(number)

    def add_terms(self, number: int, node: Reduce, state: Tile) -> None:
        if not self.combines_in_turns(number):
            super().add_terms(number, node, state)
        elif (term := self.term(number, node)) is not None:
            value = term.value
            for leaf in self.in_turn(number):
                value = monoids.fold(node, value, self.lanes.index(leaf), keep=len(self.lanes) > 1)
            self.add(monoids.step(node, cast(Var, state.value), value))

    def folded(
        self, number: int, node: Reduce, state: Tile, base: str | None = None, join_key: object = None
    ) -> Tile:
        with self._in_words(number):
            return super().folded(number, node, state, base, join_key)

    def load_first(self) -> None:
        """Load what no loop changes before anything is reduced, as what is added to a product's results."""
        if not any(map(self.combines_in_turns, self.reductions)):
            super().load_first()
            return
        self.load_plain(self.needed.difference(*(self._shared(n) for n in self.reductions)))

    def load_plain(self, numbers: Iterable[int]) -> None:
        """Emit those of some nodes that are loads without conditions, and outside of loops."""
        for number in sorted(numbers):
            node, depends = self.loops.nodes[number], self.depends[number]
            if isinstance(node, Load) and not operands_of(node) and not placed(depends, Place.LOOP):
                for elements in self.variants(depends):
                    with self.fixed(elements):
                        self.tile(number)

    def options(self, node: Load) -> Mapping[str, Expression]:
        """Return the keyword arguments of a load. A matrix leaves the cache first."""
        if not self.is_streamed(node):
            return super().options(node)
        return {**self.load_options, "eviction_policy": Literal("evict_first")}

    def is_streamed(self, node: Load) -> bool:
        """True if a load goes through the matrix of a product, of which no other program loads the same
        element. What tensor cores multiply without a loop stays in the cache."""
        axes, names = self.axes_of(node.index), set(self.in_turns)
        depends = self.where.of_axes(axes)
        if placed(depends, Place.LOOP):
            names |= {d.reduction for d in self.placement.directives if isinstance(d, On)}
        products = (n for n in self.reductions if self.loops.names[n] in names)
        if all(axes.isdisjoint(self.reduction(n).axes) for n in products):
            return False
        steps = ((abs(hint(step)), hint(self.loops.axes[k].size)) for k, step in node.index.terms if k >= 0)
        return depends.issuperset(self.where.grid) and are_apart(steps)

    def place_of(self, node: Load) -> Tile:
        place = super().place_of(node)
        if node not in self.of_bytes:
            return place
        runs = [1] * (len(self.lanes) - 1) + [self.word]
        return replace(place, value=tl.max_contiguous(place.value, runs))

    def _word_of(self, number: int) -> int:
        """Return how many neighbours along the innermost axis a thread reduces by itself."""
        if not self.combines_in_turns(number):
            return 1
        is_along = self.lanes[-1] in self.where.reduced_by(self.reduction(number))
        return self.word if is_along and self.lanes[-1].step == 1 else 1

    @contextmanager
    def _in_words(self, number: int) -> Generator[None]:
        """Emit tiles whose innermost dimension has one element for each word that a reduction combines."""
        before = self.where
        if (word := self._word_of(number)) > 1:
            self.where = before.with_leaves({self.lanes[-1]: _words(self.lanes[-1], word)})
        yield
        self.where = before

    def term(self, number: int, node: Reduce) -> Tile | None:
        """Return a reduction's operand, or what the terms of each word come to; None if they add nothing."""
        word, shared = self._word_of(number), self._shared(number)
        term = self._unshared(node, shared) if shared else super().term(number, node)
        if word == 1 or term is None:
            return term
        leaf = self.lanes[-1]
        shape = (*self.shape(term.lanes).items[:-1], Literal(leaf.lanes // word), Literal(word))
        total = monoids.fold(node, tl.reshape(term.value, Items(shape)), len(shape) - 1, keep=False)
        lanes = term.lanes - {leaf} | {_words(leaf, word)}
        return Tile(times(total, *(self._factor(n, word) for n in shared)) if shared else total, lanes, True)

    def _unshared(self, node: Reduce, shared: Collection[int]) -> Tile:
        """Return a reduction's operand without some of its factors."""
        tiles = [self.tile(n) for n in self._varying(node.operand, shared)]
        return self.masked(node, self.joined(times(*(tile.value for tile in tiles)), *tiles))

    def _shared(self, number: int) -> tuple[int, ...]:
        """Return the factors of the terms that have one value per word, and are loaded once per word."""
        word = self._word_of(number)
        if word == 1 or not self.a.is_sum(number):
            return ()
        factors = tuple(self.a.factors[self.reduction(number).operand].elements())
        shared = tuple(n for n in factors if self._is_shared(n, word))
        return shared if len(shared) < len(factors) else ()

    def _is_shared(self, number: int, word: int) -> bool:
        node = self.loops.nodes[number]
        return isinstance(node, Load) and node.within is None and self.run_length(node) % word == 0

    def _varying(self, number: int, shared: Collection[int]) -> tuple[int, ...]:
        """Return the largest subexpressions without shared factors; the terms are their product times the
        shared factors."""
        if number in shared:
            return ()
        if self.a.factors[number].keys().isdisjoint(shared):
            return (number,)
        operands = operands_of(self.loops.nodes[number])
        return tuple(n for operand in operands for n in self._varying(operand, shared))

    def _factor(self, number: int, word: int) -> Expression:
        """Return a shared factor, loaded once per word."""
        node = self.loops.nodes[number]
        assert isinstance(node, Load)
        length = self.run_length(node)
        return self.let("of_words", self.repeated(node, length, length // word).value)

    def _is_contiguous(self, load: Load) -> bool:
        """True if neighbouring lanes of a tile are neighbours in memory."""
        leaf, terms = self.lanes[-1], self.where.merged(load.index).terms
        along = [(k, step) for k, step in terms if k < 0 or leaf in self.where.of_axes((k,))]
        return along == [(leaf.axis, 1)] and leaf.step == 1


def _words(leaf: Leaf, word: int) -> Leaf:
    """Return the leaf that has one element for each word of another."""
    return leaf._replace(name=f"{leaf.name}_by_{word}", extent=leaf.lanes // word, step=word)
