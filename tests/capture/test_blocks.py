"""Repeated blocks, traced once and copied: the same graph as without, the same numbers as eager."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import re
import secrets
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch import config
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_compiler as fc
from benchmarks.models.workloads import WORKLOADS, step
from fusion_compiler.capture import blocks, capture
from fusion_compiler.capture import repeats as found_repeats
from fusion_compiler.capture.blocks import UnlikeError
from fusion_compiler.capture.repeats import repeats
from fusion_compiler.compiler import compiler
from tests.random_programs.generate import draw
from tests.random_programs.judge import judge
from tests.random_programs.program import Program, assigned

CHAINS = 6  # of drawn programs, in every run


class Layer(nn.Module):
    def __init__(self, shared: nn.Linear, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 12), nn.Linear(12, 8, bias=False)
        self.shared, self.dropout = shared, nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(x)
        q, k = (h.unflatten(-1, (2, 4)).transpose(1, 2) for h in (self.shared(y), y))
        y = nn.functional.scaled_dot_product_attention(q, k, k, mask).transpose(1, 2).flatten(2)
        x = x + self.dropout(y)
        return x + self.down(nn.functional.gelu(self.up(x)))


class Stack(nn.Module):
    """Layers with a parameter in common, a mask that is computed before them, and what lies between."""

    def __init__(self, layers: int = 7, dropout: float = 0.0, collected: bool = False) -> None:
        super().__init__()
        shared = nn.Linear(8, 8)
        self.bias, self.collected = nn.Parameter(torch.randn(5)), collected
        self.layers = nn.ModuleList(Layer(shared, dropout) for _ in range(layers))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        mask = torch.tanh(self.bias)[None, :].expand(5, 5)
        seen: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, mask)
            seen.append(x)
        return (self.head(x), *seen) if self.collected else (self.head(x),)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Counter[Any], int]]:
    """Return a list that receives, for each joint graph, the facts of its nodes and the number of
    storages."""
    graphs: list[tuple[Counter[Any], int]] = []
    original = compiler.partition

    def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        nodes = joint.graph.nodes
        values = [n.meta["val"] for n in nodes if isinstance(n.meta.get("val"), Tensor)]
        graphs.append((Counter(map(told_of, nodes)), len({v.untyped_storage()._cdata for v in values})))
        forward = Counter(n.meta["seq_nr"] for n in nodes if "from_node" in n.meta)
        backward = {n.meta["seq_nr"] for n in nodes if n.meta.get("autograd_backward")}
        graphs[-1][0].update(shared=len(backward & {*forward}), backward=len(backward), forward=len(forward))
        return original(joint, *args, **kwargs)

    monkeypatch.setattr(compiler, "partition", partition)
    return graphs


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The blocks that were copied."""
    numbers: list[int] = []
    original = blocks._Once.copy_forward

    def copy_forward(self: Any, k: int, *rest: Any) -> Any:
        if self._tracer is not None:
            numbers.append(k)
        return original(self, k, *rest)

    monkeypatch.setattr(blocks._Once, "copy_forward", copy_forward)
    return numbers


def gradients(call: Callable[..., Any], model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    results = call(x)
    sum((r * torch.linspace(-1, 1, r.numel()).view_as(r)).sum() for r in results).backward()  # type: ignore[union-attr]
    grads = [p.grad.clone() for p in (x, *model.parameters()) if p.grad is not None]
    return [*(r.detach() for r in results), *grads]


def check(model: nn.Module, **options: Any) -> Any:
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, backend="eager", fullgraph=True, **options)
    for _ in range(2):
        x = torch.randn(2, 5, 8)
        ours, truth = gradients(fast, model, x), gradients(exact, exact, x.double())
        assert len(ours) == len(truth)
        for a, b in zip(ours, truth, strict=True):
            torch.testing.assert_close(a, b, check_dtype=False, rtol=1e-4, atol=1e-5)
    return fast


@pytest.mark.parametrize("collected", [False, True])
def test_gradients_are_eagers(collected: bool, copies: list[int]) -> None:
    check(Stack(collected=collected))
    assert copies == [1, 2, 3, 4]  # of 7: the first and the last two are traced


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["Stack", "BERT", "GPT-2", "Llama"])
def test_graph_and_plan_are_those_without(
    name: str, traced: list[tuple[Counter[Any], int]], copies: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[str] = []
    for once in (True, False):
        torch._dynamo.reset()
        torch.manual_seed(0)
        if not once:
            monkeypatch.setattr(capture, "with_blocks", lambda gm: gm)
        with config.patch(enable_autograd_cache=False):
            if name == "Stack":
                model = Stack(dropout=0.1)
                fast = fc.compile(model, backend="eager", fullgraph=True)
                gradients(fast, model, torch.randn(2, 5, 8))
            else:
                workload = next(w for w in WORKLOADS if w.name.startswith(name) and w.train)
                sizes = {**workload.quick, "layers": 6}
                model, batch = replace(workload, quick=sizes).make(torch.device("cpu"), True, torch.float32)
                fast = fc.compile(model, backend="eager", fullgraph=True)
                step(fast, batch, train=True)
        plans.append(re.sub("seconds: .*", "", str(fast.plan)))
    (ours, memory), (plain, other) = traced
    assert ours - plain == plain - ours == Counter() and memory == other
    assert plans[0] == plans[1] and len(copies) >= 3


def told_of(node: fx.Node) -> tuple[object, ...]:
    """All of a node that is not its name or its place."""
    value = node.meta.get("val")
    look = (value.dtype, tuple(value.shape), value.stride()) if isinstance(value, Tensor) else None
    modules = [*(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}).values()]
    where = str(modules[-1]) if modules else None
    keys, tag = frozenset(node.meta), node.meta.get("partitioner_tag")
    return str(node.target) if node.op == "call_function" else node.op, look, where, keys, tag


