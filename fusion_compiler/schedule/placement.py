"""A placement says where each axis of a loop nest lies. It is an ordered list of directives:

    split(a, n)         axis a becomes a.o and a.i; a.i has n elements
    place(a, GRID)      programs share the axis; of several, the last one varies fastest
    place(a, LOOP)      each program goes through the axis in a loop; the first one is the outermost loop
    place(a, LANES)     a tile holds the axis; of several, the last one lies innermost in the tile
    place(a, UNROLL)    the program's text is repeated for each element

`str` prints a placement and `parse` reads it back. `refusal` says why a nest cannot run under a placement.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import ClassVar

from fusion_compiler.ir.dims import Dim
from fusion_compiler.ir.loops import Axis, LoopNest, Reduce, axes_of, operands_of
from fusion_compiler.schedule.analysis import ceil_div
from fusion_compiler.schedule.shapes import WARP, padded

MOST_COPIES = 256  # of one statement, that unrolled axes make


class Place(StrEnum):
    GRID = "GRID"
    LOOP = "LOOP"
    LANES = "LANES"
    UNROLL = "UNROLL"


@dataclass(frozen=True)
class Split:
    """Cut an axis in two; the inner one has `inner` elements."""

    axis: str
    inner: int

    def __str__(self) -> str:
        return f"split({self.axis}, {self.inner})"


@dataclass(frozen=True)
class At:
    """Place an axis, or a part of one."""

    axis: str
    place: Place

    def __str__(self) -> str:
        return f"place({self.axis}, {self.place})"


@dataclass(frozen=True)
class Leaf:
    """A part of an axis that is placed as one.

    axis: the number of the axis. step: elements of the axis from one of the leaf to the next. order: the
    position of its directive.
    """

    name: str
    axis: int
    extent: Dim
    step: int
    place: Place
    order: int

    @property
    def lanes(self) -> int:
        """The number of elements that a tile has of it, a power of two."""
        assert isinstance(self.extent, int)
        return padded(self.extent)


@dataclass(frozen=True)
class Placement:
    """Directives, with what a launch needs besides: threads, stages of loops, registers of a thread."""

    directives: tuple[Split | At, ...]
    num_warps: int = 4
    num_stages: int = 1
    registers: int | None = None
    splits: ClassVar[int] = 1  # what a `Schedule` says besides
    early: ClassVar[int] = 0
    in_passes: ClassVar[bool] = False
    misaligned: ClassVar[bool] = False

    def __str__(self) -> str:
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        limit = f", {self.registers} registers" if self.registers else ""
        return f"{'; '.join(map(str, self.directives))}; {self.num_warps} warps{stages}{limit}"

    @property
    def elements(self) -> int:
        """Return the elements of a tile, as far as splits say."""
        inner = {f"{d.axis}.i": d.inner for d in self.directives if isinstance(d, Split)}
        places = (d for d in self.directives if isinstance(d, At) and d.place is Place.LANES)
        return prod(inner.get(place.axis, 1) for place in places)

    @staticmethod
    def parse(text: str) -> Placement:
        """Return the placement that prints as `text`. Raises ValueError for any other text."""
        directives: list[Split | At] = []
        for word, axis, value in re.findall(r"(split|place)\(([\w.]+), (\w+)\)", text):
            directives.append(Split(axis, int(value)) if word == "split" else At(axis, Place(value)))
        counts = {word: int(number) for number, word in re.findall(r"(\d+) (warps|stages|registers)", text)}
        placement = Placement(
            tuple(directives), counts.get("warps", 4), counts.get("stages", 1), counts.get("registers")
        )
        if str(placement) != text:
            raise ValueError(f"{text!r} is no placement; one is {placement}")
        return placement

    def leaves(self, axes: tuple[Axis, ...]) -> tuple[Leaf, ...]:
        """Return the parts of all axes in the order of their directives. Raises ValueError where an axis is
        not placed, or placed twice."""
        parts = {axis.name: (number, axis.size, 1) for number, axis in enumerate(axes)}
        leaves: list[Leaf] = []
        for position, directive in enumerate(self.directives):
            if directive.axis not in parts:
                raise ValueError(f"{directive}: there is no axis {directive.axis} left to place")
            number, extent, step = parts.pop(directive.axis)
            if isinstance(directive, At):
                leaves.append(Leaf(directive.axis, number, extent, step, directive.place, position))
                continue
            inner = directive.inner
            parts[f"{directive.axis}.o"] = number, ceil_div(extent, inner), step * inner
            parts[f"{directive.axis}.i"] = number, inner, step
        if parts:
            raise ValueError(f"{', '.join(parts)} has no place")
        return tuple(leaves)


def refusal(loops: LoopNest, placement: Placement) -> str | None:
    """Return why a nest cannot run under a placement, or None if it can."""
    try:
        leaves = placement.leaves(loops.axes)
    except ValueError as error:
        return str(error)
    copies = 1
    for leaf in leaves:
        if leaf.place in (Place.LANES, Place.UNROLL):
            if not isinstance(leaf.extent, int):
                return f"{leaf.name} has {leaf.extent} elements, which a tile cannot hold"
            copies *= leaf.extent if leaf.place is Place.UNROLL else 1
    if copies > MOST_COPIES:
        return f"unrolled axes repeat a statement {copies} times, more than {MOST_COPIES}"
    on_grid = {leaf.axis for leaf in leaves if leaf.place is Place.GRID}
    waits = list[dict[frozenset[int], int]]()  # shared reductions, by the axes that they reduce
    for number, node in enumerate(loops.nodes):
        before = {axes: n for o in operands_of(node) for axes, n in waits[o].items()}
        if before and (isinstance(node, Reduce) or len(before) > 1):
            return f"{loops.names[number]} needs {loops.names[min(before.values())]}, which programs share"
        shared = node.axes & on_grid if isinstance(node, Reduce) else frozenset[int]()
        waits.append({node.axes: number} if isinstance(node, Reduce) and shared else before)
    return None


def placed_registers(loops: LoopNest, placement: Placement) -> float:
    """Return the 32-bit registers of a thread for the accumulators of a nest's reductions, and two tiles."""
    leaves = placement.leaves(loops.axes)
    threads, axes = WARP * placement.num_warps, axes_of(loops)
    tiles = 0.0
    for number, node in enumerate(loops.nodes):
        if isinstance(node, Reduce):
            own = [leaf for leaf in leaves if leaf.axis in axes[number] | axes[node.operand]]
            kept = [leaf for leaf in leaves if leaf.axis in axes[number] and leaf.place is Place.UNROLL]
            lanes = prod(leaf.lanes for leaf in own if leaf.place is Place.LANES)
            tiles += prod(leaf.lanes for leaf in kept) * max(1.0, lanes / threads)
    widest = prod(leaf.lanes for leaf in leaves if leaf.place is Place.LANES)
    return tiles + 2 * max(1.0, widest / threads)
