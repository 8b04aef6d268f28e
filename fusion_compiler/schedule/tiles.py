"""Placements of nests whose reductions are over different axes: a tile holds all axes that some of them reduce.

    v = sum(x * x, {g, c});  a = max(abs(x * rsqrt(v)), {c})
    place(r, GRID); place(g, LANES); place(c, LANES)

What the reductions keep is spread over programs. Where tiles are small, or where neighbours in memory lie along a
kept axis, a tile also has some elements of these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod

import sympy

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint, no_less
from fusion_compiler.ir.loops import INNER, LARGEST_TILE, Index, Load, LoopNest, Store
from fusion_compiler.schedule.cost import Roofline
from fusion_compiler.schedule.placement import At, Place, Placement, Split, held_registers, refusal
from fusion_compiler.schedule.registers import MOST
from fusion_compiler.schedule.shapes import padded

ELEMENTS = (32, 16, 64, 8)  # of a tile, for each thread, best first
TILES = (1024, 2048, 4096)  # elements: smaller tiles take several elements of kept axes
MOST_WARPS = 16
KEPT = 8  # placements of a nest, best first
NO_HINTS: Mapping[sympy.Symbol, int] = {}


def refuses(loops: LoopNest) -> str | None:
    """Return why no tile runs a nest, or None if one does."""
    for axis in loops.axes:
        if axis.group == INNER and not isinstance(axis.size, int):
            return f"a tile has no room for {axis.size} elements of {axis.name}"
    if _least(loops) > LARGEST_TILE:
        return f"a tile of {_least(loops)} elements is too large ({LARGEST_TILE})"
    overlapping = (n for n in loops.nodes if isinstance(n, Load) and not _is_injective(loops, n.index))
    if (load := next(overlapping, None)) is not None:
        return f"a tile would hold elements of {load.buffer} several times"
    return None


def placements(
    loops: LoopNest, roofline: Roofline, hints: Mapping[sympy.Symbol, int] = NO_HINTS
) -> tuple[Placement, ...]:
    """Return placements of a nest, best first by prediction; none where `refuses` has a reason."""
    if refuses(loops) is not None:
        return ()
    legal = (p for p in dict.fromkeys(_candidates(loops, hints)) if refusal(loops, p) is None)
    crowded = {p: max(0.0, held_registers(loops, p) - MOST) for p in legal}
    times = dict[tuple[Split | At, ...], float]()  # of each shape, with as many elements a thread as are best
    for p in crowded:
        times.setdefault(p.directives, roofline.us(p))
    return tuple(sorted(crowded, key=lambda p: (crowded[p], times[p.directives])))[:KEPT]


def _least(loops: LoopNest) -> int:
    """Return the elements of the smallest tile."""
    return prod(padded(hint(axis.size)) for axis in loops.axes if axis.group == INNER)


def _is_injective(loops: LoopNest, index: Index) -> bool:
    """True if no two elements of a tile have the same index, as far as sizes are known."""
    reach = 0
    terms = [(abs(hint(step)), no_less(loops.axes[key].size)) for key, step in index.terms if key >= 0]
    for step, size in sorted(terms, key=lambda term: term[0]):
        if step <= reach and size != 1:
            return False
        reach += step * (hint(size) - 1)
    return True


def _candidates(loops: LoopNest, hints: Mapping[sympy.Symbol, int]) -> Iterator[Placement]:
    order = _by_stride(loops)
    kept = [k for k in order if loops.axes[k].group != INNER]
    least = _least(loops)
    is_kept = bool(order) and loops.axes[order[-1]].group != INNER  # neighbours in memory lie along a kept axis
    for elements in TILES:
        room = max(1, min(max(elements, least * (16 if is_kept else 1)), LARGEST_TILE) // least)
        lanes = dict[int, int]()  # of kept axes, from the innermost one
        for k in reversed(kept):
            lanes[k] = min(room, padded(hint(loops.axes[k].size, hints)))
            room //= lanes[k]
        for each in ELEMENTS:
            warps = min(MOST_WARPS, max(1, least * prod(lanes.values()) // (32 * each)))
            yield _placement(loops, order, lanes, warps)


def _placement(loops: LoopNest, order: list[int], lanes: Mapping[int, int], warps: int) -> Placement:
    grid: list[Split | At] = []
    tile: list[Split | At] = []
    for k in order:
        axis = loops.axes[k]
        if axis.group == INNER:
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
    steps = {k: 0 for k in range(len(loops.axes))}
    for (k, step), _ in sorted(votes.items(), key=lambda item: item[1]):
        steps[k] = step  # of the most elements, which come last
    return sorted(steps, key=lambda k: (-steps[k], k))
