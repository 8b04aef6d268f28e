"""Means, variances and norms of very large numbers, large means, infinities and NaN: no worse than eager."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc

STATISTICS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x.var(-1),
    lambda x: torch.cat(torch.var_mean(x, -1)),
    lambda x: x.var(0, correction=0),
    lambda x: F.layer_norm(x, x.shape[1:]),
    lambda x: F.group_norm(x[:, : x.shape[1] // 4 * 4], 4),
    lambda x: F.batch_norm(x, None, None, training=True),
    lambda x: F.instance_norm(x[None]),
    lambda x: F.rms_norm(x, x.shape[1:]),
    lambda x: F.normalize(x, dim=-1),
    lambda x: torch.linalg.vector_norm(x, 3, dim=-1),
    lambda x: x.norm(float("inf"), dim=-1),
    lambda x: x.logsumexp(-1),
    lambda x: x.softmax(-1),
    lambda x: F.cosine_similarity(x, x.flip(0), dim=-1),
)


def statistics(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Each of its own tensor: none takes a mean that another has computed."""
    return tuple(statistic(x) for statistic, x in zip(STATISTICS, tensors, strict=True))


def infinite(x: Tensor) -> Tensor:
    x[0, 2], x[1, 3] = float("inf"), float("nan")
    return x


NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "N(0, 1)": lambda x: x,
    "N(1e4, 1e-2)": lambda x: x * 1e-2 + 1e4,
    "N(-1e5, 1)": lambda x: x - 1e5,
    "1e15": lambda x: x * 1e15,
    "1e30": lambda x: x * 1e30,
    "1e-30": lambda x: x * 1e-30,
    "N(8.5e37, 1e31)": lambda x: x * 1e31 + 8.5e37,
    "all 3e38": lambda x: torch.full_like(x, 3e38),
    "an infinity, a NaN": infinite,
}


def check(got: Tensor, eager: Tensor, exact: Tensor, what: str, slack: float) -> None:
    """Finite where eager is, never finite where eager and float64 are NaN, and as close to float64 as eager.

    The mean of equal numbers may be off by a unit in the last place, whose square is infinite beyond 1e26.
    """
    assert not (eager.isfinite() & ~got.isfinite() & (exact != 0)).any(), f"{what}: {got} for {eager}"
    assert not (got.isnan() & ~eager.isnan()).any(), f"{what}: {got} for {eager}"
    assert not (eager.isnan() & exact.isnan() & got.isfinite()).any(), f"{what}: {got} for {eager}"
    finite = got.isfinite() & eager.isfinite() & exact.float().isfinite()
    if finite.any():
        off, eagers = ((x.double() - exact)[finite].abs().max() for x in (got, eager))
        allowed = 2 * eagers + slack * exact[finite].abs().max()
        assert off <= allowed, f"{what}: off by {off}, eager by {eagers}"


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("backend", "width"), [("eager", 257), ("interpret", 96), ("interpret", 257), ("interpret", 9001)]
)
def test_statistics_are_as_close_to_float64_as_eagers(backend: str, width: int) -> None:
    torch._dynamo.reset()
    fast: Any = fc.compile(statistics, backend=backend, dynamic=False)
    chosen = (
        list(NUMBERS) if width < 1000 else random.sample(list(NUMBERS), 3)
    )  # the interpreter takes a while
    for name in chosen:
        x = NUMBERS[name](torch.randn(3, width))
        copies = [x.clone() for _ in STATISTICS]
        results = zip(fast(*copies), statistics(*copies), (f(x.double()) for f in STATISTICS), strict=True)
        for number, (got, eager, exact) in enumerate(results):
            # Means of parts of a row are float32, which at 1e4 is 1e-3 apart: a tenth of the deviation.
            slack = 5e-4 if name in ("N(1e4, 1e-2)", "N(-1e5, 1)") and number < 3 else 2e-5
            check(got, eager, exact, f"{name}, result {number}", slack)


def test_the_deviation_of_a_large_mean_keeps_its_digits_beside_a_gradient() -> None:
    """The gradient compares it with zero: it has one value in forward and backward."""
    torch._dynamo.reset()
    x = (torch.randn(4, 257) * 1e-2 + 1e4).requires_grad_()
    exact = x.detach().double().requires_grad_()
    got, wanted = fc.compile(lambda x: x.std(-1), backend="eager")(x), exact.std(-1)
    got.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=0)
    assert x.grad is not None
    torch.testing.assert_close(x.grad.double(), exact.grad, rtol=0.2, atol=1e-3)
