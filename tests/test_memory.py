"""What compiled programs keep in memory, and what they write into tensors of the caller."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import fusion_compiler as fc
from tests import models
from tests.fake_gpu import IdleGpu, use


def peak(call: Callable[[], object]) -> int:
    """The most bytes that `call` has allocated at once."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as traced:
        call()
    assert traced.profiler is not None and traced.profiler.kineto_results is not None
    events: list[Any] = [e for e in traced.profiler.kineto_results.events() if e.name() == "[memory]"]
    live = highest = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        live += event.nbytes()
        highest = max(highest, live)
    return highest


def step_of(called: Any, model: nn.Module, batch: dict[str, Tensor]) -> Callable[[], None]:
    def step() -> None:
        called(**batch).loss.backward()
        model.zero_grad(set_to_none=True)

    return step


class ZeroGpu(IdleGpu):
    """Results are zeros, so that what looks up rows by them finds some."""

    def __init__(self) -> None:
        super().__init__()
        self.empty = lambda shape, stride, dtype: torch.empty_strided(shape, stride, dtype=dtype).zero_()


@pytest.mark.parametrize("name", ["llama"])
def test_training_needs_no_more_memory_than_in_eager(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = models.small(name, batch=4, length=64)
    eager = step_of(model, model, batch)
    eager()
    use(ZeroGpu(), monkeypatch)
    ours = step_of(fc.compile(model, tune=False), model, batch)
    ours()
    assert peak(ours) <= peak(eager)


# -- writing into arguments -------------------------------------------------------------------------


class Cache(nn.Module):
    """Keys of the tokens so far, each call's put in their places."""

    keys: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.randn(2, 64, 8))

    def forward(self, new: Tensor, where: Tensor) -> Tensor:
        self.keys.index_copy_(1, where, torch.tanh(new))
        return torch.softmax(self.keys.sum(-1), -1)


def _twice(cache: Tensor, new: Tensor, where: Tensor) -> Tensor:
    cache[where] = new
    cache[where + 1] = new.sin()
    return cache.square().sum()


def _read_before(cache: Tensor, new: Tensor, where: Tensor) -> tuple[Tensor, ...]:
    before = cache.cos()
    cache[where] = new
    return before, cache.cos()


def _read_after(cache: Tensor, new: Tensor, where: Tensor) -> tuple[Tensor, ...]:
    """The old values are needed once the new ones are there."""
    changed = cache.index_put((where,), new)
    late = (cache @ changed.t()).sum(0) - changed.sum(1)
    cache.copy_(changed)
    return changed, late


def _from_itself(cache: Tensor, new: Tensor, where: Tensor) -> Tensor:
    cache[where] = cache[: len(where)] + new
    return cache.sum(0)


def _kept(cache: Tensor, new: Tensor, where: Tensor) -> Tensor:
    changed = cache.index_put((where,), new)
    cache.copy_(changed)
    return changed  # a tensor of its own


def _transposed(cache: Tensor, new: Tensor, where: Tensor) -> Tensor:
    cache.t()[where] = new.t()[: len(where), :1]
    return cache.sum(1)


def _element_wise(cache: Tensor, new: Tensor, where: Tensor) -> Tensor:
    cache.mul_(0.5).add_(new[0])
    return cache.index_select(0, where)


def _returned(cache: Tensor, new: Tensor, where: Tensor) -> Tensor:
    cache[where] = new
    return cache


def _returned_as_views(cache: Tensor, new: Tensor, where: Tensor) -> tuple[Tensor, ...]:
    cache.index_add_(0, where, new)
    return cache.view(-1), cache[2:], cache


@pytest.mark.parametrize(("backend", "dynamic"), [("eager", None), ("interpret", None), ("eager", True)])
@pytest.mark.parametrize(
    "function",
    [
        _twice,
        _read_before,
        _read_after,
        _from_itself,
        _kept,
        _transposed,
        _element_wise,
        _returned,
        _returned_as_views,
    ],
    ids=lambda f: f.__name__,
)
def test_arguments_that_are_written_into(
    function: Callable[..., Any], backend: str, dynamic: bool | None
) -> None:
    fast = fc.compile(function, backend=backend, dynamic=dynamic)
    mine = torch.randn(12, 8)
    theirs = mine.double()
    with torch.no_grad():
        for _ in range(3):
            new, where = torch.randn(3, 8), torch.randperm(7)[:3]
            got, want = fast(mine, new, where), function(theirs, new.double(), where)
            torch.testing.assert_close(got, want, check_dtype=False)
            torch.testing.assert_close(mine, theirs, check_dtype=False)
            assert _shared(got, mine) == _shared(want, theirs)


def _shared(results: Tensor | tuple[Tensor, ...], argument: Tensor) -> list[bool]:
    """Which results are memory of an argument."""
    each = results if isinstance(results, tuple) else (results,)
    return [r.untyped_storage().data_ptr() == argument.untyped_storage().data_ptr() for r in each]


def test_a_cache_is_written_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Cache()
    exact = Cache().double()
    exact.load_state_dict(model.state_dict())
    fast = fc.compile(model, backend="eager")
    new, where = torch.randn(2, 1, 8), torch.tensor([3])
    with torch.no_grad():
        for _ in range(4):
            new, where = torch.randn_like(new), (where + 5) % 64
            torch.testing.assert_close(fast(new, where), exact(new.double(), where), check_dtype=False)
            torch.testing.assert_close(model.keys, exact.keys, check_dtype=False)
        use(ZeroGpu(), monkeypatch)
        torch._dynamo.reset()
        fast = fc.compile(model, tune=False)
        fast(new, where)
        assert peak(lambda: fast(new, where)) < model.keys.nbytes
