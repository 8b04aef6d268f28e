"""Stochastic rounding of bfloat16 parameters: to a neighbour, unbiased, and the same by the seed."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

import fusion_compiler as fc
from fusion_compiler.errors import InvalidOptionError
from fusion_compiler.runtime.target import compile_for
from tests.optimizers import (
    check,
    give,
    take_steps,
    two,
    values,
)

SIZE = 3000


def stepped(start: Tensor, grad: Tensor, seed: int, backend: Any = "interpret") -> Tensor:
    """`start` - `grad`, rounded once; the first step, the class's own, changes nothing."""
    model = nn.ParameterList([nn.Parameter(start.clone())])
    optimizer = SGD(model, lr=1.0)
    fc.fuse_optimizer(model, optimizer, backend=backend, strict=True, rounding="stochastic")
    torch.manual_seed(seed)
    for one in (torch.zeros_like(grad), grad):
        model[0].grad = one
        optimizer.step()
    return model[0].detach()


def neighbours(exact: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of bfloat16 below and above, in magnitude."""
    bits = exact.float().view(torch.int32)
    low = (bits & -65536).view(torch.float32)
    high = ((bits & -65536) + 65536).view(torch.float32)
    return low, torch.where(low == exact, low, high)


@pytest.mark.parametrize("backend", ["interpret", "eager"])
def test_a_number_becomes_one_of_its_neighbours_as_often_as_it_is_near(backend: str) -> None:
    start, grad = torch.randn(SIZE).bfloat16(), (torch.randn(SIZE) * 2**-8).bfloat16()
    exact = start.float() - grad.float()
    low, high = neighbours(exact)
    draws = torch.stack([stepped(start, grad, seed, backend).float() for seed in range(40)])
    assert ((draws == low) | (draws == high)).all()
    up = torch.where(high == low, 0.0, (exact - low) / (high - low))
    off = (draws == high).float().mean(0) - up
    off = off[high != low]
    # A mean of 40 x 3000 trials deviates by 1 / (2 sqrt(n)) at most, and five of these are beyond chance.
    trials = 40 * len(off)
    assert abs(off.mean().item()) < 5 * 0.5 / math.sqrt(trials)
    # The trials of each element are independent: the squares of its deviations come to what they should.
    expected = (up * (1 - up))[high != low].sum().item() / 40
    assert off.square().sum().item() == pytest.approx(expected, rel=0.15)


def test_what_is_lost_by_nearest_is_kept_on_average() -> None:
    """A thousandth of the last digit at every step: nearest stays where it is."""
    steps, grad = 256, torch.full((SIZE,), 2.0**-13).bfloat16()
    moved: dict[str, float] = {}
    for rounding in ("nearest", "stochastic"):
        model = nn.ParameterList([nn.Parameter(torch.ones(SIZE).bfloat16())])
        optimizer = SGD(model, lr=1.0)
        fc.fuse_optimizer(model, optimizer, backend="eager", strict=True, rounding=rounding)  # type: ignore[arg-type]
        for _ in range(steps + 1):
            model[0].grad = grad
            optimizer.step()
        moved[rounding] = (1 - model[0].detach().double().mean()).item()
    assert moved["nearest"] == 0.0
    assert moved["stochastic"] == pytest.approx(steps * 2.0**-13, rel=0.05)


def test_the_seed_decides_and_the_kernel_draws_what_aten_draws() -> None:
    start, grad = torch.randn(SIZE).bfloat16(), (torch.randn(SIZE) * 2**-8).bfloat16()
    first = stepped(start, grad, 3)
    assert torch.equal(first, stepped(start, grad, 3))
    assert torch.equal(first, stepped(start, grad, 3, "eager"))
    assert not torch.equal(first, stepped(start, grad, 4))


def test_each_parameter_step_and_element_has_numbers_of_its_own() -> None:
    grad = torch.full((2048,), 2.0**-9 * 0.75).bfloat16()  # below one, a digit is 2**-8
    model = nn.ParameterList(nn.Parameter(torch.full((2048,), 0.75).bfloat16()) for _ in range(2))
    optimizer = SGD(model, lr=1.0)
    fc.fuse_optimizer(model, optimizer, backend="interpret", strict=True, rounding="stochastic")
    give(model, [torch.zeros(2048), torch.zeros(2048)])
    optimizer.step()
    seen: list[Tensor] = []
    for _ in range(2):
        with torch.no_grad():
            for param in model:
                param.fill_(0.75)
        give(model, [grad, grad])
        optimizer.step()
        seen += [param.detach().eq(0.75) for param in model]
    halves = [half for each in seen for half in each.split(1024)]
    for i, one in enumerate(halves):
        for other in halves[:i]:
            both = (one.float() - one.float().mean()) * (other.float() - other.float().mean())
            assert abs(both.mean().item()) < 5 * 0.25 / math.sqrt(1024)


def test_infinities_and_nan_stay_and_other_dtypes_round_to_nearest() -> None:
    start = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1.0]).bfloat16()
    for backend in ("interpret", "eager"):
        updated = stepped(start, torch.zeros(6).bfloat16(), 1, backend)
        torch.testing.assert_close(updated, start, rtol=0, atol=0, equal_nan=True)
    params = [nn.Parameter(torch.randn(70)), nn.Parameter(torch.randn(70).half())]
    pairs = two(nn.ParameterList(params), lambda p: AdamW(p, lr=0.01))
    for (model, optimizer), rounding in zip(pairs, ("stochastic", "nearest"), strict=True):
        fc.fuse_optimizer(model, optimizer, backend="interpret", strict=True, rounding=rounding)  # type: ignore[arg-type]
    take_steps(pairs, 3, all_of_them=True)
    check(*pairs)


def test_states_are_rounded_to_nearest_and_the_option_is_checked() -> None:
    ours = nn.ParameterList([nn.Parameter(torch.randn(SIZE).bfloat16())])
    pairs = two(ours, lambda p: AdamW(p, lr=0.01))
    for (model, optimizer), rounding in zip(pairs, ("stochastic", "nearest"), strict=True):
        fc.fuse_optimizer(model, optimizer, backend="interpret", strict=True, rounding=rounding)  # type: ignore[arg-type]
    take_steps(pairs, 2, all_of_them=True)
    state, other = (values(*pair) for pair in pairs)
    assert torch.equal(state["exp_avg_sq of 0"], other["exp_avg_sq of 0"])
    assert torch.equal(state["exp_avg of 0"], other["exp_avg of 0"])
    assert not torch.equal(state["0"], other["0"])
    with pytest.raises(InvalidOptionError, match="rounding"):
        fc.fuse_optimizer(ours, SGD(ours, lr=0.1), rounding="up")  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
def test_it_compiles_without_spills(target: str) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(SIZE).bfloat16())])
    optimizer = AdamW(model)
    fused = fc.fuse_optimizer(model, optimizer, backend="interpret", strict=True, rounding="stochastic")
    for _ in range(2):
        give(model, [torch.randn(SIZE)])
        optimizer.step()
    (kernel,) = fused.kernels
    assert "fm.stochastic" in kernel.source
    assert compile_for(kernel, target).spills == 0
