"""Reductions over an axis that programs share: each program stores a partial result, and a second kernel
reduces these and computes what waits for them.

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
from fusion_compiler.ir.dims import Dim, product, strides_of
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import COLS, ROWS, Axis, Index, Load, LoopNest, Reduce, Store
from fusion_compiler.schedule.analysis import accumulator_dtype, waiting
from fusion_compiler.schedule.placement import Leaf, Place, Placement, axes_of_values
from fusion_compiler.schedule.schedule import Schedule


@dataclass(frozen=True)
class Partial:
    """The partial results of one reduction. axes: those that it keeps, as they lie in the buffer, whose first
    dimension numbers the programs that share the reduction."""

    buffer: Buffer
    axes: tuple[int, ...]


@dataclass(frozen=True)
class SplitReductions:
    """What programs leave to a second kernel.

    kept: partial results, by their reductions. stores: those that wait for none. leaves: of the grid, whose
    programs share the reductions; the last varies fastest. finishings: the nest that reduces the results.
    """

    kept: Mapping[int, Partial]
    stores: tuple[Store, ...]
    leaves: tuple[Leaf, ...] = ()
    finishings: tuple[tuple[LoopNest, Schedule], ...] = ()

    @property
    def partials(self) -> dict[str, Buffer]:
        """Return the buffers of the partial results, by name."""
        return {partial.buffer.name: partial.buffer for partial in self.kept.values()}


def split_reductions(loops: LoopNest, placement: Placement, numbers: Iterator[int]) -> SplitReductions:
    """Return what programs share under a placement. numbers: of which the buffers' names are made."""
    leaves = placement.leaves(loops.axes)
    reduces = {n: node for n, node in enumerate(loops.nodes) if isinstance(node, Reduce)}
    reduced = frozenset[int]().union(*(node.axes for node in reduces.values()))
    shared = tuple(leaf for leaf in leaves if leaf.place is Place.GRID and leaf.axis in reduced)
    if not shared:
        return SplitReductions({}, loops.stores)
    behind = axes_of_values(loops)
    in_lanes = {leaf.axis: leaf.order for leaf in leaves if leaf.place is Place.LANES}
    programs = product(leaf.extent for leaf in shared)
    partials: dict[int, Partial] = {}
    for n, node in reduces.items():
        if node.axes & {leaf.axis for leaf in shared}:
            kept = tuple(sorted(behind[n], key=lambda k: (in_lanes.get(k, -1), k)))
            shape = (programs, product(loops.axes[k].size for k in kept))
            name = f"partial_{next(numbers)}"
            partials[n] = Partial(Buffer(name, shape, strides_of(shape), accumulator_dtype(node)), kept)
    late = waiting(loops, partials)
    stores = tuple(store for store in loops.stores if store.value not in late)
    longest = max((partial.axes for partial in partials.values()), key=len)
    cols = {k: i for i, k in enumerate(longest, 1)}
    axes = (Axis("part", programs, ROWS), *(replace(loops.axes[k], group=COLS) for k in longest))
    loads: dict[int, Load] = {}
    for n, partial in partials.items():
        terms: list[tuple[int, Dim]] = [(0, partial.buffer.stride[0])]
        sizes = tuple(loops.axes[k].size for k in partial.axes)
        terms += [(cols[k], step) for k, step in zip(partial.axes, strides_of(sizes), strict=True)]
        loads[n] = Load(partial.buffer.name, Index(0, tuple(sorted(terms))), None, partial.buffer.dtype)
    nest = completed(loops, loads, axes, ROWS, cols)
    return SplitReductions(partials, stores, shared, ((nest, schedule_of(nest)),))
