"""Write the expressions of the operator table that need more than a line.

A row of `ops/table.py` calls its function with the arguments of the schema by name. Functions whose names
begin with `fp16` are faster, and right to 2^-15 relative.
"""

from __future__ import annotations

import math
import struct

from fusion_compiler.ops.syntax import PROPAGATE_NAN, Call, Expression, Global, Literal, fm, libdevice, tl

ONE = Literal(1)


def number(value: Expression) -> float | None:
    """Return the value of a finite literal, typed or not; None for minus zero, and for what is computed."""
    match value:
        case Call(Global("tl.full"), (_, literal, _)):
            return number(literal)
        case Literal(int() | float() as held) if math.isfinite(held) and (held or math.copysign(1, held) > 0):
            return held
        case _:
            return None


def scaled(value: Expression, factor: Expression) -> Expression:
    return value if number(factor) == 1 else value * factor


def add(self: Expression, other: Expression, alpha: Expression = ONE) -> Expression:
    return self + scaled(other, alpha)


def sub(self: Expression, other: Expression, alpha: Expression = ONE) -> Expression:
    return self - scaled(other, alpha)


def rsub(self: Expression, other: Expression, alpha: Expression = ONE) -> Expression:
    return other - scaled(self, alpha)


def div(self: Expression, other: Expression) -> Expression:
    value = number(other)
    if value is None or not 2**-60 < abs(value) < 2**60:
        return fm.div(self, other)
    if abs(math.frexp(value)[0]) == 0.5:  # multiplying by a power of two is exact, and cheap
        return self * (1 / value)
    (in_float32,) = struct.unpack("f", struct.pack("f", value))
    return fm.div_by(self, float(value), 1 / in_float32)


def fp16_div(self: Expression, other: Expression) -> Expression:
    value = number(other)
    return self * (1 / value) if value is not None and 2**-120 < abs(value) < 2**120 else self / other


def div_mode(self: Expression, other: Expression, rounding_mode: str | None = None) -> Expression:
    match rounding_mode:
        case "floor":
            return fm.floor_divide(self, other)
        case "trunc":
            return fm.trunc_divide(self, other)
        case _:
            return div(self, other)


def pow(self: Expression, exponent: Expression) -> Expression:
    match number(exponent):
        case 1:
            return self
        case 2:
            return self * self
        case 3:
            return self * self * self
        case 0.5:
            return fm.sqrt(self)
        case -0.5:  # tl.rsqrt takes subnormal numbers as 0
            return fm.div(1.0, fm.sqrt(self))
        case -1:
            return fm.div(1.0, self)
        case -2:
            return fm.div(1.0, self * self)
        case _:
            return fm.pow(self, exponent)


def fp16_pow(self: Expression, exponent: Expression) -> Expression:
    value = number(exponent)
    match value:
        case 0.5:
            return fm.fp16_sqrt(self)
        case -1 | -2:
            return 1.0 / pow(self, Literal(-value))
        case float() if not value.is_integer() and value != -0.5 and abs(value) <= 64:
            return fm.fp16_pow(self, exponent)
        case _:
            return pow(self, exponent)


def fp16_pow_of_scalar(self: Expression, exponent: Expression) -> Expression:
    base = number(self)
    if base is None or not 0 < base < math.inf or base == 1:
        return fm.pow(self, exponent)
    return tl.exp2(exponent * math.log2(base))


def maximum(self: Expression, other: Expression) -> Expression:
    return tl.maximum(self, other, propagate_nan=PROPAGATE_NAN)


def minimum(self: Expression, other: Expression) -> Expression:
    return tl.minimum(self, other, propagate_nan=PROPAGATE_NAN)


def clamp(self: Expression, min: Expression | None = None, max: Expression | None = None) -> Expression:
    bounded = self if min is None else maximum(self, min)
    return bounded if max is None else minimum(bounded, max)


def elu(
    self: Expression,
    alpha: Expression = ONE,
    scale: Expression = ONE,
    input_scale: Expression = ONE,
    expm1: Global = libdevice.expm1,
) -> Expression:
    rise = expm1(scaled(self, input_scale))
    return tl.where(self < 0, scaled(scaled(rise, alpha), scale), scaled(self, scale))


def round_decimals(self: Expression, decimals: Expression) -> Expression:
    places = number(decimals)
    assert places is not None
    factor = 10.0 ** abs(places)
    if places > 0:
        return fm.div(libdevice.nearbyint(self * factor), factor)
    return libdevice.nearbyint(fm.div(self, factor)) * factor


def lerp(self: Expression, end: Expression, weight: Expression) -> Expression:
    from_start = self + weight * (end - self)
    from_end = end - (end - self) * (1 - weight)
    value = number(weight)
    if value is not None:
        return from_start if abs(value) < 0.5 else from_end
    return tl.where(tl.abs(weight) < 0.5, from_start, from_end)


def addcmul(
    self: Expression, tensor1: Expression, tensor2: Expression, value: Expression = ONE
) -> Expression:
    return self + scaled(tensor1, value) * tensor2


def addcdiv(
    self: Expression, tensor1: Expression, tensor2: Expression, value: Expression = ONE
) -> Expression:
    return self + scaled(fm.div(tensor1, tensor2), value)
