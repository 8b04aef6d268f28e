"""Recordings that nobody asked for, on a device that runs again what was captured, into the same memory."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import cudagraph_trees

import fusion_compiler as fc
from fusion_compiler.errors import FusionWarning
from fusion_compiler.ir.graph_info import Phase
from fusion_compiler.runtime import cuda_graphs
from fusion_compiler.runtime.cuda_graphs import BACKWARD_IS_NOT, UNASKED, Terms
from fusion_compiler.runtime.recording import Boxed, Pool, Recorder
from tests.fake_gpu import FakeGpu, use
from tests.runtime.test_cuda_graphs import Net


@dataclass
class FakePool:
    """Replays by running again, with the arguments that the capture had."""

    beside: bool = False
    captures: int = 0
    replays: int = 0
    turn: Any = field(default_factory=nullcontext[None])

    def is_beside(self) -> bool:
        return self.beside

    def capture(self, run: Boxed, arguments: Sequence[Any]) -> tuple[Callable[[], None], list[Any]]:
        self.captures += 1
        places = [a.untyped_storage() for a in arguments if isinstance(a, Tensor)]
        before = [place.clone() for place in places]
        results = list(run(list(arguments)))
        for place, values in zip(places, before, strict=True):  # a capture runs nothing
            place.copy_(values)

        def replay() -> None:
            self.replays += 1
            for kept, new in zip(results, list(run(list(arguments))), strict=True):
                if isinstance(kept, Tensor):  # all of its memory, of any layout, without a new version
                    kept.untyped_storage().copy_(new.untyped_storage())

        return replay, results


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[FakePool]:
    made: list[FakePool] = []

    def pool(index: int) -> FakePool:
        assert index == 0
        made.append(FakePool())
        return made[-1]

    monkeypatch.setattr(cuda_graphs, "Pool", pool)
    monkeypatch.setattr(cuda_graphs, "refusal", lambda *_: None)
    monkeypatch.setattr(cuda_graphs, "_device_index", lambda gm: 0)
    monkeypatch.setattr(Terms, "refusal", None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return made


def test_results_have_the_layout_of_what_they_are_of_and_are_the_callers_own() -> None:
    base = torch.arange(24.0).reshape(4, 6)

    def run(arguments: list[Any]) -> list[Any]:
        (x,) = arguments
        y = x + base
        return [y.t(), y[1:3, ::2], y[0].expand(3, 6), torch.empty(0, 3), 7, x]

    recorder = Recorder(run, FakePool(), lambda _: (), None, 1)  # type: ignore[arg-type]
    xs = [torch.randn(4, 6) for _ in range(4)]
    got = [recorder([x]) for x in xs]
    assert recorder.find(xs[:1]) is not None
    for x, results in zip(xs, got, strict=True):
        for result, want in zip(results, run([x]), strict=True):
            if isinstance(want, Tensor):
                assert torch.equal(result, want) and result.stride() == want.stride()
            else:
                assert result == want
    places = [r.data_ptr() for results in got[1:] for r in results if isinstance(r, Tensor) and r.numel()]
    assert len(set(places)) == len(places)


def test_arguments_of_any_layout_are_copied() -> None:
    memory = torch.randn(6, 8)
    for of in (memory.t(), memory[::2, ::2], memory[:1].expand(4, 8)):
        recorder = Recorder(lambda given: [given[0] * 2], FakePool(), lambda _: (), None, 1)  # type: ignore[arg-type]
        for _ in range(3):
            memory.normal_()
            assert torch.equal(recorder([of])[0], of * 2)


def test_what_lies_elsewhere_is_recorded_anew_up_to_a_number() -> None:
    pool = FakePool()

    def run(given: list[Any]) -> list[Any]:
        return [given[0] * given[1], given[0], given[0].view(2, 4).t()]

    recorder = Recorder(run, pool, lambda _: (0,), 1, 2)  # type: ignore[arg-type]
    places = [torch.randn(8) for _ in range(3)]
    x = torch.randn(8)
    for _ in range(3):
        for place in places:
            place.normal_()
            x.normal_()
            product, same, view = recorder([place, x])
            assert torch.equal(product, place * x) and same is place
            assert torch.equal(view, place.view(2, 4).t()) and view.data_ptr() == place.data_ptr()
    assert (pool.captures, pool.replays) == (2, 6)
    pool.beside = True
    assert torch.equal(recorder([places[0], x])[0], places[0] * x) and pool.replays == 6


def test_what_is_not_aligned_is_recorded_where_its_copy_lies() -> None:
    """As a token that was cut out of a prompt."""
    pool, places = FakePool(), list[int]()

    def run(given: list[Any]) -> list[Any]:
        places.extend(value.data_ptr() % 16 for value in given)
        return [given[0] + given[1], given[0]]

    recorder = Recorder(run, pool, lambda _: (1,), None, 2)  # type: ignore[arg-type]
    memory, weight = torch.randn(10, 4), torch.randn(9)[1:].reshape(4, 2)
    cut = memory.view(-1)[1:33].view(8, 4).t()
    for x in (cut[:, 1:5:2], cut[:, 1:5:2], memory.t()[:, 1:5:2]):
        memory.normal_()
        total, same = recorder([x, weight])
        assert torch.equal(total, x + weight) and torch.equal(same, x)
    assert (pool.captures, pool.replays) == (1, 3)
    assert set(places[::2]) == {0} and set(places[1::2]) == {weight.data_ptr() % 16} != {0}


def test_a_recording_for_which_memory_does_not_suffice_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("2 GB")

    pool = FakePool()
    monkeypatch.setattr(pool, "capture", full)
    recorder = Recorder(lambda given: [given[0] * 2], pool, lambda _: (), None, 4)  # type: ignore[arg-type]
    x = torch.randn(8)
    with pytest.warns(FusionWarning, match="without a recording.*2 GB"):
        assert torch.equal(recorder([x])[0], x * 2)
    assert torch.equal(recorder([x])[0], x * 2)


def test_numbers_tell_recordings_apart() -> None:
    pool = FakePool()
    recorder = Recorder(lambda given: [given[1] * given[0]], pool, lambda _: (), None, 4)  # type: ignore[arg-type]
    for number in (2, 3, 2, 3):
        x = torch.randn(4)
        assert torch.equal(recorder([number, x])[0], x * number)
    assert (pool.captures, pool.replays) == (2, 4)


def steps_beside_eager(fast: Any, model: nn.Module, exact: nn.Module, pattern: str) -> None:
    """Forwards (f), backwards (b) of the last one without, and calls that are dropped (d)."""
    pending: list[tuple[Tensor, Tensor]] = []
    for letter in pattern:
        if letter == "b":
            for result in pending.pop():
                result.square().sum().backward()
            continue
        x = torch.randn(3, 8)
        pair = fast(x), exact(x.double())
        torch.testing.assert_close(pair[0], pair[1], check_dtype=False)
        if letter == "f":
            pending.append(pair)
        del pair


@pytest.mark.parametrize("pattern", ["fb", "ffbb", "fdb", "dfb", "fbfb", "fffbbb"])
def test_gradients_are_eagers(pattern: str, pools: list[FakePool], monkeypatch: pytest.MonkeyPatch) -> None:
    use(FakeGpu(), monkeypatch)
    model = Net()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, exact)]
    for _ in range(5):
        steps_beside_eager(fast, model, exact, pattern)
        for ours, truth in zip(model.parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, truth.grad, check_dtype=False, rtol=1e-4, atol=1e-4)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.steps, exact.steps, check_dtype=False)
    assert [plan.notes["CUDA graph"] for plan in fast.plan] == [UNASKED] * 2
    (pool,) = pools
    assert pool.captures == 2
    assert pool.replays >= 5


@pytest.mark.parametrize("little", [0, 1 << 26])
def test_a_forward_that_keeps_much_is_recorded_only_where_its_backward_is(
    little: int, pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeGpu(), monkeypatch)
    monkeypatch.setattr(cuda_graphs, "LITTLE", little)
    monkeypatch.setattr(
        cuda_graphs, "refusal", lambda gm, form, phase: "too large" if phase is Phase.BACKWARD else None
    )
    model = Net()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True)
    for _ in range(4):
        steps_beside_eager(fast, model, exact, "fb")
    for ours, truth in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, truth.grad, check_dtype=False, rtol=1e-4, atol=1e-4)
    forward = UNASKED if little else BACKWARD_IS_NOT
    assert [plan.notes["CUDA graph"] for plan in fast.plan] == [forward, "too large"]
    assert (pools[0].replays > 0) == bool(little)


def test_a_backward_of_what_was_written_over_raises(
    pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeGpu(), monkeypatch)
    fast = fc.compile(Net(), tune=False, strict=True)
    for _ in range(3):
        fast(torch.randn(3, 8)).sum().backward()
    kept = fast(torch.randn(3, 8)).sum()
    kept.backward(retain_graph=True)
    kept.backward(retain_graph=True)  # nothing was written yet
    fast(torch.randn(3, 8)).sum().backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
    assert pools[0].replays


class Keeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, saved: Tensor) -> Tensor:
        ctx.save_for_backward(saved)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (saved,) = ctx.saved_tensors
        return grad_outputs[0] * saved, None


def test_what_a_replay_saved_is_told_from_what_the_next_one_saves() -> None:
    """Also where it is no copy of an argument, which a copy into it would tell."""
    pool = FakePool()
    recorder = Recorder(lambda given: [given[0] + 1, given[0].exp()], pool, lambda _: (), 1, 1)  # type: ignore[arg-type]
    x = torch.randn(8)
    recorder([x])
    for is_late in (False, True):
        leaf = torch.randn(8, requires_grad=True)
        result = Keeps.apply(leaf, recorder([x])[1])
        if not is_late:
            result.sum().backward()
            assert torch.equal(leaf.grad, x.exp())  # type: ignore[arg-type]
            continue
        recorder([x])
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_nothing_is_replayed_in_a_profile_or_into_the_users_own_graph(
    pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeGpu(), monkeypatch)
    fast = fc.compile(Net(), tune=False, strict=True)
    with torch.no_grad():
        for _ in range(4):
            fast(torch.randn(3, 8))
        before = pools[0].replays
        with cuda_graphs.unrecorded():
            fast(torch.randn(3, 8))
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            fast(torch.randn(3, 8))
        assert pools[0].replays == before == 3
        fast(torch.randn(3, 8))
        assert pools[0].replays == 4


def test_the_stream_is_that_of_the_first_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on another before it, as a warm-up makes them, bind nothing."""
    streams = {0: "main"}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index=0: streams[index])
    for name in ("device", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    for name in ("graph_pool_handle", "Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(cudagraph_trees, "clear_cublas_manager", nullcontext)
    pool = Pool(0)
    beside: list[bool] = []
    for stream in ("warm-up", "main"):
        streams[0] = stream
        beside.append(pool.is_beside())
    pool.capture(list, [])
    for stream in ("main", "warm-up"):
        streams[0] = stream
        beside.append(pool.is_beside())
    pool.capture(list, [])
    assert [*beside, pool.is_beside()] == [False, False, False, True, True]
