"""The parts of a loop that a program goes through: none for blocks that masks leave out, and one of its own
for the blocks in which no element is masked.

    for first_j in tl.range(0, i_o * 128, 64): ...                     j <= i holds everywhere
    for first_j in tl.range(i_o * 128, i_o * 128 + 128, 64): ...       and here somewhere
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import cast

from fusion_compiler.codegen.placed import Emitter
from fusion_compiler.ops.syntax import Expression, Global, Literal, lift, tl
from fusion_compiler.schedule.live_blocks import Bound
from fusion_compiler.schedule.placement import Leaf, Place

LEAST_FULL = 0.5  # of the blocks: with fewer that need no mask, one loop has the mask in all of them
PROGRAM = (Place.GRID, Place.SHARED)  # where all lanes of a program have one number


@dataclass(frozen=True)
class Edge:
    """A place along a loop's axis: const + the sum of coefficients times program numbers, within [0, most],
    rounded down to a multiple of `block`."""

    parts: tuple[tuple[Leaf, int], ...]
    const: int
    block: int
    most: int

    @property
    def is_multiple(self) -> bool:
        return all(c % self.block == 0 for _, c in self.parts)

    def at(self, share: float) -> int:
        """Return the place for a program in some part of the grid."""
        numbers = [(int(share * (cast(int, leaf.extent) - 1)), c) for leaf, c in self.parts]
        place = self.const + sum(n * c for n, c in numbers)
        return min(self.most, max(0, place) // self.block * self.block)

    def expression(self, e: Emitter) -> Expression:
        last = [c * (cast(int, leaf.extent) - 1) for leaf, c in self.parts]
        const = self.const // self.block * self.block if self.is_multiple else self.const
        low, high = (const + sum(c for c in last if c * sign > 0) for sign in (-1, 1))
        if not self.parts or low >= self.most or high <= 0:
            return lift(self.at(0.0))
        value = e.sum_of([(e.element(leaf), c) for leaf, c in self.parts], const)
        value = value if low >= 0 else tl.maximum(value, 0)
        value = value if self.is_multiple else value // self.block * self.block
        return value if high <= self.most else tl.minimum(value, self.most)


@dataclass(frozen=True)
class Edges:
    """The largest of several places, or the smallest."""

    edges: tuple[Edge, ...]
    choose: Global

    def at(self, share: float) -> int:
        places = [edge.at(share) for edge in self.edges]
        return max(places) if self.choose == tl.maximum else min(places)

    def expression(self, e: Emitter) -> Expression:
        values = [edge.expression(e) for edge in self.edges]
        places = [value.value for value in values if isinstance(value, Literal)]
        moving = [value for value in values if not isinstance(value, Literal)]
        if len(places) == len(values):
            return lift(self.at(0.0))
        value = moving[0]
        for other in moving[1:]:
            value = self.choose(value, other)
        return value


@dataclass(frozen=True)
class Span:
    """A part of a loop. is_full: no element of its blocks is masked."""

    start: Expression
    end: Expression
    is_full: bool


def spans_of(e: Emitter, loop: Leaf, bounds: Iterable[Bound]) -> list[Span]:
    """Return the parts of a loop; none where it goes through all of its axis, and all blocks have masks or
    none has. bounds: what holds wherever a block is live."""
    size, block = e.where.axes[loop.axis].size, loop.step
    in_lanes = [leaf.lanes for leaf in e.where.leaves[loop.axis] if leaf is not loop]
    if not isinstance(size, int) or loop.name not in e.where.steps or in_lanes != [block] or size < block:
        return []
    blocks_end = size // block * block
    edge = Edge((), 0, block, blocks_end)
    starts, full_starts, full_ends = [edge], [edge], [replace(edge, const=size)]
    ends = [replace(edge, const=size, block=1, most=size)]
    for bound in bounds:
        side = bound.coefficient(loop.axis)
        most, least = (_extreme(e, loop, bound, sign) for sign in (1, -1))
        if abs(side) != 1 or most is None or least is None:
            continue
        if side < 0:
            ends.append(Edge(most[0], most[1] + 1, 1, size))
            full_ends.append(Edge(least[0], least[1] + 1, block, blocks_end))
        else:
            starts.append(Edge(_negative(most[0]), -most[1], block, blocks_end))
            full_starts.append(Edge(_negative(least[0]), -least[1] + block - 1, block, blocks_end))
    first, last = Edges(tuple(starts), tl.maximum), Edges(tuple(ends), tl.minimum)
    full_first, full_last = Edges(tuple(full_starts), tl.maximum), Edges(tuple(full_ends), tl.minimum)
    is_bounded = len(starts) + len(ends) > 2
    if not is_bounded and size % block == 0:
        return []
    start, end = first.expression(e), last.expression(e)
    if full_last.at(0.5) - full_first.at(0.5) < LEAST_FULL * (last.at(0.5) - first.at(0.5)):
        return [Span(start, end, False)]
    full_start, full_end = full_first.expression(e), full_last.expression(e)
    spans = [Span(full_start, full_end, True)]
    if len(starts) > 1:
        spans.insert(0, Span(start, tl.minimum(full_start, end) if len(ends) > 1 else full_start, False))
    if full_end == end:
        return spans
    return [*spans, Span(tl.maximum(full_start, full_end) if len(starts) > 1 else full_end, end, False)]


Parts = tuple[tuple[Leaf, int], ...]


def _negative(parts: Parts) -> Parts:
    return tuple((leaf, -c) for leaf, c in parts)


def _extreme(e: Emitter, loop: Leaf, bound: Bound, sign: int) -> tuple[Parts, int] | None:
    """Return the largest value (the smallest for sign -1) that the other axes of a bound give it in a
    program; None if that is not known."""
    parts, const = list[tuple[Leaf, int]](), bound.const
    for axis, c in bound.terms:
        for leaf in e.where.leaves[axis] if axis != loop.axis else ():
            if leaf.place is Place.LANES:
                const += c * (leaf.lanes - 1) * leaf.step if c * sign > 0 else 0
            elif leaf.place in PROGRAM and isinstance(leaf.extent, int):
                parts.append((leaf, c * leaf.step))
            else:
                return None
        if axis in e.where.fused:
            return None
    return tuple(part for part in parts if part[0].extent != 1), const
