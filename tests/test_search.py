"""The greedy search beside the exhaustive one, on graphs small enough to try every clustering."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.dag import build
from fusion_compiler.decompositions import decomposition_table
from fusion_compiler.device import device_spec
from fusion_compiler.passes.parts import Parts
from fusion_compiler.passes.search import Search

from .exhaustive import best_us

ROWS, COLS = 4096, 1024


def two_sums(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = torch.sigmoid(x) * y
    return z.sum(0), z.sum(1), z


def residual_norm(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = x + y
    return z, z * torch.rsqrt(z.square().sum(1, keepdim=True))


def shared_activation(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    z = torch.tanh(x)
    return (z * y).sum(0), torch.exp(z - z.amax(1, keepdim=True)), z.t().contiguous()


def transposed(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (torch.exp(x).t() + 1).contiguous(), torch.relu(x) + y, (x * y).sum()


def softmax_and_sum(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    s = F.softmax(x, 1)
    return s * y, (s * y).sum(0)


CASES: tuple[Callable[..., tuple[torch.Tensor, ...]], ...] = (
    two_sums, residual_norm, shared_activation, transposed, softmax_and_sum,
)  # fmt: skip


def search_of(function: Callable[..., tuple[torch.Tensor, ...]]) -> Search:
    x, y = torch.empty(ROWS, COLS), torch.empty(ROWS, COLS)
    gm = make_fx(function, decomposition_table=decomposition_table(), tracing_mode="fake")(x, y)
    return Search(Parts(build(gm), device_spec("h200"), {}, rounded=False))


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_greedy_reaches_the_optimum(function: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    """No more than 2% above the best of all clusterings of the same parts; recomputation may go below it."""
    best = best_us(search_of(function))
    greedy = search_of(function)
    greedy.run()
    found = sum(part.cost.us for part in greedy.parts.values())
    assert found <= best * 1.02, (found, best)
