"""A compiled backward in two halves computes what it computes at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

import fusion_compiler as fc
from fusion_compiler.capture.deferred import Deferred, deferring, split
from fusion_compiler.ir.graph_pass import Refused


class Block(nn.Module):
    """A tied weight, two parameters with the same gradient, and one that no result depends on."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.shift, self.other = (nn.Parameter(torch.randn(4, 8)) for _ in range(2))
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        y = y + F.linear(F.silu(F.linear(y, self.up.weight)), self.down.weight) * self.frozen
        return y + self.shift + self.other, y * self.norm.weight


def model_of(dropout: float = 0.0) -> Block:
    torch.manual_seed(0)
    return Block(dropout).double()


def inputs_of(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 8, generator=generator, dtype=torch.double) for _ in range(count)]


def gradients(model: nn.Module, inputs: list[Tensor]) -> list[Tensor | None]:
    return [x.grad for x in (*inputs, *model.parameters())]


def check_gradients(model: nn.Module, inputs: list[Tensor], loss: Callable[[], Tensor]) -> None:
    """Assert that the gradients are those of eager mode, and clear them. loss: computed by the model."""
    ours = gradients(model, inputs)
    for leaf in (*inputs, *model.parameters()):
        leaf.grad = None
    loss().backward()
    torch.testing.assert_close(ours, gradients(model, inputs), rtol=1e-11, atol=1e-13)
    for leaf in (*inputs, *model.parameters()):
        leaf.grad = None


def train(model: nn.Module, call: Any, sent: tuple[int, ...], *, later: bool) -> list[Tensor | None]:
    """Run two microbatches. later: compute the gradients of parameters after both, the second one's first."""
    inputs = [x.requires_grad_() for x in inputs_of(2)]
    sums: list[Deferred] = []
    for number, x in enumerate(inputs):
        torch.manual_seed(5 + number)
        results = call(x)
        with deferring() as deferred:
            roots = [results[i] for i in sent]
            torch.autograd.backward(roots, [torch.cos(y.detach()) for y in roots])
        if later:
            sums.append(deferred)
            assert len(deferred.steps) == 1 and not deferred.refusals
            assert all(p.grad is None for p in model.parameters()) and x.grad is not None
        else:
            deferred.run()
    for deferred in reversed(sums):
        deferred.run()
    return gradients(model, inputs)


@pytest.mark.parametrize("backend", ["eager", "interpret"])
@pytest.mark.parametrize("sent", [(0, 1), (0,), (1,)])
def test_gradients_are_those_of_eager_mode(sent: tuple[int, ...], backend: str) -> None:
    model = model_of()
    truth = train(model, model, sent, later=False)
    model.zero_grad()
    fast = fc.compile(model, backend=backend)
    train(model, fast, sent, later=True)  # compiles
    model.zero_grad()
    for ours, theirs in zip(train(model, fast, sent, later=True), truth, strict=True):
        if theirs is None and ours is not None:  # a compiled backward returns zeros
            theirs = torch.zeros_like(ours)
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)
    assert [p.name for p in fast.plan][-2:] == ["graph0_inputs.backward", "graph0_weights.backward"]


@pytest.mark.parametrize("backend", ["eager", "interpret"])
def test_both_halves_draw_the_same_dropout(backend: str) -> None:
    model = model_of(0.5)
    fast = fc.compile(model, backend=backend)
    inputs = [x.requires_grad_() for x in inputs_of(2)]
    for number, x in enumerate(inputs):
        torch.manual_seed(5 + number)
        results = fast(x)
        torch.autograd.backward(results, [torch.cos(y.detach()) for y in results])
    truth = gradients(model, inputs)
    model.zero_grad()
    for ours, theirs in zip(train(model, fast, (0, 1), later=True), truth, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-13)


def test_what_the_second_half_reads_is_released_after_it() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    fast = fc.compile(model, backend="eager")
    x = inputs_of(1)[0].requires_grad_()
    y = fast(x * 1)
    saved = [StorageWeakRef(t.untyped_storage()) for t in y.grad_fn.saved_tensors if t.shape == (4, 8)]
    with deferring() as deferred:
        y.sum().backward()
    del y
    assert saved and not any(ref.expired() for ref in saved[:1])
    deferred.run()
    assert all(ref.expired() for ref in saved)


