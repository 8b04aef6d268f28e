"""explain() plans without running: the plans of compile(), and not a trace of having been there."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import fusion_compiler as fc
from fusion_compiler.capture.pre_autograd import UntraceableError
from fusion_compiler.capture.symbolic_trace import symbolic_trace
from fusion_compiler.compiler import planning
from fusion_compiler.errors import ArgumentMismatchError, NotCallableError, UnsupportedDeviceError
from fusion_compiler.report import explanation
from tests import models


def plain(explained: fc.Report) -> list[dict[str, Any]]:
    """The plans as data, without times and without the names of inputs, which are numbered differently."""
    texts = [json.dumps({**plan.json(), "notes": None, "decisions": None}) for plan in explained.plans]
    return [json.loads(re.sub(r"(primals_|arg)\d+(_1)?", "input", text)) for text in texts]


@pytest.fixture
def by_dynamo(monkeypatch: pytest.MonkeyPatch) -> Callable[..., fc.Report]:
    """explain() as if torch.fx could trace nothing."""

    def refuse(*args: Any) -> None:
        raise UntraceableError("not asked to")

    def explain(*args: Any, **kwargs: Any) -> fc.Report:
        with monkeypatch.context() as patched:
            patched.setattr(explanation, "symbolic_trace", refuse)
            explained = fc.explain(*args, **kwargs)
        assert (explained.captured_by, explained.not_whole) == ("TorchDynamo", "not asked to")
        return explained

    return explain


class Block(nn.Module):
    """A transformer layer: norms, attention, a gated MLP, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(32), nn.RMSNorm(32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.gate, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor, *, p: float = 0.1) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            t.view(batch, length, 4, 8).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).reshape(x.shape)), p)
        y = self.second(x)
        return x + F.dropout(self.down(F.silu(self.gate(y)) * self.up(y)), p)


