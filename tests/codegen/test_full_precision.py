"""Functions of float32 tensors that have no branch, over numbers of every size.

In the interpreter every approximate instruction is off by as much as its vendor allows, up or down at random;
tests/gpu/test_precision.py runs the same on the instructions themselves.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc

SPECIAL = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 2.0**-149, -(2.0**-126), 2.0**127, 1.0])
DIVISORS = (30, 3.7, -0.3, 1e-12, 3e9, 1.0000001)


def numbers(count: int) -> Tensor:
    """Special numbers, bit patterns drawn at random, and numbers of ordinary size."""
    patterns = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32).view(torch.float32)
    return torch.cat([SPECIAL, patterns, torch.randn(count) * 2])


def units(ours: Tensor, truth: Tensor) -> Tensor:
    """Errors in units in the last place of float32. NaN and infinities have to be the same."""
    exact = truth.float()
    torch.testing.assert_close(ours.isnan(), exact.isnan())
    finite = exact.isfinite()
    assert torch.equal(ours[~finite & ~exact.isnan()], exact[~finite & ~exact.isnan()])
    size = exact.abs().clamp(min=2.0**-126)
    unit = torch.nextafter(size, size.new_tensor(torch.inf)).double() - size.double()
    return ((ours.double() - truth).abs() / unit)[finite]


def check_tanh(backend: str, x: Tensor) -> None:
    ours = fc.compile(torch.tanh, backend=backend)(x)
    assert units(ours, x.double().tanh()).max() <= 2
    assert torch.equal(torch.signbit(ours[x == 0]), torch.signbit(x[x == 0]))


def check_division(backend: str, x: Tensor, divisor: float) -> None:
    """Correctly rounded, but to a unit where what is left of tiny numbers is subnormal."""
    ours = fc.compile(lambda x: x / divisor, backend=backend)(x)
    exact = x / torch.tensor(divisor, device=x.device)
    normal = exact.isfinite() & (exact.abs() >= 2.0**-100) & (x.abs() >= 2.0**-100)
    assert torch.equal(ours[normal], exact[normal])
    assert units(ours, exact.double()).max() <= 1
    assert torch.equal(torch.signbit(ours[x == 0]), torch.signbit(exact[x == 0]))


def test_tanh() -> None:
    check_tanh("interpret", numbers(2**18))


@pytest.mark.parametrize("divisor", DIVISORS, ids=str)
def test_division_by_a_number(divisor: float) -> None:
    check_division("interpret", numbers(2**16), divisor)
