"""Placements of nests with windows: convolutions, pooling, and their gradients.

An access of such a nest goes along a position and a tap together, x[y * stride + r]. The nest reduces the
taps (a convolution) or the positions (the gradient of its filter). Neighbouring positions read the same
elements at other taps: unrolled side by side, they share the loads.

Times are predicted as memory time plus issue time: kernels of both kinds were measured at 20 shapes of
EfficientNet, MobileNetV3 and ConvNeXt on an H200, within 20% of that but for filters' gradients of 7 x 7.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

import sympy

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import (
    INNER,
    Coordinate,
    InRange,
    Load,
    LoopNest,
    Reduce,
    Store,
    axes_in,
    axes_of,
    is_applied,
    number_of,
    operand_of,
)
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.ops.arithmetic import REMAINDER
from fusion_compiler.schedule.analysis import MOST_TURNS, Analysis
from fusion_compiler.schedule.placement import At, Place, Placement, Split
from fusion_compiler.schedule.products import is_product
from fusion_compiler.schedule.run import Run
from fusion_compiler.schedule.shapes import padded, powers, warps_of
from fusion_compiler.schedule.verifier import refusal_of
from fusion_compiler.schedule.work import BufferInfo

MOST_TAPS = 64  # along one axis
MOST_STRIDE = 8  # of windows, in taps
MOST_UNROLLED = 36  # taps times positions, beyond which the outer taps are a loop
MOST_ROWS = 4  # of positions in a tile, beside the sliding one
MOST_REGISTERS = 150  # of a thread, for accumulators
WARPS = 16  # of each multiprocessor, in all programs that share a filter's gradient
ISSUE, ISSUE_SPLIT = 1.5, 2.5  # instructions issued for each that is counted: of a convolution, a gradient
LATENCY_US = 8.0  # in which a program waits for the first of its taps, and stores
PER_LOAD = 9 / 8  # instructions of an element that is loaded: its conversion, and a share of a vector's load
REFUSAL = "no tile holds what its windows read"
NO_HINTS: Mapping[sympy.Symbol, int] = {}
KEPT = 8  # placements of a nest, best first
# Times the predicted time of issue, measured on an H200 (2026-11-27): by the vector's elements of a tile,
# where it has few sliding positions side by side in lanes, and where it has more than four in turn.
BLOCKS, FEW_LANES, MANY_IN_TURN = {16: 1.2, 32: 1.0, 64: 1.1}, 1.2, 1.15


@dataclass(frozen=True)
class Windows:
    """Windows describe the axes of a nest by their numbers.

    vector: the axis along which neighbours lie in memory. slide: the position, not the vector, whose elements
    are computed side by side, and its tap; None if there is none. rows: the other positions but the vector.
    taps: all taps. rest: all other axes but the vector. parted: of them, those that are reduced. are_reduced:
    True if the taps are reduced, False if the positions are. stride: of the sliding position, in taps.
    phases: of a position, how many neighbours meet different taps, as in the gradient of a convolution with
    strides: they are unrolled. has_filter: True if something is loaded for each tap, whatever the position.
    """

    vector: int
    slide: tuple[int, int] | None
    rows: tuple[int, ...]
    taps: tuple[int, ...]
    rest: tuple[int, ...]
    parted: tuple[int, ...]
    are_reduced: bool
    stride: int
    phases: Mapping[int, int]
    has_filter: bool


def windows_of(loops: LoopNest) -> Windows | None:
    """Return the windows of a nest, or None if it has none of known size, or if neighbours in memory lie
    along taps, of which no tile has several."""
    sizes = [hint(axis.size) for axis in loops.axes]
    reduced = frozenset[int]().union(*(n.axes for n in loops.nodes if isinstance(n, Reduce)))
    both: dict[int, tuple[int, int]] = {}  # an axis that is reduced -> one that is kept, and the stride
    votes: Counter[int] = Counter()
    moves: list[dict[int, int]] = []  # steps of the axes in each access
    for node in (*loops.nodes, *loops.stores):
        if not isinstance(node, InRange | Load | Store):
            continue
        terms = {key: step for key, step in node.index.terms if key >= 0 and isinstance(step, int)}
        if isinstance(node, InRange):
            for a, b in itertools.permutations(terms, 2):
                if a in reduced and b not in reduced:
                    steps = sorted((abs(terms[a]), abs(terms[b])))
                    both.setdefault(a, (b, max(1, steps[1] // steps[0])))
        else:
            elements = prod(sizes[key] for key in terms)
            votes.update({key: elements for key, step in terms.items() if step == 1})
            moves.append(terms)
    for terms in moves:
        both = _neighbours(terms, reduced, both)
    inner, outer = prod(sizes[a] for a in both), prod(sizes[b] for b, _ in both.values())
    others = prod(sizes[k] for k in reduced - both.keys())
    are_reduced = inner < outer or (inner == outer and others == 1)
    pairs = {a if are_reduced else b: (b if are_reduced else a, stride) for a, (b, stride) in both.items()}
    are_known = all(isinstance(loops.axes[tap].size, int) and sizes[tap] <= MOST_TAPS for tap in pairs)
    if are_reduced:  # by steps of two, say, along an image the taps alone move to its next element
        votes = Counter({key: elements for key, elements in votes.items() if key not in pairs})
    vector = max(votes, key=votes.__getitem__, default=None)
    if not pairs or vector is None or vector in pairs or not are_known:
        return None
    positions = [position for position, _ in pairs.values()]
    sliding = [(tap, position) for tap, (position, _) in pairs.items() if position != vector]
    slide = max(sliding, default=None)
    rows = tuple(p for p in positions if p != vector and (slide is None or p != slide[1]))
    used = {vector, *positions, *pairs}
    rest = tuple(n for n in range(len(loops.axes)) if n not in used)
    parted = tuple(n for n in rest if n in reduced)
    stride = 1 if slide is None else pairs[slide[0]][1]
    sliding = slide and (slide[1], slide[0])
    phases = {k: s for k, s in _remainders(loops).items() if k in positions}
    has_filter = any(not pairs.keys().isdisjoint(m) and {*positions}.isdisjoint(m) for m in moves)
    return Windows(
        vector, sliding, rows, tuple(pairs), rest, parted, are_reduced, stride, phases, has_filter
    )


def runs(loops: LoopNest) -> bool:
    """True if placements of windows run a nest: it has windows, which all reductions reduce, and no result
    varies along what these reduce."""
    inner = axes_in(loops.axes, (INNER,))
    stored = {k for store in loops.stores for k, _ in store.index.terms}
    reductions = (node for node in loops.nodes if isinstance(node, Reduce))
    is_single = bool(inner) and not inner & stored and all(node.axes == inner for node in reductions)
    return is_single and not is_product(loops) and windows_of(loops) is not None


def _neighbours(
    terms: Mapping[int, int], reduced: frozenset[int], both: Mapping[int, tuple[int, int]]
) -> dict[int, tuple[int, int]]:
    """Return positions of windows and taps, with those that an access moves along by similar steps: where all
    windows lie inside of an image, no range names both."""
    chosen, used = dict(both), {b for b, _ in both.values()}
    pairs: list[tuple[int, int, int]] = []
    for a, b in itertools.product(reduced & terms.keys(), terms.keys() - reduced):
        steps = sorted((abs(terms[a]), abs(terms[b])))
        pairs.append((max(1, steps[1] // steps[0]), a, b))
    for ratio, a, b in sorted(pairs):
        if a not in chosen and b not in used and ratio <= MOST_STRIDE:
            chosen[a] = b, ratio
            used.add(b)
    return chosen


def _remainders(loops: LoopNest) -> dict[int, int]:
    """Return the axes of coordinates of which a remainder is taken, and by what."""
    divisors: dict[int, int] = {}
    for node in loops.nodes:
        if is_applied(node, REMAINDER):
            source, by = operand_of(node, "self"), number_of(loops.nodes, node, "other")
            of = None if source is None else loops.nodes[source]
            if isinstance(of, Coordinate) and isinstance(by, int) and by > 1:
                divisors |= {key: by for key, _ in of.index.terms if key >= 0}
    return divisors


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


def placements(
    a: Analysis, device: DeviceSpec, hints: Mapping[sympy.Symbol, int] = NO_HINTS
) -> tuple[Placement, ...]:
    """Return placements of a nest with windows, best first by prediction; none if it has no windows."""
    legal = (placement for placement, _ in _legal(a, windows_of(a.loops), device, hints))
    return tuple(itertools.islice(dict.fromkeys(legal), KEPT))


def best(
    a: Analysis, device: DeviceSpec, hints: Mapping[sympy.Symbol, int] = NO_HINTS
) -> tuple[Windows, _Shape] | None:
    """Return the windows of a nest and the shape of its best placement; None if it has none."""
    windows = windows_of(a.loops)
    candidate = next(_legal(a, windows, device, hints), None)
    return None if windows is None or candidate is None else (windows, candidate[1])


def _legal(
    a: Analysis, windows: Windows | None, device: DeviceSpec, hints: Mapping[sympy.Symbol, int]
) -> Iterator[tuple[Placement, _Shape]]:
    """Yield the placements that run a nest, best first, with their shapes."""
    if windows is None:
        return
    loops, shapes = a.loops, dict.fromkeys(_shapes(a.loops, windows, device, hints))
    for shape in sorted(shapes, key=lambda shape: _rank(loops, windows, shape, device, hints)):
        run = Run(a, _placement(loops, windows, shape))
        if refusal_of(run) is None and run.registers <= MOST_REGISTERS:
            yield run.placement, shape


def _shapes(
    loops: LoopNest, w: Windows, device: DeviceSpec, hints: Mapping[sympy.Symbol, int]
) -> Iterator[_Shape]:
    size = {n: hint(axis.size, hints) for n, axis in enumerate(loops.axes)}
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


def _rank(
    loops: LoopNest, w: Windows, s: _Shape, device: DeviceSpec, hints: Mapping[sympy.Symbol, int]
) -> float:
    """Return the time of issue, with what it leaves out of memory's order."""
    us = issue_us(loops, w, s, device, hints)
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
    vector = [Split(name[w.vector], s.block), At(f"{name[w.vector]}.o", _outer(loops, w.vector))]
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
    return any(isinstance(node, Reduce) and axis in node.axes for node in loops.nodes)


