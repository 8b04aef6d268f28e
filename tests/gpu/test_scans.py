"""Scans on a GPU: every operator at widths of one warp and of many, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc

SCANS: dict[str, Callable[[Tensor], Tensor]] = {
    "cumsum": lambda x: torch.cumsum(x.sin(), -1) * 2,
    "segment sums": lambda x: torch.cumsum(x, 0).exp().sum(-1),
    "cumprod": lambda x: torch.cumprod(1 + x / 100, -1),
    "cummax": lambda x: torch.cummax(x, -1).values + 1,
    "cummin": lambda x: torch.cummin(x, -1).values - 1,
    "logcumsumexp": lambda x: torch.logcumsumexp(x * 3, -1),
}


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("width", [1, 31, 1000, 4096])
def test_values_and_gradients(name: str, width: int) -> None:
    x = torch.randn(37, width, device="cuda", requires_grad=True)
    wide = x.detach().double().requires_grad_()
    fast = fc.compile(SCANS[name])
    result, eager, truth = fast(x), SCANS[name](x), SCANS[name](wide)
    sent = torch.randn_like(result)
    ours, theirs, exact = (
        torch.autograd.grad(r, v, sent.to(r.dtype))[0] for r, v in ((result, x), (eager, x), (truth, wide))
    )
    for mine, other, right in ((result, eager, truth), (ours, theirs, exact)):
        error, allowed = ((t.double() - right).square().mean().sqrt() for t in (mine, other))
        assert error <= 2 * allowed + 1e-6 * right.square().mean().sqrt()


def test_where_a_running_maximum_stands() -> None:
    x = torch.randint(-9, 9, (64, 777), device="cuda")
    fast = fc.compile(lambda x: torch.cummax(x + 1, -1))
    for mine, theirs in zip(fast(x), torch.cummax(x + 1, -1), strict=True):
        assert torch.equal(mine, theirs)
