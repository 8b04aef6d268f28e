"""A small algebra of predicates over integer coordinates, in which facts about masks are proved.

    formula := True | False | Le0(e) | Every(formulas) | Some(formulas)
    e       := affine in the coordinates and the sizes, with integer coefficients

Every formula is kept simplified: an inequality that holds (or fails) within the coordinates'
bounds is True (or False) at once, so "proved" is `formula is True`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy


@dataclass(frozen=True, slots=True)
class Le0:
    """expr <= 0."""

    expr: sympy.Expr

    def __str__(self) -> str:
        return f"{self.expr} <= 0"


@dataclass(frozen=True, slots=True)
class Every:
    parts: frozenset[Formula]

    def __str__(self) -> str:
        return "(" + " and ".join(sorted(str(p) for p in self.parts)) + ")"


@dataclass(frozen=True, slots=True)
class Some:
    parts: frozenset[Formula]

    def __str__(self) -> str:
        return "(" + " or ".join(sorted(str(p) for p in self.parts)) + ")"


Formula = bool | Le0 | Every | Some


@dataclass(frozen=True)
class Bounds:
    """Coordinates range over 0 <= coordinate < size; sizes are integers or symbols of at least 1."""

    sizes: dict[sympy.Symbol, sympy.Expr]

    def at_most(self, expr: sympy.Expr) -> sympy.Expr | None:
        """Return the largest value of `expr`, or None if there is no bound for all sizes."""
        for coordinate, size in self.sizes.items():
            coefficient, rest = _linear(expr, coordinate)
            if coefficient is None:
                return None
            expr = rest + coefficient * (size - 1) if coefficient > 0 else rest
        for symbol in sympy.expand(expr).free_symbols:
            coefficient, rest = _linear(expr, symbol)
            if coefficient is None or coefficient > 0:
                return None
            expr = rest + coefficient  # the symbol's least value is 1
        expr = sympy.expand(expr)
        return expr if expr.is_Integer else None

    def le0(self, expr: sympy.Expr) -> Formula:
        """Return the formula expr <= 0, for an integer expression."""
        expr = sympy.expand(expr)
        highest, lowest = self.at_most(expr), self.at_most(-expr)
        if highest is not None and highest <= 0:
            return True
        if lowest is not None and lowest < 0:
            return False
        return Le0(expr)


def _linear(expr: sympy.Expr, symbol: sympy.Basic) -> tuple[int | None, Any]:
    """Return (c, rest) with expr = c * symbol + rest, c an integer, or None for c if there is no such c."""
    expanded: Any = sympy.expand(expr)
    coefficient = expanded.coeff(symbol)
    rest = sympy.expand(expanded - coefficient * symbol)
    if rest.has(symbol) or not coefficient.is_Integer:
        return None, expr
    return int(coefficient), rest


def every(*parts: Formula) -> Formula:
    """Return the formula that holds if all of `parts` hold."""
    flat = {q for p in parts for q in (p.parts if isinstance(p, Every) else (p,))} - {True}
    if False in flat:
        return False
    return True if not flat else next(iter(flat)) if len(flat) == 1 else Every(frozenset(flat))


def some(*parts: Formula) -> Formula:
    """Return the formula that holds if at least one of `parts` holds."""
    return negation(every(*(negation(p) for p in parts)))


def negation(formula: Formula) -> Formula:
    if isinstance(formula, bool):
        return not formula
    if isinstance(formula, Le0):
        return Le0(sympy.expand(1 - formula.expr))  # not e <= 0  <=>  e >= 1
    if isinstance(formula, Some):
        return every(*(negation(p) for p in formula.parts))
    negated = map(negation, formula.parts)
    parts = {q for n in negated for q in (n.parts if isinstance(n, Some) else (n,))} - {False}
    return True in parts or Some(frozenset(parts)) if parts else False


def at(formula: Formula, coordinates: dict[sympy.Symbol, sympy.Expr], bounds: Bounds) -> Formula:
    """Return a formula with expressions in the place of some coordinates."""
    if isinstance(formula, bool):
        return formula
    if isinstance(formula, Le0):
        return bounds.le0(formula.expr.subs(list(coordinates.items())))
    parts = [at(part, coordinates, bounds) for part in formula.parts]
    return every(*parts) if isinstance(formula, Every) else some(*parts)
