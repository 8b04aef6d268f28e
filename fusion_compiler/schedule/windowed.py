"""Placements of nests with windows, which go along a position and a tap together (`schedule.windows`).

Neighbouring positions read the same elements at other taps: unrolled side by side, they share the loads.

Times are predicted as memory time plus issue time: kernels of both kinds were measured at 20 shapes of
EfficientNet, MobileNetV3 and ConvNeXt on an H200, within 20% of that but for filters' gradients of 7 x 7.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

import sympy

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import INNER, Compute, LoopNest, Reduce
from fusion_compiler.schedule.analysis import MOST_TURNS, Analysis
from fusion_compiler.schedule.placement import At, Place, Placement, Split
from fusion_compiler.schedule.run import NO_HINTS, Run
from fusion_compiler.schedule.shapes import WARP, padded, powers, warps_of
from fusion_compiler.schedule.verifier import refusal_of
from fusion_compiler.schedule.windows import Windows
from fusion_compiler.schedule.work import Work

MOST_UNROLLED = 36  # taps times positions, beyond which the outer taps are a loop
MOST_ROWS = 4  # of positions in a tile, beside the sliding one
MOST_REGISTERS = 150  # of a thread, for accumulators
WARPS = 16  # of each multiprocessor, in all programs that share a filter's gradient
ISSUE, ISSUE_SPLIT = 1.5, 2.5  # instructions issued for each that is counted: of a convolution, a gradient
LATENCY_US = 8.0  # in which a program waits for the first of its taps, and stores
PER_LOAD = 9 / 8  # instructions of an element that is loaded: its conversion, and a share of a vector's load
KEPT = 8  # placements of a nest, best first
# Times the predicted time of issue, measured on an H200 (2026-11-27): by the vector's elements of a tile,
# where it has few sliding positions side by side in lanes, and where it has more than four in turn.
BLOCKS, FEW_LANES, MANY_IN_TURN = {16: 1.2, 32: 1.0, 64: 1.1}, 1.2, 1.15


@dataclass(frozen=True)
class _Shape:
    """A shape says how a tile covers a nest with windows.

    block: of the vector's elements. unrolled: sliding positions side by side. lanes: of the sliding position.
    rows: of the first other position. parts: programs that share a reduction over the first of the parted
    axes. spread: as many more share one over the first other position. looped: the outer taps are a loop.
    """

    block: int
    unrolled: int
    lanes: int
    rows: int
    parts: int
    spread: bool
    looped: bool
    num_warps: int


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    """Return why no placement of windows runs a nest on a device, or None if one does."""
    return None if next(runs(a, device), None) else "no tile holds what its windows read"


def placements(a: Analysis, device: DeviceSpec) -> tuple[Placement, ...]:
    """Return placements of a nest with windows, best first by prediction; none if it has no windows."""
    legal = (run.placement for run in runs(a, device))
    return tuple(itertools.islice(dict.fromkeys(legal), KEPT))


def runs(a: Analysis, device: DeviceSpec, hints: Mapping[sympy.Symbol, int] = NO_HINTS) -> Iterator[Run]:
    """Yield the runs of a nest with windows under the placements that can run it, best first."""
    if a.windows is None:
        return
    loops, w, size = a.loops, a.windows, {n: hint(axis.size, hints) for n, axis in enumerate(a.loops.axes)}
    shapes = dict.fromkeys(_shapes(loops, w, size, device))
    ranked = sorted(shapes, key=lambda shape: _rank(loops, w, shape, size, device))
    for shape in ranked:
        run = Run(a, _placement(loops, w, shape), hints)
        if refusal_of(run) is None and run.registers <= MOST_REGISTERS:
            yield run


def _shapes(
    loops: LoopNest, w: Windows, size: Mapping[int, int], device: DeviceSpec
) -> Iterator[_Shape]:
    taps = prod(size[tap] for tap in w.taps)
    phase = 1 if w.slide is None else w.phases.get(w.slide[0], 1)
    each = (8, 16) if w.are_reduced else (4, 2, 1)
    blocks = powers(32, 128) if w.are_reduced else powers(16, 64)
    if w.slide is None:
        blocks = powers(128, 1024)
    for block in dict.fromkeys(min(b, padded(size[w.vector])) for b in blocks):
        for unrolled in dict.fromkeys(phase * n for n in (1, 2, 4) if w.slide is not None or n == 1):
            for warps in (2, 4, 8):
                for elements in each:
                    lanes = warps * 32 * elements // block
                    if not lanes:
                        continue
                    along = ceil(size[w.slide[0]] / unrolled) if w.slide is not None else 1
                    wide = min(lanes, padded(along)) if w.are_reduced else 1
                    high = size[w.rows[0]] // w.phases.get(w.rows[0], 1) if w.rows else 1
                    tall = min(lanes // wide, padded(high), MOST_ROWS if w.are_reduced else lanes)
                    many = w.are_reduced and taps * unrolled > MOST_UNROLLED and len(w.taps) > 1
                    looped = many and not w.phases
                    shape = _Shape(block, unrolled, wide, tall, 1, False, looped, warps_of(warps, device))
                    shape = shape if w.are_reduced else _shared(loops, size, w, shape, device)
                    if shape is not None:
                        yield shape


def _rank(loops: LoopNest, w: Windows, s: _Shape, size: Mapping[int, int], device: DeviceSpec) -> float:
    """Return the time of issue, with what it leaves out of memory's order."""
    steps = {n: w.phases.get(n, 1) * (s.rows if i == 0 else 1) for i, n in enumerate(w.rows)}
    steps |= {w.vector: s.block} | ({} if w.slide is None else {w.slide[0]: s.unrolled * s.lanes})
    points = prod(size[n] for n in w.rest) * prod(n * ceil(size[k] / n) for k, n in steps.items())
    us = _issue_us(w, size, points, s.unrolled, s.block * s.lanes * s.rows / (WARP * s.num_warps), device)
    if not _is_reduced(loops, w.vector):
        us *= BLOCKS.get(s.block, 1.25)
    if w.are_reduced and w.slide is not None:
        us *= FEW_LANES if s.lanes < 4 else MANY_IN_TURN if s.unrolled > 4 else 1
    return us


