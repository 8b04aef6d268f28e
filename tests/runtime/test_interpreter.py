"""Corrections of Triton's interpreter, against float64 and against eager."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from fusion_compiler.errors import KernelError
from fusion_compiler.ir.kernel import Kernel, Role
from fusion_compiler.runtime.interpreter import interpreting, run_kernel
from fusion_compiler.runtime.launch import interpret
from fusion_compiler.runtime.libdevice import LIBDEVICE
from fusion_compiler.runtime.target import compile_for
from tests.hand_made import HEADER, argument, elementwise, row_softmax, ticket_sum, two_kernel_sum

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16


def apply(expression: str, *inputs: torch.Tensor, to: torch.dtype | None = None) -> torch.Tensor:
    """`expression` over x0, x1, ... in the interpreter."""
    program = elementwise(
        expression, inputs[0].numel(), tuple(x.dtype for x in inputs), to or inputs[0].dtype
    )
    (y,) = interpret(program, inputs)
    return y


def run(
    body: str, tensors: dict[str, torch.Tensor], grid: Sequence[int] = (1,), compiles: bool = True
) -> None:
    """Runs a kernel of the statements `body`, with `<name>_ptr` for each tensor; compiles it too."""
    lines = "\n".join(f"    {line}" for line in body.strip().splitlines())
    source = HEADER + f"def kernel({', '.join(f'{name}_ptr' for name in tensors)}):\n{lines}\n"
    arguments = tuple(
        argument(f"{name}_ptr", Role.INPUT, i, tensor.dtype)
        for i, (name, tensor) in enumerate(tensors.items())
    )
    kernel = Kernel("kernel", source, arguments, tuple(grid))
    run_kernel(kernel, list(tensors.values()), grid)
    if compiles:  # what is tested here must be Triton, not what the interpreter happens to take
        compile_for(kernel, "sm_90")


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.float8_e4m3fn, "float8e4nv"), (torch.float8_e5m2, "float8e5")], ids=str
)
@pytest.mark.parametrize("source", [F32, BF16], ids=str)
def test_conversion_to_eight_bits_carries_and_saturates(
    dtype: torch.dtype, name: str, source: torch.dtype
) -> None:
    largest = torch.finfo(dtype).max
    x = torch.cat(
        (torch.linspace(-largest, largest, 4000), torch.randn(92), torch.tensor([-7.9, 0, 1e6, -1e9]))
    )
    x = x.to(source)
    y = torch.empty(x.numel(), dtype=dtype)
    run(
        f"i = tl.arange(0, {x.numel()})\ntl.store(y_ptr + i, tl.load(x_ptr + i).to(tl.{name}))",
        {"x": x, "y": y},
    )
    want = x.float().clamp(-largest, largest).to(dtype)
    assert torch.equal(y.view(torch.uint8), want.view(torch.uint8))
    z = torch.zeros(x.numel())
    body = """
