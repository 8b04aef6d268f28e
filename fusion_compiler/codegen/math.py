"""Device functions that generated kernels call if Triton has no single expression.

They work on blocks of any shape, under the compiler and the interpreter. Operands of one call have the same
dtype; one of them may be a Python literal.
"""

# ruff: noqa: RET505 -- a static branch must end in else: Triton compiles what follows a return
# ruff: noqa: RUF005 -- Triton knows the sum of tuples and not how to unpack one in another
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportMissingParameterType=false, reportFunctionMemberAccess=false
# pyright: reportAssignmentType=false
# The bodies are Triton, which reuses Python's syntax and not its types.

from typing import Any

import triton
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Kernels import this module only.
from fusion_compiler.codegen.conversions import compiles_to_ptx as compiles_to_ptx
from fusion_compiler.codegen.conversions import from_bits as from_bits
from fusion_compiler.codegen.conversions import from_byte as from_byte
from fusion_compiler.codegen.conversions import to_bfloat16 as to_bfloat16
from fusion_compiler.codegen.tensor_units import both as both
from fusion_compiler.codegen.tensor_units import contract as contract
from fusion_compiler.codegen.tensor_units import contract_apart as contract_apart
from fusion_compiler.codegen.tensor_units import contracted as contracted
from fusion_compiler.codegen.tensor_units import dot_float8 as dot_float8


@triton.jit
def div(x, y):
    """Return x / y, correctly rounded. Triton's `/` has an error of up to 2 ulp in float32."""
    dtype: tl.constexpr = (x + y).dtype
    if dtype == tl.float32:
        return tl.div_rn(tl.cast(x, dtype), tl.cast(y, dtype))
    else:
        return x / y


@triton.jit
def div_by(x, divisor, inverse):
    """Return x / divisor for a divisor between 2^-60 and 2^60.

    The result is correctly rounded if |x| and the result are above 2^-100.
    inverse: the float32 reciprocal of the divisor. The quotient is corrected by its remainder (Markstein
        1990), without the branch of a division.
    """
    if x.dtype == tl.float32:
        quotient = x * inverse
        size = tl.abs(quotient)
        nearer = tl.fma(tl.fma(quotient, -divisor, x), inverse, quotient)
        return tl.where((size > 0) & (size < float("inf")), nearer, quotient)
    else:
        return div(x, divisor)


@triton.jit
def sqrt(x):
    """Return the square root, correctly rounded."""
    if x.dtype == tl.float32:
        return tl.sqrt_rn(x)
    else:
        return tl.sqrt(x)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x))."""
    return div(1.0, 1.0 + libdevice.exp(-x))


@triton.jit
def tanh(x):
    """Return tanh with an error of at most 2 units in the last place.

    CUDA's tanh branches on the size of x, and a warp with different lanes runs every branch. In float32, this
    function selects one of two values: up to 1, a polynomial in x^2 (a minimax fit of tanh(x) / x, with an
    error of 2^-27), and beyond, 1 - 2 / (1 + exp(2 |x|)).
    """
    if x.dtype == tl.float32:
        square = x * x
        series = 0.0023013639729470015 + square * -0.00035845182719640434
        series = 0.021486656740307808 + square * (-0.007946105673909187 + square * series)
        series = 0.13332344591617584 + square * (-0.05387980118393898 + square * series)
        series = -0.33333295583724976 + square * series
        size = tl.abs(x)
        exponent = size * 2.8853900817779268
        growth = instruction("ex2.approx.ftz.f32", exponent) if has_ptx() else tl.exp2(exponent)
        far = 1.0 - 2.0 * fp16_reciprocal(1.0 + growth)
        return copysign(tl.where(size < 1.0, size + size * square * series, far), x)
    else:
        return libdevice.tanh(x)


# The functions up to copysign are for float32 values that are later rounded to 16 bits. Those of fp16 have a
# relative error of 2^-15, those of bf16 one of 2^-11, with the same NaN, infinities and zeros as the exact
# ones. Results below 2^-126 may become zero. docs/numerics.md has the table, which
# tests/codegen/test_precision.py verifies.


def has_ptx(_semantic: Any = None) -> tl.constexpr:
    """Return whether the target accepts PTX, as NVIDIA's targets and the interpreter do."""
    return tl.constexpr(_semantic is None or _semantic.builder.options.backend_name == "cuda")


has_ptx.__triton_builtin__ = True


def launches_dependents(_semantic: Any = None) -> tl.constexpr:
    """Return whether the target has programmatic dependent launch, as NVIDIA's have from Hopper (sm_90)
    on."""
    if _semantic is None:
        return tl.constexpr(False)
    options = _semantic.builder.options
    return tl.constexpr(options.backend_name == "cuda" and int(options.arch.removeprefix("sm")) >= 90)


