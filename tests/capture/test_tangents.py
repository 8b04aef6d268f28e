"""Backward is told which gradients nobody sends, and makes no zeros in their place."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import fusion_compiler as fc
from fusion_compiler.capture.tangents import Backward, Missing
from fusion_compiler.compiler import compiler
from fusion_compiler.ir.dag import OpDag
from tests.fake_gpu import FakeGpu, use


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.inner(x)
        return y.square().mean(), torch.tanh(y), y.view(-1)


def gradients(model: nn.Module, x: Tensor, sent: Sequence[int]) -> list[Tensor]:
    results = model(x)
    chosen = [results[i] for i in sent]
    weights = [torch.linspace(1, 2, r.numel(), dtype=torch.float64).view(r.shape) for r in chosen]
    return list(torch.autograd.grad(chosen, (x, *model.parameters()), weights))


@pytest.mark.parametrize("backend", ["eager", "interpret"])
def test_any_set_of_results_may_be_trained_on(backend: str) -> None:
    model = Model()
    fast = fc.compile(model, backend=backend)
    sets: list[list[int]] = [[0], [1], [2], [0, 1], [0, 1, 2], [0]]
    for sent in sets:
        x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
        for mine, theirs in zip(gradients(fast, x, sent), gradients(model, x, sent), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert [p.name for p in fast.plan] == [
        "graph0.forward",
        *(f"graph0.backward{i}" for i in ("", 2, 3, 4, 5)),
    ]
    assert [p.phase for p in fast.plan] == ["forward"] + 5 * ["backward"]


class Transposed(nn.Module):
    """A loss, and a result whose gradient is viewed as it lies by the backward of a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x).transpose(1, 2)
        return y.square().mean(), y * 2


@pytest.mark.parametrize("backend", ["eager", "interpret"])
def test_zeros_lie_as_the_gradient_would(backend: str) -> None:
    model = Transposed()
    fast = fc.compile(model, backend=backend)
    for sent in ([0], [1], [0, 1]):
        x = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
        for mine, theirs in zip(gradients(fast, x, sent), gradients(model, x, sent), strict=True):
            torch.testing.assert_close(mine, theirs)
    assert not fast.plan.breaks


def read_shapes(dag: OpDag) -> set[tuple[object, ...]]:
    """Return the shapes of the gradients that a backward graph starts from and reads."""
    names = [n for n in dag.inputs if n.startswith("tangents") and dag.consumers(n)]
    return {dag.op(n).outputs[0].shape for n in names}


def test_a_loss_alone_reads_no_gradient_of_the_other_results() -> None:
    fast = fc.compile(Model(), backend="eager")
    fast(torch.randn(3, 6, dtype=torch.float64))[0].backward()
    assert [read_shapes(p.dag) for p in fast.plan] == [set(), {()}]


def test_sizes_that_only_a_call_knows_keep_autograds_zeros() -> None:
    model = Model()
    fast = fc.compile(model, backend="eager", dynamic=True)
    for rows in (3, 5):
        x = torch.randn(rows, 6, dtype=torch.float64, requires_grad=True)
        for mine, theirs in zip(gradients(fast, x, [0]), gradients(model, x, [0]), strict=True):
            torch.testing.assert_close(mine, theirs)


def test_a_retained_graph_is_run_backward_twice() -> None:
    model, x = Model(), torch.randn(3, 6, dtype=torch.float64)
    loss, features, _ = fc.compile(model, backend="eager")(x)
    loss.backward(retain_graph=True)
    features.sum().backward()
    mine = [p.grad for p in model.parameters()]
    model.zero_grad()
    loss, features, _ = model(x)
    (loss + features.sum()).backward()
    for p, q in zip(mine, model.parameters(), strict=True):
        torch.testing.assert_close(p, q.grad)


class Doubled(torch.autograd.Function):
    """Counts on gradients for both of its results, as autograd.Function promises."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, 2 * x

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return 2 * (grads[0] + grads[1])


def test_what_made_an_argument_is_left_alone() -> None:
    fast = fc.compile(lambda y: (y, y.square().mean(), torch.tanh(y)), backend="eager")
    for _ in range(2):
        x = torch.randn(3, dtype=torch.float64, requires_grad=True)
        passed, loss, _ = fast(Doubled.apply(x)[0])
        (mine,) = torch.autograd.grad(passed.sum() + loss, x)
        torch.testing.assert_close(mine, 2 + 8 * x.detach() / 3)


class Expecting:
    """A backward graph's variants, as they are compiled."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        graph = fx.Graph()
        for i, shape in enumerate(shapes):
            graph.placeholder(f"tangents_{i + 1}").meta["val"] = torch.empty(shape, device="meta")
        graph.output(())
        self.compiled: list[Missing] = []
        self.backward = Backward(fx.GraphModule({}, graph), self._compile, several=len(shapes) > 1)

    def _compile(self, graph: fx.GraphModule, missing: Missing, number: int) -> Any:
        assert number == len(self.compiled)
        self.compiled.append(missing)
        return lambda args: (missing, args)


def test_a_backward_is_made_ahead_for_a_loss_alone() -> None:
    loss = Expecting((), (4, 4), (2,))
    loss.backward.prepare()
    assert loss.compiled == [(False, True, True)]
    assert loss.backward([1.0, None, None])[0] == (False, True, True) and len(loss.compiled) == 1
    assert loss.backward([None, 1.0, None])[0] == (True, False, True) and len(loss.compiled) == 2
    one = Expecting((4, 4))
    one.backward.prepare()
    assert one.compiled == [()] and one.backward([1.0])[0] == () and len(one.compiled) == 1
    for unsure in (Expecting((4,), (2,)), Expecting((), (), (3,))):
        unsure.backward.prepare()
        assert unsure.compiled == [], "who knows which of them is trained on"


def test_a_backward_is_planned_while_the_kernels_of_its_forward_are_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    use(FakeGpu(index=-1), monkeypatch)
    for busy, expected in ((True, ["graph0.forward", "graph0.backward"]), (False, ["graph0.forward"])):
        monkeypatch.setattr(compiler, "compile_all", functools.partial(lambda busy, *_: busy, busy))
        model = Model().to(torch.float32)
        fast = fc.compile(model, tune=False)
        x = torch.randn(3, 6, requires_grad=True)
        loss = fast(x)[0]
        assert [plan.name for plan in fast.plan] == expected
        loss.backward()
        assert [plan.name for plan in fast.plan] == ["graph0.forward", "graph0.backward"]
        want = torch.autograd.grad(model(x)[0], x)[0]
        torch.testing.assert_close(x.grad, want)
