"""Recordings that nobody asked for, on a device that runs again what was captured, into the same memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import cudagraph_trees

import fusion_compiler as fc
from fusion_compiler.errors import FusionWarning
from fusion_compiler.ir.graph_info import Phase
from fusion_compiler.runtime import boxed, cuda_graphs, graph_pool, pairs, recording
from fusion_compiler.runtime.boxed import Boxed
from fusion_compiler.runtime.cuda_graphs import FORWARD_IS_NOT, RECORDED
from fusion_compiler.runtime.graph_pool import Pool
from fusion_compiler.runtime.pairs import BACKWARD_IS_NOT, GROUP, TRIED, UNASKED, Terms
from fusion_compiler.runtime.recording import Calls, Recorder, unowned
from fusion_compiler.stitch import order
from tests.fake_gpu import FakeGpu, use
from tests.runtime.test_cuda_graphs import Net

FREE = 1 << 34  # bytes of the device


class FakePool(Pool):
    """Replays by running again, with the arguments that the capture had.

    As on a device, a replay may overwrite what lies where its temporaries do: the results of graphs that were
    captured later, those of earlier ones whose memory was free at the capture, and arguments whose memory a
    capture leaves free, once they are read.
    """

    def __init__(self, index: int = 0, limit: float | int = 0.125, pools: Sequence[Pool] = ()) -> None:
        super().__init__(index, limit, pools)
        self.beside = False
        self.captures = self.replayed = 0
        self.results: list[list[Any]] = []  # storages, by capture

    def is_beside(self) -> bool:
        return self.beside

    def free_bytes(self) -> int:
        return FREE

    def capture(self, run: Boxed, arguments: list[Any]) -> tuple[Callable[[], None], list[Any], int]:
        self.captures += 1
        places = [a.untyped_storage() for a in arguments if isinstance(a, Tensor)]
        before = [place.clone() for place in places]
        results = list(run(list(arguments)))
        for place, values in zip(places, before, strict=True):  # a capture runs nothing
            place.copy_(values)
        memory = [value.untyped_storage() if isinstance(value, Tensor) else None for value in results]
        inputs = {place.data_ptr() for place in places}
        self.results.append([m for m in memory if m is not None and m.data_ptr() not in inputs])
        number = len(self.results)
        # A CUDA graph knows addresses, and keeps none of its arguments.
        inputs_again = [unowned(a) if isinstance(a, Tensor) else a for a in arguments]
        place = None
        places.clear()
        arguments.clear()
        free = [place for graph in self.results[: number - 1] for place in graph if is_free(place)]
        overlapping = [place for place in free if place.data_ptr() in inputs]

        def replay() -> None:
            self.replayed += 1
            later = [place for graph in self.results[number:] for place in graph]
            for place in (*later, *(place for place in free if place not in overlapping)):
                place.fill_(255)  # NaN
            results = [r.untyped_storage().clone() if r is not None else None for r in again()]
            for place in overlapping:
                place.fill_(255)
            for kept, new in zip(memory, results, strict=True):
                if kept is not None and new is not None:  # all of it, of any layout, without a new version
                    kept.copy_(new)

        def again() -> list[Tensor | None]:
            return [r if isinstance(r, Tensor) else None for r in run(list(inputs_again))]

        sizes = {id(place): place.nbytes() for place in memory if place is not None}
        return replay, results, sum(sizes.values())


def is_free(storage: Any) -> bool:
    """True if no tensor has the storage."""
    return torch._C._storage_Use_Count(storage._cdata) == 1


def recorder(
    run: Boxed,
    pool: FakePool,
    static: tuple[int, ...] = (),
    shown: int | None = None,
    most: int = 1,
    **more: Any,
) -> Recorder:
    return Recorder(run, pool, Calls(lambda _: static, shown, most, **more))


@pytest.fixture
def pools(monkeypatch: pytest.MonkeyPatch) -> list[FakePool]:
    created: list[FakePool] = []

    def pool(index: int, limit: float | int, others: Sequence[Pool]) -> FakePool:
        assert index == 0
        created.append(FakePool(index, limit, others))
        return created[-1]

    monkeypatch.setattr(cuda_graphs, "Pool", pool)
    monkeypatch.setattr(cuda_graphs, "refusal", lambda *_: None)
    monkeypatch.setattr(cuda_graphs, "_device_index", lambda gm: 0)
    monkeypatch.setattr(Terms, "refusal", None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return created


def test_results_have_the_layout_of_what_they_are_of_and_are_the_callers_own() -> None:
    base = torch.arange(24.0).reshape(4, 6)

    def run(arguments: list[Any]) -> list[Any]:
        (x,) = arguments
        y = x + base
        return [y.t(), y[1:3, ::2], y[0].expand(3, 6), torch.empty(0, 3), 7, x]

    replays = recorder(run, FakePool())
    xs = [torch.randn(4, 6) for _ in range(4)]
    got = [replays([x]) for x in xs]
    assert len(replays.recordings) == 1
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
        replays = recorder(lambda args: [args[0] * 2], FakePool())
        for _ in range(3):
            memory.normal_()
            assert torch.equal(replays([of])[0], of * 2)


def test_what_lies_elsewhere_is_recorded_anew_up_to_a_number() -> None:
    pool = FakePool()

    def run(args: list[Any]) -> list[Any]:
        return [args[0] * args[1], args[0], args[0].view(2, 4).t()]

    replays = recorder(run, pool, (0,), 1, 2)
    places = [torch.randn(8) for _ in range(3)]
    x = torch.randn(8)
    for _ in range(3):
        for place in places:
            place.normal_()
            x.normal_()
            product, same, view = replays([place, x])
            assert torch.equal(product, place * x) and same is place
            assert torch.equal(view, place.view(2, 4).t()) and view.data_ptr() == place.data_ptr()
    assert (pool.captures, pool.replayed) == (2, 6)
    pool.beside = True
    assert torch.equal(replays([places[0], x])[0], places[0] * x) and pool.replayed == 6


def test_what_is_not_aligned_is_recorded_where_its_copy_lies() -> None:
    """As a token that was cut out of a prompt."""
    pool, places = FakePool(), list[int]()

    def run(args: list[Any]) -> list[Any]:
        places.extend(value.data_ptr() % 16 for value in args)
        return [args[0] + args[1], args[0]]

    replays = recorder(run, pool, (1,), None, 2)
    memory, weight = torch.randn(10, 4), torch.randn(9)[1:].reshape(4, 2)
    cut = memory.view(-1)[1:33].view(8, 4).t()
    for x in (cut[:, 1:5:2], cut[:, 1:5:2], memory.t()[:, 1:5:2]):
        memory.normal_()
        total, same = replays([x, weight])
        assert torch.equal(total, x + weight) and torch.equal(same, x)
    assert (pool.captures, pool.replayed) == (1, 3)
    assert set(places[::2]) == {0} and set(places[1::2]) == {weight.data_ptr() % 16} != {0}


def test_a_recording_for_which_memory_does_not_suffice_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("2 GB")

    pool = FakePool()
    monkeypatch.setattr(pool, "capture", full)
    replays = recorder(lambda args: [args[0] * 2], pool, most=4)
    x = torch.randn(8)
    with pytest.warns(FusionWarning, match="without CUDA graphs.*2 GB"):
        assert torch.equal(replays([x])[0], x * 2)
    assert torch.equal(replays([x])[0], x * 2)


def test_numbers_tell_recordings_apart() -> None:
    pool = FakePool()
    replays = recorder(lambda args: [args[1] * args[0]], pool, most=4)
    for number in (2, 3, 2, 3):
        x = torch.randn(4)
        assert torch.equal(replays([number, x])[0], x * number)
    assert (pool.captures, pool.replayed) == (2, 4)


def kept_by(plan: Any) -> str:
    """The decision about a graph, without the bytes that it keeps."""
    return plan.decision("CUDA graph").reason.partition("; keeps")[0]


def same_gradients(model: nn.Module, exact: nn.Module) -> None:
    for ours, truth in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, truth.grad, check_dtype=False, rtol=1e-4, atol=1e-4)


def steps_beside_eager(fast: Any, model: nn.Module, exact: nn.Module, pattern: str) -> None:
    """Forwards (f), backwards of the last one without (b) or the first one (o), and calls that are
    dropped (d)."""
    pending: list[tuple[Tensor, Tensor]] = []
    for letter in pattern:
        if letter in "bo":
            for result in pending.pop(-1 if letter == "b" else 0):
                result.square().sum().backward()
            continue
        x = torch.randn(3, 8)
        pair = fast(x), exact(x.double())
        torch.testing.assert_close(pair[0], pair[1], check_dtype=False)
        if letter == "f":
            pending.append(pair)
        del pair


@pytest.mark.parametrize(
    ("pattern", "captures"),
    [
        ("fb", [2]),
        ("ffbb", [2, 2]),
        ("fdb", [2, 1]),
        ("dfb", [2]),
        ("fbfb", [2]),
        ("fffbbb", [2, 2, 2]),
        ("ffofofoo", [2, 2]),
    ],
)
def test_gradients_are_eagers(
    pattern: str, captures: list[int], pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """captures: in each lane, the second one for forwards that come while another waits for its backward."""
    use(FakeGpu(), monkeypatch)
    model = Net()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, exact)]
    for _ in range(5):
        steps_beside_eager(fast, model, exact, pattern)
        same_gradients(model, exact)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    torch.testing.assert_close(model.steps, exact.steps, check_dtype=False)
    assert [kept_by(plan) for plan in fast.plan] == [UNASKED] * 2
    assert [pool.captures for pool in pools] == captures
    assert all(pool.replayed >= 3 * count for pool, count in zip(pools, captures, strict=True))


class Shifted(nn.Module):
    """The gradient of `shift` has the size of what is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.shift = nn.Parameter(torch.randn(1, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x) + self.shift).cos()


