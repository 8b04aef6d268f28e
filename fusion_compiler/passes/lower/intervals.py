"""Compute with ranges of integers: (smallest, largest). Either may be a symbolic size.

An expression of the operator table is evaluated on ranges of its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch

from fusion_compiler.ir.dims import Dim, not_above, simple
from fusion_compiler.ops.syntax import Binary, Call, Expression, Global, Literal, Name

Range = tuple[Dim, Dim]


def range_of_dtype(dtype: torch.dtype) -> Range:
    """Return the range of a dtype; for a float, the range of an integer converted from it."""
    if dtype is torch.bool:
        return 0, 1
    info = torch.iinfo(torch.int64 if dtype.is_floating_point or dtype.is_complex else dtype)
    return info.min, info.max


def fits(range_: Range, limits: Range, dtype: torch.dtype) -> bool:
    """True if a range lies within its dtype, so that nothing wrapped around. Tensor sizes always fit in
    int64."""
    if all(isinstance(end, int) for end in range_):
        return not_above(limits[0], range_[0]) and not_above(range_[1], limits[1])
    return dtype is torch.int64


def hull(first: Range, *others: Range) -> Range | None:
    """Return the smallest range that contains all ranges, or None if their ends cannot be compared."""
    result: Range | None = first
    for low, high in others:
        if result is not None:
            result = _ends(_least(result[0], low), _greatest(result[1], high))
    return result


def _least(a: Dim, b: Dim) -> Dim | None:
    return a if not_above(a, b) else b if not_above(b, a) else None


def _greatest(a: Dim, b: Dim) -> Dim | None:
    return b if not_above(a, b) else a if not_above(b, a) else None


def evaluated(expression: Expression, operand: Callable[[str], Range | None]) -> Range | None:
    """Return the range of a row's expression, or None. operand: returns the range of an argument."""
    match expression:
        case Name(argument):
            return operand(argument)
        case Literal(int() | float() as value) if math.isfinite(value):
            return math.floor(value), math.ceil(value)
        case Binary(sign, left, right):
            rule, parts = _RULES.get(sign), (left, right)
        case Call(Global(function), arguments):
            rule, parts = _RULES.get(function), arguments[-2:]  # without the condition of `where`
        case _:
            return None
    if rule is None:
        return None
    a, b = (evaluated(part, operand) for part in parts)
    return None if a is None or b is None else rule(a, b)


def _ends(low: Dim | None, high: Dim | None) -> Range | None:
    return None if low is None or high is None else (low, high)


def _scaled(a: Range, b: Range) -> Range | None:
    ends = [x * y for x in a for y in b]
    return (min(ends), max(ends)) if all(isinstance(end, int) for end in ends) else None  # type: ignore[type-var]


def _rest(value: Range, divisor: Range) -> Range | None:
    """Return the range of x % n, which has the sign of n."""
    low, high = divisor
    return (0, simple(high - 1)) if low == high and not_above(1, low) else None


def _quotient(value: Range, divisor: Range) -> Range | None:
    low, by = divisor
    is_number = low == by and isinstance(by, int) and by > 0
    return (value[0] // by, value[1] // by) if is_number and all(isinstance(n, int) for n in value) else None


def _masked(a: Range, b: Range) -> Range | None:
    """Return the range of x & y: from zero to any operand that is not negative."""
    tops = [high for low, high in (a, b) if not_above(0, low)]
    return (0, tops[0]) if tops else None


_RULES: Mapping[str, Callable[[Range, Range], Range | None]] = {
    "+": lambda a, b: (simple(a[0] + b[0]), simple(a[1] + b[1])),
    "-": lambda a, b: (simple(a[0] - b[1]), simple(a[1] - b[0])),
    "*": _scaled,
    "&": _masked,
    "tl.maximum": lambda a, b: _ends(_greatest(a[0], b[0]), _greatest(a[1], b[1])),
    "tl.minimum": lambda a, b: _ends(_least(a[0], b[0]), _least(a[1], b[1])),
    "tl.where": hull,
    "fm.remainder": _rest,
    "fm.floor_divide": _quotient,
}
