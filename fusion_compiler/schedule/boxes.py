"""Boxes of a buffer that a tensor descriptor copies (TMA): what of a load is one, and why another is none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion_compiler.ir.dims import quotient
from fusion_compiler.ir.loops import Index, InRange, Load, LoopNest, conjuncts_of
from fusion_compiler.schedule.placement import Leaf, Place

MOST_SIDES = 5  # of a box
BOX_BYTES = 16  # a box starts at a multiple of them, its rows lie at multiples, and are no shorter


@dataclass(frozen=True)
class Side:
    """A side is one dimension of a box.

    index: the elements of the dimension that are loaded; those outside of 0 <= index < size are zero. stride:
    of the dimension, in elements of the buffer. leaf: the lanes along it, None for one element. apart: the
    step from one lane to the next, in elements of the dimension.
    """

    index: Index
    size: int
    stride: int
    leaf: Leaf | None = None
    apart: int = 1

    @property
    def lanes(self) -> int:
        return 1 if self.leaf is None else self.leaf.lanes


@dataclass(frozen=True)
class Box:
    """A box is what one load copies. offset: elements from the buffer's first to the one at 0 along all
    sides."""

    offset: int
    sides: tuple[Side, ...]


def box_of(loops: LoopNest, load: Load, leaves: Sequence[Leaf], itemsize: int) -> Box | str:
    """Return the box that a load copies, or why it copies none.

    The load reads an element, and not zero, where its axes are within their sizes and its condition holds.
    A condition is a conjunction of ranges. A range of an index whose axes move the address by nothing else is
    a side with that range. Any other axis is a side of its own; axes with the same step share one, of all
    elements that they reach together.
    """
    name, steps = load.buffer, dict[int, int]()
    fused = frozenset[int]().union(*(leaf.members - {leaf.axis} for leaf in leaves))
    for axis, step in load.index.terms:
        if axis < 0:
            return f"an index that is data says where {name} is read"
        if axis in fused:
            return f"lanes go through {loops.axes[axis].name} and other axes of {name}"
        if not isinstance(step, int) or not isinstance(loops.axes[axis].size, int):
            return f"{name}'s strides and sizes along {loops.axes[axis].name} are known at launch only"
        steps[axis] = step
    if not isinstance(offset := load.index.const, int):
        return f"where {name} begins is known at launch only"
    sides: list[Side] = []
    for number in () if load.within is None else conjuncts_of(loops.nodes, load.within):
        node = loops.nodes[number]
        if not isinstance(node, InRange):
            return f"{name} is read under a condition that is no range"
        low, high, const = node.low, node.high, node.index.const
        if not isinstance(low, int) or not isinstance(high, int) or not isinstance(const, int):
            return f"{name}'s ranges are known at launch only"
        ratios = {quotient(steps.pop(key, 0), c) for key, c in node.index.terms}
        stride = next(iter(ratios), None)
        is_whole = all(isinstance(c, int) for _, c in node.index.terms)
        if len(ratios) != 1 or not is_whole or not isinstance(stride, int) or stride < 1:
            return f"a range that {name} is read in is none of one of its dimensions"
        sides.append(Side(replace(node.index, const=const - low), high - low, stride))
        offset += stride * (low - const)
    for step in dict.fromkeys(steps.values()):
        axes = [axis for axis, other in steps.items() if other == step]
        reached = sum(int(loops.axes[axis].size) - 1 for axis in axes)
        sides.append(Side(Index(0, tuple((axis, 1) for axis in axes)), reached + 1, step))
    return _checked(name, Box(offset, tuple(sides)), leaves, itemsize)


def _checked(name: str, box: Box, leaves: Sequence[Leaf], itemsize: int) -> Box | str:
    """Return a box with its lanes and its innermost side last, or what the hardware or Triton has not."""
    sides: list[Side] = []
    for side in box.sides:
        coefficients = {axis: int(c) for axis, c in side.index.terms}
        along = [leaf for leaf in leaves if leaf.axis in coefficients and leaf.place is Place.LANES]
        if len(along) > 1:
            return f"{' and '.join(leaf.name for leaf in along)} are lanes along one dimension of {name}"
        apart = 1
        for leaf in along:
            apart = coefficients[leaf.axis] * leaf.step
            moving = [o for o in leaves if o.axis in coefficients and o.place is not Place.UNROLL]
            if not 0 < apart <= side.size or any(coefficients[o.axis] * o.step % apart for o in moving):
                return f"boxes of {name} move by no multiple of {apart} elements, the step of {leaf.name}"
            if leaf.lanes != leaf.extent and sum(other.axis == leaf.axis for other in leaves) > 1:
                return f"{leaf.name} has {leaf.extent} elements in {leaf.lanes} lanes, and more follow"
        sides.append(replace(side, leaf=along[0] if along else None, apart=apart))
    sides.sort(key=lambda side: (-side.stride, side.lanes))
    if len(sides) > MOST_SIDES:
        return f"{name} is read along {len(sides)} dimensions, more than {MOST_SIDES}"
    is_dense = bool(sides) and sides[-1].stride == sides[-1].apart == 1
    if not is_dense or sides[-1].lanes * itemsize < BOX_BYTES:
        return f"lanes do not cover {BOX_BYTES} bytes of neighbours in {name}"
    inner, others = sides[-1], [leaf for leaf in leaves if leaf != sides[-1].leaf]
    starts = [int(c) * leaf.step for axis, c in inner.index.terms for leaf in others if leaf.axis == axis]
    starts += [box.offset, int(inner.index.const), *(side.stride for side in sides[:-1])]
    if any(start * itemsize % BOX_BYTES for start in starts):
        return f"boxes of {name} or their rows begin at no multiple of {BOX_BYTES} bytes"
    if box.offset < 0 or any(side.stride < 1 or not 0 < side.size < 2**31 for side in sides):
        return f"{name} is read backwards, from before its beginning, or has no elements"
    return Box(box.offset, tuple(sides))
