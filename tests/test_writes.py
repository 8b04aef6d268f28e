"""What a program writes into its arguments: several small results together, in one call."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.stitch import stitch


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tensors each call wrote that writes several."""
    seen: list[int] = []
    original = torch._foreach_copy_

    def counted(targets: list[Tensor], results: list[Tensor]) -> None:
        seen.append(len(targets))
        original(targets, results)

    monkeypatch.setattr(stitch.torch, "_foreach_copy_", counted)
    return seen


def test_statistics_of_batch_norms(calls: list[int]) -> None:
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())]
    model = nn.Sequential(*layers).double()
    eager = copy.deepcopy(model)
    fast = fc.compile(model, backend="eager", device="h200")
    for _ in range(3):
        x = torch.randn(5, 4, 6, 6, dtype=torch.float64)
        torch.testing.assert_close(fast(x), eager(x))
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    assert calls == [3, 6] * 3, "a call for the counters and one for the statistics"


def swapped(a: Tensor, b: Tensor) -> Tensor:
    old = a.clone()
    a.copy_(b)
    b.copy_(old)
    return a - b


def chained(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    b.copy_(a)
    a.mul_(b)
    return a + b


def read_after(a: Tensor, b: Tensor) -> Tensor:
    a.add_(1)
    shown = a.sum(0)
    b.mul_(shown)
    return b.sin() * shown


def viewed(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a[0].add_(1)
    b.t().mul_(a)
    return a[1:], b.t()


def large(a: Tensor, b: Tensor) -> Tensor:
    a.add_(b[0, 0])
    b.mul_(2)
    return a


@pytest.mark.parametrize("function", [swapped, chained, read_after, viewed, large])
@pytest.mark.parametrize("size", [4, 200])
def test_arguments_hold_what_eager_writes(function: Callable[..., object], size: int) -> None:
    ours = [torch.randn(size, size, dtype=torch.float64) for _ in range(2)]
    theirs = [t.clone() for t in ours]
    fast = fc.compile(function, backend="eager", device="h200")
    for _ in range(2):
        torch.testing.assert_close(fast(*ours), function(*theirs))
        torch.testing.assert_close(ours, theirs)


def test_large_and_single_results_are_copied_one_by_one(calls: list[int]) -> None:
    def function(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        a.add_(1)
        b.mul_(2)
        c.add_(a[0])
        return c.sin()

    fast = fc.compile(function, backend="eager", device="h200")
    fast(torch.randn(200, 200), torch.randn(200, 200), torch.randn(200))
    assert not calls