launches_dependents.__triton_builtin__ = True


@triton.jit
def wait_for_kernels():
    """Let the next kernel start, then wait until earlier kernels of the stream are complete and their
    writes visible."""
    if launches_dependents():
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def instruction(name: tl.constexpr, x):
    """Return the result of one PTX instruction that approximates a function, to 2^-22 (tanh to 2^-11).

    .ftz flushes subnormal numbers to zero; without it, four more instructions handle them.
    """
    return tl.inline_asm_elementwise(name + " $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def fp16_reciprocal(x):
    """Return 1 / x, or 0 if that is below 2^-126."""
    if has_ptx():
        return instruction("rcp.approx.ftz.f32", x)
    else:
        return libdevice.fast_dividef(1.0, x)


@triton.jit
def fp16_sqrt(x):
    """Return the square root."""
    if has_ptx():
        return instruction("sqrt.approx.f32", x)
    else:
        return tl.sqrt(x)


@triton.jit
def fp16_exp(x):
    """Return exp(x). Most of its error is the product's rounding, 2^-24 of an exponent below 128."""
    return tl.exp2(x * 1.4426950408889634)


@triton.jit
def fp16_expm1(x):
    """Return exp(x) - 1, by its series where the subtraction would cancel."""
    near = x + x * x * (0.5 + x * (0.16666667 + x * 0.041666668))
    return tl.where(tl.abs(x) < 0.125, near, fp16_exp(x) - 1.0)


@triton.jit
def near_log2(x):
    """Return log2(1 + x) by its series, for |x| < 1/16."""
    return x * (1.4426950 + x * (-0.72134752 + x * (0.48089835 + x * -0.36067376)))


@triton.jit
def fp16_log2(x):
    """Return log2(x). The instruction has an absolute error of 2^-22 near 1, so a series replaces it
    there."""
    far = instruction("lg2.approx.f32", x) if has_ptx() else tl.log2(x)
    return tl.where(tl.abs(x - 1.0) < 0.0625, near_log2(x - 1.0), far)


@triton.jit
def fp16_log1p(x):
    """Return log(1 + x)."""
    far = instruction("lg2.approx.ftz.f32", 1.0 + x) if has_ptx() else tl.log2(1.0 + x)
    return tl.where(tl.abs(x) < 0.0625, near_log2(x), far) * 0.6931471805599453


@triton.jit
def fp16_pow(x, y):
    """Return x to a power that is not an integer, |y| <= 64."""
    magnitude = tl.where(x == float("-inf"), float("inf"), x)  # other negative numbers give NaN
    return tl.exp2(y * fp16_log2(magnitude))


@triton.jit
def fp16_sigmoid(x):
    """Return 1 / (1 + exp(-x)), with the relative accuracy for either sign of x."""
    return fp16_reciprocal(1.0 + tl.exp2(x * -1.4426950408889634))


@triton.jit
def bf16_sigmoid(x):
    """Return 1 / (1 + exp(-x)) to 2^-12, with one special-function instruction instead of two.

    The bits of a number are approximately its logarithm, so a constant minus the bits gives the reciprocal to
    5%, and a step of Halley's method cubes that error. If exp(-x) exceeds the number with the constant's
    bits, the guess and the result are 0.
    """
    d = 1.0 + tl.exp2(x * -1.4426950408889634)
    d = tl.minimum(d, 1.8984375 * 2.0**126, propagate_nan=tl.PropagateNan.ALL)
    guess = (0x7EF30000 - d.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
    error = 1.0 - d * guess
    return guess + guess * (error + error * error)


@triton.jit
def fp16_tanh(x):
    """Return tanh from one exponential: 1 - 2 / (1 + exp(2x)). This cancels near 0, where x - x^3 / 3 is
    used. The two errors are equal at 1/16: 2^-18."""
    near = x - x * x * x * 0.3333333432674408
    far = 1.0 - 2.0 * fp16_reciprocal(1.0 + tl.exp2(x * 2.8853900817779268))
    return tl.where(tl.abs(x) < 0.0625, near, far)


@triton.jit
def bf16_tanh(x):
    """Return tanh to 2^-11, in one instruction."""
    if has_ptx():
        return instruction("tanh.approx.f32", x)
    else:
        return fp16_tanh(x)


@triton.jit
def fp16_erf(x):
    """Return erf as a rational function of x in [-4, 4] (Eigen's coefficients)."""
    x = tl.minimum(
        tl.maximum(x, -4.0, propagate_nan=tl.PropagateNan.ALL), 4.0, propagate_nan=tl.PropagateNan.ALL
    )
    s = x * x
    p = tl.fma(s, -2.72614225801306e-10, 2.77068142495902e-08)
    p = tl.fma(s, p, -2.10102402082508e-06)
    p = tl.fma(s, p, -5.69250639462346e-05)
    p = tl.fma(s, p, -7.34990630326855e-04)
    p = tl.fma(s, p, -2.95459980854025e-03)
    p = tl.fma(s, p, -1.60960333262415e-02)
    q = tl.fma(s, -1.45660718464996e-05, -2.13374055278905e-04)
    q = tl.fma(s, q, -1.68282697438203e-03)
    q = tl.fma(s, q, -7.37332916720468e-03)
    q = tl.fma(s, q, -1.42647390514189e-02)
    return x * p * fp16_reciprocal(q)


@triton.jit
def fp16_erfc(x):
    """Return 1 - erf(x): for x > 0, exp(-x^2) times a polynomial in 1 / (1 + p |x|), the form of Hastings
    (1955). The coefficients are minimax for the relative error, 2^-16, until the result vanishes."""
    t = fp16_reciprocal(tl.fma(tl.abs(x), 0.455788, 1.0))
    p = tl.fma(t, -0.13061665, 0.26302239)
    p = tl.fma(t, p, 0.11086953)
    p = tl.fma(t, p, 0.24347869)
    p = tl.fma(t, p, 0.25605355)
    p = tl.fma(t, p, 0.25717933)
    tail = tl.exp2(x * x * -1.4426950408889634) * (t * p)
    return tl.where(x < 0, 2.0 - tail, tail)


@triton.jit
def copysign(x, y):
    """Return the magnitude of x with the sign of y, including the sign of a zero or a NaN."""
    dtype: tl.constexpr = (x + y).dtype
    return libdevice.copysign(tl.cast(x, dtype), tl.cast(y, dtype))


@triton.jit
def atan2(y, x):
    """Return the angle of the point (x, y)."""
    dtype: tl.constexpr = (x + y).dtype
    return libdevice.atan2(tl.cast(y, dtype), tl.cast(x, dtype))


@triton.jit
def hypot(x, y):
    """Return sqrt(x^2 + y^2) without intermediate overflow."""
    dtype: tl.constexpr = (x + y).dtype
    return libdevice.hypot(tl.cast(x, dtype), tl.cast(y, dtype))


@triton.jit
def minus_zero():
    """Return -0.0, for which Triton has no literal."""
    return tl.full((), -1.0, tl.float32) * 0.0


@triton.jit
def sign(x):
    """Return -1, 0 or 1 in the type of x; 0 for NaN."""
    if x.dtype == tl.int1:
        return x
    else:
        one = tl.full((), 1, x.dtype)
        return tl.where(x > 0, one, tl.where(x < 0, -one, one - one))


@triton.jit
def fmod(x, y):
    """Return the remainder with the sign of the dividend (C's fmod and %)."""
    dtype: tl.constexpr = (x + y).dtype
    if dtype.is_floating():
        return libdevice.fmod(tl.cast(x, dtype), tl.cast(y, dtype))
    else:
        return x % y


@triton.jit
def remainder(x, y):
    """Return the remainder with the sign of the divisor (Python's %)."""
    r = fmod(x, y)
    return tl.where((r != 0) & ((r < 0) != (y < 0)), r + y, r)


@triton.jit
def trunc_divide(x, y):
    """Return the quotient rounded towards zero."""
    dtype: tl.constexpr = (x + y).dtype
    if dtype.is_floating():
        return libdevice.trunc(div(x, y))
    else:
        return x // y


@triton.jit
def floor_divide(x, y):
    """Return the quotient rounded towards minus infinity; for floats exact as Python's //, as in ATen."""
    dtype: tl.constexpr = (x + y).dtype
    r = fmod(x, y)
    if dtype.is_floating():
        q = div(x - r, y)
        q = tl.where((r != 0) & ((r < 0) != (y < 0)), q - 1, q)
        down = tl.floor(q)
        down = tl.where(q - down > 0.5, down + 1, down)
        quotient = div(x, y)
        zero = libdevice.copysign(quotient * 0, quotient)
        return tl.where(y == 0, quotient, tl.where(q == 0, zero, down))
    else:
        return tl.where((r != 0) & ((r < 0) != (y < 0)), x // y - 1, x // y)


@triton.jit
def pow(x, y):
    """Return x to the power y. Integers wrap around, and a negative exponent gives 0 unless the base is
    +-1."""
    dtype: tl.constexpr = (x + y).dtype
    base = tl.cast(x, dtype)
    exponent = tl.cast(y, dtype)
    if dtype.is_floating():
        return libdevice.pow(base, exponent)
    else:
        result = tl.full((), 1, dtype) + (base + exponent) * 0
        square = base + exponent * 0
        rest = exponent + base * 0
        for _ in range(dtype.primitive_bitwidth):
            result = tl.where((rest & 1) != 0, result * square, result)
            square = square * square
            rest = rest >> 1
        if dtype.is_int_unsigned():
            return result
        else:
            odd = (exponent & 1) != 0
            negative = tl.where(base == 1, 1, tl.where(base == -1, tl.where(odd, -1, 1), 0))
            return tl.where(exponent < 0, negative.to(dtype), result)


@triton.jit
def left_shift(x, y):
    """Return x << y; 0 if y is negative or not less than the width, as in ATen."""
    dtype: tl.constexpr = (x + y).dtype
    bits: tl.constexpr = dtype.primitive_bitwidth
    fits = (y >= 0) & (y < bits)
    return tl.where(fits, x << tl.where(fits, y, 0).to(dtype), 0)


@triton.jit
def right_shift(x, y):
    """Return the arithmetic x >> y; the sign (0 if unsigned) if y is negative or not less than the width."""
    dtype: tl.constexpr = (x + y).dtype
    bits: tl.constexpr = dtype.primitive_bitwidth
    fits = (y >= 0) & (y < bits)
    sign = tl.where(x < 0, -1, 0).to(dtype)
    return tl.where(fits, x >> tl.where(fits, y, 0).to(dtype), sign)


@triton.jit
def philox_round(a, b, c, d, key_0, key_1):
    """Return the state after one round of Philox.

    One instruction gives both words of a product, which ptxas does not find. It is one block of assembly,
    since otherwise the rounds of a thread's elements overlap and use its registers.
    """
    if has_ptx():
        return tl.inline_asm_elementwise(
            """{ .reg .b64 product;
                 .reg .b32 high;
                 mul.wide.u32 product, $4, 0xD2511F53;
                 mov.b64 {$3, high}, product;
                 xor.b32 $2, high, $7;
                 xor.b32 $2, $2, $9;
                 mul.wide.u32 product, $6, 0xCD9E8D57;
                 mov.b64 {$1, high}, product;
                 xor.b32 $0, high, $5;
                 xor.b32 $0, $0, $8; }""",
            "=&r,=&r,=&r,=&r,r,r,r,r,r,r",
            [a, b, c, d, key_0, key_1],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
            is_pure=True,
            pack=1,
        )
    else:
        first = tl.umulhi(c, 0xCD9E8D57) ^ b ^ key_0
        third = tl.umulhi(a, 0xD2511F53) ^ d ^ key_1
        return first, c * 0xCD9E8D57, third, a * 0xD2511F53


@triton.jit
def philox(seed, counter, salt):
    """Return four independent uint32: Philox4x32-7 of (counter, salt) under a 64-bit key.

    seed: int64.
    counter: non-negative block, int32 or int64.
    salt: below 2^32.
    Word k of counter c is the source of element 4 * c + k of `fusion_compiler.uniform(seed, shape, salt)`.
    """
    key_0 = seed.to(tl.uint32)
    key_1 = (seed >> 32).to(tl.uint32)
    a = counter.to(tl.uint32)
    b = a * 0
    if counter.dtype.primitive_bitwidth > 32:
        b = (counter >> 32).to(tl.uint32)
    c = a * 0 + tl.cast(salt, tl.uint32)
    d = a * 0
    for _ in tl.static_range(7):
        a, b, c, d = philox_round(a, b, c, d, key_0, key_1)
        key_0 += 0x9E3779B9
        key_1 += 0xBB67AE85
    return a, b, c, d


@triton.jit
def fraction(word):
    """Return a uniform float32 in [0, 1) from a uniform uint32: its upper 24 bits, exactly."""
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def words(seed, index, salt):
    """Return the uint32 from which `uniform` computes element `index` (int32 or int64 block)."""
    a, b, c, d = philox(seed, index // 4, salt)
    lane = index % 4
    return tl.where(lane < 2, tl.where(lane == 0, a, b), tl.where(lane == 2, c, d))


@triton.jit
def words_block(seed, counter, salt):
    """Return words() of four elements per counter, adjacent along the last axis."""
    a, b, c, d = philox(seed, counter, salt)
    fours = tl.join(tl.join(a, c), tl.join(b, d))
    shape: tl.constexpr = fours.shape
    if len(shape) == 3:
        out = tl.reshape(fours, [shape[0] * 4])
    else:
        out = tl.reshape(fours, [shape[0], shape[1] * 4])
    return out


@triton.jit
def uniform(seed, index, salt):
    """Return element `index` (int32 or int64 block) of `fusion_compiler.uniform(seed, shape, salt)`."""
    return fraction(words(seed, index, salt))


@triton.jit
def uniform_block(seed, counter, salt):
    """Return uniform() of four elements per counter, adjacent along the last axis."""
    return fraction(words_block(seed, counter, salt))


@triton.jit
def stochastic(value, word):
    """Return float32 rounded stochastically to bfloat16, given a uniform uint32. Infinities and NaN are
    unchanged."""
    bits = value.to(tl.uint32, bitcast=True)
    rounded = (bits + (word & 0xFFFF)) & 0xFFFF0000
    finite = (bits & 0x7F800000) != 0x7F800000
    return tl.where(finite, rounded, bits).to(tl.float32, bitcast=True)


@triton.jit
def multiply(a, b):
    """Combine two elements of a product."""
    return a * b


@triton.jit
def add_both(a, b, c, d):
    """Combine the elements of two sums."""
    return a + c, b + d


@triton.jit
def sums(x, y, axis: tl.constexpr, keep_dims: tl.constexpr):
    """Return the sums of two tiles along an axis, computed by one reduction with one barrier."""
    if compiles_to_ptx():
        return tl.reduce((x, y), axis, add_both, keep_dims=keep_dims)
    else:
        return tl.sum(x, axis=axis, keep_dims=keep_dims), tl.sum(y, axis=axis, keep_dims=keep_dims)


@triton.jit
def larger(a, b):
    """Combine two elements of a maximum; NaN if one is NaN."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL).to(a.dtype)


@triton.jit
def smaller(a, b):
    """Combine two elements of a minimum; NaN if one is NaN."""
    return tl.minimum(a, b, propagate_nan=tl.PropagateNan.ALL).to(a.dtype)


@triton.jit
def running_larger(a, b):
    """Combine two elements of a running maximum; the first NaN if there is one."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def running_smaller(a, b):
    """Combine two elements of a running minimum; the first NaN if there is one."""
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def add_exponentials(a, s, b, t):
    """Return s * exp(a) + t * exp(b) as (maximum, factor of its exponential), also for equal infinities."""
    scale = tl.where(a == b, 1.0, libdevice.exp(-tl.abs(a - b))).to(s.dtype)
    larger_first = (a > b) | (a != a)
    return tl.where(larger_first, a, b), tl.where(larger_first, s + t * scale, t + s * scale)


@triton.jit
def add_logarithms(a, b):
    """Return log(exp(a) + exp(b))."""
    top, total = add_exponentials(a, tl.full([], 1, a.dtype), b, tl.full([], 1, b.dtype))
    return top + tl.log(total)


@triton.jit
def running_logsumexp(x, axis: tl.constexpr, reverse: tl.constexpr = False):
    """Return log(sum(exp(x))) of the elements up to each, as pairs of a maximum and a sum (Milakov,
    Gimelshein)."""
    ones = tl.full(x.shape, 1, x.dtype)
    top, total = tl.associative_scan((x, ones), axis, add_exponentials, reverse=reverse)
    return top + tl.log(total)


@triton.jit
def maximum_of(x, axis: tl.constexpr, keep_dims: tl.constexpr):
    """Return the maximum along an axis. It is NaN if there is a NaN, which tl.max would ignore."""
    if compiles_to_ptx():
        return tl.reduce(x, axis, larger, keep_dims=keep_dims)
    else:
        return tl.where(has_nan(x, axis, keep_dims), float("nan"), tl.max(x, axis=axis, keep_dims=keep_dims))


@triton.jit
def minimum_of(x, axis: tl.constexpr, keep_dims: tl.constexpr):
    """Return the minimum along an axis. It is NaN if there is a NaN, which tl.min would ignore."""
    if compiles_to_ptx():
        return tl.reduce(x, axis, smaller, keep_dims=keep_dims)
    else:
        return tl.where(has_nan(x, axis, keep_dims), float("nan"), tl.min(x, axis=axis, keep_dims=keep_dims))


@triton.jit
def has_nan(x, axis: tl.constexpr, keep_dims: tl.constexpr):
    """Return whether there is a NaN along an axis."""
    return tl.max((x != x).to(tl.int32), axis=axis, keep_dims=keep_dims) != 0


@triton.jit
def merge_moments(mean, squares, count, other_mean, other_squares, other_count):
    """Return the mean and the sum of squared differences of the union of two sets. The sets have `count` and
    `other_count` elements. Chan, Golub and LeVeque, "Algorithms for computing the sample variance", 1983."""
    # the quotient of integers would be a float32
    share = tl.full((), other_count, mean.dtype) / (count + other_count)
    move = other_mean - mean
    # In this order the product is 0 if count is 0, even if the square of move is infinite.
    return mean + move * share, squares + other_squares + move * (count * share) * move


@triton.jit
def corrected(mean, squares, left, count):
    """Return a mean and the sum of squares around it, corrected for the rounding errors of both.

    left: the sum of the differences from the mean. Nothing is subtracted if squares overflow, since infinity
        - infinity would be NaN.
    """
    off = left / count
    correction = left * off
    squares = tl.maximum(
        squares - tl.where(correction < float("inf"), correction, 0.0), 0.0, propagate_nan=tl.PropagateNan.ALL
    )
    return tl.where(tl.abs(off) < float("inf"), mean + off, mean), squares


@triton.jit
def repeated(x, count: tl.constexpr):
    """Return a tile with each column repeated `count` times."""
    if len(x.shape) == 1:
        return tl.reshape(tl.broadcast_to(x[:, None], [x.shape[0], count]), [x.shape[0] * count])
    elif len(x.shape) == 4:
        rows = tl.reshape(x, [x.shape[0] * x.shape[1] * x.shape[2], x.shape[3]])
        return tl.reshape(repeated(rows, count), [x.shape[0], x.shape[1], x.shape[2], x.shape[3] * count])
    elif len(x.shape) == 3:
        rows = tl.reshape(x, [x.shape[0] * x.shape[1], x.shape[2]])
        return tl.reshape(repeated(rows, count), [x.shape[0], x.shape[1], x.shape[2] * count])
    else:
        wide = tl.broadcast_to(x[:, :, None], [x.shape[0], x.shape[1], count])
        return tl.reshape(wide, [x.shape[0], x.shape[1] * count])


@triton.jit
def load_behind(pointer, first, lead, count: tl.constexpr, width: tl.constexpr = 0):
    """Load `count` elements from `first - lead` on: whole words are loaded and shifted by `lead` elements.

    pointer: to elements of two or four bytes, at the start of a word of 16 bytes.
    first: a multiple of a word's elements.
    width: the number of elements; those before them are zero, those after them arbitrary. If 0, all requested
        elements must exist, and the word before them.
    """
    bits: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth
    size: tl.constexpr = 128 // bits  # elements of a word
    words = (first - lead // size * size) // size + tl.arange(0, count // size)[:, None]
    numbers = pointer.to(tl.pointer_type(tl.uint64), bitcast=True) + words * 2 + tl.arange(0, 2)[None, :]
    if width == 0:
        previous, current = tl.load(numbers - 2), tl.load(numbers)
    else:
        count_of_words: tl.constexpr = (width + size - 1) // size
        previous = tl.load(numbers - 2, mask=(words > 0) & (words <= count_of_words), other=0)
        current = tl.load(numbers, mask=(words >= 0) & (words < count_of_words), other=0)
    low, middle = tl.split(previous)
    high, last = tl.split(current)
    bit_offset = lead % size * bits
    near = bit_offset < 64
    low, middle, high = tl.where(near, middle, low), tl.where(near, high, middle), tl.where(near, last, high)
    shift = (bit_offset % 64).to(tl.uint64)
    low = (middle << shift) | (low >> 1 >> (63 - shift))
    high = (high << shift) | (middle >> 1 >> (63 - shift))
    return apart(tl.join(low, high), pointer.dtype.element_ty, count)


@triton.jit
def apart(words, dtype: tl.constexpr, count: tl.constexpr):
    """Return the elements of 64-bit numbers, lowest bits first."""
    pieces = tl.join(words.to(tl.uint32), (words >> 32).to(tl.uint32))
    if dtype.primitive_bitwidth == 16:
        pieces = tl.join(pieces.to(tl.uint16), (pieces >> 16).to(tl.uint16))
    return tl.reshape(pieces, [count]).to(dtype, bitcast=True)


# A program reads its boxes this often before it raises an error: for minutes, since a read takes 0.7 us.
PATIENCE = tl.constexpr(1 << 28)
UNSENT = tl.constexpr(0x7F80BEEF)  # a NaN that no operation returns; xor with it makes every message nonzero


@triton.jit
def send(boxes, value, inside, rows=1, apart: tl.constexpr = 1, size: tl.constexpr = 0):
    """Send a row's value to all programs that share the row, including this one.

    boxes: int64, one for each receiver, zero before and after the exchange. inside: the lanes with a box.
    value: 32 bits; or [n, 1], one value for each of n rows.
    rows: the number of rows that exist, from the first on. apart: the distance of two rows of the block.
    size: the number of boxes of a row.

    A message is the value with a mark above it, in one store, so that no order of memory operations is needed
    (the status words of Merrill and Garland's decoupled look-back, 2016). The launcher makes sure that the
    programs of one row run at the same time (`binding.Entry.apart`).
    """
    post(boxes, value.to(tl.uint32, bitcast=True).to(tl.int64) | (1 << 32), inside, rows, apart, size)


@triton.jit
def send_pair(boxes, first, second, inside, rows=1, apart: tl.constexpr = 1, size: tl.constexpr = 0):
    """Send two float32 values in one message, like `send`; the message has no bit left for a mark."""
    first = tl.where(first == first, first, float("nan"))  # a NaN of the user's may have the bits of UNSENT
    low, high = (first.to(tl.uint32, bitcast=True) ^ UNSENT).to(tl.int64), second.to(tl.uint32, bitcast=True)
    post(boxes, low | (high.to(tl.int64) << 32), inside, rows, apart, size)


@triton.jit
def post(boxes, message, inside, rows, apart: tl.constexpr, size: tl.constexpr):
    """Write the message of one row, or of each row of a block, to the boxes of all receivers."""
    if len(message.shape) == 2:
        for r in tl.static_range(message.shape[0]):
            one = tl.sum(tl.sum(tl.where(row_numbers(message.shape[0]) == r, message, 0), axis=0), axis=0)
            tl.atomic_xchg(boxes + r * apart * size, one, mask=inside & (r * apart < rows), sem="relaxed")
    else:
        tl.atomic_xchg(boxes, message, mask=inside, sem="relaxed")


@triton.jit
def row_numbers(count: tl.constexpr):
    """Return the numbers of a block's rows, [count, 1]."""
    return tl.arange(0, count)[:, None]


@triton.jit
def with_row(values, r: tl.constexpr, value):
    """Return values, [rows, 1], with `value` in row r."""
    return tl.where(row_numbers(values.shape[0]) == r, value, values)


@triton.jit
def receive(boxes, value, inside, neutral, rows=1, apart: tl.constexpr = 1, size: tl.constexpr = 0):
    """Return what each program has sent, in the dtype of `value`; `neutral` in the lanes without a box.

    If `value` has several rows, return a tuple with one such tile for each row.
    """
    messages = collected(boxes, value, inside, rows, apart, size)
    if len(value.shape) == 2:
        theirs = ()
        for r in tl.static_range(value.shape[0]):
            theirs = theirs + (opened(messages[r], value, inside & (r * apart < rows), neutral),)
        return theirs
    else:
        return opened(messages, value, inside, neutral)


@triton.jit
def opened(messages, value, inside, neutral):
    """Return the values in messages."""
    return tl.where(inside, messages.to(tl.uint32).to(value.dtype, bitcast=True), neutral)


@triton.jit
def receive_pair(
    boxes, value, inside, neutral, other_neutral, rows=1, apart: tl.constexpr = 1, size: tl.constexpr = 0
):
    """Return the pairs of float32 values that each program has sent, like `receive`."""
    messages = collected(boxes, value, inside, rows, apart, size)
    if len(value.shape) == 2:
        theirs = ()
        for r in tl.static_range(value.shape[0]):
            theirs = theirs + (opened_pair(messages[r], inside & (r * apart < rows), neutral, other_neutral),)
        return theirs
    else:
        return opened_pair(messages, inside, neutral, other_neutral)


@triton.jit
def opened_pair(messages, inside, neutral, other_neutral):
    """Return the pairs of values in messages."""
    first = (messages.to(tl.uint32) ^ UNSENT).to(tl.float32, bitcast=True)
    second = (messages >> 32).to(tl.uint32).to(tl.float32, bitcast=True)
    return tl.where(inside, first, neutral), tl.where(inside, second, other_neutral)


@triton.jit
def collected(mail, value, inside, rows, apart: tl.constexpr, size: tl.constexpr):
    """Wait for all messages, empty the mailboxes, and return the messages; 1 where none is expected.

    The boxes are read once before the wait. In a loop that read is issued early and finds nothing, yet it
    delays the polling, which makes programs a sixth faster: polling at once slows down the senders.
    """
    count: tl.constexpr = value.shape[0] if len(value.shape) == 2 else 1
    boxes, wanted, messages = (), (), ()
    for r in tl.static_range(count):
        boxes = boxes + (mail + r * apart * size,)
        wanted = wanted + (inside & (r * apart < rows) if count > 1 else inside,)
    if compiles_to_ptx():
        for r in tl.static_range(count):
            messages = messages + (delivered(boxes[r], wanted[r], 1, ""),)
        messages = awaited(boxes, messages)
    else:
        for r in tl.static_range(count):
            messages = messages + (looked_for(boxes[r], wanted[r], 0, ""),)
        tl.debug_barrier()
    for r in tl.static_range(count):
        tl.store(boxes[r], messages[r] * 0, mask=wanted[r])
    return messages if count > 1 else messages[0]


@triton.jit
def looked_for(boxes, inside, before, scope: tl.constexpr):
    """Wait until no box holds `before`, and return the messages. scope: see `delivered`."""
    messages = delivered(boxes, inside, before + 1, scope)
    looks = 0
    while tl.min((messages != before).to(tl.int32)) == 0:
        messages = delivered(boxes, inside, before + 1, scope)
        looks += 1
        tl.device_assert(looks < PATIENCE, "a program waits for others that do not run")
    if boxes.numel > 32:  # the loop compared one copy of each message; those of other warps may be older
        messages = delivered(boxes, messages == before, messages, scope)
    return messages


@triton.jit
def delivered(boxes, wanted, others, scope: tl.constexpr):
    """Return the current contents of the boxes that are wanted, and `others` elsewhere.

    scope: unless "", later loads see what a sender stored before its `signal`.
    """
    if scope == "":
        return tl.load(boxes, mask=wanted, other=others, volatile=True)
    else:
        contents = tl.atomic_add(boxes, 0, mask=wanted, sem="acquire", scope=scope)
        return tl.where(wanted, contents, others)


@triton.jit
def signal(boxes, number, inside, scope: tl.constexpr):
    """Write a number to some boxes after all previous stores of this program's threads.

    boxes: int64, one for each receiver, in memory of this device or of others. scope: "gpu", or "sys" if the
    receivers are on other devices. Receivers see the previous stores after their wait (`arrived`).
    """
    tl.debug_barrier()
    tl.atomic_xchg(boxes, number, mask=inside, sem="release", scope=scope)


@triton.jit
def arrived(boxes, number, inside, scope: tl.constexpr):
    """Wait until all senders have written `number` to this program's boxes, and return `number`.

    The boxes held number - 1 before; a sender may have written number + 1 since. The boxes count the rounds
    of an exchange and are never reset.
    """
    looked_for(boxes, inside, number - 1, scope)
    tl.debug_barrier()
    return number


@triton.jit
def again(x):
    """Return x behind an opaque move, so that values computed from it are recomputed instead of kept."""
    if not compiles_to_ptx():
        return x
    elif x.dtype.primitive_bitwidth == 16:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [x], dtype=x.dtype, is_pure=False, pack=1)


def awaited(boxes: Any, messages: Any, _semantic: Any = None) -> Any:
    """Wait for all messages of some mailboxes, and return them to every warp.

    A loop or barrier of Triton would end the software pipelining of the surrounding loop, whose loads of the
    next rows should continue. A program that has waited too long for one that does not run raises an error by
    writing to address zero, which needs no register, unlike a trap.
    """
    count = len(boxes)
    looks = "".join(
        f"""
        setp.eq.u64 %missing{i}, ${i}, 0;
        @%missing{i} ld.relaxed.gpu.global.u64 ${i}, [${count + i}];"""
        for i in range(count)
    )
    begin = "".join(f"""
        mov.u64 ${i}, ${2 * count + i};""" for i in range(count))  # fmt: skip
    combine_missing = "".join(f"""
        or.pred %missing0, %missing0, %missing{i};""" for i in range(1, count))  # fmt: skip
    asm = f"""{{
        .reg .pred %missing<{count}>, %late;
        .reg .u32 %looks;
        .reg .u64 %nowhere;
        mov.u32 %looks, 0;
        mov.u64 %nowhere, 0;{begin}
        WAIT:{looks}{combine_missing}
        add.u32 %looks, %looks, 1;
        setp.gt.u32 %late, %looks, {PATIENCE.value};
        @%late st.global.u32 [%nowhere], %looks;
        @%missing0 bra WAIT;
        bar.sync 0;
        }}"""
    return tl.inline_asm_elementwise(
        asm,
        ",".join(["=&l"] * count + ["l"] * 2 * count),
        [*boxes, *messages],
        dtype=(tl.int64,) * count,
        is_pure=False,
        pack=1,
        _semantic=_semantic,
    )


awaited.__triton_builtin__ = True


@triton.jit
def last_wrong(before, index, low, high):
    """Return index if it is not in low <= index < high, else `before`."""
    return tl.where((index >= low) & (index < high), before, index)


def check_index(index: Any, low: Any, high: Any, what: Any, inside: Any = None, _semantic: Any = None) -> Any:
    """Abort the kernel unless low <= index < high in every lane that is `inside`.

    what: the name of the index. The check stands at the end of a kernel: loads would wait for it, and in a
        loop it would end software pipelining. Values read out of bounds are never seen, since the device
        fails after the error.
    This is not a Triton function, so that the error names the kernel's line instead of this one.
    """
    in_bounds = index.__ge__(low, _semantic=_semantic).__and__(
        index.__lt__(high, _semantic=_semantic), _semantic=_semantic
    )
    ends = [getattr(end, "value", "its size") for end in (low, high)]
    text = f"{getattr(what, 'value', what)}: an index is not in [{ends[0]}, {ends[1]})"
    return tl.device_assert(in_bounds, text, inside, _semantic=_semantic)


check_index.__triton_builtin__ = True
