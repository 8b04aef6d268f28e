"""Triton text for single values: dtypes, literals, indices, and the operator table's expressions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import sympy
import torch

from fusion_compiler.loops import Axis, Compute, Dim, Index, Ref, wrapped
from fusion_compiler.ops import Operands, spec_of

TRITON_TYPES = {
    torch.float8_e4m3fn: "tl.float8e4nv",
    torch.float8_e5m2: "tl.float8e5",
    torch.float16: "tl.float16",
    torch.bfloat16: "tl.bfloat16",
    torch.float32: "tl.float32",
    torch.float64: "tl.float64",
    torch.int8: "tl.int8",
    torch.int16: "tl.int16",
    torch.int32: "tl.int32",
    torch.int64: "tl.int64",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}


_SMALL = (torch.int8, torch.uint8, torch.int16)


def literal(value: object) -> str:
    """A Python scalar as it stands in a kernel."""
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def dim_text(dim: Dim) -> str:
    """A size as an integer expression; powers as products, which Triton can parse."""
    if isinstance(dim, int):
        return str(dim)
    expr = sympy.expand(dim)
    if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
        return "(" + " * ".join([dim_text(expr.base)] * int(expr.exp)) + ")"
    if isinstance(expr, sympy.Add):
        return "(" + " + ".join(dim_text(a) for a in expr.args) + ")"
    if isinstance(expr, sympy.Mul):
        return "(" + " * ".join(dim_text(a) for a in expr.args) + ")"
    if expr.is_Integer:
        return str(int(expr))
    if isinstance(expr, sympy.Symbol):
        return expr.name
    if type(expr).__name__ in ("FloorDiv", "Mod", "PythonMod") and len(expr.args) == 2:
        sign = "//" if type(expr).__name__ == "FloorDiv" else "%"
        return f"({dim_text(expr.args[0])} {sign} {dim_text(expr.args[1])})"
    raise ValueError(f"size {expr} has no Triton text")


def index_text(index: Index, axis_text: Callable[[int], str], value_text: Callable[[int], str]) -> str:
    """const + sum(axis * stride); axes and gathered values named by the two functions."""
    parts: list[str] = []
    for key, coeff in sorted(index.terms, key=lambda t: t[0] if t[0] >= 0 else -1 - t[0] - (1 << 20)):
        name = axis_text(key) if key >= 0 else value_text(~key)
        parts.append(name if coeff == 1 else f"{name} * {dim_text(coeff)}")
    if index.const != 0 or not parts:
        parts.append(dim_text(index.const))
    return " + ".join(parts).replace("+ -", "- ")


def decompose(axes: tuple[Axis, ...], number: int, flat: str) -> str:
    """Text of one axis of a group from the group's element number."""
    inner = [dim_text(a.size) for a in axes[number + 1 :]]
    text = (
        flat if not inner else f"{flat} // {inner[0] if len(inner) == 1 else '(' + ' * '.join(inner) + ')'}"
    )
    return text if number == 0 else f"{text} % {dim_text(axes[number].size)}"


def convert(text: str, have: torch.dtype, want: torch.dtype) -> str:
    """A variable in another dtype."""
    if have == want:
        return text
    if want is torch.bool:
        return f"({text} != 0)"
    return f"{text}.to({TRITON_TYPES[want]})"


def convert_literal(value: object, want: torch.dtype) -> object:
    if want is torch.bool:
        return bool(value)
    if want.is_floating_point and isinstance(value, bool | int | float):
        return float(value)
    return int(value) if isinstance(value, bool) else value


def promoted(dtypes: list[torch.dtype]) -> torch.dtype:
    result = dtypes[0]
    for dtype in dtypes[1:]:
        result = torch.promote_types(result, dtype)
    return result


def compute_text(
    node: Compute, operand: Callable[[int], tuple[str | None, object, torch.dtype]], rough: bool = False
) -> str:
    """The right-hand side of an operator: the table's expression over converted operands.

    operand(n) gives (variable, literal, dtype) of node n; the variable is None for literals. rough: one of
    the table's faster expressions, where it has one.
    """
    spec = spec_of(node.target)
    assert spec is not None and spec.expr is not None
    fetched = {name: operand(arg.node) for name, arg in node.operands if isinstance(arg, Ref)}
    rounding = dict(node.operands).get("rounding")
    if rounding is not None:
        variable, constant, _ = fetched["self"]
        return _rounded(variable or literal(constant), str(rounding))
    want = node.dtype
    if spec.operands is Operands.PROMOTED:
        scalars = [a for _, a in node.operands if isinstance(a, float)]
        dtypes = [d for _, _, d in fetched.values()]
        want = promoted([*dtypes, torch.float32] if scalars and not dtypes[0].is_floating_point else dtypes)
    values: dict[str, str] = {}
    for name, arg in node.operands:
        if not isinstance(arg, Ref):
            values[name] = scalar_text(arg, want)
            continue
        variable, constant, have = fetched[name]
        target = _wanted(node, name, spec.operands, want, have)
        if variable is None:
            values[name] = scalar_text(convert_literal(constant, target), target)
        else:
            values[name] = convert(variable, have, target)
    expr = spec.expr
    if rough:
        expr = (spec.coarse if node.coarse else None) or spec.rough or spec.expr
    text = expr(**values) if callable(expr) else expr.format(**values)
    # Triton's functions take a literal as int32, and then the other operand.
    variables = [fetched[n][0] if n in fetched else arg for n, arg in node.operands if arg is not None]
    widened = node.dtype in _SMALL and not all(isinstance(v, str) for v in variables)
    return f"({text}).to({TRITON_TYPES[node.dtype]})" if widened else text


def scalar_text(value: object, dtype: torch.dtype) -> str:
    """A number in an expression; in double precision one that float32 cannot hold is typed.

    Beside integers it is what their dtype makes of it, as in eager.
    """
    if type(value) is int and not dtype.is_floating_point and dtype is not torch.bool:
        value = wrapped(value, dtype)
    if dtype is torch.float64 and isinstance(value, float) and math.isfinite(value):
        if struct.unpack("f", struct.pack("f", min(max(value, -3e38), 3e38)))[0] != value:
            return f"tl.full((), {value!r}, tl.float64)"
    return literal(value)


def _wanted(
    node: Compute, name: str, operands: Operands, want: torch.dtype, have: torch.dtype
) -> torch.dtype:
    if operands is Operands.OWN:
        return torch.bool if name == "condition" else (node.dtype if _is_where(node) else have)
    return want


def _is_where(node: Compute) -> bool:
    return node.target is torch.ops.aten.where.self


def _rounded(variable: str, dtype: str) -> str:
    name = TRITON_TYPES[getattr(torch, dtype.removeprefix("torch."))]
    return f"{variable}.to({name}).to(tl.float32)"