def test_gradients_of_the_first_backward_are_not_written_over(
    pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It runs without a CUDA graph, and reads what a replay has saved."""
    use(FakeGpu(), monkeypatch)
    monkeypatch.setattr(order, "LEAST_PLACED", 1)
    model = Shifted()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True)
    inputs = torch.randn(4, 1, 4, 8)
    pending = [(fast(x), exact(x.double())) for x in inputs[:2]]
    for result in pending.pop():
        result.sum().backward()
    assert pools[0].captures == 1
    ours = fast(inputs[2])
    torch.testing.assert_close(ours, exact(inputs[2].double()), check_dtype=False)
    same_gradients(model, exact)


@pytest.mark.parametrize(("most", "limit", "lanes"), [(1, FREE, 1), (8, 1500, 2)])
def test_lanes_end_where_memory_or_their_number_does(
    most: int, limit: int, lanes: int, pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """limit: of bytes, which suffice for the first lane alone in one case."""
    use(FakeGpu(), monkeypatch)
    monkeypatch.setattr(pairs, "MOST_LANES", most)
    model = Net()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True, graph_memory=limit)
    for _ in range(4):
        steps_beside_eager(fast, model, exact, "ffoffooo")
    same_gradients(model, exact)
    assert [kept_by(plan) for plan in fast.plan] == [UNASKED] * 2, "the first lane is kept"
    assert pools[0].replayed > 4 and 0 < pools[0].kept <= limit
    assert len(pools) == lanes
    assert all(pool.kept == 0 for pool in pools[1:]), "a lane whose backward has no room keeps nothing"


@pytest.fixture
def group() -> Generator[None]:
    """A process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_beside_a_process_group_graphs_are_recorded_where_that_is_safe() -> None:
    terms = Terms(host_us=100.0, gpu_us=10.0, peak=0, copy_us=0.0, replay_us=5.0)
    assert terms.refusal == GROUP
    with boxed.beside_group():
        assert terms.refusal is None


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x).sin()
        return y.cos() * 2, self.second(y).exp()