class Counting(nn.Module):
    """Batch statistics in place, a counter, an auxiliary result, autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.calls = nn.BatchNorm1d(8), nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        with torch.autocast("cpu", torch.bfloat16):
            y = F.gelu(self.linear(self.norm(x)))
        with torch.no_grad():
            scale = y.abs().amax(0)
        return {"loss": (y.float() / (scale + 1)).sum(), "y": y, "calls": self.calls, "none": None}


MLP = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.LayerNorm(16))


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("model", "args"),
    [
        (MLP, (torch.randn(4, 16),)),
        (Block(), (torch.randn(2, 5, 32),)),
        (Block(), (torch.randn(2, 5, 32, requires_grad=True),)),
        (Counting(), (torch.randn(4, 8),)),
        (torch.softmax, (torch.randn(4, 8), -1)),
    ],
    ids=["mlp", "block", "block with input gradient", "counting", "function"],
)
def test_both_captures_give_the_same_plan(
    model: Any, args: tuple[Any, ...], by_dynamo: Callable[..., fc.Report]
) -> None:
    """Ops, clusters, predicted times, refusals, source lines and what is saved for backward."""
    by_fx = fc.explain(model, *args)
    assert (by_fx.captured_by, by_fx.not_whole) == ("torch.fx", "")
    assert "captured by torch.fx\n" in str(by_fx)
    assert plain(by_fx) == plain(by_dynamo(model, *args))
    assert len(by_fx.plans) == (2 if isinstance(model, nn.Module) else 1)


def test_source_lines_and_modules_without_dynamo() -> None:
    explained = fc.explain(Block(), torch.randn(2, 5, 32))
    ops = [explained.plans[0].dag.op(n) for n in explained.plans[0].dag.order]
    sources = {(s.module, s.code) for op in ops if (s := op.source) is not None}
    assert (
        "first",
        "t.view(batch, length, 4, 8).transpose(1, 2) for t in self.qkv(self.first(x)).chunk(3, dim=-1)",
    ) in sources
    assert any(code.startswith("return x + F.dropout(self.down(") and not module for module, code in sources)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2


class Keeping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = torch.tanh(x)
        return self.last * 2


class Hidden:
    def __init__(self, x: Tensor) -> None:
        self.x = x


WEIGHT = torch.randn(8, requires_grad=True)
LAYER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda x: torch.tanh(x) * WEIGHT, "no argument, parameter or buffer"),
        (lambda x: torch.tanh(x)[: int(x.sum())] * 2, "DataDependentOutputException"),
        (lambda x: torch.tanh(x) if x.sum() > 0 else x, "DataDependentOutputException"),
        (lambda x: torch.tanh(x)[x > 0] * 2, "DynamicOutputShapeException"),
        (lambda x: Double.apply(x).sum(), r"autograd.Function \(Double\)"),
        (lambda x: checkpoint(torch.tanh, x, use_reentrant=False) * 2, "checkpointed region"),
        (lambda x: checkpoint(torch.tanh, x, use_reentrant=True) * 2, "autograd.Function"),
        (lambda x: torch.vmap(torch.tanh)(x) * 2, "function transform"),
        (lambda x: Hidden(torch.tanh(x)), "a result is a Hidden"),
        (Keeping(), "keeps a tensor in Keeping.last"),
        (copy.deepcopy(LAYER).eval(), "holds a TransformerEncoderLayer"),
    ],
)
def test_what_torch_fx_cannot_trace_whole_goes_through_dynamo(
    model: Any, reason: str, by_dynamo: Callable[..., fc.Report]
) -> None:
    x = torch.randn(2, 8, 8, requires_grad=True)
    explained = fc.explain(model, x)
    assert explained.captured_by == "TorchDynamo" and re.search(reason, explained.not_whole)
    assert f"captured by TorchDynamo, not whole by torch.fx: {explained.not_whole}" in str(explained)
    assert plain(explained) == plain(by_dynamo(model, x))


def test_a_refused_transform_is_left_and_code_that_catches_the_refusal_is_refused() -> None:
    def caught(x: Tensor) -> Tensor:
        try:
            return torch.vmap(torch.tanh)(x)
        except Exception:
            return torch.tanh(x)

    depth = torch._C._functorch.get_dynamic_layer_stack_depth
    before = depth()
    with FakeTensorMode() as mode:
        x = torch.empty(2, 8)
    with pytest.raises(UntraceableError, match="function transform"):
        symbolic_trace(caught, (x,), {}, mode)
    assert depth() == before


def test_a_hook_on_the_module_is_no_part_of_it() -> None:
    model = nn.Linear(8, 8)
    model.register_forward_hook(lambda *args: args[-1] * 2)
    assert "hooks" in fc.explain(model, torch.randn(4, 8)).not_whole


def shapes(plans: Any) -> list[tuple[str, list[tuple[str, int]]]]:
    return [(p.name, sorted((c.name, len(c.ops)) for c in p.clusters)) for p in plans]


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_plans_are_those_of_compile(name: str) -> None:
    model, batch = models.small(name, dropout=False)
    explained = fc.explain(model, **batch)
    assert explained.captured_by == "torch.fx"
    fast = fc.compile(model, backend="eager", device="h200")
    fast(**batch).loss.backward()
    assert shapes(explained.plans) == shapes(fast.plan)
    assert any(p.name.endswith("backward") for p in explained.plans)
    for plan in explained.plans:
        assert str(plan) in str(explained)
    assert [g["name"] for g in explained.json()["graphs"]] == [p.name for p in explained.plans]


def test_nothing_is_executed() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return torch.dropout(self.norm(self.linear(x)), 0.5, True).sum()

    model = Stateful()
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    x = torch.randn(4, 8, requires_grad=True)
    copied, random = x.detach().clone(), torch.get_rng_state()
    explained = fc.explain(model, x)
    assert [p.name for p in explained.plans] == ["graph0.forward", "graph0.backward"]
    assert torch.equal(torch.get_rng_state(), random)
    assert model.calls == 0 and x.grad is None and torch.equal(x, copied)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(p.grad is None and not hasattr(p, "fake_mode") for p in model.parameters())


class Counter(nn.Module):
    """Writes into tensors that are neither parameters nor buffers, one of them in a container."""

    def __init__(self, broken: bool) -> None:
        super().__init__()
        self.broken, self.norm = broken, nn.BatchNorm1d(4)
        self.seen, self.more = torch.zeros(4), {"sums": [torch.zeros(4)]}

    def forward(self, x: Tensor) -> Tensor:
        self.seen.add_(1)
        if self.broken:
            torch._dynamo.graph_break()
        self.more["sums"][0].add_(x.sum(0))
        return self.norm(x) + self.seen


def _writers() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[Tensor]]]:
    """Return functions that write into tensors that they hold: each with its arguments and those tensors."""
    held, parameter = torch.ones(3), nn.Parameter(torch.ones(5))
    parameter.grad = torch.full((5,), 0.1)
    optimizer = torch.optim.Adam([parameter])
    optimizer.step()
    cases: dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[Tensor]]] = {
        "closure": (lambda x: x + held.add_(1), (torch.ones(3),), [held]),
        "optimizer": (optimizer.step, (), [parameter, parameter.grad, *optimizer.state[parameter].values()]),
    }
    for broken in (False, True):
        model = Counter(broken)
        tensors = [model.seen, *model.more["sums"], *model.state_dict().values()]
        cases[f"module, {'broken' if broken else 'whole'}"] = (model, (torch.randn(6, 4),), tensors)
    return cases


@pytest.mark.parametrize("name", _writers())
def test_what_the_model_writes_into_stays_as_it_is(name: str) -> None:
    function, args, held = _writers()[name]
    before = [(t._version, t.detach().clone()) for t in held]
    explained = fc.explain(function, *args)
    assert any(plan.dag.order for plan in explained.plans)
    for tensor, (version, value) in zip(held, before, strict=True):
        assert torch.equal(tensor, value)
        assert tensor._version == version or name == "closure"  # autograd counts before a trace sees it


def test_fake_tensors_of_any_device_and_real_sizes() -> None:
    """4 GB activations of a model whose weights never exist, on CUDA that is not there."""
    with FakeTensorMode():
        layer = nn.TransformerEncoderLayer(4096, 32, 16384, batch_first=True, dtype=torch.bfloat16)
        x = torch.empty(64, 4096, 4096, device="cuda", dtype=torch.bfloat16)
        explained = fc.explain(layer, x)
    assert "layer_norm" in str(explained) and len(explained.plans) == 2
    outside = fc.explain(layer, x)
    assert shapes(outside.plans) == shapes(explained.plans)


def test_other_devices_are_predicted_otherwise() -> None:
    x = torch.randn(4096, 1024)
    us = [
        sum(c.cost.us for c in fc.explain(torch.softmax, x, -1, device=d).plans[0].clusters)
        for d in ("h200", "a100")
    ]
    assert us[0] < us[1]


def test_functions_keyword_arguments_and_nested_outputs() -> None:
    def function(pair: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
        return {"a": torch.tanh(pair["x"]) * scale, "b": pair["x"] + 1}

    explained = fc.explain(function, {"x": torch.randn(3, 4)}, scale=2.0)
    assert [p.name for p in explained.plans] == ["graph0.inference"]


def test_what_depends_on_data_is_said() -> None:
    def function(x: Tensor) -> Tensor:
        y = torch.tanh(x)
        return y[: int(y.sum().item())] * 2

    explained = fc.explain(function, torch.randn(8))
    assert explained.plans and explained.incomplete and "incomplete" in str(explained)


def test_a_compiled_module_can_be_explained() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.GELU())
    assert shapes(fc.explain(fc.compile(model), torch.randn(2, 4)).plans) == shapes(
        fc.explain(model, torch.randn(2, 4)).plans
    )


def test_arguments_that_do_not_fit() -> None:
    model = nn.Linear(4, 4)
    for args, kwargs, text in (
        ((), {}, "missing a required argument"),
        ((torch.randn(2, 4),), {"extra": 1}, "unexpected keyword argument 'extra'"),
        ((torch.randn(2, 5),), {}, r"\[2, 5\]"),
    ):
        with pytest.raises(ArgumentMismatchError, match=f"do not fit Linear: .*{text}"):
            fc.explain(model, *args, **kwargs)
    with pytest.raises(NotCallableError):
        fc.explain(torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedDeviceError):
        fc.explain(model, torch.randn(2, 4), device="h2000")


def test_a_compiled_object_answers_from_its_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module and a function: nothing is captured or planned for it once more."""

    class Wave(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.sin() + 1) * x

    for model in (Wave(), lambda x: (x.sin() + 1) * x):
        torch._dynamo.reset()
        fast = fc.compile(model, backend="eager", device="h200")
        assert "no graph" in str(fast.plan) and not fast.report().plans
        fast(torch.randn(7, 40))
        with monkeypatch.context() as patch:
            patch.setattr(planning, "plan_clusters", None)
            report = fast.report()
            (answer,) = fast.why("sin", "mul")
        assert report.plans == tuple(fast.plan) and answer.fused
        assert "inference" in answer.graph and [*report.kernels.values()]


def test_a_model_keeps_a_method_of_its_own_by_such_a_name() -> None:
    class Reporter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

        def report(self) -> str:
            return "its own"

    assert fc.compile(Reporter(), backend="eager").report() == "its own"


class Branches(nn.Module):
    """One branch of two by the data: an operator that holds graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))

    def forward(self, x: Tensor) -> Tensor:
        def positive(y: Tensor) -> Tensor:
            return F.relu(y) * 2

        return torch.cond(x.sum() > 0, positive, torch.sigmoid, (x @ self.weight,)) + x


class Inverse(Branches):
    """The inverse raises an error for some data: an operator with an effect."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x @ torch.linalg.inv(self.weight) + x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("model", "graphs"), [(Branches, 3), (Inverse, 1)])
def test_operators_of_higher_order_are_planned(model: type[nn.Module], graphs: int, training: bool) -> None:
    explained = fc.explain(model().requires_grad_(training), torch.randn(4, 8), device="h200")
    assert not explained.incomplete
    phases = [plan.phase for plan in explained.plans]
    assert phases == (["forward"] * graphs + ["backward"] * graphs if training else ["inference"] * graphs)
    assert any(plan.clusters for plan in explained.plans)
