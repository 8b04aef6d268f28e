"""Gradients clipped by their norm within the update: what torch.nn.utils.clip_grad_norm_ does, unwritten."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

import fusion_compiler as fc
from fusion_compiler.errors import OptimizerStepError
from fusion_compiler.optimizer import forward
from tests.fake_gpu import FakeGpu
from tests.optimizers import (
    OPTIMIZERS,
    Sizes,
    Tied,
    both,
    check,
    check_same,
    data,
    fused_on,
    loss_of,
    take_steps,
    three,
    values,
)


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("when", ["step", "forward", "auto"])
def test_the_same_steps_as_with_torchs(when: str, norm_type: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "BUCKET_BYTES", 200)
    ours, eager, fused = both(Tied(), OPTIMIZERS["adamw"], when=when, strict=True)
    for step in range(6):
        batch = data()
        for model, _ in (ours, eager):
            loss_of(model, batch).backward()
        before = [p.grad.clone() for p in ours[0].parameters() if p.grad is not None]
        limit = 0.05 if step % 3 else 100.0  # what is short enough stays
        norm = fused.clip_grad_norm_(limit, norm_type)
        assert torch.equal(norm, clip_grad_norm_(eager[0].parameters(), limit, norm_type))
        now = [p.grad for p in ours[0].parameters() if p.grad is not None]
        assert all(map(torch.equal, before, now))
        for _, optimizer in (ours, eager):
            optimizer.step()
            optimizer.zero_grad()
    fused.finish()
    check_same(values(*ours), values(*eager))
    if when == "auto":
        assert "is clipped by clip_grad_norm_" in str(fused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_kernels_multiply(dtype: torch.dtype) -> None:
    """In two groups, with steps that are not clipped between those that are."""
    pairs = three(Sizes(dtype), lambda p: AdamW(p, lr=0.01), Sizes.groups)
    fused = fc.fuse_optimizer(*pairs[0], backend="interpret", strict=True)

    def clip(step: int, model: nn.Module, _: Optimizer) -> None:
        if step % 3 and model is pairs[0][0]:
            fused.clip_grad_norm_(2.0)
        elif step % 3:
            clip_grad_norm_(model.parameters(), 2.0)

    take_steps(pairs, 6, clip)
    check(*pairs)
    assert "clipped" in str(fused)


def test_on_a_device_by_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu(compiles=True)
    model = nn.ParameterList([nn.Parameter(torch.zeros(3000))])
    optimizer = SGD(model, lr=1.0)
    fused = fused_on(gpu, optimizer, monkeypatch)
    for grad in (torch.zeros(3000), torch.full((3000,), 2.0)):
        model[0].grad = grad
        fused.clip_grad_norm_(1.0)
        optimizer.step()
    torch.testing.assert_close(model[0].detach(), torch.full((3000,), -(3000**-0.5)))
    assert len(gpu.launched) == 1


def test_twice_is_of_what_is_clipped() -> None:
    ours, eager, fused = both(Tied(), lambda p: SGD(p, lr=0.1), strict=True)
    for _ in range(3):
        batch = data()
        for model, _ in (ours, eager):
            loss_of(model, batch).backward()
        for limit in (0.1, 0.01):
            norms = fused.clip_grad_norm_(limit), clip_grad_norm_(eager[0].parameters(), limit)
            torch.testing.assert_close(*norms)
        for _, optimizer in (ours, eager):
            optimizer.step()
            optimizer.zero_grad()
    check_same(values(*ours), values(*eager))


@pytest.mark.parametrize("when", ["step", "forward"])
def test_a_scaler_unscales_before_and_skips(when: str) -> None:
    ours, eager, fused = both(Tied(), lambda p: AdamW(p, lr=0.05), when=when, strict=True)
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in range(2)]
    for step in range(7):
        batch = data()
        for (model, optimizer), scaler in zip((ours, eager), scalers, strict=True):
            scaler.scale(loss_of(model, batch) * (math.inf if step in (2, 5) else 1)).backward()
            scaler.unscale_(optimizer)
            if model is ours[0]:
                fused.clip_grad_norm_(0.1)
            else:
                clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    fused.finish()
    check_same(values(*ours), values(*eager))


def test_gradients_that_are_dropped_take_the_factor_with_them() -> None:
    ours, eager, fused = both(Tied(), lambda p: SGD(p, lr=0.1), strict=True)
    for step in range(4):
        batch = data()
        for model, optimizer in (ours, eager):
            loss_of(model, batch).backward()
            if step % 2:
                optimizer.step()
            elif model is ours[0]:
                fused.clip_grad_norm_(1e-3)
            optimizer.zero_grad()
    check_same(values(*ours), values(*eager))


def accumulated(model: Any) -> None:
    loss_of(model, data()).backward()


def noisy(model: Any) -> None:
    model.first.weight.grad.add_(1.0)


def made_anew(model: Any) -> None:
    model.first.weight.grad = torch.ones_like(model.first.weight)


@pytest.mark.parametrize("write", [accumulated, noisy, made_anew])
def test_what_is_written_after_it_is_an_error_once(write: Callable[[Any], None]) -> None:
    (model, optimizer), _, fused = both(Tied(), lambda p: SGD(p, lr=0.1), strict=True)
    for _ in range(2):
        loss_of(model, data()).backward()
        optimizer.step()
        optimizer.zero_grad()
    loss_of(model, data()).backward()
    fused.clip_grad_norm_(0.1)
    write(model)
    before = {name: value.clone() for name, value in values(model, optimizer).items()}
    with pytest.raises(OptimizerStepError, match="between clip_grad_norm_ and step"):
        optimizer.step()
    check_same(values(model, optimizer), before)
    optimizer.step()


def test_what_is_not_finite_is_an_error_where_that_is_asked_for() -> None:
    (model, optimizer), _, fused = both(Tied(), lambda p: SGD(p, lr=0.1))
    (loss_of(model, data()) * math.inf).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        fused.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert not fused.clip_grad_norm_(1.0).isfinite()
    optimizer.zero_grad()
    assert fused.clip_grad_norm_(1.0) == 0


def test_a_backward_pass_that_updates_has_nothing_to_clip() -> None:
    (model, _), _, fused = both(Tied(), lambda p: SGD(p, lr=0.1), when="backward")
    loss_of(model, data()).backward()
    with pytest.raises(OptimizerStepError, match="the backward pass has updated"):
        fused.clip_grad_norm_(1.0)
