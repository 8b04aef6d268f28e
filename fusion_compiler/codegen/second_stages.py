"""Second stages: loop nests that reduce the partial results of programs which share a reduction.

    s = sum(x, {n})                 split(n, 16); place(n.o, GRID); place(n.i, LOOP)
    ->
    partial[n.o] = sum(x, {n.i})    each program, under its placement (`codegen.placed`)
    s = sum(partial, {n.o})         the second stage, whose rows are the programs

Each program stores a partial result in scratch memory. The second stage reduces the partial results and
computes every node that waits for them. A second kernel runs it. In a placement with `combine(r, LAST)`, the
last of the programs that share a reduction runs their part of it, which an atomic counter for the programs of
each part finds.

A norm of channels in groups needs the sums of each channel over all samples in addition to those of each
group of each sample. Programs that share a group then store their parts of the first and exchange their parts
of the second (`schedule.shared_reductions`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import cast

import torch
from torch._ops import OpOverload

from fusion_compiler.ir.dims import Dim, product, strides_of
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Axis,
    Compute,
    Constant,
    Index,
    Load,
    LoopNest,
    Node,
    Reduce,
    Store,
    applied,
    axes_in,
    operands_of,
    renumber,
    renumber_store,
    store_operands,
    with_operands,
)
from fusion_compiler.ops.arithmetic import ABS, LT, WHERE
from fusion_compiler.schedule import placement as place
from fusion_compiler.schedule.analysis import Analysis, accumulator_dtype
from fusion_compiler.schedule.carried import Carried, Values, rescaled, step_of
from fusion_compiler.schedule.placement import At, Directive, Fuse, Leaf, Place, Placement
from fusion_compiler.schedule.row_tiles import Cols, RowTile, placement_of
from fusion_compiler.schedule.run import Run
from fusion_compiler.schedule.shapes import padded

# With fewer columns of partial results, each program of a second kernel has one sector of 32 bytes.
NARROW, SECTOR = 2048, 8
UNKNOWN_HEIGHT = 1024  # partial results of one number that a tile has, where it is unknown how many there are
TILE = (256, 16, 4)  # rows, columns and warps of other second kernels: two sectors of each row

NONE_CARRIED: Mapping[int, Carried] = {}

Stage = tuple[LoopNest, Placement]  # that a second kernel runs


@dataclass(frozen=True)
class Partial:
    """A buffer holds the partial results of one reduction.

    buffer: its first dimension numbers the programs that share the reduction.
    axes: the axes that the reduction keeps, in the order in which they lie in the buffer.
    leaves: the leaves of the grid that number the programs; the last varies fastest.
    """

    buffer: Buffer
    axes: tuple[int, ...]
    leaves: tuple[Leaf, ...] = ()


@dataclass(frozen=True)
class Split:
    """A Split holds what a nest needs if its programs share reductions that second kernels finish.

    partials: the buffers, by the names that the nest's emitter uses. kept: the partial results, by reduction.
    stores: the stores that wait for no such reduction. last: the stage that the last programs run in place of
    a second kernel.
    """

    partials: Mapping[str, Buffer] = field(default_factory=dict[str, Buffer])
    stages: tuple[Stage, ...] = ()
    kept: Mapping[int, Partial] = field(default_factory=dict[int, Partial])
    stores: tuple[Store, ...] = ()
    last: LastStage | None = None


@dataclass(frozen=True)
class LastStage:
    """The second stage of which the last programs to arrive run a part each: those of a part share
    reductions.

    loops, placement: the nest and its placement, whose programs are the parts.
    programs: how many share a reduction. blocks: the leaves of the grid that number the parts.
    counter: int32 [parts], counts finished programs.
    """

    loops: LoopNest
    placement: Placement
    programs: Dim
    blocks: tuple[Leaf, ...]
    counter: Buffer


def completed(
    loops: LoopNest,
    partials: Mapping[int, Load],
    axes: tuple[Axis, ...],
    group: str,
    moved: Mapping[int, int],
    carried: Mapping[int, Carried] = NONE_CARRIED,
) -> LoopNest:
    """Return the nest of some reductions over their partial results, and of the stores that depend on them.

    partials: loads of the partial results, by reduction.
    group: the group of `axes` over which they are reduced.
    moved: new numbers of the axes of `loops` that remain.
    carried: reductions whose parts are first multiplied by what the law of carried reductions says.
    """
    dependent = _late(loops, partials)
    stores_left = [s for s in loops.stores if s.value in dependent]
    needed = with_operands(loops, (o for s in stores_left for o in store_operands(s)), partials)
    laws = [carried[n] for n in needed if n in carried]
    needed |= {n for of in laws for n in (*of.reads, of.plain) if n is not None}
    numbers, parts = dict[int, int](), dict[int, int]()
    nodes: list[Node] = []
    names: list[str] = []
    for number in sorted(needed):
        if number in partials:
            node = loops.reduction(number)
            nodes.append(partials[number])
            names.append("partial")
            parts[number] = len(nodes) - 1
            if number in carried:
                values = _Merged(loops, nodes, numbers, node.axes, moved)
                parts[number] = values.rescale(carried[number], parts)
                names += ["rescaled"] * (len(nodes) - len(names))
            node = Reduce(node.combine, parts[number], axes_in(axes, (group,)), node.dtype)
        else:
            node = renumber(loops.nodes[number], numbers, moved)
        numbers[number] = len(nodes)
        nodes.append(node)
        names.append(loops.names[number])
    stores = tuple(renumber_store(s, numbers, moved) for s in stores_left)
    return LoopNest(axes, tuple(nodes), stores, tuple(names))


@dataclass(frozen=True)
class _Merged(Values[int]):
    """Values that are nodes of a second stage. nodes: the nodes so far. numbers: of the first stage's nodes.
    axes: the axes along which x varies. moved: new numbers of the axes that remain."""

    loops: LoopNest
    nodes: list[Node]
    numbers: Mapping[int, int]
    axes: frozenset[int]
    moved: Mapping[int, int]

    def add(self, node: Node) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def computed(self, node: Compute, operands: Mapping[int, int]) -> int:
        return self.add(renumber(node, operands))

    def fixed(self, number: int) -> int:
        node = self.loops.nodes[number]
        if number in self.numbers:
            return self.numbers[number]
        if not self.axes.isdisjoint(self.loops.node_axes[number]):
            return self.add(Constant(0.0, node.dtype))
        return self.add(renumber(node, {o: self.fixed(o) for o in operands_of(node)}, self.moved))

    def combined(self, operator: OpOverload, left: int, right: int) -> int:
        return self.add(applied(self.nodes, operator, left, right))

    def finite(self, number: int, value: int) -> int:
        dtype, size = self.nodes[value].dtype, self.add(applied(self.nodes, ABS, value))
        is_finite = self.add(applied(self.nodes, LT, size, other=math.inf))
        zero = self.add(Constant(0.0, dtype))
        return self.add(applied(self.nodes, WHERE, is_finite, value, zero, dtype=dtype))

    def rescale(self, of: Carried, parts: Mapping[int, int]) -> int:
        """Return the last node, a part of a reduction, as it is with the maxima of all parts. parts: the
        parts of the reductions before it, of which sums are rescaled already."""
        before, now = ({n: numbers[n] for n in of.reads} for numbers in (parts, self.numbers))
        step = functools.partial(step_of, self.loops, before=before, now=now, values=self)
        plain = None if of.plain is None else parts[of.plain]
        return rescaled(of, len(self.nodes) - 1, plain, step, self)


def _partial(loops: LoopNest, number: int, position: int, programs: Dim, kept: Sequence[int]) -> Partial:
    """Return the partial results of a reduction, [programs, elements of the kept axes]."""
    shape = programs, product(loops.axes[k].size for k in kept)
    dtype = accumulator_dtype(loops.reduction(number))
    buffer = Buffer(f"partial_{position}", shape, strides_of(shape), dtype)
    return Partial(buffer, tuple(kept))


def _over_programs(
    loops: LoopNest,
    partials: Mapping[int, Partial],
    part: Axis,
    kept: Sequence[int],
    carried: Mapping[int, Carried],
) -> LoopNest:
    """Return the nest that reduces partial results along axis `part`, which numbers the programs. kept: the
    axes that remain, as columns."""
    moved = {k: i for i, k in enumerate(kept, 1)}
    loads: dict[int, Load] = {}
    for number, partial in partials.items():
        steps = strides_of(tuple(loops.axes[k].size for k in partial.axes))
        terms = ((moved[k], step) for k, step in zip(partial.axes, steps, strict=True))
        index = Index(0, ((0, partial.buffer.stride[0]), *sorted(terms)))
        loads[number] = Load(partial.buffer.name, index, None, partial.buffer.dtype)
    axes = (part, *(replace(loops.axes[k], group=COLS) for k in kept))
    return completed(loops, loads, axes, part.group, moved, carried)


# -- reductions that programs share -------------------------------------------------------------------------


def _counter(number: int, blocks: Dim = 1) -> Buffer:
    """Return the counters of the programs that have finished, int32 [blocks]."""
    return Buffer(f"ticket_{number}" if number else "ticket", (blocks,), (1,), torch.int32, zeroed=True)


def split_of(run: Run, numbers: Iterator[int], tickets: Iterator[int]) -> Split:
    """Return the reductions whose parts programs store. numbers, tickets: the numbers in the names of
    buffers and counters."""
    analysis, placement, leaves, sharing = run.a, run.placement, run.leaves, run.sharing
    loops = analysis.loops
    on_grid = [leaf for leaf in leaves if leaf.place is Place.GRID and leaf.extent != 1]
    in_lanes = {leaf.axis: leaf.order for leaf in leaves if leaf.place is Place.LANES}
    kept: dict[int, Partial] = {}
    carried = {n: of for n, of in run.carried.items() if isinstance(of, Carried)}
    of_each = placement.combined(place.Stage.EACH)
    for n, node in enumerate(loops.nodes):
        shared = tuple(leaf for leaf in on_grid if isinstance(node, Reduce) and leaf.members & node.axes)
        if sharing is not None:
            shared = sharing.leaves[n] if n in sharing.partial else ()
        if shared and loops.names[n] not in of_each:
            axes = sorted(analysis.node_axes[n], key=lambda k: (in_lanes.get(k, -1), k))
            programs = product(leaf.extent for leaf in shared)
            kept[n] = replace(_partial(loops, n, next(numbers), programs, axes), leaves=shared)
    late = _late(loops, kept)
    stores = tuple(store for store in loops.stores if store.value not in late)
    nests: list[LoopNest] = []
    for together in _needed_together(loops, kept):
        alike = {n: kept[n] for n in sorted(together)}
        by_length = sorted((partial.axes for partial in alike.values()), key=len, reverse=True)
        axes = tuple(dict.fromkeys(k for of_one in (*by_length, _axes_behind(loops, alike)) for k in of_one))
        programs = next(iter(alike.values())).buffer.shape[0]
        nests.append(_over_programs(loops, alike, Axis("part", programs, ROWS), axes, carried))
    buffers = {partial.buffer.name: partial.buffer for partial in kept.values()}
    placed = _placement_of_parts if carried else _placement_of if analysis.inner else _placement_of_rows
    placed = placed if analysis.matrices is None else _placement_of_products
    if len(nests) == 1 and placement.combined(place.Stage.LAST) >= {loops.names[n] for n in kept}:
        shared = next(iter(kept.values())).leaves
        blocks = tuple(leaf for leaf in on_grid if leaf not in shared)
        counter = _counter(next(tickets), product(leaf.extent for leaf in blocks))
        apart = (leaf for leaf in leaves if leaf.place is Place.SHARED)
        programs = product(leaf.extent for leaf in (*shared, *apart))
        last = LastStage(nests[0], _of_kept_axes(nests[0], placement), programs, blocks, counter)
        return Split(buffers, (), kept, stores, last)
    return Split(buffers, tuple((nest, placed(nest)) for nest in nests), kept, stores)


def _late(loops: LoopNest, partials: Collection[int]) -> frozenset[int]:
    """Return the nodes that no program can compute: some reductions of which each program has a part, and
    what depends on them. A reduction that reads a part of them is a part itself."""
    late = set(partials)
    for n, node in enumerate(loops.nodes):
        if not isinstance(node, Reduce) and not late.isdisjoint(operands_of(node)):
            late.add(n)
    return frozenset(late)


def _axes_behind(loops: LoopNest, partials: Collection[int]) -> list[int]:
    """Return the axes over which what waits for some reductions varies, or is stored."""
    behind, varies = _late(loops, partials), loops.node_axes
    stores = [store for store in loops.stores if store.value in behind]
    stored = {k for store in stores for k, _ in store.index.terms if k >= 0}
    return sorted(stored.union(*(varies[n] for store in stores for n in store_operands(store))))


def _needed_together(loops: LoopNest, partials: Mapping[int, Partial]) -> list[set[int]]:
    """Return the reductions with partial results, those in one set of which one nest computes its stores.
    Those that are stored by themselves are together if they keep the same axes."""
    sets = list[set[int]]()
    for form in dict.fromkeys((partial.leaves, partial.axes) for partial in partials.values()):
        sets.append({n for n, partial in partials.items() if (partial.leaves, partial.axes) == form})
    late = _late(loops, partials)
    for store in loops.stores:
        needed = with_operands(loops, store_operands(store), partials) & partials.keys()
        if store.value not in late:  # its programs have all that it needs
            continue
        touched = [numbers for numbers in sets if numbers & needed]
        if len(touched) > 1:
            sets = [numbers for numbers in sets if numbers not in touched]
            sets.append(set[int]().union(*touched))
    return sets


def _of_kept_axes(nest: LoopNest, placement: Placement) -> Placement:
    """Return the placement of a second stage, in which kept axes lie as under `placement` and a tile has all
    partial results."""
    names = {axis.name for axis in nest.axes}
    part = next(axis.name for axis in nest.axes if axis.group == ROWS)
    directives: list[Directive] = []
    for d in placement.directives:
        if isinstance(d, Fuse) and names.issuperset(d.axes):
            names.add(d.name)
            directives.append(d)
        elif isinstance(d, place.Split | At) and d.axis.split(".")[0] in names:
            directives.append(d)
    return Placement((At(part, Place.LANES), *directives), placement.num_warps)


def _placement_of(nest: LoopNest) -> Placement:
    """Return the placement of a nest that reduces partial results along its rows."""
    height, width, warps = TILE
    return _in_tiles(nest, height, width, warps)


def _placement_of_parts(nest: LoopNest) -> Placement:
    """Return the placement of a nest whose reductions of partial results read each other: a program has all
    parts of its columns."""
    (part,) = (axis.name for axis in nest.axes if axis.group == ROWS)
    others = (d for d in _placement_of(nest).directives if f"({part}" not in str(d))
    return Placement((At(part, Place.LANES), *others), 4)


def _placement_of_rows(nest: LoopNest) -> Placement:
    """Return the placement of a nest that reduces the partial results of sums over rows."""
    sizes = [a.size for a in nest.axes if a.group == COLS]
    is_narrow = all(isinstance(n, int) for n in sizes) and prod(cast(list[int], sizes)) < NARROW
    height, width = (256, SECTOR) if is_narrow else (64, 32)
    return _in_tiles(nest, height, width, 4)


def _placement_of_products(nest: LoopNest) -> Placement:
    """Return the placement of a nest that adds up many results with few parts each."""
    height, width, warps = TILE
    parts = prod(padded(axis.size) for axis in nest.axes if axis.group == ROWS and isinstance(axis.size, int))
    return _in_tiles(nest, height, max(width, height * width // parts), warps)


def _in_tiles(nest: LoopNest, height: int, width: int, warps: int) -> Placement:
    """Return a placement with tiles of rows and columns. All partial results of a number are a tile, if their
    count is known."""
    rows = [axis for axis in nest.axes if axis.group == ROWS]
    size = product(axis.size for axis in rows)
    if len(nest.axes) == 1 and isinstance(size, int):
        return Placement((At(rows[0].name, Place.LANES),), min(32, max(4, padded(size) // 512)))
    if len(nest.axes) == 1:
        tile = RowTile(UNKNOWN_HEIGHT, 1, Cols.WHOLE, programs=1, num_warps=warps)
    else:
        height = min(height, padded(size)) if isinstance(size, int) else height
        tile = RowTile(height, width, Cols.GRID, programs=1, num_warps=warps)
    return placement_of(Analysis(nest), tile)
