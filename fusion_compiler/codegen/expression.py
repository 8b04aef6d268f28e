"""Triton text for single values: dtypes, literals, indices, and the operator table's expressions."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import sympy
import torch

from fusion_compiler.ir.loops import Axis, Compute, Dim, Index, Value, wrapped
from fusion_compiler.ir.ops import Operands, spec_of

CONDITIONS = frozenset({"condition", "mask"})  # operands that choose among the others
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
    if isinstance(value, float) and not value and math.copysign(1, value) < 0:
        return "fm.minus_zero()"  # Triton takes every zero that it is given as a number for 0.0
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
    if isinstance(expr, sympy.Min):
        first, second = expr.args
        return f"tl.minimum({dim_text(first)}, {dim_text(second)})"  # type: ignore[arg-type]
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
    """A number in another dtype; integers wrap around."""
    if want is torch.bool:
        return bool(value)
    if want.is_floating_point and isinstance(value, bool | int | float):
        return float(value)
    if not want.is_floating_point and isinstance(value, bool | int):
        return wrapped(int(value), want)
    return value


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
    fetched = {name: operand(arg.node) for name, arg in node.operands if isinstance(arg, Value)}
    rounding = dict(node.operands).get("rounding")
    if rounding is not None:
        variable, constant, _ = fetched["self"]
        return _rounded(variable or literal(constant), str(rounding))
    want = node.dtype
    if spec.operands is Operands.PROMOTED:
        scalars = [_beside(a, fetched["self"][2]) for _, a in node.operands if not isinstance(a, Value)]
        want = promoted([*(d for _, _, d in fetched.values()), *scalars])
    alone = not any(fetched[name][0] for name in fetched if name not in CONDITIONS)
    values: dict[str, str] = {}
    for name, arg in node.operands:
        if not isinstance(arg, Value):
            values[name] = scalar_text(arg, want, alone)
            continue
        variable, constant, have = fetched[name]
        target = _wanted(node, name, spec.operands, want, have)
        if variable is None:
            values[name] = scalar_text(convert_literal(constant, target), target, alone)
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


def scalar_text(value: object, dtype: torch.dtype, alone: bool = False) -> str:
    """A number in an expression of a dtype, typed where Triton would not see it as one of that dtype.

    Beside a block a number takes the block's type. A function such as tl.maximum gives it its own first, and
    the result the larger of both. alone: there is no block beside it.
    """
    if not isinstance(value, bool | int | float) or dtype is torch.uint32:  # random words, beside each other
        return literal(value)
    if not dtype.is_floating_point:
        converted = convert_literal(value, dtype)
        if not isinstance(converted, int):  # a fraction beside integers: nothing stores the result as one
            return literal(value)
        value = converted
    own = _own_type(value)
    apart = own != dtype and (alone or torch.promote_types(own, dtype) != dtype)
    apart |= alone and dtype is torch.bool  # two of which Triton takes for integers
    if apart or (dtype is torch.float64 and isinstance(value, float) and not _is_single(value)):
        return f"tl.full((), {literal(value)}, {TRITON_TYPES[dtype]})"
    return literal(value)


def _own_type(value: float) -> torch.dtype:
    """The type that Triton gives a number."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int32 if -(2**31) <= value < 2**31 else torch.int64
    single = torch.finfo(torch.float32)
    normal = single.tiny <= abs(value) <= single.max
    return torch.float32 if normal or not value or not math.isfinite(value) else torch.float64


def _is_single(value: float) -> bool:
    """Whether float32 holds a number exactly."""
    if not math.isfinite(value):
        return True
    return abs(value) < 2.0**127 and struct.unpack("f", struct.pack("f", value))[0] == value


def _beside(value: object, dtype: torch.dtype) -> torch.dtype:
    """What a number that is compared with a tensor of some dtype makes of it."""
    if isinstance(value, float) and not dtype.is_floating_point:
        return torch.float32
    return torch.int32 if dtype is torch.bool and value not in (0, 1) else dtype


def _wanted(
    node: Compute, name: str, operands: Operands, want: torch.dtype, have: torch.dtype
) -> torch.dtype:
    if operands is Operands.OWN:
        return torch.bool if name == "condition" else (node.dtype if _is_where(node) else have)
    return want


def _is_where(node: Compute) -> bool:
    return node.target is torch.ops.aten.where.self


def _rounded(variable: str, dtype: str) -> str:
    if dtype == str(torch.bfloat16):
        return f"fm.to_bfloat16({variable})"
    name = TRITON_TYPES[getattr(torch, dtype.removeprefix("torch."))]
    return f"{variable}.to({name}).to(tl.float32)"