i = tl.arange(0, 4096)
tl.store(z_ptr + i, tl.load(y_ptr + i, i < 4000, other=0.0).to(tl.float32))
"""
    run(body, {"y": y, "z": z})
    want[4000:] = 0
    assert torch.equal(z, want.float())


# -- programs -----------------------------------------------------------------------------------------


def test_row_softmax() -> None:
    x = torch.randn(7, 903).bfloat16()
    (y,) = interpret(row_softmax(903), [x], [7])
    torch.testing.assert_close(y.double(), torch.softmax(x.double(), -1), rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    "program", [two_kernel_sum(37, 64), ticket_sum(37, 64)], ids=["two kernels", "ticket"]
)
def test_column_sums(program: Any) -> None:
    x = torch.randn(37, 64)
    torch.testing.assert_close(interpret(program, [x])[0].double(), x.double().sum(0), rtol=0, atol=1e-5)


def test_views_are_read_where_they_lie() -> None:
    x = torch.randn(300)
    assert torch.equal(apply("x0 * 2", x[37:137]), x[37:137] * 2)


# -- libdevice ----------------------------------------------------------------------------------------

REAL = (-100.0, 100.0)
UNARY: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[float, float]]] = {
    "tanh": (torch.tanh, REAL),
    "tan": (torch.tan, (-1.5, 1.5)),
    "asin": (torch.asin, (-1.2, 1.2)),
    "acos": (torch.acos, (-1.2, 1.2)),
    "atan": (torch.atan, REAL),
    "sinh": (torch.sinh, (-80, 80)),
    "cosh": (torch.cosh, (-80, 80)),
    "asinh": (torch.asinh, REAL),
    "acosh": (torch.acosh, (0.5, 100)),
    "atanh": (torch.atanh, (-1.2, 1.2)),
    "log1p": (torch.log1p, (-1.2, 100)),
    "expm1": (torch.expm1, (-80, 80)),
    "log10": (torch.log10, (-1, 100)),
    "log2": (torch.log2, (-1, 100)),
    "log": (torch.log, (-1, 100)),
    "exp": (torch.exp, (-80, 80)),
    "exp2": (torch.exp2, (-100, 100)),
    "exp10": (lambda x: 10**x, (-30, 30)),
    "sin": (torch.sin, REAL),
    "cos": (torch.cos, REAL),
    "sqrt": (torch.sqrt, (-1, 100)),
    "rsqrt": (torch.rsqrt, (-1, 100)),
    "cbrt": (lambda x: x.sign() * x.abs() ** (1 / 3), REAL),
    "erf": (torch.erf, (-4, 4)),
    "erfc": (torch.erfc, (-4, 4)),
    "erfinv": (torch.erfinv, (-1.2, 1.2)),
    "lgamma": (torch.lgamma, REAL),
    "rint": (torch.round, REAL),
    "nearbyint": (torch.round, REAL),
    "trunc": (torch.trunc, REAL),
    "floor": (torch.floor, REAL),
    "ceil": (torch.ceil, REAL),
    "abs": (torch.abs, REAL),
    "j0": (torch.special.bessel_j0, REAL),
    "cyl_bessel_i0": (torch.special.i0, (-50, 50)),
    "normcdf": (torch.special.ndtr, (-5, 5)),
}
SPECIAL = [0.0, -0.0, 1.0, -1.0, float("inf"), float("-inf"), float("nan"), 0.5, 1.5, 2.5, -2.5]


def points(interval: tuple[float, float], dtype: torch.dtype, special: bool = True) -> torch.Tensor:
    low, high = interval
    random = torch.rand(200, dtype=F64) * (high - low) + low
    return torch.cat([random, torch.tensor(SPECIAL, dtype=F64)] if special else [random]).to(dtype)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_unary_functions(name: str, dtype: torch.dtype) -> None:
    reference, interval = UNARY[name]
    x = points(interval, dtype)
    y, truth = apply(f"libdevice.{name}(x0)", x), reference(x.double())
    # One rounding to the type; in float64 the two libraries may differ in the last few bits.
    torch.testing.assert_close(
        y.double(), truth.to(dtype).double(), rtol=2**-23 if dtype == F32 else 1e-12, atol=0, equal_nan=True
    )


def test_round_goes_away_from_zero_at_halves() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -2.5, 0.49999997, 8388609.0, 2.4, -2.6])
    expected = torch.tensor([1.0, 2.0, 3.0, -1.0, -3.0, 0.0, 8388609.0, 2.0, -3.0])
    assert torch.equal(apply("libdevice.round(x0)", x), expected)


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
def test_predicates(dtype: torch.dtype) -> None:
    x = points(REAL, dtype)
    for name in ("isnan", "isinf", "signbit"):
        got = apply(f"libdevice.{name}(x0).to(tl.int1)", x, to=torch.bool)
        assert torch.equal(got, getattr(torch, name)(x)), name


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", ["atan2", "pow", "fmod", "hypot", "copysign", "nextafter", "div_rn", "fdim"])
def test_binary_functions(name: str, dtype: torch.dtype) -> None:
    x = points((-20, 20), dtype)
    y = x[torch.randperm(x.numel())]
    references: dict[str, Callable[..., torch.Tensor]] = {
        "div_rn": torch.div,
        "fdim": lambda a, b: torch.where((a - b).isnan() & (a == b), 0, (a - b).clamp_min(0)),
    }
    reference = references.get(name) or getattr(torch, name)
    wide = name != "nextafter"
    truth = reference(x.double(), y.double()) if wide else reference(x, y)
    got = apply(f"libdevice.{name}(x0, x1)", x, y)
    rtol = 2**-23 if dtype == F32 else 1e-12
    torch.testing.assert_close(got.double(), truth.to(dtype).double(), rtol=rtol, atol=0, equal_nan=True)


def test_functions_of_an_integer() -> None:
    x, n = torch.randn(64), torch.randint(-20, 20, (64,), dtype=torch.int32)
    assert torch.equal(apply("libdevice.ldexp(x0, x1)", x, n), torch.ldexp(x, n))
    assert torch.equal(apply("libdevice.llrint(x0 * 10)", x, to=torch.int64), (x * 10).round().long())


def test_every_function_of_the_table_is_one_of_libdevice() -> None:
    from triton.language.extra.cuda import libdevice

    text = Path(libdevice.__file__).read_text()
    for name in LIBDEVICE:
        assert any(
            f'"__nv_{prefix}{name}{s}"' in text for prefix in ("", "f", "d", "fast_") for s in ("", "f", "d")
        )


def test_an_unknown_function_says_so() -> None:
    with pytest.raises(KernelError, match="norm4d"):
        apply("libdevice.norm4d(x0, x0, x0, x0)", torch.randn(4))
    with pytest.raises(KernelError, match=r"sad\.approx"):
        apply(ASSEMBLY.format("sad.approx.f32"), torch.randn(4))


ASSEMBLY = "tl.inline_asm_elementwise('{} $0, $1;', '=f,f', [x0], tl.float32, is_pure=True, pack=1)"


@pytest.mark.parametrize(
    ("instruction", "reference"),
    [
        ("tanh.approx.f32", torch.tanh),
        ("ex2.approx.ftz.f32", torch.exp2),
        ("lg2.approx.f32", torch.log2),
        ("rcp.approx.ftz.f32", torch.reciprocal),
    ],
)
def test_inline_assembly(instruction: str, reference: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.rand(100) * 4 + 0.1
    truth = reference(x.double()).float()
    torch.testing.assert_close(apply(ASSEMBLY.format(instruction), x), truth, rtol=2**-23, atol=0)


# -- bfloat16 -----------------------------------------------------------------------------------------


def test_conversion_to_bfloat16_rounds_to_nearest_even() -> None:
    bits = torch.cat(
        [torch.randint(-(2**31), 2**31, (5000,)), (torch.randint(0, 2**16, (2000,)) << 16) + 2**15]
    )
    x = bits.to(torch.int64).remainder(2**32)
    x = torch.where(x >= 2**31, x - 2**32, x).to(torch.int32).view(F32)
    x = torch.cat([x, torch.tensor([1.9999, -0.0, float("inf"), 3.4e38, 1e-40, float("nan")])])
    y = apply("x0.to(tl.bfloat16)", x, to=BF16)
    torch.testing.assert_close(y, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(apply("x0", y[~y.isnan()], to=F32), y[~y.isnan()].float())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, F16, F64], ids=str)
def test_conversions_through_bfloat16(dtype: torch.dtype) -> None:
    x = (torch.randn(500, dtype=F64) * 1000).to(dtype)
    assert torch.equal(apply("x0.to(tl.bfloat16)", x, to=BF16), x.float().bfloat16())
    back = x.bfloat16()
    kind = {torch.int32: "int32", torch.int64: "int64", F16: "float16", F64: "float64"}[dtype]
    assert torch.equal(apply(f"x0.to(tl.{kind})", back, to=dtype), back.float().to(dtype))


def test_arithmetic_on_bfloat16_is_on_values() -> None:
    a, b = torch.randn(256).bfloat16(), torch.randn(256).bfloat16()
    y, less, total = torch.empty_like(a), torch.empty(256, dtype=torch.bool), torch.empty(1, dtype=BF16)
    run(
        """