@pytest.mark.parametrize("pattern", ["bb", "ba", "ab", "abba"])
def test_each_set_of_gradients_has_a_backward_of_its_own(
    pattern: str, pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """b: the loss reads both results, a: the first alone."""
    use(FakeGpu(), monkeypatch)
    model = Two()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True)
    for letter in 6 * pattern:
        model.zero_grad()
        exact.zero_grad()
        x = torch.randn(3, 8)
        for first, second in (fast(x), exact(x.double())):
            (first.sum() + second.square().sum() if letter == "b" else first.sum()).backward()
        for ours, truth in zip(model.parameters(), exact.parameters(), strict=True):
            got, want = (torch.zeros_like(p) if p.grad is None else p.grad for p in (ours, truth))
            torch.testing.assert_close(got, want, check_dtype=False, rtol=1e-4, atol=1e-4)
    assert pools[0].replayed > 4


class Empty(nn.Module):
    """It saves an empty tensor, whose address is that of every other one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.none = nn.Parameter(torch.randn(0, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).exp()
        nothing = (x[:0] @ self.linear.weight) * (self.none @ self.linear.weight).exp()
        return torch.cat([nothing, y.sin() * y])


@pytest.mark.parametrize("pattern", ["fb", "ffoo", "ffbb", "ffofofoo"])
def test_an_empty_tensor_tells_nothing_of_a_lane(
    pattern: str, pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeGpu(), monkeypatch)
    model = Empty()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True)
    for _ in range(6):
        steps_beside_eager(fast, model, exact, pattern)
    same_gradients(model, exact)
    assert [pool.captures for pool in pools] == [2] * len(pools)


def test_gradients_of_a_backward_that_is_not_recorded_are_not_written_over(
    pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeGpu(), monkeypatch)
    monkeypatch.setattr(order, "LEAST_PLACED", 1)
    monkeypatch.setattr(
        cuda_graphs, "refusal", lambda gm, form, phase: "too large" if phase is Phase.BACKWARD else None
    )
    model = nn.Sequential(nn.Linear(8, 8, bias=False), Shifted())
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True)
    for _ in range(5):
        x = torch.randn(1, 4, 8)
        ours = torch.autograd.grad(fast(x).sum(), list(model.parameters()))
        truth = torch.autograd.grad(exact(x.double()).sum(), list(exact.parameters()))
        fast(torch.randn(1, 4, 8))  # its replay writes over what nobody holds
        for got, want in zip(ours, truth, strict=True):
            torch.testing.assert_close(got, want, check_dtype=False, rtol=1e-4, atol=1e-4)
    assert pools[0].replayed > 4


@pytest.mark.parametrize("count", [1, 3, 8])
def test_steps_in_which_graphs_are_captured_are_not_timed(
    count: int, pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeGpu(), monkeypatch)
    monkeypatch.setattr(Terms, "refusal", "its launches take 2 us")
    monkeypatch.setattr(Terms, "is_open", True)
    before: list[tuple[int, int]] = []

    def mark(index: int) -> int:
        before.append((sum(p.replayed for p in pools), sum(p.captures for p in pools)))
        return len(before) - 1

    def between_us(marks: tuple[int, int]) -> float:
        (replays, captures), (replays_then, captures_then) = (before[i] for i in marks)
        return 30000.0 * (captures_then - captures) + (20.0 if replays_then > replays else 30.0)

    monkeypatch.setattr(pairs, "mark", mark)
    monkeypatch.setattr(pairs, "between_us", between_us)
    model = Net()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True)
    for _ in range(16):
        steps_beside_eager(fast, model, exact, "f" * count + "o" * count)
    assert all(kept_by(plan).startswith(RECORDED) for plan in fast.plan)


@pytest.mark.parametrize("little", [0, 1 << 26])
def test_a_forward_that_keeps_much_is_recorded_only_where_its_backward_is(
    little: int, pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeGpu(), monkeypatch)
    monkeypatch.setattr(pairs, "LITTLE", little)
    monkeypatch.setattr(
        cuda_graphs, "refusal", lambda gm, form, phase: "too large" if phase is Phase.BACKWARD else None
    )
    model = Net()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True)
    for _ in range(4):
        steps_beside_eager(fast, model, exact, "fb")
    same_gradients(model, exact)
    forward = UNASKED if little else BACKWARD_IS_NOT
    assert [kept_by(plan) for plan in fast.plan] == [forward, "too large"]
    assert (pools[0].replayed > 0) == bool(little)


def test_what_a_retained_graph_saved_is_not_written_over(
    pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeGpu(), monkeypatch)
    model = Net()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True)
    for _ in range(3):
        steps_beside_eager(fast, model, exact, "fb")
    x = torch.randn(3, 8)
    kept = [(m, called(x.to(m.steps.dtype)).sum()) for m, called in ((model, fast), (exact, exact))]
    for _, loss in kept:
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
    before = pools[0].replayed
    steps_beside_eager(fast, model, exact, "fb")
    assert pools[0].replayed == before, "the forward runs as without"
    for _, loss in kept:
        loss.backward()
    same_gradients(model, exact)


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
    replays = recorder(lambda args: [args[0] + 1, args[0].exp()], pool, shown=1)
    x = torch.randn(8)
    replays([x])
    for is_late in (False, True):
        leaf = torch.randn(8, requires_grad=True)
        result = Keeps.apply(leaf, replays([x])[1])
        if not is_late:
            result.sum().backward()
            assert torch.equal(leaf.grad, x.exp())  # type: ignore[arg-type]
            continue
        replays.recordings[0]([x])  # which asks nobody whether it may
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
        before = pools[0].replayed
        with boxed.unrecorded():
            fast(torch.randn(3, 8))
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            fast(torch.randn(3, 8))
        assert pools[0].replayed == before == 3
        fast(torch.randn(3, 8))
        assert pools[0].replayed == 4


class Halves(nn.Module):
    """One block, compiled once and called with two sets of parameters, and a break between the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), Net()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x.sin())


