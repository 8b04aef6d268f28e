"""A placement says where each axis of a loop nest lies. It is an ordered list of directives:

    split(a, n)         axis a becomes a.o and a.i; a.i has n elements
    place(a, GRID)      programs share the axis; of several, the last one varies fastest
    place(a, LOOP)      each program goes through the axis in a loop; the first one is the outermost loop
    place(a, LANES)     a tile holds the axis; of several, the last one lies innermost in the tile
    place(a, UNROLL)    the program's text is repeated for each element
    unit(r, TENSOR_CORE)  tensor cores make the reduction r: a sum of products of two tiles that have the axes
                        which it reduces in common, and no others
    access(x, DESCRIPTOR)    loads of buffer x copy boxes of it by a tensor descriptor (TMA)

`str` prints a placement and `parse` reads it back. `refusal` says why a nest cannot run under a placement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from math import prod
from typing import ClassVar

import torch

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import Dim, quotient
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import (
    Axis,
    Compute,
    Constant,
    Index,
    InRange,
    Load,
    LoopNest,
    Reduce,
    axes_of,
    operands_of,
)
from fusion_compiler.schedule.analysis import ceil_div
from fusion_compiler.schedule.shapes import WARP, padded

MUL = torch.ops.aten.mul.Tensor
SMALLEST = 16  # rows and terms of a product that tensor cores take
MOST_COPIES = 256  # of one statement, that unrolled axes make
MOST_SIDES = 5  # of a box
DESCRIPTORS = 90  # the first compute capability that has them, times ten
BOX_BYTES = 16  # a box starts at a multiple of them, its rows lie at multiples, and are no shorter
NO_BUFFERS: Mapping[str, Buffer] = {}


class Place(StrEnum):
    GRID = "GRID"
    LOOP = "LOOP"
    LANES = "LANES"
    UNROLL = "UNROLL"


class Access(StrEnum):
    PLAIN = "PLAIN"
    DESCRIPTOR = "DESCRIPTOR"


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


class Unit(StrEnum):
    TENSOR_CORE = "TENSOR_CORE"


@dataclass(frozen=True)
class On:
    """Have a unit other than the threads make a reduction, by its name."""

    reduction: str
    unit: Unit

    def __str__(self) -> str:
        return f"unit({self.reduction}, {self.unit})"


@dataclass(frozen=True)
class Via:
    """Load a buffer in some way. PLAIN, by pointers, is the default and is not printed."""

    buffer: str
    access: Access

    def __str__(self) -> str:
        return f"access({self.buffer}, {self.access})"


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
class Side:
    """One dimension of a box.

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
    """What one load copies. offset: elements from the buffer's first to the one at 0 along all sides."""

    offset: int
    sides: tuple[Side, ...]


@dataclass(frozen=True)
class Placement:
    """Directives, with what a launch needs besides: threads, stages of loops, registers of a thread."""

    directives: tuple[Split | At | On | Via, ...]
    num_warps: int = 4
    num_stages: int = 1
    registers: int | None = None
    splits: ClassVar[int] = 1  # what a `Schedule` says besides
    early: ClassVar[int] = 0
    in_passes: ClassVar[bool] = False

    def __str__(self) -> str:
        stages = f", {self.num_stages} stages" if self.num_stages > 1 else ""
        limit = f", {self.registers} registers" if self.registers else ""
        printed = (str(d) for d in self.directives if not isinstance(d, Via) or d.access is not Access.PLAIN)
        return f"{'; '.join(printed)}; {self.num_warps} warps{stages}{limit}"

    @property
    def descriptors(self) -> frozenset[str]:
        """Return the buffers that are loaded through descriptors."""
        accesses = {d.buffer: d.access for d in self.directives if isinstance(d, Via)}
        return frozenset(buffer for buffer, access in accesses.items() if access is Access.DESCRIPTOR)

    @property
    def misaligned(self) -> bool:
        """True if another program has to run where an input is not aligned, as under such a `Schedule`."""
        return bool(self.descriptors)

    @property
    def elements(self) -> int:
        """Return the elements of a tile, as far as splits say."""
        inner = {f"{d.axis}.i": d.inner for d in self.directives if isinstance(d, Split)}
        places = (d for d in self.directives if isinstance(d, At) and d.place is Place.LANES)
        return prod(inner.get(place.axis, 1) for place in places)

    @staticmethod
    def parse(text: str) -> Placement:
        """Return the placement that prints as `text`. Raises ValueError for any other text."""
        directives: list[Split | At | On | Via] = []
        for word, name, value in re.findall(r"(split|place|unit|access)\(([\w.]+), (\w+)\)", text):
            match word:
                case "split":
                    directives.append(Split(name, int(value)))
                case "place":
                    directives.append(At(name, Place(value)))
                case "unit":
                    directives.append(On(name, Unit(value)))
                case _:
                    directives.append(Via(name, Access(value)))
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
            if isinstance(directive, On | Via):
                continue
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


