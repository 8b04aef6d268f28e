"""The check of equality in compile(): rewrites that change a result are refused, others are taken."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.errors import InvalidPatternError, RewriteNotEqualError
from fusion_compiler.passes.rewrites.equality import check_equal
from fusion_compiler.passes.rewrites.trials import trials

Code = Callable[..., Any]
rows, row = torch.ones(6, 10), torch.ones(10)


def exp_over_sum(x: Tensor) -> Tensor:
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def last_argmax(x: Tensor) -> Tensor:
    return x.shape[-1] - 1 - x.flip(-1).argmax(-1)


# name: (code, replacement, what the error says)
WRONG: dict[str, tuple[Code, Code, str]] = {
    "rounded result": (
        lambda x: torch.sin(x) * 2,
        lambda x: (torch.sin(x) * 2).half(),
        r"its form \(torch.float32 .*torch.float16",
    ),
    "rounded on the way": (
        lambda x: torch.sin(x) * 2,
        lambda x: (torch.sin(x) * 2).bfloat16().float(),
        r"\(float32; the code itself is off by",
    ),
    "clamp": (lambda x: x.clamp(-10, 10), lambda x: x * 1, "normal x 100"),
    "far branch": (lambda x: torch.where(x > 5, x * x, x), lambda x: x * 1, "normal x 100"),
    "floor": (torch.floor, lambda x: torch.round(x - 0.5), "half-integer"),
    "comparison at a tie": (
        lambda x: torch.where(x > 0, x, x + 1), lambda x: torch.where(x >= 0, x, x + 1), "half-integer",
    ),
    "overflow": (lambda x: F.softmax(x, -1), exp_over_sum, r"inf \(float32"),
    "nan_to_num": (lambda x: torch.nan_to_num(x, posinf=math.inf, neginf=-math.inf), lambda x: x * 1, "NaN"),
    "division by zero": (lambda x: x / (x * x + 1e-30), lambda x: 1 / x, "half-integer"),
    "ties of an index": (lambda x: x.argmax(-1), last_argmax, "half-integer"),
    "a zero's sign": (lambda x: 1 / x, lambda x: 1 / (x + 0.0), "half-integer"),
    "infinities": (lambda x: x - x, torch.zeros_like, "infinite"),
    "cancellation": (torch.log1p, lambda x: torch.log(1 + x), "normal / 1000"),
    "order in memory": (lambda x: x.t().contiguous(), lambda x: x.t(), r"strides \[6, 1\], then .*\[1, 10\]"),
    "a gradient far out": (
        lambda x: x * 2, lambda x: 2 * torch.where(x.abs() > 50, x.detach(), x), "the gradient of argument 0",
    ),
    "a gradient that overflows": (torch.sigmoid, lambda x: 1 / (1 + torch.exp(-x)), "gradient .* by inf"),
    "imaginary part": (torch.fft.rfft, lambda x: torch.fft.rfft(x).conj().resolve_conj(), "output 0 differs"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_rewrite_that_changes_a_result_is_refused(case: str) -> None:
    before, after, text = WRONG[case]
    with pytest.raises(RewriteNotEqualError, match=r"(?s)counterexample: .*manual_seed") as caught:
        fc.compile(torch.sin, patterns=(fc.rewrite(before, after, rows, name="wrong"),))
    assert re.search(text, str(caught.value))


def written_softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def written_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    d = x - x.mean(-1, keepdim=True)
    return d * torch.rsqrt((d * d).mean(-1, keepdim=True) + 1e-5) * w + b


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2) * 0.25, -1) @ v


heads = torch.ones(2, 3, 4, 10)
EQUAL: dict[str, tuple[Code, Code, tuple[Tensor, ...], Any]] = {
    "softmax": (written_softmax, lambda x: torch.softmax(x, -1), (rows,), None),
    "norm": (written_norm, lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b), (rows, row, row), None),
    "mask": (lambda x: x.masked_fill(x < 0, 0), lambda x: torch.where(x < 0, 0.0, x), (rows,), None),
    "silu": (lambda x: x / (1 + torch.exp(-x)), F.silu, (rows,), None),
    "draws": (lambda x: F.dropout(x, 0.5), lambda x: F.dropout(x, 0.5), (rows,), None),
    "no overflow": (lambda x: torch.log(torch.exp(x).sum(-1)), lambda x: x.logsumexp(-1), (rows,), None),
    "products": (lambda x, w: x @ w.t() * 3, lambda x, w: x @ (w.t() * 3), (rows, torch.ones(7, 10)), None),
    "attention": (
        attention,
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.25),
        (heads, heads, heads),
        "finite",
    ),
    "clamp": (lambda x: x.clamp(-10, 10) * 2, lambda x: x * 2, (rows,), (-9.9, 9.9)),
    "root": (lambda x: torch.sqrt(x) * torch.sqrt(x), lambda x: x * 1, (rows,), (0, math.inf)),
    "one of two": (lambda x, y: x.clamp(max=3) + y, lambda x, y: x + y, (rows, rows), {"x": (-math.inf, 3)}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", EQUAL)
def test_a_rewrite_that_is_equal_in_its_domain_is_taken(case: str, dtype: torch.dtype) -> None:
    before, after, example, domain = EQUAL[case]
    inputs = [e.to(dtype) for e in example]
    check_equal(fc.rewrite(before, after, *inputs, name="equal", domain=domain))
    if domain is not None:  # and is none without it
        with pytest.raises(RewriteNotEqualError):
            check_equal(fc.rewrite(before, after, *inputs, name="equal"))


def test_a_domain_hides_nothing_within_it() -> None:
    for domain in ((-11, 10), (-10, math.inf), (-math.inf, 10), {"x": "finite"}):
        rule = fc.rewrite(lambda x: x.clamp(-10, 10), lambda x: x * 1, rows, name="clamp", domain=domain)
        with pytest.raises(RewriteNotEqualError, match=r"what to do: .*domain="):
            check_equal(rule)


@pytest.mark.parametrize("domain", [(-2.5, 7), (0.5, math.inf), (-math.inf, -3), "finite"], ids=str)
def test_trials_stay_in_the_domain(domain: Any) -> None:
    low, high = (-math.inf, math.inf) if domain == "finite" else domain
    rule = fc.rewrite(lambda x, y: x + y, lambda x, y: y + x, rows, rows, name="sum", domain={"x": domain})
    drawn = [t.inputs for t in trials(rule)]
    for x, _ in drawn:
        assert bool(((low <= x) & (x <= high) & x.isfinite()).all())
    assert any(bool(y.isnan().any()) for _, y in drawn) and any(bool(y.isinf().any()) for _, y in drawn)
    spread = torch.cat([x.flatten() for x, _ in drawn])
    assert float(spread.max() - spread.min()) > 0.9 * min(high - low, 300)


@pytest.mark.parametrize("domain", ["positive", (1, 1), (0, 1, 2), {"y": "finite"}, {"x": 3}], ids=str)
def test_a_domain_of_the_wrong_form(domain: Any) -> None:
    with pytest.raises(InvalidPatternError, match="domain"):
        fc.rewrite(lambda x: x * 1, lambda x: 1 * x, rows, name="form", domain=domain)


def test_a_plan_says_for_which_numbers_a_rewrite_is_equal() -> None:
    rule = fc.rewrite(
        lambda x: torch.tanh(x.clamp(-10, 10)), torch.tanh, rows, name="near", domain={"x": (-10, 10)}
    )
    assert 'domain={"x": (-10, 10)},' in str(rule)
    fast = fc.compile(lambda x: torch.tanh(x.clamp(-10, 10)) + 1, patterns=(rule,), backend="eager")
    fast(torch.rand(3, 4))
    assert fast.plan[0].notes["near"].endswith(", equal where x is from -10 to 10")
