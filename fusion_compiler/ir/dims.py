"""Compute with sizes: integers, or sympy expressions of positive integer symbols if shapes are dynamic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fractions import Fraction
from functools import lru_cache
from math import prod

import sympy

Dim = int | sympy.Expr
Hints = Mapping[sympy.Symbol, int]  # the sizes that symbols had at capture, or an assumption
FEW = 16  # the least estimate of a size without hints, since 64 - 64 would leave nothing


def simple(dim: Dim) -> Dim:
    """Return an expression in normal form, or an integer if it is constant."""
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
    """Return a / b if b divides a for every value of the symbols, else None."""
    if isinstance(a, int) and isinstance(b, int):
        return a // b if b and a % b == 0 else None
    ratio = sympy.cancel(sympy.sympify(a) / b)
    numerator, denominator = sympy.fraction(ratio)
    if denominator != 1 or not numerator.is_integer:
        return None
    return simple(numerator)


@lru_cache(maxsize=65536)
def not_above(a: Dim, b: Dim) -> bool:
    """True if a <= b is proved for every value of the symbols."""
    if isinstance(a, int) and isinstance(b, int):
        return a <= b
    return bool(sympy.expand(sympy.sympify(b) - a).is_nonnegative)


@lru_cache(maxsize=65536)
def smaller(a: int, b: Dim) -> Dim:
    """Return min(a, b)."""
    return min(a, b) if isinstance(b, int) else sympy.Min(a, b)


def upper_bound(dim: Dim) -> Dim:
    """Return an upper bound of `dim`: n replaces each min(n, size), with which `dim` must grow."""
    if isinstance(dim, int):
        return dim
    bounds = {m: next((a for a in m.args if a.is_Integer), m) for m in dim.atoms(sympy.Min)}
    return simple(dim.xreplace(bounds))  # type: ignore[arg-type]


@lru_cache(maxsize=65536)
def is_positive(dim: Dim) -> bool:
    """True if a size is proved to be positive for every value of the symbols."""
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
    """Return an estimate of a size. Symbols have their size in `values`. Without `values`, each symbol is 64
    and the result is at least FEW."""
    if isinstance(dim, int):
        return dim
    return int(_value(dim, values)) if values else max(FEW, int(_value(dim, {})))


def _value(expr: sympy.Basic, sizes: Hints) -> int | Fraction:
    """Return the exact value of an expression. Sympy's own substitution takes thirty times as long."""
    if isinstance(expr, sympy.Symbol):
        return sizes.get(expr, 64)
    if isinstance(expr, sympy.Integer):
        return int(expr)
    if isinstance(expr, sympy.Rational):
        return Fraction(expr.p, expr.q)
    if isinstance(expr, sympy.Add | sympy.Mul):
        terms = [_value(term, sizes) for term in expr.args]
        return sum(terms) if isinstance(expr, sympy.Add) else prod(terms)
    value = expr.subs({s: sizes.get(s, 64) for s in expr.free_symbols})  # type: ignore[arg-type]
    return _value(value, sizes) if isinstance(value, sympy.Rational) else int(value)  # type: ignore[arg-type]


def numel(shape: Iterable[Dim], values: Hints | None = None) -> int:
    """Return the number of elements, with symbols estimated as by `hint`."""
    total = 1
    for dim in shape:
        total *= hint(dim, values)
    return total


def strides_of(shape: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Return contiguous strides in elements."""
    strides: list[Dim] = []
    step: Dim = 1
    for size in reversed(shape):
        strides.append(step)
        step = simple(step * size)
    return tuple(reversed(strides))