def _shared(
    loops: LoopNest, size: Mapping[int, int], w: Windows, s: _Shape, device: DeviceSpec
) -> _Shape | None:
    """Return a shape whose reductions programs share: enough to fill the device, and so that no lane adds up
    more than `MOST_TURNS` terms one after the other. None if there is none."""
    across = ceil(size[w.vector] / s.block)
    is_reduced = _is_reduced(loops, w.vector)
    wanted = WARPS * device.sms / (s.num_warps * (1 if is_reduced else across))
    wanted /= prod(size[n] for n in w.rest if n not in w.parted)
    count = size[w.parted[0]] if w.parted else 1
    turns = prod(size[n] for n in w.parted[1:]) * (across if is_reduced else 1)
    turns *= size[w.slide[0]] if w.slide is not None else 1
    blocks = ceil(size[w.rows[0]] / s.rows) if w.rows else 1
    for spread in (False, True):
        for parts in (d for d in range(1, count + 1) if count % d == 0):
            enough = parts * (blocks if spread else 1) >= wanted or (spread and parts == count)
            if enough and turns * (count // parts) * (1 if spread else blocks) <= MOST_TURNS:
                return replace(s, parts=parts, spread=spread and blocks > 1)
    return None


def _placement(loops: LoopNest, w: Windows, s: _Shape) -> Placement:
    name = [axis.name for axis in loops.axes]
    outer = Place.GRID if w.are_reduced else Place.LOOP
    grid: list[Split | At] = []
    lanes: list[Split | At] = []
    unrolled: list[Split | At] = []
    place = Place.LOOP if _is_reduced(loops, w.vector) else Place.GRID
    vector = [Split(name[w.vector], s.block), At(f"{name[w.vector]}.o", place)]
    grid += [At(name[n], Place.GRID) for n in w.rest if n not in w.parted]
    if not w.are_reduced:
        for n in w.parted[:1]:
            size = loops.axes[n].size
            assert isinstance(size, int), "parts of a reduction have a known size"
            grid += [Split(name[n], size // s.parts), At(f"{name[n]}.o", Place.GRID)]
        grid += vector
        grid += [At(f"{name[n]}.i", Place.LOOP) for n in w.parted[:1]]
    grid += [At(name[n], Place.LOOP) for n in (w.parted if w.are_reduced else w.parted[1:])]
    for i, n in enumerate(w.rows):
        rows, base = s.rows if i == 0 else 1, name[n]
        if n in w.phases:
            grid.append(Split(base, w.phases[n]))
            unrolled.append(At(f"{base}.i", Place.UNROLL))
            base = f"{base}.o"
        if rows > 1:
            if s.spread and i == 0:
                grid = [Split(base, rows), At(f"{base}.o", Place.GRID), *grid]
            else:
                grid += [Split(base, rows), At(f"{base}.o", outer)]
            lanes.append(At(f"{base}.i", Place.LANES))
        else:
            grid.append(At(base, outer))
    if w.slide is not None:
        base = name[w.slide[0]]
        if s.unrolled > 1:
            grid.append(Split(base, s.unrolled))
            unrolled.append(At(f"{base}.i", Place.UNROLL))
            base = f"{base}.o"
        if s.lanes > 1:
            grid += [Split(base, s.lanes), At(f"{base}.o", outer)]
            lanes.append(At(f"{base}.i", Place.LANES))
        else:
            grid.append(At(base, outer))
    if w.are_reduced:
        grid += vector
    lanes.append(At(f"{name[w.vector]}.i", Place.LANES))
    kept = {w.slide[1]} if w.slide is not None else {w.taps[-1]}
    taps: list[Split | At] = [
        At(name[n], Place.LOOP if s.looped and n not in kept else Place.UNROLL) for n in w.taps
    ]
    return Placement((*grid, *lanes, *unrolled, *taps), s.num_warps)


def _is_reduced(loops: LoopNest, axis: int) -> bool:
    return loops.axes[axis].group == INNER


def issue_us(run: Run, w: Windows, device: DeviceSpec) -> float:
    """Return the microseconds in which the instructions of a nest with windows are issued in a run."""
    size = {n: hint(axis.size, run.hints) for n, axis in enumerate(run.a.loops.axes)}
    kept = [leaf for leaf in run.leaves if leaf.axis not in w.taps]
    points = prod(x.lanes if x.place is Place.LANES else hint(x.extent, run.hints) for x in kept)
    unrolled = 1 if w.slide is None else run.copies((w.slide[0],))
    return _issue_us(w, size, points, unrolled, run.elements() / run.threads, device)


def _issue_us(
    w: Windows, size: Mapping[int, int], points: int, unrolled: int, each: float, device: DeviceSpec
) -> float:
    """Return the microseconds in which instructions are issued. points: all that tiles cover beside the taps.
    unrolled: sliding positions side by side. each: the elements of a tile for each thread."""
    taps = prod(size[tap] for tap in w.taps)
    shared = float(taps)
    if w.slide is not None:
        along = max(1, size[w.slide[1]])  # none of an empty image
        shared = taps / along * ((unrolled - 1) * w.stride + along) / unrolled
    taps, shared = (n / prod(w.phases.values()) for n in (taps, shared))
    pixels = max(1.0, each / 8) * unrolled
    beside = taps / pixels * w.has_filter if w.are_reduced else 1.0  # of the filter, or of the gradient
    issued = taps + PER_LOAD * (shared + beside)
    factor = ISSUE if w.are_reduced else ISSUE_SPLIT
    return 1e6 * factor * points * issued / device.fp32_per_s


def work_in_windows(work: Work) -> int:
    """Return the number of operations on the elements that sums over windows read, without the sums. They
    count once for each window that reads an element, although neighbours in a program may share them."""
    nodes = work.loops.nodes
    sums = {node.operand for node in nodes if isinstance(node, Reduce)}
    return sum(
        node.spec.flops * work.points(work.axes[n])
        for n, node in enumerate(nodes)
        if isinstance(node, Compute) and work.axes[n] & work.tile and node.dtype.is_floating_point
        if n not in sums
    )