def _outer(loops: LoopNest, axis: int) -> Place:
    """Return the place of an axis, or of its outer part, that no tile holds."""
    return Place.LOOP if _is_reduced(loops, axis) else Place.GRID


def issue_us(
    loops: LoopNest, w: Windows, s: _Shape, device: DeviceSpec, hints: Mapping[sympy.Symbol, int]
) -> float:
    """Return the microseconds in which the instructions of a nest are issued under a placement."""
    size = {n: hint(axis.size, hints) for n, axis in enumerate(loops.axes)}
    taps = prod(size[tap] for tap in w.taps)
    points = prod(size[n] for n in w.rest)
    points *= s.block * ceil(size[w.vector] / s.block)
    for i, n in enumerate(w.rows):
        rows = (s.rows if i == 0 else 1) * w.phases.get(n, 1)
        points *= rows * ceil(size[n] / rows)
    shared = float(taps)
    if w.slide is not None:
        step = s.unrolled * s.lanes
        points *= step * ceil(size[w.slide[0]] / step)
        along = max(1, size[w.slide[1]])  # none of an empty image
        shared = taps / along * ((s.unrolled - 1) * w.stride + along) / s.unrolled
    taps, shared = (n / prod(w.phases.values()) for n in (taps, shared))
    tile = s.block * s.lanes * s.rows
    pixels = max(1.0, tile / (8 * 32 * s.num_warps)) * s.unrolled
    beside = taps / pixels * w.has_filter if w.are_reduced else 1.0  # of the filter, or of the gradient
    issued = taps + PER_LOAD * (shared + beside)
    factor = ISSUE if w.are_reduced else ISSUE_SPLIT
    return 1e6 * factor * points * issued / device.fp32_per_s


