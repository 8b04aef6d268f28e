"""Whole trainings: the losses of torch.optim's own, checkpoints at any moment, and what kill -9 leaves."""

from __future__ import annotations

import copy
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import fusion_compiler as fc
from fusion_compiler.optimizer import backward
from tests import ROOT
from tests.optimizers import OPTIMIZERS, check_same, values

STEPS, RESUMED = 200, 97
SOME = ("sgd momentum", "adamw", "radam", "lion")
KILLED_AT, LAST = (12, 25), 40  # steps after which a process is killed, and the last


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: with tensors this small more threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 3))


def batch_of(step: int, part: int = 0) -> tuple[Tensor, Tensor]:
    """The same at every call: six numbers, of which three are learned."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(2 * step + part))
    return x, torch.sin(x[:, :3] * 2)


def warmed_up(optimizer: Optimizer) -> LRScheduler:
    return LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20) * 0.99**step)


class Training:
    """A model with its optimizer and schedule. when: of the fused optimizer, None for torch.optim's own."""

    def __init__(self, make: Callable[[Any], Optimizer], when: Any, backend: Any, start: nn.Module) -> None:
        self.model = copy.deepcopy(start)
        self.optimizer = make(self.model.parameters())
        self.schedule = warmed_up(self.optimizer)
        if when is not None:
            fc.fuse_optimizer(self.model, self.optimizer, when=when, backend=backend, strict=True)

    def state(self) -> dict[str, Any]:
        parts = (self.model, self.optimizer, self.schedule)
        return {
            name: part.state_dict()
            for name, part in zip(("model", "optimizer", "schedule"), parts, strict=True)
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def step(self, number: int, parts: int = 2, clip: bool = True) -> float:
        """A step over the sum of so many passes; its loss."""
        total = 0.0
        for part in range(parts):
            x, wanted = batch_of(number, part)
            loss = (self.model(x) - wanted).square().mean() / parts
            loss.backward()
            total += loss.item()
        if clip:
            clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return total


def losses(
    make: Callable[[Any], Optimizer], when: Any, backend: Any, start: nn.Module, **how: Any
) -> list[float]:
    """With a checkpoint in the middle, from which another model and optimizer go on."""
    first, second = (Training(make, when, backend, start) for _ in range(2))
    losses = [first.step(number, **how) for number in range(RESUMED)]
    second.load(copy.deepcopy(first.state()))
    return losses + [second.step(number, **how) for number in range(RESUMED, STEPS)]


@pytest.mark.sample(8)
@pytest.mark.parametrize("when", ["step", "forward"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_hundred_steps_have_the_losses_of_torch_optims(name: str, when: str) -> None:
    """With clipping, sums over two passes, a schedule and a checkpoint in the middle."""
    start = model_of()
    eager = losses(OPTIMIZERS[name], None, None, start)
    assert losses(OPTIMIZERS[name], when, "eager", start) == pytest.approx(eager, rel=1e-6, abs=0)
    assert eager[-1] != eager[0]


@pytest.mark.parametrize("name", SOME)
def test_two_hundred_steps_within_backward_passes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "BUCKET_BYTES", 150)
    start, how = model_of(), {"parts": 1, "clip": False}
    eager = losses(OPTIMIZERS[name], None, None, start, **how)
    assert losses(OPTIMIZERS[name], "backward", "eager", start, **how) == pytest.approx(
        eager, rel=1e-6, abs=0
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", SOME)
def test_kernels_over_two_hundred_steps(name: str) -> None:
    """Rounding differs by digits, which a training carries on; it learns what eager learns."""
    start = model_of()
    eager = losses(OPTIMIZERS[name], None, None, start)
    ours = losses(OPTIMIZERS[name], "step", "interpret", start)
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(eager), rtol=2e-3, atol=2e-4)
    assert sum(ours[-20:]) < 0.9 * sum(ours[:20])


# -- checkpoints ----------------------------------------------------------------------------------


def moments(training: Training, number: int) -> Iterator[str]:
    """Yield at each moment of a step at which a user may save."""
    x, wanted = batch_of(number)
    yield "before the forward"
    loss = (training.model(x) - wanted).square().mean()
    yield "before the backward"
    loss.backward()
    yield "before the step"
    training.optimizer.step()
    yield "before zero_grad"
    training.optimizer.zero_grad()
    training.schedule.step()


@pytest.mark.parametrize("when", ["step", "backward", "forward"])
def test_a_checkpoint_of_any_moment_is_whole(when: str) -> None:
    """A checkpoint holds the state after some number of steps, of parameters and optimizer alike."""
    start = model_of()
    ours, eager = (Training(OPTIMIZERS["adamw"], w, "eager", start) for w in (when, None))
    states: list[dict[str, Tensor]] = []
    for number in range(4):
        for moment in moments(eager, number):
            if moment == "before the forward":
                states.append({k: v.clone() for k, v in values(eager.model, eager.optimizer).items()})
    states.append({k: v.clone() for k, v in values(eager.model, eager.optimizer).items()})
    for number in range(4):
        for moment in moments(ours, number):
            saved = copy.deepcopy(ours.state())
            other = Training(OPTIMIZERS["adamw"], None, None, start)
            other.load(saved)
            done = number + (
                moment == "before zero_grad" or (when == "backward" and moment == "before the step")
            )
            check_same(values(other.model, other.optimizer), states[done])


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_checkpoint_within_a_pass_has_each_parameter_of_one_step(
    when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hook may save anywhere: a parameter and its state are of one step, if not of the same for all."""
    monkeypatch.setattr(backward, "BUCKET_BYTES", 1)
    start = model_of()
    ours, eager = (Training(OPTIMIZERS["adamw"], w, "eager", start) for w in (when, None))
    for training in (ours, eager):
        for number in range(3):
            training.step(number, parts=1, clip=False)
    ours.state()  # nothing is due
    before = {k: v.clone() for k, v in values(eager.model, eager.optimizer).items()}
    eager.step(3, parts=1, clip=False)
    after = values(eager.model, eager.optimizer)
    saved: list[dict[str, Tensor]] = []

    def save(*_: Any) -> None:
        saved.append({k: v.clone() for k, v in values(ours.model, ours.optimizer).items()})

    layer = ours.model[2]
    handle = (
        layer.register_forward_hook(save) if when == "forward" else layer.register_full_backward_hook(save)
    )
    ours.step(3, parts=1, clip=False)
    if when == "forward":
        (x, _) = batch_of(4)
        ours.model(x)
    handle.remove()
    for name, _ in ours.model.named_parameters():
        its = [key for key in after if key == name or key.endswith(f" of {name}")]
        old, new = (all(torch.equal(saved[-1][k], one[k]) for k in its) for one in (before, after))
        assert old != new, name
    check_same(values(ours.model, ours.optimizer), after)


def train(path: str, when: str) -> None:
    """A process that saves every step, as one does: beside the old checkpoint, and then in its place."""
    torch.set_num_threads(1)
    training, file = Training(lambda p: AdamW(p, lr=0.02), when, "eager", model_of()), Path(path)
    state = torch.load(file)
    training.load(state)
    for number in range(state["step"], 10 * LAST):
        training.step(number, parts=1, clip=False)
        torch.save({**training.state(), "step": number + 1}, file.with_suffix(".partial"))
        os.replace(file.with_suffix(".partial"), file)
        print(number + 1, flush=True)


def killed_after(step: int, path: Path, when: str) -> None:
    code = f"import sys; from {__name__} import train; train(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(path), when]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if int(line) >= step:
                break
        time.sleep(random.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert process.returncode == -signal.SIGKILL


@pytest.mark.sample(1)
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_a_process_that_is_killed_loses_no_checkpoint(when: str, tmp_path: Path) -> None:
    start = model_of()
    make = lambda p: AdamW(p, lr=0.02)  # noqa: E731
    begun, eager = (Training(make, w, "eager", start) for w in (when, None))
    path = tmp_path / "checkpoint"
    torch.save({**begun.state(), "step": 0}, path)
    for step in KILLED_AT:
        killed_after(step, path, when)
        assert torch.load(path)["step"] >= step
    state = torch.load(path)
    begun.load(state)
    last = max(LAST, state["step"])
    for number in range(state["step"], last):
        begun.step(number, parts=1, clip=False)
    for number in range(last):
        eager.step(number, parts=1, clip=False)
    begun.state()
    check_same(values(begun.model, begun.optimizer), values(eager.model, eager.optimizer))
