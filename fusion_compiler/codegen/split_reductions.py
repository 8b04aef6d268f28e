"""Split reductions over an axis that programs share: each program stores a partial result. A second kernel
reduces the partial results and computes the nodes that wait for them.

    s = sum(x, {n})                 split(n, 16); place(n.o, GRID); place(n.i, LOOP)
    ->
    partial[n.o] = sum(x, {n.i})    by the program, under its placement (`codegen.placed`)
    s = sum(partial, {n.o})         a loop nest of its own, whose rows are the programs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from fusion_compiler.codegen.finishing import completed
from fusion_compiler.codegen.partial_reductions import schedule_of
from fusion_compiler.ir.dims import product, strides_of
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Axis,
    Index,
    Load,
    LoopNest,
    Reduce,
    Store,
    axes_of,
    row_major,
)
from fusion_compiler.schedule.analysis import accumulator_dtype, waiting
from fusion_compiler.schedule.placement import Leaf, Place, Placement
from fusion_compiler.schedule.schedule import Schedule


@dataclass(frozen=True)
class Partial:
    """A buffer holds the partial results of one reduction.

    buffer: its first dimension numbers the programs that share the reduction.
    axes: the axes that the reduction keeps, in the order in which they lie in the buffer.
    leaves: the leaves of the grid that number the programs; the last varies fastest.
    """

    buffer: Buffer
    axes: tuple[int, ...]
    leaves: tuple[Leaf, ...]


@dataclass(frozen=True)
class SplitReductions:
    """Split reductions need a second kernel for their partial results.

    kept: the partial results, by reduction. stores: the stores that wait for no split reduction.
    finishings: the nests that reduce the partial results, one for all reductions that keep the same axes.
    """

    kept: Mapping[int, Partial]
    stores: tuple[Store, ...]
    finishings: tuple[tuple[LoopNest, Schedule], ...] = ()

    @property
    def partials(self) -> dict[str, Buffer]:
        """Return the buffers of the partial results, by name."""
        return {partial.buffer.name: partial.buffer for partial in self.kept.values()}


def split_reductions(loops: LoopNest, placement: Placement, numbers: Iterator[int]) -> SplitReductions:
    """Return the reductions that programs share under a placement. numbers: the numbers in buffers' names."""
    leaves = placement.leaves(loops.axes)
    on_grid = [leaf for leaf in leaves if leaf.place is Place.GRID]
    in_lanes = {leaf.axis: leaf.order for leaf in leaves if leaf.place is Place.LANES}
    node_axes = axes_of(loops.nodes)
    partials: dict[int, Partial] = {}
    for n, node in enumerate(loops.nodes):
        shared = tuple(leaf for leaf in on_grid if isinstance(node, Reduce) and leaf.members & node.axes)
        if isinstance(node, Reduce) and shared:
            kept = tuple(sorted(node_axes[n], key=lambda k: (in_lanes.get(k, -1), k)))
            shape = product(leaf.extent for leaf in shared), product(loops.axes[k].size for k in kept)
            buffer = Buffer(f"partial_{next(numbers)}", shape, strides_of(shape), accumulator_dtype(node))
            partials[n] = Partial(buffer, kept, shared)
    late = waiting(loops, partials)
    stores = tuple(store for store in loops.stores if store.value not in late)
    keys = dict.fromkeys((partial.leaves, partial.axes) for partial in partials.values())
    nests = (
        _second(loops, {n: p for n, p in partials.items() if (p.leaves, p.axes) == key}) for key in keys
    )
    return SplitReductions(partials, stores, tuple((nest, schedule_of(nest)) for nest in nests))


def _second(loops: LoopNest, partials: Mapping[int, Partial]) -> LoopNest:
    """Return the nest that reduces partial results of one shape and computes the nodes that wait for them."""
    first = next(iter(partials.values()))
    programs, width = first.buffer.shape
    axes = (Axis("part", programs, ROWS), *(replace(loops.axes[k], group=COLS) for k in first.axes))
    index = Index(0, ((0, width), *row_major(axes[1:], 1)))
    loads = {n: Load(p.buffer.name, index, None, p.buffer.dtype) for n, p in partials.items()}
    return completed(loops, loads, axes, ROWS, {k: i for i, k in enumerate(first.axes, 1)})
