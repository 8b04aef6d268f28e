"""Recorded graphs on the device: values, gradients, random numbers, sizes, and what is not recorded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from benchmarks.harness.accuracy import not_worse
from fusion_compiler.errors import FusionWarning
from fusion_compiler.runtime import pairs
from fusion_compiler.runtime.cuda_graphs import FORMS, RECORDED, UNASKED
from fusion_compiler.runtime.graph_pool import ATTACH

CUDA = torch.device("cuda")


class Block(nn.Module):
    """A gated feed-forward with a norm and dropout; `steps` counts its calls."""

    steps: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 512), nn.Linear(512, 256)
        self.dropout = dropout
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        inner = F.gelu(self.up(self.norm(x)))
        return x + F.dropout(self.down(inner), self.dropout, self.training)


def decisions(fast: Any) -> list[str]:
    """The decision about each graph, without the bytes that it keeps."""
    return [plan.decision("CUDA graph").reason.partition("; keeps")[0] for plan in fast.plan]


def test_inference_replays_with_new_values_and_new_sizes() -> None:
    model = Block().to(CUDA).eval()
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, cudagraphs=True, dynamic=False, strict=True)
    with torch.no_grad():
        for rows in (64, 7, 64, 7, 64, 7, 64, 7, 64):
            x = torch.randn(rows, 256, device=CUDA)
            assert not (problem := not_worse(fast(x), model.forward(x), exact(x.double()))), problem
    assert decisions(fast) == [RECORDED] * 2
    assert int(model.steps) == 18  # once by each of the two in each round


def steps_beside_eager(fast: Any, model: nn.Module, count: int, pattern: str) -> None:
    """Steps of forwards (f), backwards of the last one that has had none (b) or of the first (o), and calls
    that are dropped (d); gradients add up, and every result is kept to the end."""
    kept: list[tuple[Tensor, Tensor]] = []
    exact = copy.deepcopy(model).double()
    for _ in range(count):
        pending: list[tuple[Tensor, Tensor]] = []
        for letter in pattern:
            if letter in "bo":
                ours, truth = pending.pop(-1 if letter == "b" else 0)
                ours.square().mean().backward()
                truth.square().mean().backward()
                continue
            x = torch.randn(32, 256, device=CUDA)
            pair = fast(x), exact(x.double())
            kept.append((pair[0].detach(), pair[1].detach()))
            if letter == "f":
                pending.append(pair)
    for ours, truth in kept:
        torch.testing.assert_close(ours.double(), truth, rtol=1e-4, atol=1e-4)
    for (name, ours), truth in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None and truth.grad is not None, name
        torch.testing.assert_close(ours.grad.double(), truth.grad, rtol=1e-3, atol=1e-3, msg=name)


@pytest.mark.parametrize("pattern", ["fb", "ffbb", "fdb", "dfb", "fbfb", "fffbbb", "ffofofoo"])
def test_unasked_recordings_keep_every_result(pattern: str) -> None:
    model = Block().to(CUDA)
    fast = fc.compile(model, strict=True)
    steps_beside_eager(fast, model, 6, pattern)
    assert decisions(fast) == [UNASKED] * 2


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("batches", [1, 3])
def test_gradients_are_lent_until_one_is_held_too_long(is_late: bool, batches: int) -> None:
    """is_late: gradients are cleared behind the forward. batches: those whose gradients add up."""
    model = Block().to(CUDA)
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, strict=True)
    for _ in range(8):
        for batch in range(batches):
            x = torch.randn(32, 256, device=CUDA)
            for called, of in ((fast, model), (exact, exact)):
                if batch == 0 and not is_late:
                    of.zero_grad()
                loss = called(x.to(of.up.weight.dtype)).square().mean()
                if batch == 0 and is_late:
                    of.zero_grad()
                loss.backward()
                del loss
        for (name, ours), truth in zip(model.named_parameters(), exact.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.double(), truth.grad, rtol=1e-3, atol=1e-3, msg=name)  # type: ignore[union-attr]
    assert decisions(fast) == [UNASKED] * 2


@pytest.mark.parametrize("pays", [True, False])
def test_steps_are_timed_with_and_without_cuda_graphs(
    pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pairs.Terms, "refusal", "its launches take 2 us")
    monkeypatch.setattr(pairs.Terms, "is_open", True)
    monkeypatch.setattr(pairs, "GAIN", -10.0 if pays else 0.99)
    model = Block().to(CUDA)
    fast = fc.compile(model, strict=True)
    steps_beside_eager(fast, model, 16, "fb")
    model.zero_grad()
    steps_beside_eager(fast, model, 4, "fb")
    assert all("and with CUDA graphs" in decision for decision in decisions(fast)), decisions(fast)
    assert all(decision.startswith(RECORDED) == pays for decision in decisions(fast))


class Broken(nn.Module):
    """A small and a large part, with a graph break between them."""

    def __init__(self) -> None:
        super().__init__()
        self.small = Block()
        self.large = nn.Sequential(nn.Linear(256, 4096), nn.GELU(), nn.Linear(4096, 256))

    def forward(self, x: Tensor) -> Tensor:
        x = self.small(x)
        torch._dynamo.graph_break()
        return self.large(x)


@pytest.mark.filterwarnings("ignore:TorchDynamo breaks the graph")
def test_others_keep_their_cuda_graphs_where_one_does_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their memory is the same: they are captured anew, in other memory."""
    is_large = property(lambda terms: "its launches take 2 us" if terms.peak > 4e6 else None)
    monkeypatch.setattr(pairs.Terms, "refusal", is_large)
    monkeypatch.setattr(pairs.Terms, "is_open", True)
    monkeypatch.setattr(pairs, "GAIN", 0.99)
    model = Broken().to(CUDA)
    fast = fc.compile(model)
    steps_beside_eager(fast, model, 24, "fb")
    recorded = [decision == UNASKED for decision in decisions(fast)]
    assert sorted(recorded) == [False, False, True, True], decisions(fast)
    assert all("and with CUDA graphs" in d for d, r in zip(decisions(fast), recorded, strict=True) if not r)


