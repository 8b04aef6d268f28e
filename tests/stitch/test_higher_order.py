"""Higher-order operators: calls around which all else is fused; FlexAttention's go to Inductor on a GPU."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor.lowering import lowerings
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils import _pytree as pytree

import fusion_compiler as fc
from fusion_compiler.capture.decompositions import decomposition_table
from fusion_compiler.errors import FusionWarning
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
    assert left.kind == "contraction" and left.reason == "library call"
    assert {"sin", "mul"} <= {op.rpartition("_")[0] or op for c in fast.plan[-1].clusters for op in c.ops}


@pytest.mark.parametrize("grad", [False, True])
def test_other_higher_order_operators_stay_calls(grad: bool) -> None:
    def branches(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos() + 1, (x * 2,)) + 1

    fast = fc.compile(branches, backend="eager", device="h200")
    for sign in (1, -1):
        x = sign * torch.rand(4, 8, dtype=torch.float64)
        x.requires_grad_(grad)
        torch.testing.assert_close(fast(x), branches(x))
        if grad:
            ours, theirs = (torch.autograd.grad(f(x).sum(), x) for f in (fast, branches))
            torch.testing.assert_close(ours, theirs)


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
    for graph, known in ((module.score.graph, False), (gm.score.graph, True)):
        calls = [n for n in graph.nodes if n.op == "call_function"]
        assert calls and all(n.target in lowerings for n in calls) == known
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
