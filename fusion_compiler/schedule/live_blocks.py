"""Blocks of a loop that masks leave out, and blocks in which they hold everywhere.

    s = where(j <= i, x, -inf)       of a block of keys j for a block of queries i, none, some or all is live

A condition is a conjunction of bounds, each of which is a sum of axis numbers, times integers, that must not
be negative: i - j >= 0. For a block of i and a block of j, the largest and smallest value of a bound say
whether it holds anywhere and everywhere.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fusion_compiler.ir.loops import (
    Compute,
    Constant,
    Coordinate,
    InRange,
    Load,
    LoopNest,
    Node,
    Reduce,
    Value,
    arity_of,
    is_applied,
    number_of,
    operand_of,
    operands_of,
    rounding_of,
    with_operands,
)
from fusion_compiler.ops.arithmetic import ADD, AND, BITS_NOT, CAST, DIV, EXP, EXP2, MUL, OR, SUB, WHERE


@dataclass(frozen=True)
class Bound:
    """A condition on axes: const + the sum of coefficients times axis numbers is not negative."""

    terms: tuple[tuple[int, int], ...]
    const: int

    def coefficient(self, axis: int) -> int:
        return dict(self.terms).get(axis, 0)


Sum = tuple[Mapping[int, int], int]  # coefficients by axis, and a constant
# By the node of a condition: its value where no mask leaves an element out, and the bounds that it means. It
# means none if it is about other values than places.
Bounds = Mapping[int, tuple[bool, tuple[Bound, ...]]]
LOWEST = -1e30  # a mask that adds this makes exp(s - max(s)) zero, if an element of the row has none

_COMPARISONS: Mapping[object, Callable[[Sum], tuple[Sum, ...]]] = {
    operator.ge: lambda s: (s,),
    operator.gt: lambda s: (_plus(s, -1),),
    operator.le: lambda s: (_times(s, -1),),
    operator.lt: lambda s: (_plus(_times(s, -1), -1),),
    operator.eq: lambda s: (s, _times(s, -1)),
}
OPPOSITES: Mapping[object, object] = {
    operator.gt: operator.le,
    operator.ge: operator.lt,
    operator.lt: operator.ge,
    operator.le: operator.gt,
    operator.ne: operator.eq,
}


@dataclass(frozen=True)
class Live:
    """The elements of a node that may be other than zero or -inf.

    bounds: the conditions outside of which it is zero or -inf. lowest: those among them whose masks add the
    lowest finite number instead of -inf. They hold for rows in which each of `guards`, nodes that are
    subtracted from what is masked, is larger than LOWEST.
    """

    bounds: Bounds
    lowest: frozenset[int] = frozenset()
    guards: frozenset[int] = frozenset()


def live_of(loops: LoopNest, number: int, neutral: float) -> Live:
    """Return the conditions outside of which a node is zero or -inf (`neutral`), with the bounds on axes that
    they are. Other operands are taken to be finite, so that zero times a value that is masked is zero, and
    divisors not to be zero.

    Masks of the lowest finite number count as -inf. If they leave an element in each row and column, no guard
    has to be asked.
    """
    reading = _Reading(loops)
    bounds = reading.bounds(number, neutral)
    lowest = frozenset(reading.lowest & bounds.keys())
    if not lowest or reading.leaves_some(bounds):
        return Live(bounds)
    return Live(bounds, lowest, frozenset(reading.guards))


class _Reading:
    """A reading of a value's masks.

    lowest: the conditions of masks with the lowest finite number. guards: what is subtracted from such a
    mask. is_complete: False if there are masks that are no bounds. unread: other values that are added, which
    may be masks.
    """

    def __init__(self, loops: LoopNest) -> None:
        self.loops, self.nodes = loops, loops.nodes
        self.lowest, self.guards = set[int](), set[int]()
        self.is_complete = True
        self.unread = list[int]()

    def bounds(self, number: int, neutral: float) -> Bounds:
        """Return the conditions of a node, with all masks of the lowest finite number."""
        node = self.nodes[number]
        if is_applied(node, WHERE):
            return self.of_where(node, neutral)
        if is_applied(node, CAST):  # to the nearest number of another dtype
            return self.bounds(operands_of(node)[0], neutral)
        if neutral == 0:
            if is_applied(node, EXP) or is_applied(node, EXP2):
                return self.bounds(operands_of(node)[0], -math.inf)
            if is_applied(node, MUL):
                return self.of_any(operands_of(node), neutral)
            if is_applied(node, DIV):
                of = operand_of(node, "self")
                return {} if of is None else self.bounds(of, neutral)
            operands = operands_of(node)
            if isinstance(node, Compute) and node.spec.keeps_zero and len(operands) == arity_of(node) > 0:
                first, *others = (self.bounds(operand, neutral) for operand in operands)
                return {n: b for n, b in first.items() if all(other.get(n) == b for other in others)}
        elif isinstance(node, Compute) and dict(node.operands).get("alpha", 1) == 1:
            first = operand_of(node, "self")
            if is_applied(node, ADD):
                return self.of_any(operands_of(node), neutral)
            is_scaled = is_applied(node, MUL) and (number_of(self.nodes, node, "other") or 0) > 0
            if is_scaled and first is not None:
                return self.bounds(first, neutral)
            if is_applied(node, SUB) and first is not None:
                return self.of_difference(first, operand_of(node, "other"), neutral)
        if neutral != 0:
            self.unread.append(number)
        return {}

    def of_difference(self, masked: int, subtracted: int | None, neutral: float) -> Bounds:
        """Return the conditions of a difference, and record what is subtracted from masks of the lowest
        number."""
        before = len(self.lowest)
        bounds = self.bounds(masked, neutral)
        if subtracted is not None and len(self.lowest) > before:
            self.guards.add(subtracted)
        return bounds

    def of_any(self, numbers: Iterable[int], neutral: float) -> Bounds:
        """Return the bounds of several nodes, each of which alone makes a result `neutral`."""
        bounds: Bounds = {}
        for number in numbers:
            bounds = {**bounds, **self.bounds(number, neutral)}
        return bounds

    def of_where(self, node: Compute, neutral: float) -> Bounds:
        values = [number_of(self.nodes, node, name) for name in ("self", "other")]
        are_lowest = [neutral == -math.inf and value is not None and value <= LOWEST for value in values]
        are_masks = [value == neutral or low for value, low in zip(values, are_lowest, strict=True)]
        condition = operand_of(node, "condition")
        if condition is None or are_masks.count(True) != 1:
            self.is_complete &= neutral == 0
            return {}
        is_shown, bounds = are_masks[1], dict[int, tuple[bool, tuple[Bound, ...]]]()
        for part, value in _parts(self.nodes, condition, is_shown):
            of_part = _of_condition(self.loops, part, opposite=not value)
            self.is_complete &= neutral == 0 or bool(of_part)
            bounds[part] = value, of_part
        if values[are_masks.index(True)] != neutral:
            self.lowest |= bounds.keys()
        inner = operand_of(node, "self" if is_shown else "other")
        return bounds if inner is None else {**bounds, **self.bounds(inner, neutral)}

    def leaves_some(self, bounds: Bounds) -> bool:
        """True if bounds are on two axes, hold somewhere for each element of either, and no other mask can
        hide what they leave."""
        every = [bound for _, of_part in bounds.values() for bound in of_part]
        axes = {axis for bound in every for axis, _ in bound.terms}
        if not self.is_complete or len(axes) != 2 or self.may_be_masked(axes):
            return False
        return all(_has_partners(self.loops, every, a, b) for a, b in itertools.permutations(axes))

    def may_be_masked(self, axes: Collection[int]) -> bool:
        """True if a value that is added is computed, up to reductions, from the lowest number or from a
        tensor along some axes."""
        reductions = [n for n, node in enumerate(self.nodes) if isinstance(node, Reduce)]
        for n in with_operands(self.loops, self.unread, reductions):
            node = self.nodes[n]
            if isinstance(node, Constant) and node.value <= LOWEST:
                return True
            if isinstance(node, Load) and not self.loops.node_axes[n].isdisjoint(axes):
                return True
        return False


def _parts(nodes: Sequence[Node], condition: int, value: bool) -> Iterator[tuple[int, bool]]:
    """Yield the conditions, with their values, that together make up a condition with some value."""
    node = nodes[condition]
    if is_applied(node, BITS_NOT):
        yield from _parts(nodes, operands_of(node)[0], not value)
    elif is_applied(node, AND if value else OR):
        for operand in operands_of(node):
            yield from _parts(nodes, operand, value)
    else:
        yield condition, value


def _has_partners(loops: LoopNest, bounds: Iterable[Bound], axis: int, other: int) -> bool:
    """True if bounds hold for each element of an axis and some element of the other one."""
    size, most = loops.axes[axis].size, loops.axes[other].size
    if not isinstance(size, int) or not isinstance(most, int):
        return False
    lows, highs = [(0, 0)], [(0, most - 1)]  # of the other axis: a coefficient of this one, and a constant
    for bound in bounds:
        step, side = bound.coefficient(axis), bound.coefficient(other)
        if abs(side) != 1:
            return False
        (lows if side > 0 else highs).append((-side * step, -side * bound.const))
    between = [(high[0] - low[0], high[1] - low[1]) for low in lows for high in highs]
    return all(c * place + const >= 0 for c, const in between for place in (0, size - 1))


def _of_condition(loops: LoopNest, number: int, opposite: bool = False) -> tuple[Bound, ...]:
    """Return the bounds that a condition, or its opposite, says; () if it says something else."""
    node = loops.nodes[number]
    if isinstance(node, InRange):
        index = _sum_of_index(loops, number)
        if index is None or opposite or not isinstance(node.low, int) or not isinstance(node.high, int):
            return ()
        return _as_bounds((_plus(index, -node.low), _plus(_times(index, -1), node.high - 1)))
    if is_applied(node, BITS_NOT):
        return _of_condition(loops, operands_of(node)[0], not opposite)
    if not isinstance(node, Compute) or node.spec.compare is None:
        return ()
    compare: object = OPPOSITES.get(node.spec.compare) if opposite else node.spec.compare
    left, right = (_sum_of(loops, side) for _, side in node.operands[:2])
    if compare not in _COMPARISONS or left is None or right is None:
        return ()
    return _as_bounds(_COMPARISONS[compare](_added(left, _times(right, -1))))


def _as_bounds(sums: tuple[Sum, ...]) -> tuple[Bound, ...]:
    return tuple(Bound(tuple(sorted(terms.items())), const) for terms, const in sums)


def _sum_of(loops: LoopNest, side: object) -> Sum | None:
    """Return an operand as a sum of axis numbers, or None if it is none."""
    if not isinstance(side, Value):
        return ({}, side) if isinstance(side, int) else None
    node = loops.nodes[side.node]
    if isinstance(node, Constant):
        return ({}, node.value) if isinstance(node.value, int) else None
    if isinstance(node, Coordinate):
        return _sum_of_index(loops, side.node)
    is_copy = is_applied(node, CAST) and rounding_of(node) is None and not node.dtype.is_floating_point
    if is_copy:
        return _sum_of(loops, Value(operands_of(node)[0]))
    for sign, target in ((1, ADD), (-1, SUB)):
        if is_applied(node, target) and dict(node.operands).get("alpha", 1) == 1:
            left, right = (_sum_of(loops, operand) for _, operand in node.operands[:2])
            return None if left is None or right is None else _added(left, _times(right, sign))
    return None


def _sum_of_index(loops: LoopNest, number: int) -> Sum | None:
    node = loops.nodes[number]
    assert isinstance(node, Coordinate | InRange)
    terms, const = dict(node.index.terms), node.index.const
    is_known = isinstance(const, int) and all(k >= 0 and isinstance(c, int) for k, c in terms.items())
    return (terms, const) if is_known else None  # type: ignore[return-value]


def _plus(of: Sum, number: int) -> Sum:
    return of[0], of[1] + number


def _times(of: Sum, number: int) -> Sum:
    return {k: c * number for k, c in of[0].items()}, of[1] * number


def _added(left: Sum, right: Sum) -> Sum:
    terms = {k: left[0].get(k, 0) + right[0].get(k, 0) for k in {**left[0], **right[0]}}
    return {k: c for k, c in terms.items() if c}, left[1] + right[1]