i = tl.arange(0, 256)
a = tl.load(a_ptr + i)
b = tl.load(b_ptr + i, mask=i < 256, other=1.0)
tl.store(y_ptr + i, tl.where(a < b, a * b, a + b))
tl.store(less_ptr + i, a < b)
tl.store(total_ptr, tl.max(a, axis=0))
""",
        {"a": a, "b": b, "y": y, "less": less, "total": total},
    )
    assert torch.equal(y, torch.where(a < b, a * b, a + b))
    assert torch.equal(less, a < b)
    assert torch.equal(total, a.max()[None])


# -- reductions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [0, 1, None])
@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_reductions(name: str, axis: int | None) -> None:
    x = torch.randn(8, 32)
    shape = () if axis is None else (1, 32) if axis == 0 else (8, 1)
    y = torch.empty(shape or (1,))
    store = "tl.store(y_ptr, r)" if axis is None else "tl.store(y_ptr + k, r)"
    offsets = {0: "tl.arange(0, 32)[None, :]", 1: "tl.arange(0, 8)[:, None]", None: "0"}[axis]
    keep = "" if axis is None else ", keep_dims=True"
    run(
        f"""
x = tl.load(x_ptr + tl.arange(0, 8)[:, None] * 32 + tl.arange(0, 32)[None, :])
r = tl.{name}(x, axis={axis}{keep})
k = {offsets}
{store}
""",
        {"x": x, "y": y},
    )
    truth = getattr(x.double(), f"a{name}" if name != "sum" else name)(dim=() if axis is None else axis)
    torch.testing.assert_close(y.double().flatten(), truth.flatten(), rtol=1e-6, atol=1e-6)


def test_maximum_ignores_nan_as_the_hardware_does_and_propagates_when_told() -> None:
    x = torch.randn(64)
    x[5] = float("nan")
    y, z = torch.empty(2), torch.empty(64)
    run(
        """