def refusal(
    loops: LoopNest,
    placement: Placement,
    buffers: Mapping[str, Buffer] = NO_BUFFERS,
    device: DeviceSpec | None = None,
) -> str | None:
    """Return why a nest cannot run under a placement, or None if it can. buffers, device: where the placement
    has descriptors; those buffers, and all that the nest stores, and the device if it is known."""
    try:
        leaves = placement.leaves(loops.axes)
    except ValueError as error:
        return str(error)
    for directive in placement.directives:
        if isinstance(directive, On):
            numbers = (n for n, name in enumerate(loops.names) if name == directive.reduction)
            if not any(product_of(loops, n, leaves) for n in numbers):
                return f"{directive}: {directive.reduction} is no sum of products of two tiles"
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
    capability = re.fullmatch(r"sm_(\d+)", device.target) if device is not None else None
    for name in sorted(placement.descriptors):
        if device is not None and (capability is None or int(capability[1]) < DESCRIPTORS):
            return f"{device.target} has no tensor descriptors"
        loads = [node for node in loops.nodes if isinstance(node, Load) and node.buffer == name]
        if not loads:
            return f"the nest loads no {name}"
        if name not in buffers:
            return f"nothing is known about {name}"
        if any(buffer.over == name for buffer in buffers.values()):
            return f"{name} is overwritten"
        if buffers[name].dtype is torch.bool:
            return f"{name} has elements of {buffers[name].dtype}"
        boxes = (box_of(loops, load, leaves, buffers[name].dtype.itemsize) for load in loads)
        if (reason := next((box for box in boxes if isinstance(box, str)), None)) is not None:
            return reason
    return None


@dataclass(frozen=True)
class Product:
    """A reduction that is a product of a matrix [rows, terms] and vectors [few, terms]: nodes, and the leaves
    in LANES that are their dimensions."""

    matrix: int
    vectors: int
    rows: Leaf
    few: Leaf
    terms: Leaf


def product_of(loops: LoopNest, number: int, leaves: tuple[Leaf, ...]) -> Product | None:
    """Return the product of tiles that a reduction is, or None if it is none."""
    node = loops.nodes[number]
    term = loops.nodes[node.operand] if isinstance(node, Reduce) else None
    if not isinstance(node, Reduce) or node.combine != "sum" or node.dtype is not torch.float32:
        return None
    factors = operands_of(term) if isinstance(term, Compute) and term.target is MUL else ()
    if len(set(factors)) != 2:
        return None
    axes, lanes = axes_of(loops), [leaf for leaf in leaves if leaf.place is Place.LANES]
    tiles = [{leaf for leaf in lanes if leaf.axis in axes[factor]} for factor in factors]
    terms, own = tiles[0] & tiles[1], [tiles[0] - tiles[1], tiles[1] - tiles[0]]
    reduced = {leaf for leaf in leaves if leaf.axis in node.axes}
    if reduced != terms or [len(terms), *map(len, own)] != [1, 1, 1]:
        return None
    (few, vectors), (rows, matrix) = sorted(
        ((next(iter(leaf)), factor) for leaf, factor in zip(own, factors, strict=True)),
        key=lambda side: side[0].lanes,
    )
    terms_leaf = next(iter(terms))
    if min(rows.lanes, terms_leaf.lanes) < SMALLEST:
        return None
    return Product(matrix, vectors, rows, few, terms_leaf)


