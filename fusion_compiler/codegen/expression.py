"""Expressions of single values: indices, conversions, and the operator table's rows."""

from __future__ import annotations

import functools
import math
import operator
import struct
from collections.abc import Callable
from typing import Any, cast

import torch

from fusion_compiler.ir.loops import Axis, Compute, Index, Value, wrapped
from fusion_compiler.ir.ops import Operands, spec_of
from fusion_compiler.ir.syntax import Expression, Global, Literal, Operand, fm, lift, plus, times, tl

CONDITIONS = frozenset({"condition", "mask"})  # operands that choose among the others
_SMALL = (torch.int8, torch.uint8, torch.int16)


def index_of(index: Index, axis: Callable[[int], Operand], value: Callable[[int], Operand]) -> Expression:
    """Return const + sum(axis * stride); the two functions give axes and gathered values."""
    terms: list[Expression] = []
    for key, coeff in sorted(index.terms, key=lambda t: t[0] if t[0] >= 0 else -1 - t[0] - (1 << 20)):
        own = axis(key) if key >= 0 else value(~key)
        terms.append(times(own) if coeff == 1 else times(own, coeff))
    if isinstance(index.const, int) and (index.const or not terms):
        return plus(*terms, index.const)
    return functools.reduce(operator.add, terms if index.const == 0 else [*terms, lift(index.const)])


def decompose(axes: tuple[Axis, ...], number: int, flat: Operand) -> Expression:
    """Return one axis of a group, taken out of the group's element number."""
    inner = [a.size for a in axes[number + 1 :]]
    value = lift(flat) // times(*inner) if inner else lift(flat)
    return value if number == 0 else value % axes[number].size


def convert(value: Expression, have: torch.dtype, want: torch.dtype) -> Expression:
    """Return a value of one dtype in another."""
    if have == want:
        return value
    return value.ne(0) if want is torch.bool else value.to(want)


def convert_literal(value: object, want: torch.dtype) -> object:
    """Return a number in another dtype; integers wrap around."""
    if want is torch.bool:
        return bool(value)
    if want.is_floating_point and isinstance(value, bool | int | float):
        return float(value)
    if not want.is_floating_point and isinstance(value, bool | int):
        return wrapped(int(value), want)
    return value


def promoted(dtypes: list[torch.dtype]) -> torch.dtype:
    return functools.reduce(torch.promote_types, dtypes)


def computed(
    node: Compute, operand: Callable[[int], tuple[Expression, torch.dtype]], rough: bool = False
) -> Expression:
    """Return what an operator computes: the table's expression over converted operands.

    operand(n) gives the value of node n, a `Literal` of a number, and its dtype. rough: one of the table's
    faster expressions, where it has one.
    """
    spec = spec_of(node.target)
    assert spec is not None and spec.expr is not None
    fetched = {name: operand(arg.node) for name, arg in node.operands if isinstance(arg, Value)}
    rounding = dict(node.operands).get("rounding")
    if rounding is not None:
        return _rounded(fetched["self"][0], str(rounding))
    want = node.dtype
    if spec.operands is Operands.PROMOTED:
        scalars = [_beside(a, fetched["self"][1]) for _, a in node.operands if not isinstance(a, Value)]
        want = promoted([*(d for _, d in fetched.values()), *scalars])
    alone = all(isinstance(value, Literal) for name, (value, _) in fetched.items() if name not in CONDITIONS)
    values: dict[str, Any] = {}
    for name, arg in node.operands:
        if name in fetched:
            value, have = fetched[name]
            target = _wanted(node, name, spec.operands, want, have)
            if isinstance(value, Literal):
                values[name] = scalar(convert_literal(value.value, target), target, alone)
            else:
                values[name] = convert(value, have, target)
        else:
            values[name] = scalar(arg, want, alone) if isinstance(arg, int | float) else arg
    row = spec.expr
    if rough:
        row = (spec.coarse if node.coarse else None) or spec.rough or spec.expr
    if isinstance(row, Global):  # which does not know the schema's names
        result = row(*(values[a.name] for a in spec.target._schema.arguments if a.name in values))
    else:
        result = row(**values)
    # Triton's functions take a literal as int32, and then the other operand.
    given = [fetched[name][0] if name in fetched else arg for name, arg in node.operands if arg is not None]
    numbers = any(isinstance(value, Literal) or not isinstance(value, str | Expression) for value in given)
    return result.to(node.dtype) if numbers and node.dtype in _SMALL else result


def scalar(value: object, dtype: torch.dtype, alone: bool = False) -> Expression:
    """Return a number of an expression, with its dtype where Triton would not see it as one of that dtype.

    Beside a block a number takes the block's type. A function such as tl.maximum gives it its own first, and
    the result the larger of both. alone: there is no block beside it.
    """
    if not isinstance(value, bool | int | float) or dtype is torch.uint32:  # random words, beside each other
        return _literal(value)
    if not dtype.is_floating_point:
        converted = convert_literal(value, dtype)
        if not isinstance(converted, int):  # a fraction beside integers: nothing stores the result as one
            return _literal(value)
        value = converted
    own = _own_type(value)
    apart = own != dtype and (alone or torch.promote_types(own, dtype) != dtype)
    apart |= alone and dtype is torch.bool  # two of which Triton takes for integers
    if apart or (dtype is torch.float64 and isinstance(value, float) and not _is_single(value)):
        return tl.full((), value, dtype)
    return _literal(value)


def _own_type(value: float) -> torch.dtype:
    """Return the type that Triton gives a number."""
    if isinstance(value, bool):
        return torch.bool
    if isinstance(value, int):
        return torch.int32 if -(2**31) <= value < 2**31 else torch.int64
    single = torch.finfo(torch.float32)
    normal = single.tiny <= abs(value) <= single.max
    return torch.float32 if normal or not value or not math.isfinite(value) else torch.float64


def _is_single(value: float) -> bool:
    """True if float32 holds a number exactly."""
    if not math.isfinite(value):
        return True
    return abs(value) < 2.0**127 and struct.unpack("f", struct.pack("f", value))[0] == value


def _beside(value: object, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype with which a number joins the promotion of a tensor that it is compared with."""
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


def _literal(value: object) -> Expression:
    return Literal(cast("float | str | None", value))


def _rounded(value: Expression, dtype: str) -> Expression:
    if dtype == str(torch.bfloat16):
        return fm.to_bfloat16(value)
    return value.to(getattr(torch, dtype.removeprefix("torch."))).to(torch.float32)