i = tl.arange(0, 64)
x = tl.load(x_ptr + i)
tl.store(y_ptr, tl.max(x, axis=0))
tl.store(y_ptr + 1, tl.min(x, axis=0))
tl.store(z_ptr + i, tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL))
""",
        {"x": x, "y": y, "z": z},
    )
    rest = x[~x.isnan()]
    assert y.tolist() == [rest.max().item(), rest.min().item()]
    assert torch.equal(z.isnan(), x.isnan())
    assert torch.equal(apply("tl.maximum(x0, x0 * 0)", x)[5:6].isnan(), torch.tensor([True]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(
            "tl.store(x_ptr, tl.max(tl.load(x_ptr + tl.arange(0, 4)), axis=0))",
            {"x": torch.full((4,), torch.nan)},
        )


@pytest.mark.parametrize("propagate", ["NONE", "ALL"])
def test_clamp_of_nan(propagate: str) -> None:
    x = torch.cat([torch.randn(60), torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0])])
    y = apply(f"tl.clamp(x0, -0.5, 1.0, propagate_nan=tl.PropagateNan.{propagate})", x)
    truth = (
        x.clamp(-0.5, 1.0) if propagate == "ALL" else x.nan_to_num(-9, torch.inf, -torch.inf).clamp(-0.5, 1)
    )
    torch.testing.assert_close(y, truth, rtol=0, atol=0, equal_nan=True)


def test_argmax_breaks_ties_to_the_left() -> None:
    x = torch.randint(0, 5, (4, 64)).float()
    value, index = torch.empty(4), torch.empty(4, dtype=torch.int32)
    run(
        """
rows = tl.arange(0, 4)
v, i = tl.max(tl.load(x_ptr + rows[:, None] * 64 + tl.arange(0, 64)[None, :]), axis=1, return_indices=True)
tl.store(v_ptr + rows, v)
tl.store(i_ptr + rows, i)
""",
        {"x": x, "v": value, "i": index},
    )
    assert torch.equal(value, x.amax(1)) and torch.equal(index.long(), torch.from_numpy(x.numpy().argmax(1)))


def test_logic_of_blocks_and_of_scalars() -> None:
    x, y = torch.randn(64), torch.empty(2, 64, dtype=torch.bool)
    run(
        """
i = tl.arange(0, 64)
x = tl.load(x_ptr + i)
p = tl.program_id(0)
if p == 0 and not p > 0 or p == 7:
    tl.store(y_ptr + i, x > 0 and x < 1 or x < -1)
    tl.store(y_ptr + 64 + i, not (x > 0))
