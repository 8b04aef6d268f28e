"""explain() plans without running: the plans of compile(), and not a trace of having been there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_compiler as fc
from fusion_compiler.errors import ArgumentMismatchError, NotCallableError, UnsupportedDeviceError
from tests import models


def shapes(plans: Any) -> list[tuple[str, list[tuple[str, int]]]]:
    return [(p.name, sorted((c.name, len(c.ops)) for c in p.clusters)) for p in plans]


@pytest.mark.parametrize("name", ["llama", "bert", "vit"])
def test_the_plans_are_those_of_compile(name: str) -> None:
    model, batch = models.small(name, dropout=False)
    explained = fc.explain(model, **batch)
    fast = fc.compile(model, backend="eager", device="h200")
    fast(**batch).loss.backward()
    assert shapes(explained.plans) == shapes(fast.plan)
    assert any(p.name.endswith("backward") for p in explained.plans)
    for plan in explained.plans:
        assert str(plan) in str(explained)
    assert [p["graph"] for p in explained.json()] == [p.name for p in explained.plans]


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
