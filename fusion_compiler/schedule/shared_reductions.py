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

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import cast

from fusion_compiler.ir.loops import LoopNest, Reduce, operands_of, with_operands
from fusion_compiler.schedule.analysis import Analysis, accumulator_dtype
from fusion_compiler.schedule.placed_axes import NOWHERE, PlacedAxes, placed
from fusion_compiler.schedule.placement import Leaf, On, Place, Placement
from fusion_compiler.schedule.tile_products import is_chained


def sharing_of(
    a: Analysis, placement: Placement, where: PlacedAxes, carried: Collection[int] = ()
) -> SharedReductions | None:
    """Return what programs do with the reductions of a nest over different axes (`over_different_axes`) that
    they share; None where one program has all that is reduced. where: the nest's axes under the placement.
    carried: reductions whose parts the law of carried reductions merges."""
    places = {leaf.place for leaves in where.leaves.values() for leaf in leaves}
    in_products = any(isinstance(d, On) for d in placement.directives)
    in_chain = is_chained(a, placement)
    if Place.UNROLL in places or (in_products and not in_chain):
        return None
    sharing = SharedReductions.of(a, where, carried)
    return sharing if sharing.leaves or in_chain or places & {Place.LOOP, Place.SHARED} else None


@dataclass(frozen=True)
class SharedReductions:
    """The reductions that programs share, and what the programs do with them.

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
    def of(cls, a: Analysis, where: PlacedAxes, carried: Collection[int]) -> SharedReductions:
        loops, uses = a.loops, a.uses
        leaves, partial, exchanged = dict[int, tuple[Leaf, ...]](), set[int](), set[int]()
        left = dict[int, frozenset[Leaf]]()  # by reader, the leaves of the inner reductions that it reads
        refusal: str | None = None
        for n, node in enumerate(loops.nodes):
            if not isinstance(node, Reduce):
                continue
            members = where.of_axes(node.axes) | left.get(n, NOWHERE)
            shared = tuple(leaf for leaf in where.grid if leaf in members and leaf.extent != 1)
            if not shared:
                continue
            leaves[n], use = shared, uses[n]
            on_grid = any(leaf.place is Place.GRID for leaf in shared)
            if n in carried and on_grid:
                partial.add(n)
                continue
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
            forms = {(leaves[m], NOWHERE if m in carried else where.depends[m]) for m in together}
            if len(forms) > 1 or others:
                refusal = refusal or f"what is stored of {loops.names[n]} needs other reductions"
        self = cls(loops, where, leaves, frozenset(partial), frozenset(exchanged), refusal)
        return self if refusal else replace(self, refusal=self._refusal())

    def _refusal(self) -> str | None:
        for n in sorted(self.exchanged):
            node, name = self.loops.reduction(n), self.loops.names[n]
            if accumulator_dtype(node).itemsize != 4:
                return f"{name} has {node.dtype}, whose values do not fit in a message"
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
        return prod(cast(int, leaf.extent) for leaf in self.where.grid if leaf.place is Place.SHARED)
