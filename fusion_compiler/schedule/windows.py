"""The windows of a loop nest: of convolutions, pooling, and their gradients.

An access of such a nest goes along a position and a tap together, x[y * stride + r]. The nest reduces the
taps (a convolution) or the positions (the gradient of its filter).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

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
    is_applied,
    number_of,
    operand_of,
)
from fusion_compiler.ops.arithmetic import REMAINDER

MOST_TAPS = 64  # along one axis
MOST_STRIDE = 8  # of windows, in taps


@dataclass(frozen=True)
class Windows:
    """Windows describe the axes of a nest by their numbers.

    vector: the axis along which neighbours lie in memory. slide: the position, not the vector, whose elements
    are computed side by side, and its tap; None if there is none. rows: the other positions but the vector.
    taps: all taps. rest: all other axes but the vector. parted: the reduced axes among them. are_reduced:
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
    """Return the windows of a nest; None if it has none of known size, if it does not reduce inner axes
    alone, or if neighbours in memory lie along taps, as no tile has several taps."""
    if not _reduces_inner_alone(loops):
        return None
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


def _reduces_inner_alone(loops: LoopNest) -> bool:
    """True if a nest has inner axes, all reductions reduce these, and no result varies along them."""
    inner = axes_in(loops.axes, (INNER,))
    stored = {k for store in loops.stores for k, _ in store.index.terms}
    reductions = (node for node in loops.nodes if isinstance(node, Reduce))
    return bool(inner) and not inner & stored and all(node.axes == inner for node in reductions)


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
    """Return the axes of coordinates with a remainder, and the divisor."""
    divisors: dict[int, int] = {}
    for node in loops.nodes:
        if is_applied(node, REMAINDER):
            source, by = operand_of(node, "self"), number_of(loops.nodes, node, "other")
            of = None if source is None else loops.nodes[source]
            if isinstance(of, Coordinate) and isinstance(by, int) and by > 1:
                divisors |= {key: by for key, _ in of.index.terms if key >= 0}
    return divisors
