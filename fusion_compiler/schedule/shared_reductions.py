"""Reductions whose elements several programs have, under a placement of a nest with inner axes.

    t = sum(x, {s});  db = sum(t, {n});  v = sum(w * t, {c});  y = x - v
    place(n, GRID); place(g, GRID); place(c, SHARED); split(s, 8192); place(s.o, SHARED); place(s.i, LANES)

Each program reduces its own part. What happens with the part depends on what reads the reduction:

- `db` is only stored. Each program stores its part, and a second stage reduces these (`partial`).
- `y` needs all of `v`. The programs that share `v` exchange their parts (`exchanged`).
- `t` is read by sums that are linear in it. They sum the parts of `t` as they are, so that a program needs
  no more than its own part. `v` and `db` then have the axes of `t` in addition to their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from fusion_compiler.ir.loops import INNER, Compute, LoopNest, Reduce, axes_of, operands_of, with_operands
from fusion_compiler.schedule.analysis import accumulator_dtype, rounding_of
from fusion_compiler.schedule.placed_axes import NOWHERE, PlacedAxes, placed
from fusion_compiler.schedule.placement import Leaf, On, Place, Placement
from fusion_compiler.schedule.products import Products

aten = torch.ops.aten
RECENT = 64  # nests and placements of which the answers are kept: each is asked several times in a row


@dataclass(frozen=True)
class Uses:
    """What reads a reduction.

    readers: reductions of the same kind that may reduce its parts as they are.
    late: the reduction, and the nodes that depend on it without another reduction.
    stored: those of them that are stored.
    needs_all: the first node that needs the complete reduction, or None.
    """

    readers: frozenset[int]
    late: frozenset[int]
    stored: frozenset[int]
    needs_all: int | None


@lru_cache(maxsize=RECENT)
def uses_of(loops: LoopNest) -> Mapping[int, Uses]:
    """Return, by reduction, what reads it."""
    varies = axes_of(loops.nodes)
    reductions = ((n, node) for n, node in enumerate(loops.nodes) if isinstance(node, Reduce))
    return {n: _uses(loops, n, node, varies) for n, node in reductions}


def _uses(loops: LoopNest, number: int, reduction: Reduce, varies: Sequence[frozenset[int]]) -> Uses:
    linear, late, readers, needs_all = {number}, {number}, set[int](), None
    for n, node in enumerate(loops.nodes):
        read = late.intersection(operands_of(node))
        if not read:
            continue
        if isinstance(node, Reduce) and node.combine == reduction.combine and read <= linear:
            if node.combine == "sum" or node.operand == number:
                readers.add(n)
                continue
        if not isinstance(node, Compute):
            needs_all = n if needs_all is None else needs_all
            continue
        late.add(n)
        factors = [o for o in operands_of(node) if o not in read]
        is_product = node.target is aten.mul.Tensor and len(operands_of(node)) == len(node.operands) == 2
        is_cast = node.target is aten._to_copy.default and rounding_of(node) is None
        is_same = is_cast and node.dtype == reduction.dtype
        if read <= linear and len(read) == 1 and (is_same or (is_product and len(factors) == 1)):
            if all(varies[o].isdisjoint(reduction.axes) for o in factors):
                linear.add(n)
    stores = [store for store in loops.stores if store.value in late]
    for store in stores:
        axes = varies[store.value] | {k for k, _ in store.index.terms}
        if not axes <= varies[number] or store.within is not None:
            needs_all = store.value if needs_all is None else needs_all
    return Uses(frozenset(readers), frozenset(late), frozenset(store.value for store in stores), needs_all)


@lru_cache(maxsize=RECENT)
def sharing_of(loops: LoopNest, placement: Placement) -> SharedReductions | None:
    """Return what programs do with the reductions that they share, for nests with inner axes whose reductions
    are over different axes; None for all others, and where one program has all that is reduced."""
    reduced = {node.axes for node in loops.nodes if isinstance(node, Reduce)}
    has_units = any(isinstance(d, On) for d in placement.directives)
    if len(reduced) < 2 or has_units or not any(axis.group == INNER for axis in loops.axes):
        return None
    places = {leaf.place for leaf in placement.leaves(loops.axes)}
    if Place.UNROLL in places or Products.of(loops, {}) is not None:
        return None
    sharing = SharedReductions.of(loops, placement)
    return sharing if sharing.leaves or places & {Place.LOOP, Place.SHARED} else None


@dataclass(frozen=True)
class SharedReductions:
    """What programs do with the reductions that they share.

    leaves: by reduction, the leaves of the grid whose programs have its parts.
    partial: the reductions of which programs store their parts. exchanged: those that programs exchange.
    refusal: why the nest cannot run, or None.
    """

    loops: LoopNest
    where: PlacedAxes
    leaves: Mapping[int, tuple[Leaf, ...]]
    partial: frozenset[int]
    exchanged: frozenset[int]
    refusal: str | None

    @classmethod
    def of(cls, loops: LoopNest, placement: Placement) -> SharedReductions:
        where = PlacedAxes.of(loops, placement)
        leaves, partial, exchanged = dict[int, tuple[Leaf, ...]](), set[int](), set[int]()
        left = dict[int, frozenset[Leaf]]()  # by reader, the leaves of the inner reductions that it reads
        uses, refusal = uses_of(loops), None
        for n, node in enumerate(loops.nodes):
            if not isinstance(node, Reduce):
                continue
            members = where.of_axes(node.axes) | left.get(n, NOWHERE)
            shared = tuple(leaf for leaf in where.grid if leaf in members and leaf.extent != 1)
            if not shared:
                continue
            leaves[n], use = shared, uses[n]
            on_grid = any(leaf.place is Place.GRID for leaf in shared)
            if on_grid and (use.needs_all is not None or use.readers):
                reader = min(use.readers) if use.needs_all is None else use.needs_all
                refusal = refusal or f"{loops.names[reader]} needs {loops.names[n]}, which programs share"
            if use.needs_all is not None:
                exchanged.add(n)
            else:
                left |= {r: left.get(r, NOWHERE) | frozenset(shared) for r in use.readers}
                partial |= {n} if use.stored else set()
        for n in sorted(partial):
            together = {m for m in partial if not uses[m].stored.isdisjoint(uses[n].stored)}
            needed = with_operands(loops, uses[n].stored, partial)
            others = {m for m in needed - partial if isinstance(loops.nodes[m], Reduce)}
            if len({(leaves[m], where.depends[m]) for m in together}) > 1 or others:
                refusal = refusal or f"what is stored of {loops.names[n]} needs other reductions"
        self = cls(loops, where, leaves, frozenset(partial), frozenset(exchanged), None)
        return cls(loops, where, leaves, self.partial, self.exchanged, refusal or self._refusal())

    def _refusal(self) -> str | None:
        for n in sorted(self.exchanged):
            node, name = self.loops.nodes[n], self.loops.names[n]
            assert isinstance(node, Reduce)
            if accumulator_dtype(node).itemsize != 4:
                return f"{name} has {node.dtype}, of which no message has room for a value"
            kept = [leaf for leaf in self.where.depends[n] if leaf.place in (Place.LANES, Place.LOOP)]
            if kept:
                return f"{name} has a value for each element of {kept[0].name}, and programs exchange one"
        for n, node in enumerate(self.loops.nodes):
            if isinstance(node, Reduce):
                over = placed(self.where.reduced_by(node), Place.LOOP)
                kept = placed(self.where.depends[n], Place.LOOP)
                if over and kept and over[0].order < kept[-1].order:
                    return f"{self.loops.names[n]} would need room for each element of {kept[-1].name}"
        return None

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Return how many reductions that wait for loops or for other programs stand before each node, and in
        it."""
        levels: list[int] = []
        for n, node in enumerate(self.loops.nodes):
            before = max((levels[o] for o in operands_of(node)), default=0)
            in_loop = isinstance(node, Reduce) and placed(self.where.reduced_by(node), Place.LOOP)
            levels.append(before + bool(in_loop or n in self.exchanged))
        return tuple(levels)

    def together(self) -> Iterator[tuple[int, ...]]:
        """Yield the reductions that programs exchange at the same time."""
        for level in sorted({self.levels[n] for n in self.exchanged}):
            yield tuple(n for n in sorted(self.exchanged) if self.levels[n] == level)

    @property
    def programs(self) -> int:
        """Return how many programs exchange reductions."""
        extents = [leaf.extent for leaf in self.where.grid if leaf.place is Place.SHARED]
        count = 1
        for extent in extents:
            assert isinstance(extent, int)
            count *= extent
        return count


def late_axes(loops: LoopNest, axes: Set[int]) -> frozenset[int]:
    """Return those of some axes over which nothing is reduced but what is only stored."""
    late = set(axes)
    for n, use in uses_of(loops).items():
        node = loops.nodes[n]
        if isinstance(node, Reduce) and (use.needs_all is not None or use.readers):
            late -= node.axes
    return frozenset(late)