def trained_beside_eager(fast: Any, model: nn.Module, steps: int, evaluated: bool = False) -> None:
    exact = copy.deepcopy(model).double()
    for _ in range(steps):
        for m in (model, exact):
            m.zero_grad()
        x = torch.randn(3, 8)
        ours, truth = fast(x), exact(x.double())
        if evaluated:
            with torch.no_grad():
                other = torch.randn(3, 8)
                torch.testing.assert_close(fast(other), exact(other.double()), check_dtype=False)
        for result in (ours, truth):
            result.square().sum().backward()
        torch.testing.assert_close(ours, truth, check_dtype=False)
        for (name, got), want in zip(model.named_parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, check_dtype=False, rtol=1e-4, atol=1e-4, msg=name)


@pytest.mark.parametrize("evaluated", [False, True])
def test_all_graphs_of_a_model_share_one_pool(
    evaluated: bool, pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeGpu(), monkeypatch)
    model = Halves()
    fast = fc.compile(model, tune=False)
    with pytest.warns(FusionWarning, match="graph_break"):
        trained_beside_eager(fast, model, 6, evaluated)
    (pool,) = pools
    graphs = [plan for plan in fast.plan if kept_by(plan).startswith(UNASKED)]
    assert len(graphs) == len(list(fast.plan)) >= 4
    before = pool.captures, pool.replayed
    trained_beside_eager(fast, model, 3, evaluated)
    assert pool.captures == before[0], "each is captured once"
    assert pool.replayed == before[1] + 3 * len(graphs), "all of them are replayed in each step"