def cost(
    a: Analysis,
    device: DeviceSpec,
    buffers: Mapping[str, BufferInfo],
    hints: Mapping[sympy.Symbol, int] = NO_HINTS,
) -> Cost:
    """Return what a nest with windows takes under its best placement. Raises LookupError if it has none."""
    loops, windows_and_shape = a.loops, best(a, device, hints)
    if windows_and_shape is None:
        raise LookupError(REFUSAL)
    windows, shape = windows_and_shape

    def moved(names: set[str]) -> int:
        infos = (buffers[name] for name in names)
        return sum(hint(info.numel, hints) * info.itemsize for info in infos)

    read = moved({node.buffer for node in loops.nodes if isinstance(node, Load)})
    written = moved({store.buffer for store in loops.stores})
    memory = 1e6 * (read + written) / device.copy_bandwidth
    issue = issue_us(loops, windows, shape, device, hints)
    second = device.launch_us if shape.parts > 1 or shape.spread else 0.0
    sizes = [hint(axis.size, hints) for axis in loops.axes]
    axes = axes_of(loops.nodes)
    flops = sum(2 * prod(sizes[k] for k in axes[n.operand]) for n in loops.nodes if isinstance(n, Reduce))
    us = device.launch_us - device.floor_us + LATENCY_US + memory + issue + second
    return Cost(us, read, written, flops, "memory" if memory > issue else "arithmetic")