""",
        {"x": x, "y": y},
        compiles=False,  # compiled Triton takes `and` of blocks only where it may not stay
    )
    assert torch.equal(y[0], ((x > 0) & (x < 1)) | (x < -1))
    assert torch.equal(y[1], x <= 0)


def test_reduction_by_a_function_of_several_tensors() -> None:
    """Welford's combination of (mean, sum of squared differences, count), and a product."""
    x = torch.randn(4, 128)
    y, p = torch.empty(3, 4), torch.empty(4)
    source = (
        HEADER
        + """def welford(m1, s1, n1, m2, s2, n2):
    d = m2 - m1
    n = n1 + n2
    return m1 + d * (n2 / n), s1 + s2 + d * d * (n1 * n2 / n), n


@triton.jit
def times(a, b):
    return a * b


@triton.jit
def statistics(x_ptr, y_ptr, p_ptr):
    rows = tl.arange(0, 4)
    x = tl.load(x_ptr + rows[:, None] * 128 + tl.arange(0, 128)[None, :])
    mean, m2, count = tl.reduce((x, x * 0, x * 0 + 1), 1, welford)
    tl.store(y_ptr + rows, mean)
    tl.store(y_ptr + 4 + rows, m2)
    tl.store(y_ptr + 8 + rows, count)
    tl.store(p_ptr + rows, tl.reduce(1 + x / 16, 1, times))
"""
    )
    names = {"x_ptr": x, "y_ptr": y, "p_ptr": p}
    arguments = tuple(argument(name, Role.INPUT, i, F32) for i, name in enumerate(names))
    kernel = Kernel("statistics", source, arguments, (1,))
    run_kernel(kernel, list(names.values()), (1,))
    compile_for(kernel, "sm_90")
    truth = x.double()
    torch.testing.assert_close(y[0].double(), truth.mean(1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(y[1].double(), truth.var(1, correction=0) * 128, rtol=1e-5, atol=0)
    assert y[2].tolist() == [128.0] * 4
    torch.testing.assert_close(p.double(), (1 + truth / 16).prod(1), rtol=1e-5, atol=0)


def test_scan() -> None:
    x = torch.randint(-9, 9, (64,), dtype=torch.int32)
    y = torch.empty_like(x)
    body = "i = tl.arange(0, 64)\ntl.store(y_ptr + i, tl.cumsum(tl.load(x_ptr + i), axis=0))"
    run(body, {"x": x, "y": y})
    assert torch.equal(y, x.cumsum(0).int())


# -- the rest of the language that kernels use --------------------------------------------------------


def test_atomics_and_tickets_over_a_grid() -> None:
    x, total, most, order = (
        torch.randn(6, 32),
        torch.zeros(32),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(6, dtype=torch.int32),
    )
    ticket = torch.zeros(1, dtype=torch.int32)
    run(
        """
p = tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
i = tl.arange(0, 32)
tl.atomic_add(total_ptr + i, tl.load(x_ptr + p * 32 + i), mask=i < 30, sem="relaxed")
tl.atomic_max(most_ptr, p)
tl.debug_barrier()
t = tl.atomic_add(ticket_ptr, 1, sem="acq_rel", scope="gpu")
tl.store(order_ptr + p, t)
if t == 5:
    tl.atomic_xchg(ticket_ptr, 0)
""",
        {"x": x, "total": total, "most": most, "order": order, "ticket": ticket},
        grid=(3, 2),
    )
    torch.testing.assert_close(total[:30].double(), x.double().sum(0)[:30], rtol=0, atol=1e-5)
    assert total[30:].tolist() == [0, 0] and most.item() == 5 and ticket.item() == 0
    assert sorted(order.tolist()) == list(range(6))


def test_loops_modifiers_and_helpers() -> None:
    x, y = torch.randn(4, 256), torch.zeros(256)
    run(
        """
i = tl.arange(0, 256)
acc = tl.zeros((256,), dtype=tl.float32)
for row in tl.range(0, 4, 1, num_stages=3, flatten=True):
    acc += tl.load(x_ptr + row * 256 + i, cache_modifier=".ca", eviction_policy="evict_last")
for k in tl.static_range(2):
    acc = acc * 2
k = 0
while k < 3:
    acc += 1
    k += 1
acc = tl.where(i < 100, acc, tl.sigmoid(acc))
tl.store(y_ptr + i, acc, eviction_policy="evict_first")
tl.store(y_ptr + i, acc, cache_modifier=".cs")
""",
        {"x": x, "y": y},
    )
    truth = x.double().sum(0) * 4 + 3
    truth[100:] = truth[100:].sigmoid()
    torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-5)


def test_join_interleave_reshape_and_transpose() -> None:
    a, b = torch.randn(16), torch.randn(16)
    y, z = torch.empty(32), torch.empty(32)
    run(
        """
i = tl.arange(0, 16)
a = tl.load(a_ptr + i)
b = tl.load(b_ptr + i)
j = tl.arange(0, 32)
tl.store(y_ptr + j, tl.interleave(a, b))
tl.store(z_ptr + j, tl.reshape(tl.trans(tl.join(a, b)), [32]))
""",
        {"a": a, "b": b, "y": y, "z": z},
    )
    assert torch.equal(y, torch.stack([a, b], -1).flatten())
    assert torch.equal(z, torch.cat([a, b]))


@pytest.mark.parametrize("wide", [False, True])
def test_random_numbers_are_those_of_philox(wide: bool) -> None:
    """randint4x against Philox4x32-10 of Python's integers; rand4x is uniform and the same each time."""
    seed = torch.tensor([0x1234_5678_9ABC if wide else 42], dtype=torch.int64)
    bits, numbers = torch.empty(4, 64, dtype=torch.int32), torch.empty(4, 64)
    body = """
i = tl.arange(0, 64)
seed = tl.load(seed_ptr)
a, b, c, d = tl.randint4x(seed, i)
e, f, g, h = tl.rand4x(seed, i)
"""
    body += "".join(
        f"tl.store(bits_ptr + {64 * k} + i, {n}.to(tl.int32, bitcast=True))\n" for k, n in enumerate("abcd")
    )
    body += "".join(f"tl.store(numbers_ptr + {64 * k} + i, {n})\n" for k, n in enumerate("efgh"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(body, {"seed": seed, "bits": bits, "numbers": numbers})
    expected = torch.tensor([philox(int(seed), i) for i in range(64)]).T
    assert torch.equal(bits.long() % 2**32, expected)
    assert numbers.min() >= 0 and numbers.max() < 1 and 0.4 < numbers.mean() < 0.6


def philox(seed: int, offset: int) -> list[int]:
    counter, key, m32 = [offset, 0, 0, 0], [seed % 2**32, (seed >> 32) % 2**32], 2**32 - 1
    for _ in range(10):
        p, q = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(q >> 32) ^ counter[1] ^ key[0], q & m32, (p >> 32) ^ counter[3] ^ key[1], p & m32]
        key = [(key[0] + 0x9E3779B9) & m32, (key[1] + 0xBB67AE85) & m32]
    return counter


def test_high_product_of_64_bits() -> None:
    a, b = (torch.randint(0, 2**63 - 1, (200,)) for _ in range(2))
    high = apply("tl.umulhi(x0.to(tl.uint64), x1.to(tl.uint64)).to(tl.int64)", a, b)
    assert high.tolist() == [(x * y) >> 64 for x, y in zip(a.tolist(), b.tolist(), strict=True)]


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, F16, BF16, F32, F64],
    ids=str,
)
def test_every_type_is_loaded_and_stored(dtype: torch.dtype) -> None:
    x = torch.randn(100).mul(50).abs().to(dtype) if dtype != torch.bool else torch.rand(100) < 0.5
    assert torch.equal(apply("x0", x), x)