def test_what_an_earlier_graph_would_overwrite_is_not_replayed_over() -> None:
    """The second graph's results lie where the first one's temporaries may."""
    pool = FakePool()
    first = recorder(lambda args: [args[0] + 1, args[0] * 2], pool, shown=1, most=4)
    second = recorder(lambda args: [args[0] - 1, args[0] * 3], pool, shown=1, most=4)
    x = torch.randn(8)
    for replays in (first, second):
        replays([x])  # what it saves is released at once
    for _ in range(4):
        y = torch.randn(8)
        held, saved = second([x]), first([y])
        assert all(map(torch.equal, (*held, *saved), (x - 1, x * 3, y + 1, y * 2)))
        del held, saved
    assert pool.captures == 3, "the first is captured once more, behind the second"
    assert pool.replayed == 2 + 2 * 4


def test_what_is_held_in_free_memory_is_not_captured_over() -> None:
    """A graph that is first called between a forward and its backward, when both were captured before."""
    pool = FakePool()
    forward = recorder(lambda args: [args[0] + 1, args[0] * 2], pool, shown=1, most=4)
    between = recorder(lambda args: [args[0] - 1], pool, most=4)
    x = torch.randn(8)
    forward([x])
    forward.recordings[0].release()
    for captures in (1, 3, 3):
        y = torch.randn(8)
        total, saved = forward([y])
        assert torch.equal(between([x])[0], x - 1) and pool.captures == captures
        assert torch.equal(saved, y * 2) and torch.equal(total, y + 1)
        del saved


def test_graphs_keep_no_more_than_they_may() -> None:
    reports: list[tuple[str | None, int]] = []
    pool = FakePool(limit=600)
    x = torch.randn(64)  # 256 bytes, as its copy and each result

    def replays(factor: int) -> Recorder:
        calls = Calls(lambda _: (), needed=lambda: 256, report=lambda *about: reports.append(about))
        return Recorder(lambda args: [args[0] * factor], pool, calls)

    kept = [replays(factor) for factor in (2, 3)]
    for _ in range(2):
        for factor, each in zip((2, 3), kept, strict=True):
            assert torch.equal(each([x])[0], x * factor)
    assert pool.captures == 1 and reports[0] == (None, 512)
    assert (
        reports[1][0]
        == "it would keep 256 B between calls beside 512 B of others: graph_memory=600 allows 600 B"
    )
    assert len(reports) == 2, "it is asked once"


