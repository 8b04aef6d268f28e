"""Device functions that generated kernels call where Triton has no single expression.

Each works on blocks of any shape, under the compiler and under the interpreter. Operands of
one call have the same dtype; one of them may be a Python literal.
"""

# ruff: noqa: RET505 -- a static branch must end in else: Triton compiles what follows a return
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportMissingParameterType=false
# The bodies are Triton, which reuses Python's syntax and not its types.

import triton
import triton.language as tl
from triton.language.extra import libdevice


@triton.jit
def div(x, y):
    """x / y, correctly rounded: Triton's own `/` is off by up to 2 ulp in float32."""
    dtype: tl.constexpr = (x + y).dtype
    if dtype == tl.float32:
        return tl.div_rn(tl.cast(x, dtype), tl.cast(y, dtype))
    else:
        return x / y


@triton.jit
def sqrt(x):
    """Square root, correctly rounded."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x))."""
    return div(1.0, 1.0 + libdevice.exp(-x))


@triton.jit
def rough_exp(x):
    """exp for float32 by one exp2: to 2^-17 for all x, to 2^-20 where |x| < 16."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def rough_sigmoid(x):
    """1 / (1 + exp(-x)) by approximate functions, for float32: to 2^-18 while exp(-x) is below 2^90."""
    return libdevice.fast_dividef(1.0, 1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def rough_tanh(x):
    """tanh from one exponential, right to 2^-18 relative, for float32.

    1 - 2 / (1 + exp(2x)) cancels near 0, where x - x^3 / 3 is used: the two errors meet at 1/16.
    """
    near = x - x * x * x * 0.3333333432674408
    far = 1.0 - libdevice.fast_dividef(2.0, 1.0 + tl.exp2(x * 2.8853900817779268))
    return tl.where(tl.abs(x) < 0.0625, near, far)


@triton.jit
def rough_erf(x):
    """erf as a rational function of x in [-4, 4], for float32: to 2^-21 relative (Eigen's coefficients)."""
    x = tl.minimum(
        tl.maximum(x, -4.0, propagate_nan=tl.PropagateNan.ALL), 4.0, propagate_nan=tl.PropagateNan.ALL
    )
    s = x * x
    p = s * -2.72614225801306e-10 + 2.77068142495902e-08
    p = s * p - 2.10102402082508e-06
    p = s * p - 5.69250639462346e-05
    p = s * p - 7.34990630326855e-04
    p = s * p - 2.95459980854025e-03
    p = s * p - 1.60960333262415e-02
    q = s * -1.45660718464996e-05 - 2.13374055278905e-04
    q = s * q - 1.68282697438203e-03
    q = s * q - 7.37332916720468e-03
    q = s * q - 1.42647390514189e-02
    return libdevice.fast_dividef(x * p, q)


@triton.jit
def copysign(x, y):
    """The magnitude of x with the sign of y, also that of a zero or a NaN."""
    dtype: tl.constexpr = (x + y).dtype
    return libdevice.copysign(tl.cast(x, dtype), tl.cast(y, dtype))


@triton.jit
def fmod(x, y):
    """Remainder with the sign of the dividend (C's fmod and %)."""
    dtype: tl.constexpr = (x + y).dtype
    if dtype.is_floating():
        return libdevice.fmod(tl.cast(x, dtype), tl.cast(y, dtype))
    else:
        return x % y


@triton.jit
def remainder(x, y):
    """Remainder with the sign of the divisor (Python's %)."""
    r = fmod(x, y)
    return tl.where((r != 0) & ((r < 0) != (y < 0)), r + y, r)


@triton.jit
def trunc_divide(x, y):
    """Quotient rounded towards zero."""
    dtype: tl.constexpr = (x + y).dtype
    if dtype.is_floating():
        return libdevice.trunc(div(x, y))
    else:
        return x // y


@triton.jit
def floor_divide(x, y):
    """Quotient rounded towards minus infinity; for floats exact as Python's //, as in ATen."""
    dtype: tl.constexpr = (x + y).dtype
    r = fmod(x, y)
    if dtype.is_floating():
        q = div(x - r, y)
        q = tl.where((r != 0) & ((r < 0) != (y < 0)), q - 1, q)
        down = tl.floor(q)
        down = tl.where(q - down > 0.5, down + 1, down)
        whole = div(x, y)
        zero = libdevice.copysign(whole * 0, whole)
        return tl.where(y == 0, whole, tl.where(q == 0, zero, down))
    else:
        return tl.where((r != 0) & ((r < 0) != (y < 0)), x // y - 1, x // y)


@triton.jit
def pow(x, y):
    """x to the power y; integers wrap around, and a negative exponent gives 0 but for a base of +-1."""
    dtype: tl.constexpr = (x + y).dtype
    base = tl.cast(x, dtype)
    exponent = tl.cast(y, dtype)
    if dtype.is_floating():
        return libdevice.pow(base, exponent)
    else:
        odd = (exponent & 1) != 0
        negative = tl.where(base == 1, 1, tl.where(base == -1, tl.where(odd, -1, 1), 0))
        is_negative = exponent < 0
        result = tl.full((), 1, dtype) + (base + exponent) * 0
        square = base + exponent * 0
        rest = exponent + base * 0
        for _ in range(dtype.primitive_bitwidth):
            result = tl.where((rest & 1) != 0, result * square, result)
            square = square * square
            rest = rest >> 1
        return tl.where(is_negative, negative.to(dtype), result)


@triton.jit
def left_shift(x, y):
    """x << y; 0 where y is negative or not less than the width, as in ATen."""
    dtype: tl.constexpr = (x + y).dtype
    bits: tl.constexpr = dtype.primitive_bitwidth
    fits = (y >= 0) & (y < bits)
    return tl.where(fits, x << tl.where(fits, y, 0).to(dtype), 0)


@triton.jit
def right_shift(x, y):
    """Arithmetic x >> y; the sign (0 if unsigned) where y is negative or not less than the width."""
    dtype: tl.constexpr = (x + y).dtype
    bits: tl.constexpr = dtype.primitive_bitwidth
    fits = (y >= 0) & (y < bits)
    sign = tl.where(x < 0, -1, 0).to(dtype)
    return tl.where(fits, x >> tl.where(fits, y, 0).to(dtype), sign)


@triton.jit
def uniform4(seed, counter, salt):
    """Four independent uniform float32 in [0, 1): Philox4x32-10 of (counter, salt) under a 64-bit key.

    seed: int64. counter: non-negative block, int32 or int64. salt: below 2^32. Lane k of
    counter c is element 4 * c + k of `fusion_compiler.uniform(seed, shape, salt)`.
    """
    low = counter.to(tl.uint32)
    zero = low * 0
    high = zero
    if counter.dtype.primitive_bitwidth > 32:
        high = (counter >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(seed, low, high, zero + tl.cast(salt, tl.uint32), zero)
    return (
        tl.uint_to_uniform_float(a),
        tl.uint_to_uniform_float(b),
        tl.uint_to_uniform_float(c),
        tl.uint_to_uniform_float(d),
    )


@triton.jit
def uniform(seed, index, salt):
    """Element `index` (int32 or int64 block) of `fusion_compiler.uniform(seed, shape, salt)`."""
    a, b, c, d = uniform4(seed, index // 4, salt)
    lane = index % 4
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))


@triton.jit
def multiply(a, b):
    """The combining function of products."""
    return a * b


@triton.jit
def maximum_of(x, axis: tl.constexpr, keep_dims: tl.constexpr):
    """The maximum along an axis; NaN where there is one, which tl.max would pass over."""
    nan = tl.max((x != x).to(tl.int32), axis=axis, keep_dims=keep_dims)
    return tl.where(nan != 0, float("nan"), tl.max(x, axis=axis, keep_dims=keep_dims))


@triton.jit
def minimum_of(x, axis: tl.constexpr, keep_dims: tl.constexpr):
    """The minimum along an axis; NaN where there is one, which tl.min would pass over."""
    nan = tl.max((x != x).to(tl.int32), axis=axis, keep_dims=keep_dims)
    return tl.where(nan != 0, float("nan"), tl.min(x, axis=axis, keep_dims=keep_dims))


@triton.jit
def uniform_block(seed, counter, salt):
    """uniform() of four elements for each counter, side by side along the last axis."""
    a, b, c, d = uniform4(seed, counter, salt)
    fours = tl.join(tl.join(a, c), tl.join(b, d))
    shape: tl.constexpr = fours.shape
    if len(shape) == 3:
        out = tl.reshape(fours, [shape[0] * 4])
    else:
        out = tl.reshape(fours, [shape[0], shape[1] * 4])
    return out
