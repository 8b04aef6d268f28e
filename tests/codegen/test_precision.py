"""Functions of 16-bit tensors, over every number that there is, within the bounds of docs/numerics.md.

In the interpreter every approximate instruction is off by as much as its vendor allows, up or down at
random; tests/gpu/test_precision.py runs the same on the instructions themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from fusion_compiler.runtime import interpreter
from fusion_compiler.runtime.libdevice import APPROXIMATIONS, Array
from tests import ROOT
from tests.exactness import Compiled

TABLE = ROOT / "docs" / "numerics.md"
DTYPES = (torch.float16, torch.bfloat16)


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


# PyTorch's own lose all digits where x is negative, in float64 too.
EXACT: dict[Any, Callable[[Tensor], Tensor]] = {
    F.gelu: lambda x: x * 0.5 * torch.erfc(x * -(0.5**0.5)),
    gelu_tanh: lambda x: x * torch.sigmoid((8 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
}
FUNCTIONS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "exp": (torch.exp,),
    "exp2": (torch.exp2, lambda x: 2.5**x),
    "expm1": (torch.expm1,),
    "log": (torch.log,),
    "log2": (torch.log2,),
    "log10": (torch.log10,),
    "log1p": (torch.log1p,),
    "sqrt": (torch.sqrt, lambda x: x**0.5),
    "pow": (lambda x: x**1.7, lambda x: x**-0.3, lambda x: x**-2, lambda x: x**-0.5),
    "division": (lambda x: x / 3.7, lambda x: 1.7 / x, lambda x: x / x.flip(0), torch.reciprocal),
    "erf": (torch.erf,),
    "erfc": (torch.erfc,),
    "sigmoid": (torch.sigmoid,),
    "tanh": (torch.tanh,),
    "gelu": (F.gelu,),
    "gelu_tanh": (gelu_tanh,),
    "silu": (F.silu,),
    "mish": (F.mish,),
    "softplus": (F.softplus,),
    "logsigmoid": (F.logsigmoid,),
    "elu": (F.elu,),
}
WITH_GRADIENTS = ("gelu", "gelu_tanh", "silu", "mish", "softplus", "logsigmoid", "elu")
INSTRUCTION_ERRORS = {"rcp": 2**-23, "sqrt": 2**-23, "tanh": 2**-11}


def bounds() -> dict[str, dict[torch.dtype, float]]:
    """Function -> dtype -> the largest error in units in the last place, from the table in the docs."""
    rows = re.findall(r"^\| ([a-z][\w, ]*) \| ([\d.]+) \| ([\d.]+) \|$", TABLE.read_text(), re.MULTILINE)
    return {
        name: dict(zip(DTYPES, (float(half), float(brain)), strict=True))
        for names, half, brain in rows
        for name in names.split(", ")
    }


def every_number(dtype: torch.dtype) -> Tensor:
    """All 65,536 bit patterns: NaNs, infinities, subnormal numbers and all."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)


