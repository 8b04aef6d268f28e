"""`when="auto"`: what each parameter's gradients show in two steps decides, and the reason is told."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

import fusion_compiler as fc
from fusion_compiler.errors import OptimizerStepError
from fusion_compiler.optimizer import backward, choice
from tests.optimizers import Tied, check_same, data, loss_of, values

Loop = Callable[[nn.Module, Optimizer, Any], None]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch for each hundred bytes of gradients."""
    for module in (backward, choice):
        monkeypatch.setattr(module, "BUCKET_BYTES", 100)


def plainly(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    loss_of(model, batch).backward()
    clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def in_two_passes(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    loss_of(model, batch).backward()
    loss_of(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def with_a_late_rate(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    loss_of(model, batch).backward()
    optimizer.param_groups[0]["lr"] *= 0.9
    optimizer.step()
    optimizer.zero_grad()


def scaled(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    scaler: Any = getattr(optimizer, "scaler", None) or torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer.scaler = scaler  # type: ignore[attr-defined]
    scaler.scale(loss_of(model, batch)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def partly_in_two_passes(model: nn.Module, optimizer: Optimizer, batch: Any) -> None:
    """The second pass reaches the table alone."""
    loss_of(model, batch).backward()
    model.embed.weight.square().sum().backward()  # type: ignore[union-attr,operator]
    optimizer.step()
    optimizer.zero_grad()


LOOPS: dict[Loop, tuple[str, str]] = {
    plainly: ("backward", "of gradients 100 B live at a time, for"),
    clipped: ("step", "is written between the pass and step()"),
    in_two_passes: ("step", "is a sum over 2 passes"),
    with_a_late_rate: ("step", "numbers change between"),
    scaled: ("step", "a GradScaler is in use"),
    partly_in_two_passes: ("step", "is a sum over 2 passes"),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_the_loop_decides(loop: Loop) -> None:
    ours = Tied()
    eager = copy.deepcopy(ours)
    pairs = [(m, AdamW(m.parameters(), lr=0.02)) for m in (ours, eager)]
    fused = fc.fuse_optimizer(ours, pairs[0][1], when="auto", backend="eager", strict=True)
    for step in range(6):
        assert ("not yet chosen" in str(fused)) == (step < 2)
        batch = data()
        for model, optimizer in pairs:
            loop(model, optimizer, batch)
    check_same(values(*pairs[0]), values(*pairs[1]))
    choices: dict[str, choice.Choice] = fused.timing.choices  # type: ignore[attr-defined]
    when, reason = LOOPS[loop]
    assert choices["embed.weight"].when == when and reason in choices["embed.weight"].reason
    assert reason in str(fused)
    others = "backward" if loop is partly_in_two_passes else when
    assert choices["first.weight"].when == choices["second.bias"].when == others
    unused = reason if loop is scaled else "it has had no gradient"
    assert choices["unused"] == choice.Choice("step", unused)


def test_few_gradients_are_left_to_step() -> None:
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    fused = fc.fuse_optimizer(model, optimizer, when="auto", backend="eager")
    for _ in range(3):
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        assert isinstance(model.weight.grad, Tensor)  # as with torch.optim's own
        optimizer.zero_grad()
    assert "step: weight, bias: all gradients are 32 B" in str(fused)


def test_a_loop_that_changes_later_is_told() -> None:
    model = Tied()
    optimizer = AdamW(model.parameters(), lr=0.02)
    fc.fuse_optimizer(model, optimizer, when="auto", backend="eager")
    for _ in range(3):
        plainly(model, optimizer, data())
    with pytest.raises(OptimizerStepError, match="the backward pass has updated"):
        clipped(model, optimizer, data())


def test_compile_passes_it_on_and_the_plan_says_what_was_chosen() -> None:
    model = Tied()
    optimizer = AdamW(model.parameters(), lr=0.02)
    fast = fc.compile(model, optimizer=optimizer, when="auto", backend="eager")
    for _ in range(3):
        plainly(fast, optimizer, data())
    assert "backward: " in str(fast.plan) and "step: unused: it has had no gradient" in str(fast.plan)
    fast.plan.optimizer.remove()
    plainly(fast, optimizer, data())