def test_hooks_of_a_parameter_are_called_once_with_its_gradient() -> None:
    model = model_of()
    calls: list[Tensor] = []
    model.shift.register_hook(calls.append)
    model.other.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad))
    fast = fc.compile(model, backend="eager")
    y, _ = fast(inputs_of(1)[0].requires_grad_())
    with deferring() as deferred:
        y.backward(torch.ones_like(y))
    deferred.run()
    assert [x.tolist() for x in calls] == [torch.ones(4, 8).tolist()] * 2


@pytest.mark.parametrize("backend", ["eager", "interpret"])
def test_an_input_without_gradient_and_a_graph_without_parameters(backend: str) -> None:
    model = model_of()
    fast = fc.compile(model, backend=backend)
    (x,) = inputs_of(1)
    y, _ = fast(x)
    with deferring() as deferred:
        y.sum().backward()
    assert len(deferred.steps) == 1 and model.up.weight.grad is None
    deferred.run()
    check_gradients(model, [], lambda: model(x)[0].sum())
    bare = fc.compile(nn.Tanh(), backend=backend)
    y = bare(x.requires_grad_())
    with deferring() as deferred:
        y.sum().backward()
    assert deferred == Deferred() and x.grad is not None


def test_a_backward_that_cannot_be_split_runs_at_once_and_says_why() -> None:
    model = model_of()
    fast = fc.compile(model, backend="eager")
    (x,) = inputs_of(1)
    y, _ = fast(x)
    with deferring() as deferred:
        y.sum().backward(retain_graph=True)
    assert not deferred.steps and "keeps its graph" in deferred.refusals[0]
    check_gradients(model, [], lambda: model(x)[0].sum())


def test_what_was_written_between_the_halves_raises() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    fast = fc.compile(model, backend="eager")
    x = torch.randn(3, 8, dtype=torch.double, requires_grad=True)
    y = fast(x)
    with deferring() as deferred:
        y.square().sum().backward()
    with torch.no_grad():
        x.add_(1)  # the gradient of the first weight reads it
    with pytest.raises(RuntimeError, match=r"shape \[3, 8\] were modified by an inplace operation"):
        deferred.run()


def test_sizes_among_the_arguments_are_no_obstacle_to_right_gradients() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)).double()
    fast = fc.compile(model, backend="eager", dynamic=True)
    for rows in (3, 5, 7):
        x = torch.randn(rows, 8, dtype=torch.double, requires_grad=True)
        y = fast(x)
        with deferring() as deferred:
            y.square().sum().backward()
        assert len(deferred.steps) + len(deferred.refusals) == 1
        deferred.run()
        check_gradients(model, [x], lambda x=x: model(x).square().sum())


def test_a_convolution_computes_the_gradients_of_its_weights_in_the_second_half() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GELU(), nn.Conv2d(4, 2, 3)).double()
    fast = fc.compile(model, backend="eager")
    x = torch.randn(2, 2, 8, 8, dtype=torch.double, requires_grad=True)
    y = fast(x)
    with deferring() as deferred:
        y.square().sum().backward()
    assert len(deferred.steps) == 1
    deferred.run()
    check_gradients(model, [x], lambda: model(x).square().sum())
    calls = {plan.name: str(plan).count("convolution_backward") for plan in fast.plan}
    assert calls["graph0_inputs.backward"] and calls["graph0_weights.backward"]


def test_a_backward_that_writes_is_not_split() -> None:
    def write(tangents_1: Tensor, buffer: Tensor) -> tuple[Tensor, Tensor]:
        return buffer.add_(tangents_1), tangents_1 * 2

    graph = make_fx(write)(torch.ones(3), torch.ones(3))
    with pytest.raises(Refused, match="it writes"):
        split(graph, (1,))


def test_the_second_half_takes_what_it_reads_alone() -> None:
    def backward(saved: Tensor, other: Tensor, tangents_1: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        through = tangents_1 * other
        return through @ saved, through.t() @ torch.tanh(saved), through.sum(0)

    graph = make_fx(backward)(torch.ones(3, 3), torch.ones(3, 3), torch.ones(3, 3))
    halves = split(graph, (1, 2))
    assert halves.saved == (0,)  # and the product, which the first half computes for both
    values = [torch.randn(3, 3) for _ in range(3)]
    first = halves.inputs(*values)
    assert first[1:3] == (None, None) and len(first) == 4
    second = halves.weights(values[0], first[3])
    torch.testing.assert_close((first[0], *second), backward(*values))
