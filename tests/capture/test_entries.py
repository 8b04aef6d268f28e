"""Methods besides forward: those that Lightning's Trainer calls, and those that nobody compiled."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.errors import EagerMethodError, FusionWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*is on cpu.*")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)

    def loss(self, x: Tensor) -> dict[str, Any]:
        return {"loss": self.body(x).square().mean(), "x": x}


class Lit(Net):
    """As a LightningModule: the attribute by which the Trainer knows what was compiled, and steps."""

    def __init__(self) -> None:
        super().__init__()
        self._compiler_ctx = None

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch).square().mean() + 0 * index

    def validation_step(self, batch: Tensor, index: int) -> Tensor:
        return self.body(batch).mean()


def test_the_steps_of_a_lightning_module_are_compiled() -> None:
    model, x = Lit(), torch.randn(3, 4)
    compiled: Any = fc.compile(model)
    loss = compiled.training_step(x, 0)
    loss.backward()
    got = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.training_step(x, 0).backward()
    for ours, eager in zip(got, [p.grad for p in model.parameters()], strict=True):
        torch.testing.assert_close(ours, eager)
    with torch.no_grad():
        torch.testing.assert_close(compiled.validation_step(x, 0), model.validation_step(x, 0))
    assert [plan.name for plan in compiled.plan] == ["graph0.forward", "graph0.backward", "graph1.inference"]
    # Lightning finds out by its code whether a class has a step of its own.
    assert compiled.training_step.__wrapped__ is Lit.training_step


@pytest.mark.parametrize("strict", [False, True])
def test_training_by_a_method_that_is_not_compiled_is_said_once(strict: bool) -> None:
    compiled: Any = fc.compile(Net(), strict=strict, backend="eager")
    if strict:
        with pytest.raises(EagerMethodError, match=r"Net\.loss"):
            compiled.loss(torch.randn(3, 4))["loss"].backward()
        return
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(3):
            compiled.loss(torch.randn(3, 4))["loss"].backward()
    (warning,) = (w for w in warned if w.category is FusionWarning)
    assert "Net.loss() is not compiled" in str(warning.message)
    assert "model.loss = compile(model.loss)" in str(warning.message)


def test_the_advice_works() -> None:
    model: Any = Net()
    model.loss = fc.compile(model.loss)
    model.loss(torch.randn(3, 4))["loss"].backward()
    assert len(model.loss.plan) == 2


def test_nothing_is_said_where_nothing_is_missed() -> None:
    """An eager pass of the same parameters first, a method before the first call, and a method afterwards."""
    model, x = Net(), torch.randn(3, 4)
    compiled: Any = fc.compile(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusionWarning)
        warnings.filterwarnings("ignore", ".*is on cpu.*")
        model(x).sum().backward()
        with torch.no_grad():
            compiled.loss(x)
        loss = compiled.loss(x)["loss"]
        (compiled(x).sum() + loss).backward()
        compiled.loss(x)["loss"].backward()
