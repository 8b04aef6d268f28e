"""Sizes: integers, or sympy expressions of positive integer symbols where shapes are dynamic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from math import prod

import sympy

Dim = int | sympy.Expr
Hints = Mapping[sympy.Symbol, int]  # sizes that symbols had, or are taken to have
FEW = 16  # that an estimate without any hint is at least: of 64 - 64 nothing would be left


def simple(dim: Dim) -> Dim:
    """An expression in normal form, an integer where it is constant."""
    if isinstance(dim, int):
        return dim
    expr = sympy.expand(dim)
    return int(expr) if expr.is_Integer else expr


def product(dims: Iterable[Dim]) -> Dim:
    result: Dim = 1
    for dim in dims:
        result = result * dim
    return simple(result)


@lru_cache(maxsize=65536)
def quotient(a: Dim, b: Dim) -> Dim | None:
    """a / b where b divides a for every value of the symbols, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    ratio = sympy.cancel(sympy.sympify(a) / b)
    numerator, denominator = sympy.fraction(ratio)
    if denominator != 1 or not numerator.is_integer:
        return None
    return simple(numerator)


@lru_cache(maxsize=65536)
def not_above(a: Dim, b: Dim) -> bool:
    """Whether a <= b for every value of the symbols (False: not proved)."""
    if isinstance(a, int) and isinstance(b, int):
        return a <= b
    return bool(sympy.expand(sympy.sympify(b) - a).is_nonnegative)


@lru_cache(maxsize=65536)
def smaller(a: int, b: Dim) -> Dim:
    """min(a, b)."""
    return min(a, b) if isinstance(b, int) else sympy.Min(a, b)


def no_less(dim: Dim) -> Dim:
    """`dim`, or what it is no larger than, with n in the place of min(n, size); it grows with these."""
    if isinstance(dim, int):
        return dim
    known = {m: next((a for a in m.args if a.is_Integer), m) for m in dim.atoms(sympy.Min)}
    return simple(dim.xreplace(known))  # type: ignore[arg-type]


@lru_cache(maxsize=65536)
def is_positive(dim: Dim) -> bool:
    """Whether a size is no zero for any value of the symbols (False: not proved)."""
    if isinstance(dim, int):
        return dim > 0
    from torch.utils._sympy.numbers import int_oo
    from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

    symbols = [s for s in dim.free_symbols if isinstance(s, sympy.Symbol) and s.is_positive]
    if len(symbols) < len(dim.free_symbols):
        return False
    least = bound_sympy(dim, {symbol: ValueRanges(1, int_oo) for symbol in symbols}).lower
    return bool(least > 0)


def hint(dim: Dim, values: Hints | None = None) -> int:
    """A number for estimates: the size itself; symbols from `values`, else 64 each, and FEW at least."""
    if isinstance(dim, int):
        return dim
    return int(_value(dim, values)) if values else max(FEW, int(_value(dim, {})))


def _value(expr: sympy.Basic, known: Hints) -> int | Fraction:
    """An expression in numbers, exact; sympy's own substitution takes thirty times as long."""
    if isinstance(expr, sympy.Symbol):
        return known.get(expr, 64)
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Rational):
        return Fraction(expr.p, expr.q)
    if isinstance(expr, sympy.Add | sympy.Mul):
        parts = [_value(part, known) for part in expr.args]
        return sum(parts) if isinstance(expr, sympy.Add) else prod(parts)
    value = expr.subs({s: known.get(s, 64) for s in expr.free_symbols})  # type: ignore[arg-type]
    return _value(value, known) if isinstance(value, sympy.Rational) else int(value)  # type: ignore[arg-type]


def numel(shape: Iterable[Dim], values: Hints | None = None) -> int:
    """Number of elements, symbols estimated as by `hint`."""
    total = 1
    for dim in shape:
        total *= hint(dim, values)
    return total


def strides_of(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Contiguous strides in elements."""
    strides: list[Dim] = []
    step: Dim = 1
    for size in reversed(shape):
        strides.append(step)
        step = simple(step * size)
    return tuple(reversed(strides))