@pytest.mark.parametrize(("limit", "text"), [(0, "graph_memory=0 allows 0 B"), (0.5, "keeps")])
def test_the_plan_says_what_is_kept_or_why_nothing_is(
    limit: float, text: str, pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeGpu(), monkeypatch)
    model = Net()
    fast = fc.compile(model, tune=False, strict=True, graph_memory=limit)
    trained_beside_eager(fast, model, 4)
    notes = [plan.decision("CUDA graph").reason for plan in fast.plan]
    assert text in notes[0] and (text in notes[1] or notes[1] == FORWARD_IS_NOT)
    assert (pools[0].replayed > 0) == bool(limit)


@pytest.mark.parametrize(
    ("with_", "text"), [(20.0, RECORDED), (29.5, "a step takes 30 us, and with CUDA graphs 30 us")]
)
@pytest.mark.parametrize("pattern", ["fb", "fdb", "fbd"])
def test_where_prediction_does_not_tell_it_is_tried(
    with_: float, text: str, pattern: str, pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(FakeGpu(), monkeypatch)
    monkeypatch.setattr(Terms, "refusal", "its launches take 2 us")
    monkeypatch.setattr(Terms, "is_open", True)
    replayed_before: list[int] = []
    emptied: list[int] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))

    def mark(index: int) -> int:
        replayed_before.append(pools[index].replayed)
        return len(replayed_before) - 1

    def between_us(marks: tuple[int, int]) -> float:
        first, second = (replayed_before[i] for i in marks)
        return with_ if second > first else 30.0

    monkeypatch.setattr(pairs, "mark", mark)
    monkeypatch.setattr(pairs, "between_us", between_us)
    model = Net()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True)
    steps_beside_eager(fast, model, exact, pattern)
    assert {kept_by(plan) for plan in fast.plan} == {TRIED}
    for _ in range(2 * pairs.TIMED + 4):
        steps_beside_eager(fast, model, exact, pattern)
    assert all(text in kept_by(plan) for plan in fast.plan)
    count = len(replayed_before), pools[0].replayed
    for _ in range(2):
        steps_beside_eager(fast, model, exact, pattern)
    assert len(replayed_before) == count[0], "nothing is timed any more"
    is_kept = text == RECORDED
    assert (pools[0].replayed > count[1]) == is_kept == bool(pools[0].kept) == (not emptied)
    assert is_kept or not pools[0]._pending
    same_gradients(model, exact)


