"""The run of a loop nest under a placement: its programs, the tiles of its values, the registers of a thread.

Legality, the cost model, the ranking of placements and the code generator read these facts from one place.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from math import prod

import sympy

from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, operands_of
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.carried import Carried, carried_of
from fusion_compiler.schedule.placed_axes import PlacedAxes
from fusion_compiler.schedule.placement import Place, Placement, Stage
from fusion_compiler.schedule.shapes import WARP, padded
from fusion_compiler.schedule.shared_reductions import SharedReductions, sharing_of
from fusion_compiler.schedule.tile_products import products_of

# Registers of a thread for tiles. Addresses, masks and temporaries take the rest of the 255. Measured on the
# golden kernels: those above the limit spill, the others do not.
MOST = 200
LEAST_WORD = 4  # elements that each turn of a loop adds up at once
NO_HINTS: Mapping[sympy.Symbol, int] = {}


class Run:
    """The facts about a nest under a placement. Raises ValueError where the placement does not fit its axes.

    hints: sizes of symbolic dimensions to plan for.
    programs: size of the grid. parts: how many programs run together and exchange what they reduce.
    counts: by place and group of axes, how many programs, turns, or elements of a tile there are.
    """

    def __init__(
        self, a: Analysis, placement: Placement, hints: Mapping[sympy.Symbol, int] = NO_HINTS
    ) -> None:
        self.a, self.placement, self.hints = a, placement, hints
        self.leaves = placement.leaves(a.loops.axes)
        self.threads = WARP * placement.num_warps
        self.parts = self.programs = 1
        self.counts: dict[tuple[Place, str], int] = {}
        for leaf in self.leaves:
            place = leaf.place
            size = leaf.extent if type(leaf.extent) is int else hint(leaf.extent, hints)
            if place is Place.LANES:
                size = padded(size)
            elif place is Place.GRID or place is Place.SHARED:
                self.programs *= size
                self.parts *= size if place is Place.SHARED else 1
            key = place, a.loops.axes[min(leaf.members)].group
            self.counts[key] = self.counts.get(key, 1) * size

    @cached_property
    def in_rows(self) -> bool:
        """True if programs have tiles of rows and columns: parts of all rows, and of all columns."""
        groups = self.a.rows, self.a.cols
        leaves = (leaf for leaf in self.leaves if leaf.members.isdisjoint(self.a.ragged))
        fits = all(leaf.place is not Place.UNROLL and leaf.members in groups for leaf in leaves)
        return self.a.in_rows and fits

    @cached_property
    def in_passes(self) -> bool:
        """True if a reduction along the row takes a pass of its own, because a tile is not the whole row."""
        return self.in_rows and ((Place.LOOP, COLS) in self.counts or self.parts > 1)

    def elements(self, axes: Collection[int] | None = None) -> int:
        """Return the elements of a tile, or of that of a value which varies over some axes."""
        return self._lanes(Place.LANES, axes)

    def copies(self, axes: Collection[int]) -> int:
        """Return how often a statement is repeated for the unrolled ones of some axes."""
        return self._lanes(Place.UNROLL, axes)

    def _lanes(self, place: Place, axes: Collection[int] | None) -> int:
        count = 1
        for leaf in self.leaves:
            if leaf.place is place and (axes is None or not leaf.members.isdisjoint(axes)):
                count *= leaf.lanes
        return count

    @cached_property
    def sharing(self) -> SharedReductions | None:
        """Return what programs do with reductions that they share, as `sharing_of` does."""
        if not self.a.over_different_axes and not self.merged:
            return None
        return sharing_of(self.a, self.placement, self.where, self.merged)

    @cached_property
    def carried(self) -> Mapping[int, Carried | str]:
        """Return how loops make reductions together with those that they read, or why they cannot."""
        names = self.placement.combined(Stage.CARRIED)
        numbers = (n for n, name in enumerate(self.a.loops.names) if name in names)
        return {n: carried_of(self.a.loops, n) for n in numbers}

    @cached_property
    def merged(self) -> frozenset[int]:
        """Return the carried reductions and those that they read: the law merges parts of them."""
        pairs = ((n, of.reads) for n, of in self.carried.items() if isinstance(of, Carried))
        return frozenset(number for n, reads in pairs for number in (n, *reads))

    @cached_property
    def where(self) -> PlacedAxes:
        """Return the axes that each value has, and where they lie."""
        return PlacedAxes.of(self.a.loops, self.placement)

    @cached_property
    def together(self) -> int:
        """Return how many programs have to run at the same time, because they exchange reductions."""
        return 1 if self.sharing is not None and not self.sharing.exchanged else self.parts

    def extent(self, place: Place) -> int:
        """Return how many programs, turns, lanes or copies there are at a place."""
        return prod(size for (where, _), size in self.counts.items() if where is place)

    @cached_property
    def terms(self) -> frozenset[int]:
        """Return the nodes that tensor cores add up: threads hold no tiles of them."""
        numbers = products_of(self.a.loops, self.placement)
        return frozenset(operands_of(self.a.loops.nodes[n])[0] for n in numbers)

    @cached_property
    def tile_sizes(self) -> list[int]:
        """Return the elements of each node's tile."""
        sizes = [self.elements(axes) for axes in self.a.node_axes]
        for number in self.terms:
            sizes[number] = 0
        return sizes

    @cached_property
    def registers(self) -> float:
        """Return the largest number of 32-bit registers of a thread that are live at the same time.

        Reductions in steps, of a loop or of repeated statements, keep accumulators beside two tiles. Others
        keep what is read later, and sums that a program's turns share.
        """
        a, stepped = self.a, frozenset[int]()
        for leaf in self.leaves:
            if leaf.place in (Place.LOOP, Place.UNROLL):
                stepped |= leaf.members
        in_steps = [n for n in a.along if not stepped.isdisjoint(a.loops.reduction(n).axes)]
        if in_steps:
            return self._accumulators(in_steps) + 2 * self._per_thread(self.elements())
        in_turns = not stepped.isdisjoint(a.rows)
        of_rows = (a.node_axes[n] if in_turns else None for n in a.across_rows)
        return self._held() + sum(self._per_thread(self.elements(axes)) for axes in of_rows)

    def _held(self) -> float:
        """Return the most registers of a thread that hold values at the same time."""
        if self.terms:
            left = ({n: size for n, size in m.items() if n not in self.terms} for m in self.a.live)
            moments = ([(self.a.node_axes[n], size) for n, size in moment.items()] for moment in left)
        else:
            moments = (list(moment.items()) for moment in self.a.live_by_axes)
        each = {
            axes: self.copies(axes) * self._per_thread(self.elements(axes)) / 4
            for axes in {*self.a.node_axes}
        }
        return max((sum(each[axes] * size for axes, size in moment) for moment in moments), default=0.0)

    def _per_thread(self, elements: float) -> float:
        """Return a thread's share of a tile. Values smaller than a warp are replicated."""
        return max(1.0, elements / self.threads)

    def _accumulators(self, numbers: Collection[int]) -> float:
        """Return a thread's registers for the accumulators of the reductions that one pass makes."""
        a, in_turn, of_pass = self.a, self.placement.combined(Stage.TURN), dict[int, float]()
        for n in numbers:
            axes = a.node_axes[n] | a.node_axes[a.loops.reduction(n).operand] | a.loops.reduction(n).axes
            elements = self.elements(axes) / (LEAST_WORD if a.loops.names[n] in in_turn else 1)
            held = self.copies(a.node_axes[n]) * self._per_thread(elements)
            of_pass[a.level[n]] = of_pass.get(a.level[n], 0.0) + (0.0 if n in a.per_row else held)
        return max(of_pass.values())
