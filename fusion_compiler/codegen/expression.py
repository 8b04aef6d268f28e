"""Expressions of single values: indices, conversions, and rows of the operator table."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import Any, cast

import torch

from fusion_compiler.ir.loops import Compute, Value, is_applied, wrapped
from fusion_compiler.ops.arithmetic import WHERE
from fusion_compiler.ops.syntax import Expression, Literal, fm, tl
from fusion_compiler.ops.table import Operands

CONDITIONS = frozenset({"condition", "mask"})  # operands that select among the others
_SMALL = (torch.int8, torch.uint8, torch.int16)


def convert(value: Expression, source_dtype: torch.dtype, want: torch.dtype) -> Expression:
    """Return a value converted from one dtype to another."""
    if source_dtype == want:
        return value
    return value.ne(0) if want is torch.bool else value.to(want)


def convert_literal(value: object, want: torch.dtype) -> object:
    """Return a number converted to another dtype; integers wrap around."""
    if want is torch.bool:
        return bool(value)
    if want.is_floating_point and isinstance(value, bool | int | float):
        return float(value)
    if not want.is_floating_point and isinstance(value, bool | int):
        return wrapped(int(value), want)
    return value


def base_name(node: Compute) -> str:
    """Return the beginning of the name of an operator's value."""
    return "rounded" if "rounding" in dict(node.operands) else str(node.target._opname).lstrip("_")


def promoted(dtypes: list[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


def computed(
    node: Compute, operand: Callable[[int], tuple[Expression, torch.dtype]], fp16: bool = False
) -> Expression:
    """Return the value of an operator: the table's expression of the converted operands.

    operand(n): returns the value of node n (a `Literal` if it is a number) and its dtype.
    fp16: use the table's faster expression, if it has one.
    """
    spec = node.spec
    assert spec.expr is not None
    fetched = {name: operand(arg.node) for name, arg in node.operands if isinstance(arg, Value)}
    rounding = dict(node.operands).get("rounding")
    if rounding is not None:
        return _rounded(fetched["self"][0], str(rounding))
    want = node.dtype
    if spec.operands is Operands.PROMOTED:
        scalars = [_scalar_dtype(a, fetched["self"][1]) for _, a in node.operands if not isinstance(a, Value)]
        want = promoted([*(d for _, d in fetched.values()), *scalars])
    all_literals = all(
        isinstance(value, Literal) for name, (value, _) in fetched.items() if name not in CONDITIONS
    )
    values: dict[str, Any] = {}
    for name, arg in node.operands:
        if name in fetched:
            value, source_dtype = fetched[name]
            target = _operand_dtype(node, name, spec.operands, want, source_dtype)
            if isinstance(value, Literal):
                values[name] = scalar(convert_literal(value.value, target), target, all_literals)
            else:
                values[name] = convert(value, source_dtype, target)
        else:
            values[name] = scalar(arg, want, all_literals) if isinstance(arg, int | float) else arg
    row = spec.expr
    if fp16:
        row = (spec.bf16 if node.bf16 else None) or spec.fp16 or spec.expr
    result = spec.applied(row, values)
    # Triton's functions promote a literal to int32, and the other operand with it.
    arguments = [
        fetched[name][0] if name in fetched else arg for name, arg in node.operands if arg is not None
    ]
    has_literal = any(
        isinstance(value, Literal) or not isinstance(value, str | Expression) for value in arguments
    )
    return result.to(node.dtype) if has_literal and node.dtype in _SMALL else result


def scalar(value: object, dtype: torch.dtype, literals_only: bool = False) -> Expression:
    """Return a number as an expression, with an explicit dtype if Triton would infer another one.

    Next to a block, a number takes the block's type. A function such as tl.maximum first gives it its own
    type, and the result the larger of both.
    literals_only: there is no block next to it.
    """
    # numbers next to random words
    if not isinstance(value, bool | int | float) or dtype is torch.uint32:
        return _literal(value)
    if not dtype.is_floating_point:
        converted = convert_literal(value, dtype)
        if not isinstance(converted, int):  # a fraction next to integers: no result is stored as an integer
            return _literal(value)
        value = converted
    inferred = _inferred_dtype(value)
    needs_dtype = inferred != dtype and (literals_only or torch.promote_types(inferred, dtype) != dtype)
    needs_dtype |= literals_only and dtype is torch.bool  # Triton treats two bool literals as integers
    if needs_dtype or (dtype is torch.float64 and isinstance(value, float) and not _is_single(value)):
        return tl.full((), value, dtype)
    return _literal(value)


def _inferred_dtype(value: float) -> torch.dtype:
    """Return the dtype that Triton infers for a number."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int32 if -(2**31) <= value < 2**31 else torch.int64
    single = torch.finfo(torch.float32)
    normal = single.tiny <= abs(value) <= single.max
    return torch.float32 if normal or not value or not math.isfinite(value) else torch.float64


def _is_single(value: float) -> bool:
    """True if float32 represents a number exactly."""
    if not math.isfinite(value):
        return True
    return abs(value) < 2.0**127 and struct.unpack("f", struct.pack("f", value))[0] == value


def _scalar_dtype(value: object, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype with which a number takes part in the promotion of a tensor that it is compared
    with."""
    if isinstance(value, float) and not dtype.is_floating_point:
        return torch.float32
    return torch.int32 if dtype is torch.bool and value not in (0, 1) else dtype


def _operand_dtype(
    node: Compute, name: str, operands: Operands, want: torch.dtype, source_dtype: torch.dtype
) -> torch.dtype:
    """Return the dtype to which an operand is converted."""
    if operands is Operands.OWN:
        if name == "condition":
            return torch.bool
        return node.dtype if is_applied(node, WHERE) else source_dtype
    return want


def _literal(value: object) -> Expression:
    return Literal(cast("float | str | None", value))


def _rounded(value: Expression, dtype: str) -> Expression:
    if dtype == str(torch.bfloat16):
        return fm.to_bfloat16(value)
    return value.to(getattr(torch, dtype.removeprefix("torch."))).to(torch.float32)