def products_of(loops: LoopNest, placement: Placement) -> dict[int, Product]:
    """Return the reductions that tensor cores make under a placement."""
    names = {d.reduction for d in placement.directives if isinstance(d, On)}
    if not names:
        return {}
    leaves = placement.leaves(loops.axes)
    products = ((n, product_of(loops, n, leaves)) for n, name in enumerate(loops.names) if name in names)
    return {n: product for n, product in products if product is not None}


def tile_sizes(loops: LoopNest, placement: Placement) -> list[int]:
    """Return the elements of each node's tile; none of terms that tensor cores add up."""
    leaves = [leaf for leaf in placement.leaves(loops.axes) if leaf.place is Place.LANES]
    sizes = [prod(leaf.lanes for leaf in leaves if leaf.axis in axes) for axes in axes_of(loops)]
    for number in products_of(loops, placement):
        sizes[operands_of(loops.nodes[number])[0]] = 0
    return sizes


def held_registers(loops: LoopNest, placement: Placement) -> float:
    """Return the most 32-bit registers of a thread that hold values of a tile at the same time, if nodes are
    computed in their order and results are stored in the end."""
    unrolled = [leaf for leaf in placement.leaves(loops.axes) if leaf.place is Place.UNROLL]
    copies = [prod(leaf.lanes for leaf in unrolled if leaf.axis in axes) for axes in axes_of(loops)]
    threads, last = WARP * placement.num_warps, dict[int, int]()
    for number, node in enumerate(loops.nodes):
        last |= dict.fromkeys(operands_of(node), number)
    last |= dict.fromkeys((store.value for store in loops.stores), len(loops.nodes))
    held, most = dict[int, float](), 0.0
    for number, (node, lanes) in enumerate(zip(loops.nodes, tile_sizes(loops, placement), strict=True)):
        if not isinstance(node, Constant) and lanes:
            size = 1 if node.dtype is torch.bool else node.dtype.itemsize
            held[number] = copies[number] * max(1.0, lanes / threads) * size / 4
        most = max(most, sum(held.values()))
        held = {n: registers for n, registers in held.items() if last.get(n, -1) > number}
    return most


def box_of(loops: LoopNest, load: Load, leaves: Sequence[Leaf], itemsize: int) -> Box | str:
    """Return the box that a load copies, or why it copies none.

    The load reads an element, and not zero, where its axes are within their sizes and its condition holds.
    A condition is a conjunction of ranges. A range of an index whose axes move the address by nothing else is
    a side with that range. Any other axis is a side of its own; axes with the same step share one, of all
    elements that they reach together.
    """
    name, steps = load.buffer, dict[int, int]()
    for axis, step in load.index.terms:
        if axis < 0:
            return f"an index that is data says where {name} is read"
        if not isinstance(step, int) or not isinstance(loops.axes[axis].size, int):
            return f"{name}'s strides and sizes along {loops.axes[axis].name} are known at launch only"
        steps[axis] = step
    if not isinstance(offset := load.index.const, int):
        return f"where {name} begins is known at launch only"
    sides: list[Side] = []
    for node in () if load.within is None else _conjuncts(loops, load.within):
        if node is None:
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


def _conjuncts(loops: LoopNest, condition: int) -> Iterator[InRange | None]:
    """Yield the ranges whose conjunction a condition is, and None for what is no range."""
    node = loops.nodes[condition]
    if isinstance(node, Compute) and node.target is torch.ops.aten.logical_and.default:
        for operand in operands_of(node):
            yield from _conjuncts(loops, operand)
    else:
        yield node if isinstance(node, InRange) else None


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