def units(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance of neighbouring numbers of `dtype` at the size of x (float64)."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(x.abs().clamp(min=info.tiny))[1] - 1
    return torch.ldexp(torch.full_like(x, info.eps), exponent)


def excess(ours: Tensor, eager: Tensor, truth: Tensor, bound: float, terms: float) -> Tensor:
    """Return how far the error is above `bound` units in the last place; infinite for a NaN or an infinity
    that neither the truth nor eager, which overflows within, has.

    terms: magnitude of the terms of a sum; an error of 2^-18 of it is allowed.
    """
    dtype = ours.dtype
    rounded = truth.to(dtype)
    error = (ours.double() - truth).abs()
    allowed = bound * units(truth, dtype) + 2**-18 * terms
    if dtype is torch.bfloat16:
        allowed += 2**-119  # subnormal numbers may be zero, and 100 times such a number too
    within = (error <= allowed) | (ours == rounded) | (ours.isnan() & rounded.isnan())
    within |= ~eager.isfinite() & ((ours == eager) | (ours.isnan() & eager.isnan()))
    over = (error / units(truth, dtype)).nan_to_num(torch.inf, torch.inf)
    return torch.where(within, 0.0, over)


def check(
    compiler: Callable[..., Any], fn: Callable[[Tensor], Tensor], x: Tensor, bound: float, gradient: bool
) -> None:
    """The values of compiler(fn) at x, a 16-bit tensor on any device, and its gradient if asked for."""
    exact = EXACT.get(fn, fn)
    calls = ((compiler(fn), x.clone()), (fn, x.clone()), (exact, x.double()))
    outs = [call(value.requires_grad_(gradient)) for call, value in calls]
    assert_within([out.detach() for out in outs], x, bound)
    if gradient:
        pairs = zip(outs, calls, strict=True)
        slopes = [torch.autograd.grad(out, value, torch.ones_like(out))[0] for out, (_, value) in pairs]
        number = ~x.isnan()  # at a NaN eager's own gradients differ from device to device
        assert_within([slope[number] for slope in slopes], x[number], bound, terms=1.0)


def assert_within(results: Sequence[Tensor], x: Tensor, bound: float, terms: float = 0.0) -> None:
    """results: ours, eager's and the truth at x."""
    over = excess(*results, bound=bound, terms=terms)
    at = over.argmax()
    ours, _, truth = (result[at].item() for result in results)
    assert over.max() == 0, f"at {x[at]}: {ours}, not {truth}: {over[at]:.3f} units"


def off(function: Callable[[Array], Array], error: float) -> Callable[[Array], Array]:
    """The function with a relative error of `error`, up or down at random; powers of two stay exact."""
    signs = np.random.default_rng(0)

    def perturbed(x: Array) -> Array:
        value = function(x.astype(np.float64))
        scale = error * (np.abs(np.frexp(value)[0]) != 0.5)
        return value * (1 + scale * signs.choice([-1.0, 1.0], size=np.shape(value)))

    return perturbed


@pytest.fixture(autouse=True)
def as_vendors_allow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, error in INSTRUCTION_ERRORS.items():
        monkeypatch.setitem(APPROXIMATIONS, name, off(APPROXIMATIONS[name], error))
    exp2, logarithm, signs = off(np.exp2, 2**-22), APPROXIMATIONS["lg2"], np.random.default_rng(1)

    def log2(x: Array) -> Array:
        value = logarithm(x)
        size = np.where((x > 0.5) & (x < 2), 1, np.abs(value))
        finite = np.isfinite(value) & (value != 0)
        return np.where(
            finite, value + 2**-22 * size * signs.choice([-1.0, 1.0], size=np.shape(value)), value
        )

    monkeypatch.setitem(APPROXIMATIONS, "lg2", log2)
    builder: Any = interpreter_builder
    monkeypatch.setitem(
        interpreter.BUILDER_FUNCTIONS,
        "create_exp2",
        lambda x: builder.unary_op(x, lambda data: exp2(data).astype(data.dtype)),
    )


def test_the_table_has_every_function() -> None:
    assert set(bounds()) == set(FUNCTIONS)


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_number(name: str, dtype: torch.dtype) -> None:
    for fn in FUNCTIONS[name]:
        check(Compiled, fn, every_number(dtype), bounds()[name][dtype], name in WITH_GRADIENTS)


def test_the_short_forms_are_used_and_the_errors_felt() -> None:
    """For tanh in bfloat16, over 1% of the results are not the rounded truth; in float32 all are close to
    it."""
    x = every_number(torch.bfloat16)
    x = x[x.isfinite() & (x.abs() < 4) & (x.abs() > 2**-6)]
    ours, truth = Compiled(torch.tanh)(x), torch.tanh(x.double())
    share = (ours != truth.bfloat16()).double().mean().item()
    assert 0.01 < share < 0.2
    exact = Compiled(torch.tanh)(x.float())
    assert ((exact - truth).abs() <= 1e-7 * truth.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_cancels_is_not_coarse(dtype: torch.dtype) -> None:
    """tanh of float32, then 1 + it: the tail is right although the result has 16 bits."""
    x = every_number(dtype)
    x = x[(x > -6) & (x < 6)]

    def fn(x: Tensor) -> Tensor:
        return (1 + torch.tanh(x.to(torch.promote_types(x.dtype, torch.float32)))).to(x.dtype)

    ours, truth = Compiled(fn)(x), 1 + torch.tanh(x.double())
    assert ((ours.double() - truth).abs() <= 0.54 * units(truth, dtype) + 2**-21).all()
