"""Placements of nests whose reductions are over different axes: a tile holds all that some of them reduce.

    v = sum(x * x, {g, c});  a = max(abs(x * rsqrt(v)), {c})
    place(r, GRID); place(g, LANES); place(c, LANES)

Programs share the axes that all reductions keep. Where tiles are small, or where neighbours in memory lie
along a kept axis, a tile also has some elements of these. A kept axis whose elements share a large operand,
as the few queries of a head share its keys, is unrolled, or tensor cores multiply the operand by all of them
at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from itertools import islice
from math import prod

import sympy
import torch

from fusion_compiler.ir.dag import LEAST_SHARING
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import (
    INNER,
    LARGEST_TILE,
    Index,
    Load,
    LoopNest,
    Store,
    axes_in,
)
from fusion_compiler.schedule import chained, few_rows, matrix_products
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.cost import Roofline
from fusion_compiler.schedule.placed_axes import PlacedAxes
from fusion_compiler.schedule.placement import At, Directive, On, Place, Placement, Split, Unit
from fusion_compiler.schedule.run import MOST, NO_HINTS, Run
from fusion_compiler.schedule.shapes import are_apart, padded
from fusion_compiler.schedule.tile_parts import group_of, parts
from fusion_compiler.schedule.tile_products import SMALLEST, product_of, with_exact_products
from fusion_compiler.schedule.verifier import refusal_of

ELEMENTS = (32, 16, 64, 8)  # of a tile, for each thread, best first: measured on an H200
SHARED_ELEMENTS = (16, 8, 32, 64)  # the same where programs store parts of sums
# The least share of such a tile that axes may fill; below it two kernels are faster. Groups of 20 channels
# of 144 pixels fill 0.35 of a tile: one kernel takes 19.7 us for 64 x 32 of them, two 25 (H200, 2026-11-29).
LEAST_FILLED = 0.3
TILES = (1024, 2048, 4096)  # elements: smaller tiles take several elements of kept axes
MOST_WARPS = 16
KEPT = 8  # placements of a nest, best first
MOST_UNROLLED, MOST_SHARING = 8, 16  # elements that share an operand: unrolled, on tensor cores
# What buffers of elements with so many bytes most likely hold: the planner knows no more.
DTYPES = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    """Return why no tile runs a nest on a device, or None if one does."""
    loops = a.loops
    if a.matrices is not None:
        return matrix_products.refuses(a, a.matrices)
    for axis in loops.axes:
        if axis.group == INNER and not isinstance(axis.size, int):
            return f"a tile has no room for {axis.size} elements of {axis.name}"
    if a.products is not None:
        return None  # in a loop
    if (least := min(_least(loops, group) for group in _groups(a))) > LARGEST_TILE:
        in_loops = (*_chained(a, device), *parts(a, _by_stride(loops), device, NO_HINTS))
        if next(_legal(a, in_loops), None) is None:
            return f"a tile of {least} elements is too large ({LARGEST_TILE})"
    overlapping = (n for n in loops.nodes if isinstance(n, Load) and not _is_injective(loops, n.index))
    if (load := next(overlapping, None)) is not None:
        return f"a tile would hold elements of {load.buffer} several times"
    if load := next((n for n in loops.nodes if isinstance(n, Load) and _overlaps(loops, n.index)), None):
        return f"windows of {load.buffer} overlap"
    return None


def placements(a: Analysis, roofline: Roofline) -> tuple[Placement, ...]:
    """Return placements of a nest, best first by prediction; none where `refuses` has a reason."""
    if refuses(a, roofline.device) is not None:
        return ()
    loops, hints = a.loops, roofline.work.hints
    if a.matrices is not None:
        return matrix_products.placements(a, a.matrices, roofline)
    itemsizes = matrix_products.itemsizes_of(roofline)
    dtypes = {name: DTYPES[size] for name, size in itemsizes.items()}
    products = roofline.work.products
    if products is not None:
        of_products = few_rows.placements(loops, products, itemsizes, roofline.device)
        runs = list(_legal(a, of_products, hints))
        if products.is_turned and products.size(products.few) < LEAST_SHARING:
            runs.sort(key=roofline.us)
        return with_exact_products(loops, tuple(run.placement for run in runs), dtypes)
    if of_chain := tuple(run.placement for run in _legal(a, _chained(a, roofline.device, itemsizes), hints)):
        return of_chain
    in_parts = islice(_legal(a, parts(a, _by_stride(loops), roofline.device, hints), hints), KEPT)
    if of_parts := tuple(run.placement for run in in_parts):
        return of_parts
    runs = list(_legal(a, candidates(a, hints), hints))
    times = dict[tuple[Directive, ...], float]()  # of a tile with the best number of elements a thread
    for run in runs:
        times.setdefault(run.placement.directives, roofline.us(run))

    def rank(run: Run) -> tuple[float, bool, float]:
        return max(0.0, run.registers - MOST), not run.terms, times[run.placement.directives]

    first = sorted(runs, key=rank)[:KEPT]
    return with_exact_products(loops, tuple(run.placement for run in first), dtypes)


def _legal(
    a: Analysis, placements: Iterable[Placement], hints: Mapping[sympy.Symbol, int] = NO_HINTS
) -> Iterator[Run]:
    """Yield the runs of a nest under the placements that can run it."""
    runs = (Run(a, placement, hints) for placement in dict.fromkeys(placements))
    return (run for run in runs if refusal_of(run) is None)


def _chained(
    a: Analysis, device: DeviceSpec, itemsizes: Mapping[str, int] = matrix_products.NO_SIZES
) -> Iterator[Placement]:
    """Yield placements of a chain of products with many rows, or of one that no tile holds."""
    if a.chain is not None:
        rows = hint(a.loops.axes[a.chain.rows].size)
        if rows > MOST_SHARING or _least(a.loops, a.inner) > LARGEST_TILE:
            yield from chained.placements(a.loops, a.chain, _by_stride(a.loops), device, itemsizes)


def _groups(a: Analysis) -> list[frozenset[int]]:
    """Return sets of axes that a tile may hold. The last set has all that are reduced. Another one lacks axes
    over which programs may share what is stored, unless the others would fill little of a tile."""
    loops = a.loops
    inner, order = a.inner, _by_stride(loops)
    group = group_of(a, order)
    if not group or group == inner:
        return [inner]
    if prod(hint(loops.axes[k].size) for k in group) < LEAST_FILLED * _least(loops, group):
        return [inner]
    ones = {k: 1 for k in order if k not in group}
    return [inner] if refusal_of(Run(a, _placement(loops, order, ones, 1))) else [group, inner]


def _least(loops: LoopNest, group: Set[int]) -> int:
    """Return the elements of the smallest tile that holds some axes."""
    return prod(padded(hint(loops.axes[k].size)) for k in group)


def _overlaps(loops: LoopNest, index: Index) -> bool:
    """True if an index goes along a kept axis by fewer steps of an inner one than that has, as windows do."""
    terms = [(loops.axes[key], abs(hint(step))) for key, step in index.terms if key >= 0]
    inner = [(step, hint(axis.size)) for axis, step in terms if axis.group == INNER and step]
    kept = [step for axis, step in terms if axis.group != INNER and axis.size != 1]
    return any(k % step == 0 and k < step * size for k in kept for step, size in inner)


def _is_injective(loops: LoopNest, index: Index) -> bool:
    """True if no two elements of a tile have the same index."""
    inner = axes_in(loops.axes, (INNER,))
    terms = ((abs(hint(step)), hint(loops.axes[key].size)) for key, step in index.terms if key in inner)
    return are_apart(terms)


def _shared_axis(loops: LoopNest) -> int | None:
    """Return a kept axis of few elements that a load of a whole tile lacks, or None."""
    inner = axes_in(loops.axes, (INNER,))
    for k, axis in enumerate(loops.axes):
        if axis.group != INNER and isinstance(axis.size, int) and 1 < axis.size <= MOST_SHARING:
            loads = ({key for key, _ in n.index.terms} for n in loops.nodes if isinstance(n, Load))
            if any(keys >= inner and k not in keys for keys in loads):
                return k
    return None


def _sharing(loops: LoopNest, order: list[int], shared: int) -> Iterator[Placement]:
    """Yield placements whose programs have all elements of an axis that share an operand."""
    size, least = hint(loops.axes[shared].size), _least(loops, axes_in(loops.axes, (INNER,)))
    ones = {k: 1 for k, axis in enumerate(loops.axes) if axis.group != INNER}
    lanes = _placement(loops, [shared, *(k for k in order if k != shared)], ones | {shared: padded(size)}, 1)
    where = PlacedAxes.of(loops, lanes)
    products = {n: p for n in range(len(loops.nodes)) if (p := product_of(loops, n, where)) is not None}
    if size >= LEAST_SHARING and products:
        units = tuple(On(loops.names[n], Unit.TENSOR_CORE) for n in products)
        fair = min(min(p.rows.lanes, p.terms.lanes) for p in products.values()) // SMALLEST
        for each in ELEMENTS[:3]:
            warps = max(1, min(MOST_WARPS, least // (32 * each), fair * ELEMENTS[0] // each))
            yield replace(lanes, directives=(*lanes.directives, *units), num_warps=warps)
    if size <= MOST_UNROLLED:
        name = loops.axes[shared].name
        for each in ELEMENTS:
            placement = _placement(loops, order, ones, max(1, min(MOST_WARPS, least // (32 * each))))
            at = (At(name, Place.UNROLL) if d == At(name, Place.GRID) else d for d in placement.directives)
            yield replace(placement, directives=tuple(at))


def candidates(a: Analysis, hints: Mapping[sympy.Symbol, int] = NO_HINTS) -> Iterator[Placement]:
    """Yield placements of a nest that may be fast, without a check that they can run it."""
    loops = a.loops
    order = _by_stride(loops)
    shared = _shared_axis(loops)
    if shared is not None:
        yield from _sharing(loops, order, shared)
    for group in _groups(a):
        least = _least(loops, group)
        if least > LARGEST_TILE:
            continue
        kept = [k for k in order if k not in group]
        is_kept = bool(order) and order[-1] not in group  # where neighbours in memory lie
        for elements in TILES:
            room = max(1, min(max(elements, least * (16 if is_kept else 1)), LARGEST_TILE) // least)
            lanes = dict[int, int]()  # of kept axes, from the innermost one
            for k in reversed(kept):
                lanes[k] = min(room, padded(hint(loops.axes[k].size, hints)))
                room //= lanes[k]
            for each in ELEMENTS if group == a.inner else SHARED_ELEMENTS:
                warps = min(MOST_WARPS, max(1, least * prod(lanes.values()) // (32 * each)))
                yield _placement(loops, order, lanes, warps)


def _placement(loops: LoopNest, order: list[int], lanes: Mapping[int, int], warps: int) -> Placement:
    grid: list[Split | At] = []
    tile: list[Split | At] = []
    for k in order:
        axis = loops.axes[k]
        if k not in lanes:
            tile.append(At(axis.name, Place.LANES))
        elif lanes[k] == 1:
            grid.append(At(axis.name, Place.GRID))
        elif lanes[k] >= hint(axis.size) and isinstance(axis.size, int):
            tile.append(At(axis.name, Place.LANES))
        else:
            grid += [Split(axis.name, lanes[k]), At(f"{axis.name}.o", Place.GRID)]
            tile.append(At(f"{axis.name}.i", Place.LANES))
    return Placement((*grid, *tile), warps)


def _by_stride(loops: LoopNest) -> list[int]:
    """Return the axes from the outermost in memory to the innermost, as most elements of the nest lie."""
    votes: Counter[tuple[int, int]] = Counter()
    for access in (*loops.nodes, *loops.stores):
        if isinstance(access, Load | Store):
            terms = [(k, abs(hint(step))) for k, step in access.index.terms if k >= 0]
            for k, step in terms:
                votes[k, step] += prod(hint(loops.axes[n].size) for n, _ in terms)
    steps = dict.fromkeys(range(len(loops.axes)), 0)
    for (k, step), _ in sorted(votes.items(), key=lambda item: item[1]):
        steps[k] = step  # of the most elements, which come last
    return sorted(steps, key=lambda k: (-steps[k], k))