def lending(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lend results of any size."""
    monkeypatch.setattr(recording, "LARGE", 1)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("steps_each", [1, 3])
def test_gradients_are_lent_until_one_is_held_too_long(
    is_late: bool, steps_each: int, pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """is_late: gradients are cleared between a forward and its backward, when the forward's replay may have
    overwritten them. steps_each: backwards whose gradients add up."""
    use(FakeGpu(), monkeypatch)
    lending(monkeypatch)
    model = Net()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, exact)]
    places: list[int] = []
    for step in range(8 * steps_each):
        x = torch.randn(3, 8)
        for called, of, optimizer in ((fast, model, optimizers[0]), (exact, exact, optimizers[1])):
            result = called(x.to(of.steps.dtype))
            if is_late and step % steps_each == 0:
                optimizer.zero_grad()
            result.square().sum().backward()
            del result
        same_gradients(model, exact)
        if step % steps_each == steps_each - 1:
            places.append(model.linear.weight.grad.data_ptr())  # type: ignore[union-attr]
            for optimizer in optimizers:
                optimizer.step()
                if not is_late:
                    optimizer.zero_grad()
            assert model.linear.weight.grad is None or is_late
    torch.testing.assert_close(model.linear.weight, exact.linear.weight, check_dtype=False)
    (pool,) = pools
    is_held = is_late or steps_each > 1
    assert pool.captures == (4 if is_held else 2), "once more, with copies of the results"
    assert is_held or len(set(places[-3:])) == 1, "it lies in the pool"
    assert pool.replayed >= 8


def test_lent_results_lie_in_the_pool_and_those_that_share_memory_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lending(monkeypatch)

    def run(args: list[Any]) -> list[Tensor]:
        sum_ = args[0] + 1
        return [args[0] * 2, sum_, sum_[0], (args[0] * 3).t()]

    pool = FakePool()
    replays = recorder(run, pool, lends=True, most=8)
    places: list[list[int]] = []
    x = torch.randn(4, 6)
    for _ in range(3):
        x.normal_()
        results = replays([x])
        for got, want in zip(results, run([x]), strict=True):
            assert torch.equal(got, want) and got.stride() == want.stride()
        places.append([r.data_ptr() for r in results])
        del results, got, want  # pyright: ignore[reportPossiblyUnboundVariable]
    assert [len({row[i] for row in places}) == 1 for i in (0, 3)] == [True, True]
    first = replays([x])
    kept = first[0].clone()
    assert torch.equal(replays([x + 1])[0], 2 * (x + 1)), "it runs as without"
    assert torch.equal(first[0], kept) and pool.replayed == 4
    second, third = replays([x]), replays([x + 1])
    assert torch.equal(second[0], kept) and torch.equal(third[0], 2 * (x + 1)) and pool.replayed == 6


def test_a_failed_allocation_drops_what_is_kept(
    pools: list[FakePool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever makes it, between a forward and its backward too: what that saved stays."""
    use(FakeGpu(), monkeypatch)
    model = Net()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, tune=False, strict=True)
    for _ in range(3):
        steps_beside_eager(fast, model, exact, "fb")
    (pool,) = pools
    monkeypatch.setattr(graph_pool, "_watched", weakref.WeakSet(pools))
    before = pool.replayed, pool.kept
    x = torch.randn(3, 8)
    ours, truth = fast(x), exact(x.double())
    graph_pool.memory_ran_out(1, 0, 0, 0)  # another device's
    assert pool.kept == before[1] > 0
    with pool.turn:  # a graph is being replayed
        graph_pool.memory_ran_out(0, 0, 0, 0)
    assert pool.kept == before[1]
    graph_pool.memory_ran_out(0, 0, 0, 0)
    assert not pool.kept
    for result in (ours, truth):
        result.square().sum().backward()
    for got, want in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad, check_dtype=False, rtol=1e-4, atol=1e-4)
    steps_beside_eager(fast, model, exact, "fb")
    assert pool.replayed == before[0] + 1
    assert "memory does not suffice" in fast.plan[0].decision("CUDA graph").reason


def test_a_replay_for_whose_results_memory_does_not_suffice_runs_as_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pool = FakePool()
    replays = recorder(lambda args: [args[0] * 2], pool)
    x = torch.randn(8)
    replays([x])
    empty_like = torch.empty_like

    def full(like: Tensor, **how: Any) -> Tensor:
        if like.device.type == "meta" or how:
            return empty_like(like, **how)
        raise torch.OutOfMemoryError("32 B")

    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.warns(FusionWarning, match="without CUDA graphs.*32 B"):
        assert torch.equal(replays([x])[0], x * 2)
    assert torch.equal(replays([x])[0], x * 2) and (pool.replayed, pool.kept) == (1, 0)


@pytest.mark.parametrize("helps", [False, True])
def test_a_graph_is_called_again_once_graphs_have_given_back_memory(
    helps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = FakePool()
    monkeypatch.setattr(graph_pool, "_watched", weakref.WeakSet([pool]))
    calls: list[Any] = []

    def run(arguments: list[Any]) -> list[Any]:
        calls.append(list(arguments))
        arguments.clear()
        if pool in graph_pool._watched:
            if helps:
                graph_pool.memory_ran_out(0, 0, 0, 0)
            raise torch.OutOfMemoryError("2 GB")
        return ["done"]

    if helps:
        assert graph_pool.retried(run)([1, 2]) == ["done"] and calls == [[1, 2]] * 2
    else:
        with pytest.raises(torch.OutOfMemoryError):
            graph_pool.retried(run)([1, 2])
        assert calls == [[1, 2]]


def test_the_stream_is_that_of_the_first_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on another before it, as a warm-up makes them, bind nothing."""
    streams = {0: "main"}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index=0: streams[index])
    for name in ("device", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())
    for name in ("graph_pool_handle", "Stream", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, lambda: SimpleNamespace(replay=None))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 0)
    monkeypatch.setattr(graph_pool, "_is_watching", True)
    monkeypatch.setattr(cudagraph_trees, "clear_cublas_manager", nullcontext)
    pool = Pool(0, 0.5)
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
