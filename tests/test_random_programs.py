"""Fresh random programs in every run, and that their judge sees what is wrong and nothing else.

FUSION_RANDOM_SEED=7 draws the same again; `python -m tests.random_programs` draws as many as one likes.
"""

from __future__ import annotations

import os
import secrets
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import batch_norm, layer_norm, scaled_dot_product_attention

from fusion_compiler.errors import FusionWarning
from tests.random_programs.generate import draw
from tests.random_programs.judge import MANY, Verdict, judge
from tests.random_programs.program import Input, Program, attention
from tests.random_programs.rounding import RandomRounding
from tests.random_programs.shrink import shrunk

PROGRAMS, PARTS = 100, 4  # parts run beside each other
Function = Callable[..., Any]


@pytest.mark.sample(2)
@pytest.mark.parametrize("part", range(PARTS))
def test_fresh_programs(part: int) -> None:
    first = int(os.environ.get("FUSION_RANDOM_SEED", secrets.randbelow(2**31))) + part * PROGRAMS // PARTS
    failures: list[str] = []
    for seed in range(first, first + PROGRAMS // PARTS):
        program = draw(seed)
        again = f"python -m tests.random_programs --seed {seed} --count 1 --shrink"
        try:
            verdict = judge(program)
        except Exception as error:
            error.add_note(f"of the judge itself: {again}")
            raise
        if verdict.failed:
            failures.append(f"seed {seed}: {verdict}\n{verdict.detail}\n{program.text()}\n# {again}")
    assert not failures, "\n\n".join(failures)


def program(*lines: str, dtype: str = "float32", gradient: bool = True) -> Program:
    """Return a program of two arguments [4, 6], whose result is that of the last line."""
    inputs = tuple(Input(i, ((4, 6),), dtype, "normal", gradient=gradient) for i in range(2))
    return Program(inputs, lines, (lines[-1].split(" ")[0],))


SMOOTH = program("v0 = torch.softmax(a0 * a1, -1)", "v1 = v0.cumsum(0) @ a1.t()")
WRITING = program("a0[1:].mul_(2)", "v0 = a0.sum()", gradient=False)
CHOOSING = program("v0 = torch.tanh(a0 * 0.3)", "v1 = v0 == v0.amax(-1, True)", dtype="bfloat16")


def off_by(relative: float) -> Callable[[Function, bool], Function]:
    def compiled(fn: Function, dynamic: bool) -> Function:
        return lambda *args: tuple(r * (1 + relative) for r in fn(*args))

    return compiled


def without_gradient(fn: Function, dynamic: bool) -> Function:
    def run(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
        nothing = 0 * sum(a.sum() for a in args)
        return tuple(r.detach().requires_grad_() + nothing for r in fn(*args))

    return run


def without_writes(fn: Function, dynamic: bool) -> Function:
    return lambda *args: fn(*(a.clone() for a in args))


def in_columns(fn: Function, dynamic: bool) -> Function:
    return lambda *args: tuple(r.t().contiguous().t() for r in fn(*args))


def unrounded(fn: Function, dynamic: bool) -> Function:
    """A mask of the largest values, made before those are rounded: in bfloat16 it is lost."""
    return lambda x, y: ((t := torch.tanh(x.float() * 0.3)) == t.bfloat16().amax(-1, True),)


def falling_back(fn: Function, dynamic: bool) -> Function:
    def call(*args: Tensor) -> Any:
        warnings.warn("runs eager", FusionWarning, stacklevel=2)
        return fn(*args)

    return call


def failing(fn: Function, dynamic: bool) -> Function:
    def call(*args: Tensor) -> Any:
        raise KeyError("copy_")

    return call


def endless(fn: Function, dynamic: bool) -> Function:
    def call(*args: Tensor) -> Any:
        while True:
            time.sleep(0.01)

    return call


@pytest.mark.parametrize(
    ("compiled", "drawn", "expected"),
    [
        (off_by(1e-4), SMOOTH, "wrong: v1"),
        (without_gradient, SMOOTH, "wrong: gradient of a0"),
        (in_columns, SMOOTH, "wrong: strides of result 0"),
        (without_writes, WRITING, "wrong: a0 after the call"),
        (unrounded, CHOOSING, "wrong: v1"),
        (falling_back, WRITING, "warning: FusionWarning: runs eager"),
        (failing, WRITING, "error: KeyError: 'copy_'"),
        (endless, WRITING, "no end: after 1 seconds"),
    ],
)
def test_what_is_wrong_is_seen(compiled: Any, drawn: Program, expected: str) -> None:
    assert str(judge(drawn, compiled, seconds=1 if compiled is endless else 60)) == expected


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_what_is_inexact_is_rounded_otherwise_and_nothing_else(dtype: str) -> None:
    x = torch.tensor([0.3, 9.0, 0.5, 1.0, -2.0]).to(getattr(torch, dtype))
    changed, written = torch.zeros(2, 5, dtype=torch.bool)
    for seed in range(20):
        into = x.clone()
        with RandomRounding(seed):
            tanh, half = x.tanh(), x / 2
            into.tanh_()
        changed |= tanh != x.tanh()
        written |= into != x.tanh()
        assert torch.equal(half, x / 2)
        torch.testing.assert_close(tanh, x.tanh())
    assert bool(changed[[0, 2, 3, 4]].all()) and bool(written[[0, 2, 3, 4]].all())


@pytest.mark.parametrize("order", [torch.inf, -torch.inf])
def test_what_is_chosen_is_one_of_the_terms(order: float) -> None:
    """A gradient goes to the terms that equal the norm: of one that none equals all is NaN, and no member."""
    x = torch.randn(64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    for seed in range(20):
        with RandomRounding(seed):
            norm = torch.linalg.vector_norm(x, order)
            (gradient,) = torch.autograd.grad(norm, x)
        assert norm.abs() in x.abs() and bool(gradient.isfinite().all())


def test_a_variance_in_float64_is_as_far_off_as_a_running_mean_makes_it() -> None:
    x = torch.randn(2808, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact, far = x.var(), 0.0
    for seed in range(20):
        with RandomRounding(seed):
            far = max(far, abs(float(x.var() / exact) - 1))
    assert 1e-15 < far < 2e-14


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_other_roundings_are_right(dtype: str) -> None:
    drawn = program(*SMOOTH.lines, "v2 = v1 == v1.amax(-1, True)", "v3 = v1 * v2", dtype=dtype)

    def rounded(fn: Function, dynamic: bool) -> Function:
        def call(*args: Tensor) -> Any:
            with RandomRounding(1234):
                return fn(*args)

        return call

    assert judge(drawn, rounded) == Verdict("right")
    assert judge(SMOOTH, off_by(1e-7)) == Verdict("right")


def test_zero_times_an_infinite_weight_of_a_norm_is_nobodys() -> None:
    """Eager's result is NaN, an infinity or neither at the element that is the mean, and at no other."""
    x, weight = torch.tensor([[-1.0, 0.0, 1.0, 0.0, 5.0]]), torch.full((5,), torch.inf)
    results: list[Tensor] = []
    for seed in range(MANY):
        with RandomRounding(seed):
            results.append(layer_norm(x, [5], weight))
    kinds = [{str(r[0, k].item()) for r in results} for k in range(5)]
    assert kinds == [{"-inf"}, {"-inf"}, {"nan", "inf", "-inf"}, {"-inf"}, {"inf"}]


def test_a_batch_norm_updates_its_running_statistics_once() -> None:
    x, weight = torch.randn(16, 3, generator=torch.Generator().manual_seed(1)), torch.ones(3)
    means, variances = zip(*((torch.zeros(3), torch.ones(3)) for _ in range(2)), strict=True)
    batch_norm(x, means[0], variances[0], weight, weight, training=True)
    with RandomRounding(1):
        batch_norm(x, means[1], variances[1], weight, weight, training=True)
    torch.testing.assert_close(*means)
    torch.testing.assert_close(*variances)


def test_attention_that_is_written_out_may_round_as_one_call() -> None:
    """A gradient that cancels: the call takes what it subtracts from its output, which is rounded."""
    shapes = ((8, 4, 16),)
    halves = (Input(i, shapes, "bfloat16", gradient=True) for i in (1, 2))
    inputs = (*halves, Input(3, shapes, "bfloat16", "normal", gradient=True))
    attention = "v0 = torch.softmax(a1 @ a2.mT * a1.shape[-1] ** -0.5, -1) @ a2"
    drawn = Program(inputs, (attention, "v1 = torch.stack([v0, a3], 3)"), ("v1",))
    assert judge(drawn, lambda fn, dynamic: drawn.fused_function) == Verdict("right")
    assert judge(drawn, lambda fn, dynamic: fn) == Verdict("right")
    assert judge(drawn, off_by(2**-3)).kind == "wrong"


def test_a_query_that_is_no_number_may_get_zeros_or_none() -> None:
    """PyTorch's kernel for CPUs gives zeros."""
    shapes = ((2, 2, 32, 4),)
    inputs = tuple(Input(i, shapes, "float32", kind) for i, kind in enumerate(("special", "normal")))
    drawn = Program(inputs, ("v0 = F.scaled_dot_product_attention(a0, a1, a1)",), ("v0",))

    def written_out(fn: Function, dynamic: bool) -> Function:
        return lambda q, k: (torch.softmax(q @ k.mT / 2, -1) @ k,)

    assert judge(drawn, written_out) == Verdict("right")
    assert judge(drawn, lambda fn, dynamic: fn) == Verdict("right")
    assert judge(drawn, lambda fn, dynamic: lambda q, k: (torch.zeros_like(q),)).kind == "wrong"


def test_the_sign_of_what_is_not_a_number_is_nobodys() -> None:
    special = (Input(i, ((4, 64),), "float32", "special") for i in range(2))
    drawn = Program(tuple(special), ("v0 = torch.copysign(a0 * 0 + 1, torch.maximum(a0, a1))",), ("v0",))

    def otherwise(fn: Function, dynamic: bool) -> Function:
        def call(a: Tensor, b: Tensor) -> tuple[Tensor]:
            most = torch.maximum(a, b)
            return (torch.copysign(a * 0 + 1, torch.where(most.isnan(), most.abs(), most)),)

        return call

    assert judge(drawn, otherwise) == judge(drawn, lambda fn, dynamic: fn) == Verdict("right")


def test_fused_attention_is_that_of_contiguous_rows() -> None:
    """As the compiler copies them, where PyTorch would compute by products in float32."""
    q, k = (torch.randn(2, 8, 8, 32).bfloat16() for _ in range(2))
    sliced = torch.empty(2, 8, 8, 64, dtype=torch.bfloat16)[..., ::2].copy_(k)
    assert torch.equal(attention(q, sliced, sliced), attention(q, k, k))
    assert not torch.equal(scaled_dot_product_attention(q, sliced, sliced), attention(q, k, k))


def test_attention_that_is_written_out_may_be_written_into() -> None:
    inputs = tuple(Input(i, ((8, 4, 16),), "float32", "normal", gradient=True) for i in range(2))
    attention = "v0 = torch.softmax(a0 @ a1.mT * a0.shape[-1] ** -0.5, -1) @ a1"
    drawn = Program(inputs, (attention, "v0[1:].mul_(2)"), ("v0",))
    assert judge(drawn) == Verdict("right")


def test_the_query_of_attention_that_is_written_out_may_be_written_into() -> None:
    """A gradient of products does not read it, and that of the fused kernel does."""
    shape = ((8, 4, 16),)
    inputs = Input(0, shape, "float16", "normal", gradient=True), Input(1, shape, "float16", "normal")
    attention = "v1 = torch.softmax(v0 @ a1.mT * v0.shape[-1] ** -0.5, -1) @ a1"
    drawn = Program(inputs, ("v0 = a0 * 1", attention, "v0.mul_(2)"), ("v1",))
    assert "attention" in drawn.fused_function.__code__.co_names
    assert judge(drawn) == Verdict("right")


def test_written_attention_of_drawn_programs_is_known() -> None:
    drawn = (draw(seed) for seed in range(500))
    written = [p for p in drawn if "torch.softmax(" in p.body and " @ " in p.body and ".mT" in p.body]
    assert written
    for case in written:
        assert "attention" in case.fused_function.__code__.co_names, case.body


def test_what_aot_autograd_cannot_do_does_not_apply() -> None:
    drawn = Program((Input(0, ((4, 6),), "float32", layout="expanded"),), ("a0.fill_(2)",), ("a0",))
    assert judge(drawn, failing).kind == "does not apply"


def test_a_seed_is_a_program() -> None:
    programs = [draw(seed) for seed in range(20)]
    assert programs == [draw(seed) for seed in range(20)]
    assert len({p.body for p in programs}) == 20
    assert {p.dynamic for p in programs} == {True, False}
    scope: dict[str, Any] = {"__name__": "pasted"}
    text = programs[0].text()
    exec(text[: text.index("compiled = ")], scope)
    arguments = scope["ARGUMENTS"][0]()
    results = scope["program"](*arguments), programs[0].function(*programs[0].arguments())
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_programs_that_fail_become_small() -> None:
    def verdict(p: Program) -> Verdict:
        return Verdict("wrong", "v2") if "tanh" in p.body else Verdict("right")

    lines = ("v0 = a0 + a1", "a1.mul_(2)", "v1 = v0.reshape(-1)", "v2 = torch.tanh(v1)", "v3 = v2.sum() * a1")
    drawn = program(*lines)
    small = shrunk(drawn, verdict(drawn), verdict)
    assert len(small.lines) == len(small.inputs) == 1 and "tanh" in small.lines[0]