def test_without_gradients(copies: list[int]) -> None:
    model = Stack().eval()
    fast = fc.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        x, exact = torch.randn(2, 5, 8), copy.deepcopy(model).double()
        torch.testing.assert_close(fast(x)[0], exact(x.double())[0], check_dtype=False)
    assert copies == [1, 2, 3, 4, 5, 6]


def test_dropout_of_each_block_is_its_own(copies: list[int]) -> None:
    class Drops(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            seen: list[Tensor] = []
            for _ in range(8):
                x = nn.functional.dropout(x * 1.5, 0.5) + 1
                seen.append(x)
            return tuple(seen)

    first, *rest = fc.compile(Drops(), backend="eager", fullgraph=True)(torch.ones(64, requires_grad=True))
    assert len(copies) == 5
    for later in rest:
        assert not torch.equal(later == 1, first == 1)


def chained(program: Program, times: int = 6) -> Program | None:
    """A drawn program on what it has made of one of its arguments, several times; None where it makes nothing
    that looks like one."""
    with warnings.catch_warnings(action="ignore"):
        if program.dynamic or program.mutated:
            return None
        results = dict(zip(program.results, program.function(*program.arguments()), strict=True))
    looks = {i.name: (x.shape, x.dtype) for i, x in zip(program.inputs, program.arguments(), strict=True)}
    # Of float64 the judge has no wider numbers to round other sums by, and blocks add up in another order.
    wanted = [i.name for i in program.inputs if i.gradient and i.dtype != "float64"]
    smooth = (n for n in results if n.startswith("v") and results[n].requires_grad)
    pairs = [(a, n) for n in smooth for a in wanted if (results[n].shape, results[n].dtype) == looks[a]]
    if not pairs:
        return None
    argument, result = pairs[-1]
    lines: list[str] = []
    values = sum(assigned(line) is not None for line in program.lines)

    def name(k: int, text: str) -> str:
        if text[0] == "v":
            return f"v{int(text[1:]) + k * values}"
        return name(k - 1, result) if text == argument and k else text

    for k in range(times):
        renamed = functools.partial(re.sub, r"\b[av]\d+\b", lambda match, k=k: name(k, match[0]))
        lines += map(renamed, program.lines)
    ends = tuple(name(k, n) for k in range(times) for n in program.results if n[0] == "v")
    return replace(program, lines=tuple(lines), results=ends)


def test_fresh_chains() -> None:
    first = int(os.environ.get("FUSION_RANDOM_SEED", secrets.randbelow(2**31)))
    drawn = filter(None, map(chained, map(draw, itertools.count(first))))
    for program in itertools.islice(drawn, CHAINS):
        # With backend "eager" each ATen call rounds to 16 bits: gradients may be less exact than eager's.
        verdict = judge(program, lambda fn, _: fc.compile(fn, backend="interpret", fullgraph=True))
        assert not verdict.failed, f"{first}: {verdict}\n{verdict.detail}\n{program.text()}"


def test_blocks_that_differ_are_traced_one_by_one(copies: list[int]) -> None:
    model = Stack()
    for parameter in model.layers[3].up.parameters():  # type: ignore[union-attr]
        parameter.requires_grad_(False)
    check(model)
    assert copies == [1, 2, 4]


def test_what_cannot_be_copied_is_traced_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def unlike(*_: Any) -> Any:
        raise UnlikeError("a test")

    monkeypatch.setattr(blocks._Once, "copy_backward", unlike)
    fast = check(Stack())
    assert "each block is traced by itself: UnlikeError: a test" in str(fast.plan)


def chain(*calls: Callable[[Tensor], Tensor]) -> fx.Graph:
    def run(x: Tensor) -> Tensor:
        for call in calls:
            x = call(x)
        return x

    return make_fx(run, tracing_mode="fake")(torch.randn(4, 4)).graph


def test_keys_grow_as_the_graph_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list of thousands that has as many readers took minutes: each wrote all of it."""
    looked: list[object] = []
    look = found_repeats.look
    monkeypatch.setattr(found_repeats, "look", lambda value: (looked.append(value), look(value))[1])

    def counted(rows: int) -> int:
        looked.clear()
        graph = make_fx(lambda x: x.unbind()[0], tracing_mode="fake")(torch.randn(rows, 2)).graph
        assert repeats(graph) == []
        return len(looked)

    assert counted(400) < 2.5 * counted(200)


def test_blocks_are_found_by_what_they_compute() -> None:
    def block(x: Tensor) -> Tensor:
        return x + torch.tanh(x * 2).sin()

    (repeat,) = repeats(chain(torch.cos, *[block] * 6, torch.exp))
    assert [len(b) for b in repeat.blocks] == [4] * 6 and len(repeat.outputs) == 1
    assert [str(n.target) for n in repeat.blocks[0]][-1] == "aten.add.Tensor"
    assert not repeats(chain(*[block] * 4))
    assert not repeats(chain(*[lambda x, k=k: block(x) + k for k in range(6)]))  # type: ignore[misc]
    two = repeats(chain(*[block] * 6, torch.exp, *[lambda x: x.relu() - 1] * 9))
    assert [len(r.blocks) for r in two] == [6, 9]
    assert not repeats(chain(*[lambda x: x.mul_(2).add_(1)] * 8))
