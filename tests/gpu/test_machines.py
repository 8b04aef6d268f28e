"""Pipelines whose processes share GPUs, over Gloo, against the uncut model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fusion_compiler as fc
from tests.machines.processes import run
from tests.machines.test_run import COUNT, STEPS, data, loss_of, model_of, optimizer_of, uncut

LINK = fc.Link(bytes_per_s=1e9, latency_us=50.0)
ROWS, WIDTH = 1024, 2048  # a message of 8 MB


def device_of(rank: int) -> torch.device:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def plan_of(model: nn.Module, example: Tensor, world: int, **options: Any) -> fc.Pipeline:
    machines = [fc.Machine(f"m{i}") for i in range(world)]
    options.setdefault("microbatches", COUNT)
    return fc.partition(model, (example,), machines=machines, links=LINK, **options)


def train(rank: int, world: int, schedule: str, local: int) -> tuple[list[Tensor], dict[str, Tensor]]:
    device = device_of(rank)
    plan = plan_of(
        model_of().to(device), data(0)[0][:2].to(device), world, schedule=schedule, stages_per_machine=local
    )
    runner = fc.PipelineRunner(plan, loss=loss_of, optimizer=optimizer_of, compression=None, throttle=LINK)
    assert runner.device == device
    losses = [runner.step(*(x.to(device) for x in data(step))) for step in range(STEPS)]
    tensors = {name: t.detach().cpu() for name, t in {**runner.parameters, **runner.buffers}.items()}
    runner.close()
    return [loss.cpu() for loss in losses if loss is not None], tensors


@pytest.mark.parametrize(
    ("world", "schedule", "local"),
    [(2, "1f1b", 1), (2, "interleaved", 2), (4, "gpipe", 1), (2, "zero-bubble", 1)],
)
def test_processes_that_share_gpus_train_the_uncut_model(
    world: int, schedule: str, local: int, tmp_path: Path
) -> None:
    results = run(train, world, tmp_path, world, schedule, local, timeout=300)
    assert all(isinstance(result, tuple) for result in results), results
    model = model_of()
    losses = uncut(lambda words, *_: model(words), model)
    (ours,) = (result[0] for result in results if result[0])
    torch.testing.assert_close(ours, losses, rtol=1e-8, atol=0)
    truth = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for _, tensors in results:
        for name, tensor in tensors.items():
            torch.testing.assert_close(tensor, truth[name].detach(), rtol=1e-7, atol=1e-9)


def wide(device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(*layers).to(device)


def batch(step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    x, y = torch.randn(2, 8 * ROWS, WIDTH, generator=generator)
    return x.to(device), y.to(device)


def train_wide(rank: int, throttle: fc.Link | None) -> list[float]:
    device = device_of(rank)
    plan = plan_of(wide(device), batch(0, device)[0][:ROWS], 2, microbatches=8, cuts=["linear_4"])
    runner = fc.PipelineRunner(
        plan, loss=F.mse_loss, optimizer=optimizer_of, compression=None, throttle=throttle
    )
    losses = [runner.step(*batch(step, device)) for step in range(4)]
    runner.close()
    return [float(loss) for loss in losses if loss is not None]


@pytest.mark.parametrize("throttle", [None, LINK])
def test_large_messages_are_sent_when_they_are_complete(throttle: fc.Link | None, tmp_path: Path) -> None:
    """Kernels take longer than the host takes to launch them: a copy that did not wait would be seen."""
    results = run(train_wide, 2, tmp_path, throttle, timeout=300)
    assert all(isinstance(result, list) for result in results), results
    device = torch.device("cuda")
    model = wide(device)
    optimizer = optimizer_of(model.parameters())
    losses: list[float] = []
    for step in range(4):
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(*(t.chunk(8) for t in batch(step, device)), strict=True):
            loss = F.mse_loss(model(x), y) / 8
            loss.backward()
            total += loss.item()
        optimizer.step()
        losses.append(total)
    assert results[1] == pytest.approx(losses, rel=1e-5)