def test_unasked_inference_keeps_every_result() -> None:
    model = nn.Sequential(*(Block() for _ in range(3))).to(CUDA).eval()  # of one, few kernels are launched
    fast = fc.compile(model, dynamic=False, strict=True)
    with torch.no_grad():
        inputs = [torch.randn(16, 256, device=CUDA) for _ in range(8)]
        results = [fast(x) for x in inputs]
        for x, got in zip(inputs, results, strict=True):
            torch.testing.assert_close(got, nn.Sequential.forward(model, x), rtol=1e-4, atol=1e-4)
    assert decisions(fast) == [UNASKED]


def test_a_failed_allocation_of_anybody_drops_what_is_kept() -> None:
    assert hasattr(torch._C, ATTACH)
    model = Block().to(CUDA)
    fast = fc.compile(model, strict=True)
    steps_beside_eager(fast, model, 3, "fb")
    assert decisions(fast) == [UNASKED] * 2
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 50, dtype=torch.uint8, device=CUDA)
    assert all("memory does not suffice" in decision for decision in decisions(fast))
    model.zero_grad()
    steps_beside_eager(fast, model, 3, "fb")


def test_all_graphs_of_a_model_share_a_pool_and_are_replayed() -> None:
    """Equal blocks, compiled once, with breaks between them; the second half after an evaluation."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
                torch._dynamo.graph_break()
            return x

    model = Net().to(CUDA)
    fast = fc.compile(model)
    with pytest.warns(FusionWarning, match="graph_break"):
        steps_beside_eager(fast, model, 4, "fb")
    assert all(decision.startswith(UNASKED) for decision in decisions(fast))
    with torch.no_grad():
        x = torch.randn(32, 256, device=CUDA)
        torch.testing.assert_close(fast(x), Net.forward(model, x), rtol=1e-4, atol=1e-4)
    model.zero_grad()
    steps_beside_eager(fast, model, 6, "fb")


def test_long_work_is_not_recorded_unasked() -> None:
    fast = fc.compile(lambda x: torch.softmax(x, -1), strict=True)
    with torch.no_grad():
        fast(torch.randn(1 << 16, 4096, device=CUDA))
    assert "its launches take" in decisions(fast)[0]


def test_a_replay_launches_once() -> None:
    model = Block().to(CUDA).eval()
    fast = fc.compile(model, cudagraphs=True, strict=True)
    x = torch.randn(64, 256, device=CUDA)
    with torch.no_grad():
        for _ in range(5):
            fast(x)
        activities = [torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities, acc_events=True) as traced:
            fast(x)
    names = [event.name for event in traced.events() or ()]
    assert not [name for name in names if name.startswith("aten::addmm")]


def test_training_gives_eagers_gradients() -> None:
    model = Block().to(CUDA)
    exact = copy.deepcopy(model).double()
    plain = copy.deepcopy(model)
    fast = fc.compile(model, cudagraphs=True, strict=True)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.01) for m in (model, plain, exact)]
    for step in range(8):
        x = torch.randn(32, 256, device=CUDA)
        for called, optimizer in zip((fast, plain, exact), optimizers, strict=True):
            optimizer.zero_grad()
            called(x.to(next(called.parameters()).dtype)).square().mean().backward()
            optimizer.step()
        for (name, ours), eager, truth in zip(
            model.named_parameters(), plain.parameters(), exact.parameters(), strict=True
        ):
            assert ours.grad is not None and eager.grad is not None and truth.grad is not None
            problem = not_worse(ours.grad, eager.grad, truth.grad)
            assert not problem, (step, name, problem)
    assert decisions(fast) == [RECORDED] * 2
    assert int(model.steps) == 8


def test_dropout_differs_from_replay_to_replay_and_agrees_with_backward() -> None:
    fast = fc.compile(lambda x: F.dropout(x * 2, 0.5), cudagraphs=True, strict=True)
    masks: list[Tensor] = []
    for _ in range(6):
        x = torch.ones(1 << 16, device=CUDA, requires_grad=True)
        y = fast(x)
        masks.append(y.detach().clone() != 0)
        y.sum().backward()
        assert x.grad is not None and torch.equal(x.grad != 0, masks[-1])
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert abs((a == b).double().mean().item() - 0.5) < 0.02


def test_a_seed_repeats_a_replay() -> None:
    fast = fc.compile(lambda x: F.dropout(x, 0.5), cudagraphs=True, strict=True)
    x = torch.ones(1 << 12, device=CUDA)
    for _ in range(4):
        fast(x)
    torch.manual_seed(3)
    first = fast(x).clone()
    second = fast(x).clone()
    torch.manual_seed(3)
    assert torch.equal(fast(x), first) and not torch.equal(first, second)


def test_several_forwards_before_a_backward_and_forwards_without() -> None:
    model = Block().to(CUDA)
    plain = copy.deepcopy(model)
    fast = fc.compile(model, cudagraphs=True, strict=True)
    for _ in range(5):
        batches = [torch.randn(16, 256, device=CUDA) for _ in range(2)]
        for called, owner in ((fast, model), (plain, plain)):
            owner.zero_grad()
            with torch.no_grad():
                called(batches[0])
            torch.compiler.cudagraph_mark_step_begin()
            for batch in batches:
                called(batch).square().mean().backward()
        for ours, eager in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, eager.grad)


def test_a_cache_that_is_marked_is_written_in_replays() -> None:
    def put(cache: Tensor, new: Tensor, where: Tensor) -> Tensor:
        cache.index_copy_(0, where, torch.tanh(new))
        return cache.sum(0)

    fast = fc.compile(put, cudagraphs=True, strict=True)
    mine = torch.randn(32, 64, device=CUDA)
    theirs = mine.clone()
    torch._dynamo.mark_static_address(mine)
    with torch.no_grad():
        for position in range(8):
            new, where = torch.randn(1, 64, device=CUDA), torch.tensor([position], device=CUDA)
            torch.testing.assert_close(fast(mine, new, where), put(theirs, new, where))
            torch.testing.assert_close(mine, theirs)
    assert decisions(fast) == [RECORDED]


def test_caches_that_move_and_grow_are_written_in_replays() -> None:
    """As `generate` makes them: for each prompt one of its own length."""

    def put(cache: Tensor, new: Tensor, where: Tensor) -> Tensor:
        cache.index_copy_(0, where, torch.tanh(new))
        return cache.sum(0)

    fast = fc.compile(put, cudagraphs=True, strict=True)
    with torch.no_grad():
        for length in (32, 48, 32, 96, 48):
            mine = torch.randn(length, 64, device=CUDA)
            theirs = mine.clone()
            for position in range(6):
                new, where = torch.randn(1, 64, device=CUDA), torch.tensor([position], device=CUDA)
                torch.testing.assert_close(fast(mine, new, where), put(theirs, new, where))
                torch.testing.assert_close(mine, theirs)
    assert decisions(fast) == [f"{RECORDED}; {FORMS}"] * 2


def test_sizes_that_come_twice_are_replayed() -> None:
    fast = fc.compile(lambda x: torch.softmax(x, -1).sum(0) + 1, cudagraphs=True, dynamic=True, strict=True)
    with torch.no_grad():
        for rows in (4, 5, 9, 5, 4, 5, 9, 4):
            x = torch.randn(rows, 8, device=CUDA)
            torch.testing.assert_close(fast(x), torch.softmax(x, -1).sum(0) + 1)
    assert decisions(fast) == [f"{RECORDED}; {FORMS}"]


def test_what_is_not_recorded_says_why_and_is_right() -> None:
    def put(cache: Tensor, new: Tensor) -> Tensor:
        with torch.no_grad():  # else autograd writes, outside of the graph
            cache.add_(new.detach())
        return (cache * new).sin()

    fast = fc.compile(put, cudagraphs=True)
    with pytest.warns(FusionWarning, match="address may change"):
        for _ in range(3):
            mine, new = torch.randn(64, device=CUDA), torch.randn(64, device=CUDA)
            theirs, weight = mine.clone(), new.clone().requires_grad_()
            torch.testing.assert_close(fast(mine, weight), put(theirs, weight))
    dynamic = fc.compile(lambda x: x.sin() + 1, cudagraphs=True, dynamic=True)
    with pytest.warns(FusionWarning, match="sizes differ"):
        for rows in (4, 5, 9):
            x = torch.randn(rows, 8, device=CUDA, requires_grad=True)
            torch.testing.assert_close(dynamic(x), x.sin() + 1)