def test_fused_multiply_add_rounds_once() -> None:
    a, b = torch.randn(1000), torch.randn(1000)
    c = -(a * b)
    truth = (a.double() * b.double() + c.double()).float()
    assert torch.equal(apply("tl.fma(x0, x1, x2)", a, b, c), truth)


# -- leaving Triton as it was -------------------------------------------------------------------------


def language() -> dict[tuple[str, str], int]:
    from triton.language.extra import libdevice
    from triton.language.extra.cuda import libdevice as cuda_libdevice

    objects = {"tl": tl, "core": tl.core, "math": tl.math, "libdevice": libdevice, "cuda": cuda_libdevice}
    objects |= {"tensor": tl.tensor, "dtype": tl.dtype, "jit": JITFunction}
    return {
        (where, name): id(value) for where, thing in objects.items() for name, value in vars(thing).items()
    }


def test_triton_is_left_as_it_was_even_after_an_error() -> None:
    before = language()
    apply("libdevice.tanh(tl.sigmoid(x0))", torch.randn(4))
    with pytest.raises(KernelError):
        apply("tl.no_such(x0)", torch.randn(4))
    with pytest.raises(KernelError):
        apply("x0", torch.randn(4, device="meta"))
    assert language() == before
    with pytest.raises(RuntimeError, match="outside of the scope"):
        tl.sigmoid(1)
    assert np.geterr()["over"] == "warn"


def test_compiling_and_interpreting_take_turns() -> None:
    failures: list[BaseException] = []

    def work(which: int) -> None:
        try:
            for i in range(6):
                program = elementwise(f"tl.sigmoid(x0) + {which * 10 + i}", 64, (F32,), F32)
                if which:
                    compile_for(program.kernels[0], "sm_90")
                else:
                    x = torch.randn(64)
                    y = interpret(program, [x])[0]
                    torch.testing.assert_close(y, x.sigmoid() + i, rtol=1e-6, atol=1e-6)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(which,)) for which in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_nesting() -> None:
    with interpreting():
        assert torch.equal(apply("x0 + 1", torch.zeros(4)), torch.ones(4))
    compile_for(elementwise("tl.sigmoid(x0) - 3", 4, (F32,), F32).kernels[0], "sm_90")
    assert triton.language is tl
