"""Blocks of a loop that masks leave out, and blocks in which they hold everywhere.

    s = where(j <= i, x, -inf)       of a block of keys j for a block of queries i, none, some or all is live

A condition is a conjunction of bounds, each of which is a sum of axis numbers, times integers, that must not
be negative: i - j >= 0. For a block of i and a block of j, the largest and smallest value of a bound say
whether it holds anywhere and everywhere.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fusion_compiler.ir.loops import (
    Compute,
    Constant,
    Coordinate,
    InRange,
    LoopNest,
    Value,
    conjuncts_of,
    is_applied,
    operand_of,
    operands_of,
    pair_of,
    rounding_of,
    source_of,
)
from fusion_compiler.ops.arithmetic import ADD, BITS_NOT, CAST, EXP, MUL, SUB, WHERE


@dataclass(frozen=True)
class Bound:
    """A condition on axes: const + the sum of coefficients times axis numbers is not negative."""

    terms: tuple[tuple[int, int], ...]
    const: int

    def coefficient(self, axis: int) -> int:
        return dict(self.terms).get(axis, 0)


Sum = tuple[Mapping[int, int], int]  # coefficients by axis, and a constant
Bounds = Mapping[int, tuple[Bound, ...]]  # by the node of a condition that holds where all of them do

_COMPARISONS: Mapping[object, Callable[[Sum], tuple[Sum, ...]]] = {
    operator.ge: lambda s: (s,),
    operator.gt: lambda s: (_plus(s, -1),),
    operator.le: lambda s: (_times(s, -1),),
    operator.lt: lambda s: (_plus(_times(s, -1), -1),),
    operator.eq: lambda s: (s, _times(s, -1)),
}
_OPPOSITES: Mapping[object, object] = {
    operator.gt: operator.le,
    operator.ge: operator.lt,
    operator.lt: operator.ge,
    operator.le: operator.gt,
}


def bounds_of(loops: LoopNest, number: int, neutral: float) -> Bounds:
    """Return the conditions outside of which a node is zero or -inf (`neutral`), as far as they are bounds on
    axes. Other operands are taken to be finite: zero times a value that is masked is zero."""
    node, bounds = loops.nodes[source_of(loops.nodes, number)], dict[int, tuple[Bound, ...]]()
    if is_applied(node, WHERE):
        condition = operand_of(node, "condition")
        sides = [_is(loops, node, name, neutral) for name in ("self", "other")]
        inner = operand_of(node, "other" if sides[0] else "self")
        if condition is None or inner is None or sides.count(True) != 1:
            return bounds
        parts = conjuncts_of(loops.nodes, condition) if sides[1] else [condition]
        of_parts = {part: _of_condition(loops, part, opposite=sides[0]) for part in parts}
        bounds |= {part: of_part for part, of_part in of_parts.items() if of_part}
        return bounds | dict(bounds_of(loops, inner, neutral))
    if neutral == 0 and is_applied(node, EXP):
        return bounds_of(loops, operands_of(node)[0], -math.inf)
    through = (MUL,) if neutral == 0 else (ADD, SUB)
    for operator_ in through:
        operands = pair_of(node, operator_)
        for operand in operands[:1] if operator_ is SUB else operands:
            bounds |= bounds_of(loops, operand, neutral)
    return bounds


def _is(loops: LoopNest, node: Compute, name: str, neutral: float) -> bool:
    number = operand_of(node, name)
    constant = None if number is None else loops.nodes[number]
    return isinstance(constant, Constant) and constant.value == neutral


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
    compare: object = _OPPOSITES.get(node.spec.compare) if opposite else node.spec.compare
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
