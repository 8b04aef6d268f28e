"""report.why() with pieces of source: the call that a piece names, of all that one line computes."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fusion_compiler as fc
from fusion_compiler.ir.sources import frames_of, marked
from fusion_compiler.passes.fuse.source_lookup import references

VERSION = tuple(int(n) for n in torch.__version__.split("+")[0].split(".")[:2])


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.n, self.f1, self.f2 = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.f2(F.relu(self.f1(self.n(x))))


class Chained(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        i = x.topk(12, -1).indices
        w = x.gather(-1, i) * 2
        return (w / w.sum(-1, keepdim=True)).tanh()


def gate(x: Tensor) -> Tensor:
    return torch.sigmoid(x) * x


class Nested(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.amax(-1) + gate(x.exp()).sum(-1)


def asked(model: nn.Module, a: str, b: str, *shape: int) -> list[str]:
    return [str(answer) for answer in fc.explain(model, torch.randn(*shape)).why(a, b)]


@pytest.mark.parametrize(
    ("a", "b", "forward"),
    [
        ("F.relu", "n", "layer_norm and relu_2 are apart: convex"),
        ("relu", "n", "layer_norm and relu_2 are apart: convex"),
        ("self.f1(", "F.relu(", "addmm and relu_2 are apart: contraction"),
        ("x + self.f2", "n", "layer_norm and add_3 are apart: convex"),
        ("self.f2(", "x + self", "addmm_1 and add_3 are apart: contraction"),
        ("self.n(x)", "n", "self.n(x) and n are one kernel: layer_norm"),
    ],
)
def test_a_piece_of_a_dense_line_is_one_call_of_it(a: str, b: str, forward: str) -> None:
    first, *others = asked(Dense(), a, b, 8, 64)
    assert first.startswith(f"graph0.forward: {forward}")
    assert not any("one kernel: layer_norm" in text for text in others)


def test_pieces_of_statements_and_method_chains() -> None:
    for a, b in (("topk", "gather"), ("x.topk", "w.sum")):
        (text,) = asked(Chained(), a, b, 4, 64)
        assert "topk stays an ATen call" in text and "one kernel" not in text
    for a, b in (("x.gather", "w.sum"), ("w /", "tanh")):
        _, answer = asked(Chained(), a, b, 4, 64)[0].split(": ", 1)
        assert answer.startswith(f"{a} and {b} are one kernel: gather_mul_sum")


def test_a_call_of_the_users_own_function_is_what_that_computes() -> None:
    ops = {m.label: m.ops for m in references(fc.explain(Nested(), torch.randn(8, 64)).plans[0].dag, "gate(")}
    assert ops == {"gate(": ("sigmoid", "mul")}
    ops = {m.label: m.ops for m in references(fc.explain(Nested(), torch.randn(8, 64)).plans[0].dag, "exp")}
    assert ops == {"exp": ("exp",)}


def test_a_piece_that_is_several_calls_is_answered_for_each() -> None:
    def twice(x: Tensor) -> Tensor:
        return torch.exp(x) @ torch.exp(x * 2).sum(0)

    report = fc.explain(twice, torch.randn(64, 64))
    (place,) = {f.line for n in report.plans[0].dag.module.graph.nodes for f in frames_of(n)}
    matches = references(report.plans[0].dag, "torch.exp")
    assert [(m.label, m.ops) for m in matches] == [
        (f"torch.exp(x) (test_source_lookup.py:{place})", ("exp",)),
        (f"torch.exp(x * 2) (test_source_lookup.py:{place})", ("exp_1",)),
    ]
    assert len(report.why("torch.exp", "sum")) == 2


def dynamo_dag(model: Any, *inputs: Tensor) -> Any:
    torch._dynamo.reset()
    fast = fc.compile(model, backend="eager")
    fast(*inputs)
    return fast.plan[0].dag


def test_where_only_the_beginning_of_a_call_is_known_names_decide() -> None:
    dag = dynamo_dag(Dense(), torch.randn(8, 64))
    has_marks = any("^" in (n.meta.get("stack_trace") or "") for n in dag.module.graph.nodes)
    assert has_marks == (VERSION >= (2, 13))
    (relu,) = references(dag, "F.relu")
    assert relu.sure and {str(dag.op(n).target) for n in relu.ops} <= {"aten.relu.default", "aten.le.Scalar"}

    def chain(x: Tensor) -> Tensor:
        return x.softmax(-1).exp()

    dag = dynamo_dag(chain, torch.randn(8, 64))
    (last,) = references(dag, ".exp()")
    assert not {str(dag.op(n).target) for n in last.ops} - {"aten.exp.default"}


def test_what_cannot_be_told_apart_is_not_claimed() -> None:
    """As in torch 2.11, whose TorchDynamo says nothing of columns."""
    report = fc.explain(Dense(), torch.randn(8, 64))
    dag = report.plans[0].dag
    for node in dag.module.graph.nodes:
        if "stack_trace" in node.meta:
            node.meta["stack_trace"] = re.sub(r"\n *[~^]+(?=\n)", "", node.meta["stack_trace"])
    (relu,) = references(dag, "F.relu(")
    assert relu.sure and {str(dag.op(n).target) for n in relu.ops} == {"aten.relu.default"}
    (norm,) = references(dag, "self.n(")  # by its module
    assert norm.sure and len(norm.ops) > 10
    (unclear,) = references(dag, "x + ")
    assert not unclear.sure and len(unclear.ops) > len(norm.ops)
    text = str(report.why("x + ", "n")[0])
    assert ": some of what return x + self.f2(" in text and "which of it cannot be told" in text


def test_marks_are_read_as_they_are_written() -> None:
    node = fx.Graph().placeholder("x")
    line, span = "y = é(a, b) + f(a)", (4, 11)
    outer, inner = '  File "/a.py", line 3, in f\n', '  File "/b.py", line 4, in g\n    g()\n'
    node.meta["stack_trace"] = f"{outer}{marked(line, span)}{inner}"
    first, second = frames_of(node)
    assert (first.code, first.span, first.exact) == (line, span, True)
    assert (second.code, second.span, second.exact) == ("g()", None, False)
