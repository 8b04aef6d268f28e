"""Lowering once for equal structure leaves every plan as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.dag import OpDag, build
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.loops import Random
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.ops.own.random import seed, uniform
from fusion_compiler.passes.fuse import memo
from fusion_compiler.passes.fuse.cluster import plan as plan_clusters
from fusion_compiler.passes.fuse.memo import Memo


class Layer(nn.Module):
    def __init__(self, power: float) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(32), nn.Linear(32, 32)
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        y = torch.softmax(self.inner(self.norm(x)).view(2, 8, 4, 8).transpose(1, 2), -1)
        y = F.dropout(y.transpose(1, 2).reshape(2, 8, 32) ** self.power, 0.1)
        return x + F.dropout(y, 0.2)


def dag_of(powers: list[float]) -> OpDag:
    model = nn.Sequential(*(Layer(p) for p in powers))
    names = dict(model.named_parameters())

    def gradients(x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        named = dict(zip(names, parameters, strict=True))
        loss = torch.func.functional_call(model, named, (x,)).square().mean()
        return (loss, *torch.autograd.grad(loss, list(parameters)))

    inputs = (torch.randn(2, 8, 32), *(p.detach().requires_grad_() for p in names.values()))
    return build(make_fx(gradients, decomposition_table(), tracing_mode="fake")(*inputs))


def planned(dag: OpDag) -> FusionPlan:
    return plan_clusters("graph", dag, device_spec("h200"), {})


def test_plans_are_the_same_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    dag = dag_of([2.0, 2.0, 3.0])
    with_memo = planned(dag)
    monkeypatch.setattr(Memo, "__call__", lambda self, ops, outputs: self._price(ops, outputs))
    without = planned(dag)
    assert str(with_memo) == str(without)
    assert with_memo.decisions == without.decisions
    for mine, theirs in zip(with_memo.clusters, without.clusters, strict=True):
        assert (mine.ops, mine.inputs, mine.outputs, mine.cost) == (
            theirs.ops,
            theirs.inputs,
            theirs.outputs,
            theirs.cost,
        )
        assert canonical(mine, dag) == canonical(theirs, dag)
        assert mine.nests == theirs.nests  # with the salts of each layer


def test_a_further_equal_layer_costs_nothing_new(monkeypatch: pytest.MonkeyPatch) -> None:
    memos: list[Memo] = []
    monkeypatch.setattr(
        "fusion_compiler.passes.fuse.candidates.Memo", lambda *a: memos.append(memo.Memo(*a)) or memos[-1]
    )
    for layers in (4, 6):
        planned(dag_of([2.0] * layers))
    small, large = (len(m._results) for m in memos)
    assert large <= small * 1.1


def test_ops_that_differ_in_a_number_alone_are_not_the_same() -> None:
    def powers(x: Tensor) -> tuple[Tensor, ...]:
        return (x + 0.0, x + -0.0, x + 1, x + 1.0, torch.where(x > 0, x, 0.0))

    dag = build(make_fx(powers, tracing_mode="fake")(torch.randn(4)))
    keys = Memo(dag, lambda ops, outputs: pytest.fail("not priced"))
    named = [n for n in dag.order if n.startswith("add")]
    assert len({keys._key((n,), (n,))[0] for n in named}) == len(named) == 4


def test_numbers_of_two_salts_are_not_those_of_one() -> None:
    salts = ((3, 3), (3, 5), (5, 5), (7, 3))

    def differences(x: Tensor) -> tuple[Tensor, ...]:
        drawn = seed(x.device)
        return tuple(uniform(drawn, [4], a) - uniform(drawn, [4], b) for a, b in salts)

    dag = build(make_fx(differences, tracing_mode="fake")(torch.randn(4)))
    keys = Memo(dag, lambda ops, outputs: pytest.fail("not priced"))
    same, two, same_again, two_again = (
        keys._key((*dag.op(n).inputs, n), (n,)) for n in dag.order if n.startswith("sub")
    )
    assert same[0] == same_again[0] != two[0] == two_again[0]
    assert (same[2], two[2], same_again[2], two_again[2]) == ((3,), (3, 5), (5,), (7, 3))
    drawn = [
        tuple(n.salt for n in nest.nodes if isinstance(n, Random))
        for cluster in planned(dag).clusters
        for nest in cluster.nests
    ]
    assert sorted({salt for nest in drawn for salt in nest}) == [3, 5, 7]
