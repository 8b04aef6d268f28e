"""Higher-order operators: calls around which all else is fused; FlexAttention's go to Inductor on a GPU."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.map import map as map_rows
from torch._inductor.lowering import lowerings
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils import _pytree as pytree

import fusion_compiler as fc
from fusion_compiler.errors import FusionWarning
from fusion_compiler.ir.graph_info import Phase
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.runtime.cuda_graphs import Form, refusal
from fusion_compiler.stitch.higher_order import Lowered, lowered

HIGHER = torch.ops.higher_order


def capped(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return 20 * torch.tanh(score / 20)


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def attention(length: int, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Causal, with scores capped, and work on both sides of it."""
    mask = create_block_mask(causal, None, None, length, length, device=device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flex_attention(q * 1.5, k, v, score_mod=capped, block_mask=mask).sin() + 1

    return attend


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 20 * torch.tanh(q * 1.5 @ k.mT / q.shape[-1] ** 0.5 / 20)
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return (torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v).sin() + 1


def test_all_around_flex_attention_is_fused() -> None:
    q, k, v = (torch.randn(1, 2, 128, 16, dtype=torch.float64) for _ in range(3))
    fast = fc.compile(attention(128, "cpu"), backend="eager", device="h200", strict=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", FusionWarning)
        torch.testing.assert_close(fast(q, k, v), dense(q, k, v))
    (left,) = [x for p in fast.plan for x in p.leftovers if "flex" in x.target]
    assert left.rule == "library call" and left.reason == "library call"
    assert {"sin", "mul"} <= {op.rpartition("_")[0] or op for c in fast.plan[-1].clusters for op in c.ops}


def branches(x: Tensor) -> Tensor:
    """A branch in a branch; which of the three runs is told by the signs of x."""

    def positive(y: Tensor) -> Tensor:
        return torch.cond(y[0, 0] > 0, lambda z: z.sin() * 2, lambda z: torch.tanh(z) * z, (y,))

    return torch.cond(x.sum() > 0, positive, lambda y: (y.softmax(-1) + 1) * 3, (x * 2,)) + 1


@pytest.mark.parametrize("grad", [False, True])
def test_branches_are_compiled(grad: bool) -> None:
    fast = fc.compile(branches, backend="interpret", strict=True)
    for sign, first in ((1, 1), (1, -1), (-1, 1)):
        x = sign * torch.rand(4, 8) + 0.1
        x[0, 0] = first
        x.requires_grad_(grad)
        wide = x.detach().double().requires_grad_(grad)
        torch.testing.assert_close(fast(x), branches(wide).float(), rtol=1e-5, atol=1e-5)
        if grad:
            (ours,), (truth,) = (torch.autograd.grad(f(v).sum(), v) for f, v in ((fast, x), (branches, wide)))
            torch.testing.assert_close(ours, truth.float(), rtol=1e-5, atol=1e-5)
    phases = ["forward", "backward"] if grad else ["inference"]
    for phase in phases:
        plans = [plan for plan in fast.plan if plan.name.startswith(f"graph0.{phase}.")]
        assert len(plans) == 4 and all(plan.clusters for plan in plans if plan.name.count("graph_") != 1)
    outer = [plan for plan in fast.plan if plan.name.count(".") == 1]
    assert all(any(left.reason.startswith("control flow") for left in plan.leftovers) for plan in outer)


def test_loop_bodies_are_compiled() -> None:
    weight = torch.randn(8, 8) * 0.3

    def loop(x: Tensor) -> Tensor:
        body = lambda i, y: (i + 1, torch.tanh(y @ weight) + y.sin() * 0.5)  # noqa: E731
        count, y = while_loop(lambda i, y: i < 3, body, (torch.tensor(0), x * 2))
        return y + count

    def rows(x: Tensor) -> Tensor:
        return map_rows(lambda row: torch.softmax(row, -1) * 2, x.T).sum(0)

    for function, bodies in ((loop, 2), (rows, 1)):
        fast, x = fc.compile(function, backend="interpret", strict=True), torch.randn(4, 8)
        torch.testing.assert_close(fast(x), function(x), rtol=1e-5, atol=1e-5)
        assert len(fast.plan) == 1 + bodies and all(plan.clusters for plan in fast.plan)


def test_what_data_chooses_is_not_recorded() -> None:
    with FakeTensorMode():
        x = torch.empty(4, device="cuda")
        graph = fx.Graph()
        flag, value = graph.placeholder("flag"), graph.placeholder("x")
        flag.meta["val"], value.meta["val"] = torch.empty((), dtype=torch.bool, device="cuda"), x
        node = graph.call_function(HIGHER.cond, (flag, None, None, (value,)))
        node.meta["val"] = (x,)
        graph.output((node,))
        gm = fx.GraphModule(torch.nn.Module(), graph)
    assert refusal(gm, Form(), Phase.INFERENCE) == "data decides what cond runs"


def call(*values: Any, results: Any) -> tuple[fx.Node, fx.GraphModule]:
    """A graph with one call of FlexAttention on those values, None for a graph of its own."""
    graph, module = fx.Graph(), torch.nn.Module()
    with FakeTensorMode():
        numbers = [torch.empty((), dtype=dtype) for dtype in (torch.bfloat16, *[torch.int32] * 4)]
    table = decomposition_table()  # of which some operators are none of Inductor's
    module.score = make_fx(lambda s, b, h, i, j: 1 - s.float(), decomposition_table=table)(*numbers)
    nodes: list[fx.Node] = []
    for i, value in enumerate(values):
        nodes.append(graph.get_attr("score") if value is None else graph.placeholder(f"x{i}"))
        if value is not None:
            nodes[-1].meta["val"] = value
    node = graph.call_function(HIGHER.flex_attention, (nodes[0], (nodes[1:], 7), 0.5))
    node.meta["val"] = results
    graph.output(node)
    return node, fx.GraphModule(module, graph)


def test_a_call_becomes_a_graph_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        a, b = torch.empty(2, 3), torch.empty(4)
    node, module = call(a, None, b, results=(a, (b, None), b))
    compiled, operands = lowered(node, module)
    assert [n.name for n in operands] == ["x0", "x2"]
    seen: list[Any] = []

    def inductor(gm: fx.GraphModule, inputs: list[Any]) -> Callable[[list[Any]], Any]:
        seen.append((gm, inputs))
        return lambda args: (args[0] + 1, args[1] + 2, None, args[1] + 3)

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx_inner", inductor)
    x, y = torch.randn(2, 3), torch.randn(4)
    for _ in range(2):
        first, (second, nothing), third = compiled(x, y)
        assert torch.equal(first, x + 1) and torch.equal(second, y + 2) and torch.equal(third, y + 3)
        assert nothing is None
    ((gm, inputs),) = seen
    assert inputs == [a, b]
    (inner,) = gm.graph.find_nodes(op="call_function", target=HIGHER.flex_attention)
    assert inner.args[1][1] == 7 and inner.args[1][0][0].op == "get_attr"
    for graph, is_lowered in ((module.score.graph, False), (gm.score.graph, True)):
        calls = [n for n in graph.nodes if n.op == "call_function"]
        assert calls and all(n.target in lowerings for n in calls) == is_lowered
    results = gm.graph.output_node().args[0]
    assert [r and (r.target, r.args[1]) for r in results] == [
        (operator.getitem, 0), (operator.getitem, 0), None, (operator.getitem, 2),
    ]  # fmt: skip
    assert results[1].args[0].args == (inner, 1)


def test_what_inductor_raises_is_raised_at_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Lowered) -> Any:
        raise ValueError("no")

    monkeypatch.setattr(Lowered, "_compiled", refuse)
    compiled = Lowered("flex_attention", fx.symbolic_trace(lambda x: x), pytree.tree_structure((1,)))
    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            compiled(torch.ones(1))
