"""The greedy search beside the exhaustive one, on graphs small enough to try every clustering."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.ir.dag import build
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.passes.fuse.candidates import Candidates
from fusion_compiler.passes.fuse.recompute import merge_and_recompute
from fusion_compiler.passes.fuse.search import MOST_READERS, Search, _outward
from fusion_compiler.passes.lower import effort
from fusion_compiler.passes.lower.lower import lower
from fusion_compiler.passes.lower.space import Illegal
from tests.exactness import Compiled
from tests.exhaustive import best_us

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
    return Search(Candidates(build(gm), device_spec("h200"), {}, rounded=False))


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_greedy_reaches_the_optimum(function: Callable[..., tuple[torch.Tensor, ...]]) -> None:
    """No more than 2% above the best of all clusterings of the same ops; recomputation may go below it."""
    best = best_us(search_of(function))
    greedy = search_of(function)
    merge_and_recompute(greedy)
    total = sum(candidate.cost.us for candidate in greedy.candidates.values())
    assert total <= best * 1.02, (total, best)


def shifted(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Multiply shifted copies of a value again and again: each way to reach an element has its own value."""
    for i in range(12):
        x = torch.roll(x, (i + 1, 2), (0, 1)) * x
    return (x, x + y)


def test_lowering_ends_where_values_are_exponentially_many() -> None:
    pool = search_of(shifted).pool
    ops = tuple(n for n in pool.dag.order if n in pool.owned)
    with pytest.raises(Illegal, match="more than 4096 values"):
        lower(pool.dag, ops, ops[-1:], effort=pool.effort)
    assert pool.effort.spent > 4096


def test_a_search_that_takes_too_long_ends_with_what_it_found(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = torch.randn(6, 5), torch.randn(6, 5)
    complete = Compiled(shifted_twice)
    complete(x, y)
    assert "search" not in complete.plans[0].notes
    monkeypatch.setattr(effort, "LEAST", 60)
    monkeypatch.setattr(effort, "PER_OP", 2)
    ended = [Compiled(shifted_twice) for _ in range(2)]
    for compiled in ended:
        for our, their in zip(compiled(x, y), shifted_twice(x, y), strict=True):
            torch.testing.assert_close(our, their)
    plans = [str(replace(compiled.plans[0], decisions=())) for compiled in ended]
    assert plans[0] == plans[1], "however fast a machine is"
    early = ended[0].plans[0]
    assert len(early.clusters) > len(complete.plans[0].clusters)
    assert "search: ended before all was tried: " in str(early)
    monkeypatch.setattr(effort, "LEAST", 10**6)
    monkeypatch.setattr(effort, "SECONDS", 0.0)
    slow = Compiled(shifted_twice)
    slow(x, y)
    assert "ended before all was tried: it took 0 s" in slow.plans[0].notes["search"]


def shifted_twice(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = torch.tanh(x + torch.roll(y, 1, 0)) * 2
    b = torch.sigmoid(y - a) + x
    return a, b, torch.roll(a * b, 2, 1).sum(1), (b * x).sum(0)


def updates(rate: torch.Tensor, *pairs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    half = len(pairs) // 2
    return tuple(p - rate * g for p, g in zip(pairs[:half], pairs[half:], strict=True))


def test_what_very_many_read_makes_no_pair_of_each_with_each() -> None:
    tensors = [torch.empty(16 + i % 3, 8, device="meta") for i in range(100)]
    gm = make_fx(updates)(torch.empty((), device="meta"), *tensors, *tensors)
    search = Search(Candidates(build(gm), device_spec("h200"), {}, rounded=False))
    number = sorted(search.candidates)[60]
    near = search.neighbours(number)
    assert MOST_READERS <= len(near) <= MOST_READERS + 2
    position = sorted(search.candidates).index
    assert max(abs(position(n) - position(number)) for n in near) < 80  # of 200: two for each update
    assert len(search.readers(search.dag.inputs[0])) == 100


def test_positions_by_their_distance() -> None:
    assert list(_outward([1, 4, 5, 9, 20], 6)) == [5, 4, 9, 1, 20]
    assert list(_outward([3], 0)) == [3] and list(_outward([], 2)) == []
