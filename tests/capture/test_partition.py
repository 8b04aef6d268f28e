"""Equal calls of a joint graph become one, as PyTorch's own pass has it, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._functorch import compile_utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_compiler as fc
from fusion_compiler.capture import partition
from fusion_compiler.ops.own import random
from tests import models

aten = torch.ops.aten


def traced(function: Callable[..., Any]) -> fx.GraphModule:
    with FakeTensorMode():
        return make_fx(function)(torch.empty(4, 6), torch.empty(4, 6))


def calls(graph: fx.Graph) -> list[tuple[object, ...]]:
    return [(n.name, n.target, str(n.args), str(n.kwargs)) for n in graph.nodes]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama", "bert", "t5"])
def test_joint_graphs_are_those_of_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original, seen = partition.merge_equal, []

    def compared(graph: fx.Graph) -> None:
        theirs = compile_utils.fx_graph_cse(graph)
        before = len(graph.nodes)
        original(graph)
        assert calls(graph) == calls(theirs)
        seen.append(before - len(graph.nodes))

    monkeypatch.setattr(partition, "merge_equal", compared)
    model, batch = models.small(name, dropout=False)
    fc.compile(model, backend="eager")(**batch).loss.backward()
    assert sum(seen) > 10


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (lambda x, y: torch.tanh(x * 2) + torch.tanh(x * 2), 3),
        (lambda x, y: (x + y) * (x + y) - (y + x), 4),  # commuted operands are other arguments
        (lambda x, y: x * 1 + x * 1.0 + x * True, 5),
        (lambda x, y: torch.full((2,), 0.0) / torch.full((2,), -0.0), 3),
        (lambda x, y: (torch.tanh(x), torch.tanh(x)), 2),  # the caller may write into one of the two
        (lambda x, y: (torch.tanh(x).view(-1), torch.tanh(x) + 1), 4),
        (lambda x, y: torch.rand(3) + torch.rand(3), 3),
        (lambda x, y: torch.empty(3).fill_(1) + torch.empty(3).fill_(2), 5),
        (lambda x, y: torch.tanh(x) + y.add_(1) + torch.tanh(x), 5),
        (lambda x, y: torch.max(x, 0)[0] + torch.max(x, 0)[0], 3),
        (lambda x, y: random.seed(x.device) + random.seed(x.device), 3),
    ],
)
def test_what_is_merged_and_what_is_not(function: Callable[[Tensor, Tensor], Any], left: int) -> None:
    gm = traced(function)
    partition.merge_equal(gm.graph)
    gm.graph.eliminate_dead_code()
    gm.graph.lint()
    assert len([n for n in gm.graph.nodes if n.op == "call_function"]) == left, gm.graph


def test_inductor_stays_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes half a second to import."""

    def refuse(graph: fx.Graph) -> None:
        raise AssertionError("PyTorch's own pass ran")

    monkeypatch.setattr(torch._functorch.partitioners, "fx_graph_cse", refuse)
    x = torch.randn(4, 6, requires_grad=True)
    fc.compile(lambda x: torch.softmax(x, -1).sum(), backend="eager")(x).backward()
    assert x.grad is not None and float(x.grad.abs().max()) < 1e-6


@pytest.mark.parametrize("step", [1, 2])
def test_saved_arguments_are_as_they_were_before_they_are_written(step: int) -> None:
    """The backward makes a mask again from an index, which the forward overwrites."""

    def fn(x: Tensor, index: Tensor) -> Tensor:
        taken = torch.take_along_dim(x, index, -1)
        index.fill_(2)
        return taken

    x, larger = torch.randn(3, 5, 20), torch.arange(30).remainder(20).view(3, 10, 1)
    results: list[Tensor] = []
    for f in (fn, fc.compile(fn, backend="interpret")):
        leaf, index = x.clone().requires_grad_(), larger.clone()[:, ::step][:, :5]
        out = f(leaf, index)
        results += [out.detach(), index, *torch.autograd.grad(out, leaf, torch.ones_like(out))]
    for ours, eager in zip(results[3:], results[:3], strict=True):
        torch.testing.assert_close(ours, eager)


def test_saved_arguments_that_need_gradients_are_as_they_were_too() -> None:
    """AOTAutograd writes those itself, when the graph has run."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        product = x * torch.sigmoid(y + 1)
        y.mul_(2)
        return product

    x, y = torch.randn(4, 6), torch.randn(4, 6)
    results: list[tuple[Tensor, ...]] = []
    for f in (fn, fc.compile(fn, backend="interpret")):
        leaves = [x.clone().requires_grad_(), y.clone().requires_grad_()]
        other = leaves[1].clone()
        out = f(leaves[0], other)
        results.append((out.detach(), other.detach(), *torch.autograd.grad(out.sum() + other.sum(), leaves)))
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)


def padded_and_turned(x: Tensor) -> Tensor:
    """A padded or flipped tensor is as large as its source, which the backward has."""
    wide = torch.nn.functional.pad(x.sin(), (0, 3))
    return wide.flip(0).exp() * wide


def test_pads_and_flips_are_made_again_in_backward() -> None:
    x, grad = torch.randn(8, 13, dtype=torch.float64, requires_grad=True), torch.randn(8, 16).double()
    fast = fc.compile(padded_and_turned, backend="interpret", strict=True)
    truth = padded_and_turned(x)
    torch.testing.assert_close(fast(x), truth)
    (ours,) = torch.autograd.grad(fast(x), x, grad)
    torch.testing.assert_close(ours, torch.autograd.grad(truth, x, grad)[0])
    forward, backward = fast.plan
    kept = set(forward.dag.outputs[1:]) - set(forward.dag.inputs)
    assert not kept, f"{kept} is saved where x does"
    assert len(forward.clusters) == 1 and not backward.leftovers
