"""Sizes that a kernel's text cannot express: each becomes an argument, which the launcher computes.

int(n / 6)    TruncToInt(IntTrueDiv(s0, 6))    size_0
-(-n // 4)    -FloorDiv(-s0, 4)                -size_0    Triton's // and % of negative numbers are C's
"""

from __future__ import annotations

import sympy

from fusion_compiler.ir.dims import Dim
from fusion_compiler.ir.loops import LoopNest, resized

QUOTIENTS = ("FloorDiv", "Mod", "PythonMod")  # PyTorch's classes, which several modules define


def name_sizes(nests: tuple[LoopNest, ...]) -> tuple[tuple[LoopNest, ...], dict[sympy.Expr, sympy.Symbol]]:
    """Return the loop nests with a symbol for every size that a kernel cannot express, and the symbols."""
    names: dict[sympy.Expr, sympy.Symbol] = {}

    def expressible(size: Dim) -> Dim:
        return size if isinstance(size, int) else _expressible(size, names)

    return tuple(resized(loops, expressible) for loops in nests), names


def _expressible(size: sympy.Expr, names: dict[sympy.Expr, sympy.Symbol]) -> sympy.Expr:
    if size.is_Integer or isinstance(size, sympy.Symbol):
        return size
    power = isinstance(size, sympy.Pow) and size.exp.is_Integer and size.exp.is_positive
    sum_or_product = power or isinstance(size, sympy.Add | sympy.Mul | sympy.Min)
    quotient = type(size).__name__ in QUOTIENTS and all(a.is_nonnegative for a in size.args)
    if (sum_or_product or quotient) and all(a.is_integer for a in size.args):
        return size.func(*(_expressible(a, names) for a in size.args))  # type: ignore[arg-type]
    if size not in names:
        least = {"nonnegative": True} if size.is_nonnegative else {}
        names[size] = sympy.Symbol(f"size_{len(names)}", integer=True, **least)
    return names[size]
