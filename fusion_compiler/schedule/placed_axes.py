"""The axes of a loop nest under a placement: what each value depends on, and what a tile has of it.

Legality, the registers of a thread and the code generator derive their facts about a placed nest from here.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_compiler.ir.dims import Dim, product, quotient, strides_of
from fusion_compiler.ir.loops import (
    COLS,
    Axis,
    Coordinate,
    Index,
    InRange,
    Load,
    LoopNest,
    Random,
    Reduce,
    Scan,
    Store,
    axes_in,
    operands_of,
    store_operands,
)
from fusion_compiler.schedule.analysis import ceil_div
from fusion_compiler.schedule.placement import Align, Leaf, Place, Placement, Stage

NOWHERE = frozenset[Leaf]()
INDEXED = (Load, Coordinate, InRange, Random)  # nodes that depend on what their index varies over


@dataclass(frozen=True)
class PlacedAxes:
    """Say what values depend on, and how axes lie, under a placement.

    axes: those of the nest, and behind them the fused ones.
    leaves: by axis, the leaves on which its element number depends.
    lanes: the leaves in LANES, in the order of a tile's dimensions.
    grid: the leaves in GRID, and then those in SHARED. The last one varies fastest.
    members: by fused axis, the axes that were fused. fused: by each of these, the fused axis.
    aligned: the axes, fused or not, that begin with a word.
    turns: by loop over what programs take in turns, the leaf of the grid that numbers the programs.
    steps: by the name of a loop, how many elements lie between its turns. Loops that are not here count
        blocks, because other loops go over the same axis.
    depends: by node, the leaves on which its value depends.
    """

    axes: tuple[Axis, ...]
    leaves: Mapping[int, Sequence[Leaf]]
    lanes: tuple[Leaf, ...]
    grid: tuple[Leaf, ...]
    members: Mapping[int, tuple[int, ...]]
    fused: Mapping[int, int]
    aligned: frozenset[int]
    turns: Mapping[Leaf, Leaf]
    steps: Mapping[str, int]
    depends: tuple[frozenset[Leaf], ...] = ()

    @classmethod
    def of(cls, loops: LoopNest, placement: Placement) -> PlacedAxes:
        """Return the facts about a nest. Raises ValueError where the placement does not fit its axes."""
        leaves, axes = placement.leaves(loops.axes), placement.axes(loops.axes)
        members = dict(enumerate(placement.fused(loops.axes), len(loops.axes)))
        aligned = {d.axis for d in placement.directives if isinstance(d, Align)}
        places = {place: tuple(leaf for leaf in leaves if leaf.place is place) for place in Place}
        grid = (*places[Place.GRID], *places[Place.SHARED])
        turns = {
            loop: programs
            for loop in places[Place.LOOP]
            for programs in grid
            if loop.axis == programs.axis and loop.step == product((programs.step, programs.extent))
        }
        loops_over = Counter(leaf.axis for leaf in places[Place.LOOP])
        self = cls(
            axes=axes,
            leaves={n: tuple(leaf for leaf in leaves if leaf.axis == n) for n in range(len(axes))},
            lanes=places[Place.LANES],
            grid=grid,
            members=members,
            fused={member: axis for axis, of_axis in members.items() for member in of_axis},
            aligned=frozenset(n for n, axis in enumerate(axes) if axis.name in aligned),
            turns=turns,
            steps={
                leaf.name: leaf.step
                for leaf in places[Place.LOOP]
                if leaf in turns or loops_over[leaf.axis] == 1
            },
        )
        of_members = {member: self._leaves_of_member(member) for member in self.fused}
        self = replace(self, leaves={**self.leaves, **of_members})
        depends, of_each = list[frozenset[Leaf]](), placement.combined(Stage.EACH)
        for node, name in zip(loops.nodes, loops.names, strict=True):
            read = NOWHERE.union(*(depends[o] for o in operands_of(node)))
            if isinstance(node, INDEXED):
                read |= self.of_index(node.index)
            elif isinstance(node, Scan):
                read |= self.of_axes(axes_in(loops.axes, (COLS,)))
            elif isinstance(node, Reduce):
                read -= self.of_axes(node.axes) if name in of_each else self.reduced_by(node)
            depends.append(read)
        return replace(self, depends=tuple(depends))

    def _leaves_of_member(self, member: int) -> Sequence[Leaf]:
        """Return the leaves of a fused axis on which the element number of one of its axes depends.

        It is the fused number, divided by the number of elements of all inner axes, modulo the axis' size.
        Neighbours along inner leaves have the same one if that number is a multiple of theirs.
        """
        axis, first, inner = self.fused[member], self.members[self.fused[member]][0], self.inner_size(member)
        size = product((inner, self.axes[member].size))
        if size == 0 or axis in self.aligned:
            return self.leaves[axis]
        leaves = sorted(self.leaves[axis], key=lambda leaf: (leaf.step, leaf.extent != 1))
        filled = [leaf.place is not Place.LANES or leaf.lanes == leaf.extent for leaf in leaves]
        multiples = (quotient(inner, leaf.step) is not None for leaf in leaves)
        same = max(i for i, is_multiple in enumerate(multiples) if is_multiple and all(filled[:i]))
        return [leaf for leaf in leaves[same:] if member == first or quotient(leaf.step, size) is None]

    def with_leaves(self, changes: Mapping[Leaf, Leaf]) -> PlacedAxes:
        """Return the same axes with other leaves in the place of some."""
        leaves = {k: [changes.get(x, x) for x in of_axis] for k, of_axis in self.leaves.items()}
        return replace(self, leaves=leaves, lanes=tuple(changes.get(leaf, leaf) for leaf in self.lanes))

    def of_axes(self, axes: Iterable[int]) -> frozenset[Leaf]:
        return NOWHERE.union(*(self.leaves[axis] for axis in axes))

    def of_index(self, index: Index) -> frozenset[Leaf]:
        return self.of_axes(key for key, _ in index.terms if key >= 0)

    def of_store(self, store: Store) -> frozenset[Leaf]:
        return self.of_index(store.index).union(*(self.depends[o] for o in store_operands(store)))

    def reduced_by(self, node: Reduce) -> frozenset[Leaf]:
        """Return the part of a reduction that each program reduces."""
        return frozenset(leaf for leaf in self.of_axes(node.axes) if leaf.place is not Place.GRID)

    def last_group(self) -> tuple[Dim, Leaf, Leaf] | None:
        """Return (blocks, groups, blocks of a group) of an axis whose blocks the grid has in groups, of which
        the last one may have fewer; None if there is no such axis."""
        for outer, inner in itertools.permutations(self.grid, 2):
            if outer.axis == inner.axis and outer.step == inner.step * inner.extent:
                blocks = ceil_div(self.axes[inner.axis].size, inner.step)
                if quotient(blocks, inner.extent) is None:
                    return blocks, outer, inner
        return None

    def outermost(self, axis: int) -> Sequence[Leaf]:
        """Return the leaves of an axis, or of the one with which it is fused."""
        return self.leaves[self.fused.get(axis, axis)]

    def is_single(self, leaf: Leaf) -> bool:
        """True if a leaf has one element, whose number needs no variable. Where other leaves of the axis are
        unrolled, it has one, so that elements behind the end are masked."""
        others = self.leaves[leaf.axis]
        is_moved = leaf.place is Place.LANES or leaf in self.turns
        return leaf.extent == 1 and not is_moved and not any(x.place is Place.UNROLL for x in others)

    def moving(self, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Return the leaves whose numbers make up a position."""
        in_turns = {self.turns[leaf] for leaf in leaves if leaf in self.turns}
        return [leaf for leaf in leaves if not self.is_single(leaf) and leaf not in in_turns]

    def step_of(self, leaf: Leaf) -> int:
        """Return how many elements lie between values of a leaf's variable that differ by one."""
        return leaf.step // self.steps.get(leaf.name, 1)

    def inner_size(self, member: int) -> Dim:
        """Return the number of elements of all axes inside of one with which they are fused."""
        axes = self.members[self.fused[member]]
        return product(self.axes[k].size for k in axes if k > member)

    def unit_of(self, leaves: Iterable[Leaf], inner: Dim) -> int:
        """Return a number by which the steps of some leaves, and that of a fused axis, may be divided."""
        leaves = list(leaves)
        counts_elements = all(leaf.name in self.steps for leaf in leaves)
        if not isinstance(inner, int) or counts_elements or any(leaf.axis in self.aligned for leaf in leaves):
            return 1
        return math.gcd(inner, *(leaf.step for leaf in leaves))

    def merged(self, index: Index) -> Index:
        """Return an index in which terms that go through a fused axis element by element are one term."""
        terms = dict(index.terms)
        for axis, members in self.members.items():
            step = terms.get(members[-1], 0)
            steps = strides_of(tuple(self.axes[k].size for k in members))
            if step != 0 and all(terms.get(k, 0) == step * s for k, s in zip(members, steps, strict=True)):
                terms = {k: c for k, c in terms.items() if k not in members} | {axis: step}
        return Index(index.const, tuple(sorted(terms.items())))


def placed(leaves: Iterable[Leaf], place: Place) -> list[Leaf]:
    """Return the leaves that are at a place, in the order of their directives."""
    return sorted((leaf for leaf in leaves if leaf.place is place), key=lambda leaf: leaf.order)
