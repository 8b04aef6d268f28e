"""Groups with numbers, and ways of their own, in one launch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RAdam

import fusion_compiler as fc
from fusion_compiler.ir.kernel import Kernel
from fusion_compiler.runtime.target import compile_for
from tests.fake_gpu import FakeGpu
from tests.optimizers import (
    Layers,
    Lion,
    check,
    check_nearly,
    fused_on,
    give,
    gradients,
    take_steps,
    three,
    two,
)

Make = Callable[[Any], Optimizer]
MAKES: dict[str, Make] = {
    "adamw": lambda p: AdamW(p, lr=0.01),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1),
    "sgd momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    "radam": lambda p: RAdam(p, lr=0.01, weight_decay=0.1),
    "lion": lambda p: Lion(p, weight_decay=0.1),
}


GROUPS = {"by decay": Layers.by_decay, "by layer": Layers.by_layer}


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", MAKES)
def test_one_launch_for_all(name: str, groups: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    pairs = three(Layers(), MAKES[name], GROUPS[groups])
    fused_on(gpu, pairs[0][1], monkeypatch)

    def schedule(step: int, _: nn.Module, optimizer: Optimizer) -> None:
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] *= 0.9 if (i + step) % 2 else 1.1

    take_steps(pairs, 9, schedule, all_of_them=True)
    check(*pairs)
    assert len(gpu.launched) == 8 and len(gpu.loaded) == (2 if name == "radam" else 1)


@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", MAKES)
def test_to_the_bit_by_aten(name: str, groups: str) -> None:
    """And with parameters that have taken fewer steps than others."""
    pairs = two(Layers(), MAKES[name], GROUPS[groups])
    fc.fuse_optimizer(*pairs[0], backend="eager", strict=True)
    take_steps(pairs, 8)
    check(*pairs)


def test_groups_that_change_their_ways() -> None:
    """Weight decay goes from one to the other, and gradients lie where they lay."""
    pairs = two(Layers(), lambda p: AdamW(p, lr=0.01), Layers.by_decay)
    fused = fc.fuse_optimizer(*pairs[0], backend="interpret", strict=True)
    for model, _ in pairs:
        give(model, gradients(model, 1))
    for step in range(6):
        for ours, eager in zip(*(model.parameters() for model, _ in pairs), strict=True):
            ours.grad.normal_()
            eager.grad.copy_(ours.grad)
        for _, optimizer in pairs:
            for i, group in enumerate(optimizer.param_groups):
                group["weight_decay"] = 0.3 if (i == 0) is (step < 3) else 0.0
            optimizer.step()
    check_nearly(*pairs)
    assert len(fused.kernels) == 1


class Orthogonal(SGD):
    """A step that takes matrices as a whole, as Muon does, and vectors element by element."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                grad = param.grad if param.dim() == 1 else param.grad @ param.grad.T @ param.grad
                param.add_(grad, alpha=-group["lr"])


@pytest.mark.filterwarnings("ignore::fusion_compiler.errors.FusionWarning")
def test_what_one_set_cannot_have_the_others_have() -> None:
    pairs = two(Layers(), lambda p: Orthogonal(p, lr=1e-3))
    fused = fc.fuse_optimizer(*pairs[0], backend="eager")
    take_steps(pairs, 4, all_of_them=True)
    check(*pairs)
    assert set(fused.unfused) == {"all.0", "all.2", "all.5"}


def test_each_formula_is_said_once() -> None:
    model = Layers()
    optimizer = AdamW(model.by_decay())
    fused = fc.fuse_optimizer(model, optimizer, backend="interpret", strict=True)
    for _ in range(3):
        give(model, gradients(model, 1))
        optimizer.step()
    (kernel,) = fused.kernels
    assert [f"def adamw_{i}_{part}(" in kernel.source for i in (0, 1) for part in ("block", "rest")] == [
        True
    ] * 4
    assert "weight_decay" in str(fused) and " or " in str(fused)


def test_a_state_dict_of_counters_that_lie_side_by_side() -> None:
    """Each is a tensor of its own: what one writes, no other has."""
    model = Layers()
    optimizer = AdamW(model.by_decay())
    fc.fuse_optimizer(model, optimizer, backend="eager", strict=True)
    held = []
    for _ in range(3):
        give(model, gradients(model, 1))
        optimizer.step()
        held = held or [state["step"] for state in optimizer.state.values()]
    assert [step.item() for step in held] == [3.0] * 6  # those that a user has held since the first step
    saved = copy.deepcopy(optimizer.state_dict())
    held[0] += 5
    assert [state["step"].item() for state in optimizer.state.values()] == [8.0] + [3.0] * 5
    plain = AdamW(copy.deepcopy(model).by_decay())
    plain.load_state_dict(saved)
    for group in plain.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    plain.step()
    assert [state["step"].item() for state in plain.state.values()] == [4.0] * 6


def kernels(groups: str, dtype: torch.dtype, clip: bool) -> Kernel:
    model = Layers(dtype)
    optimizer = AdamW(GROUPS[groups](model))
    fused = fc.fuse_optimizer(model, optimizer, backend="interpret", strict=True)
    for _ in range(2):
        give(model, gradients(model, 1))
        if clip:
            fused.clip_grad_norm_(1.0)
        optimizer.step()
    return fused.kernels[-1]


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("clip", [False, True])
def test_kernels_of_several_sets_compile_without_spills(groups: str, clip: bool, target: str) -> None:
    binary = compile_for(kernels(groups, torch.bfloat16, clip), target)
    assert binary.spills == 0 and binary.registers <= 128
