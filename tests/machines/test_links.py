"""Pipelines whose stages only sleep, over imitated links, take the simulated time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fusion_compiler as fc
from fusion_compiler.machines.plan import Schedule
from fusion_compiler.machines.simulate import simulate
from tests.machines.processes import run

ROWS, WIDTH, COUNT, STEPS = 16, 64, 6, 8
SPEED = 1e5  # bytes per second
MESSAGE_S = 4 * ROWS * WIDTH / SPEED
# seconds of a stage, forward and backward, and of a link's latency; a message takes 41 ms besides
CASES = {"slow stages": (0.04, 0.06, 0.01), "slow links": (0.01, 0.02, 0.01), "latency": (0.02, 0.03, 0.08)}
Events = list[tuple[str, float]]


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, events: Events) -> Tensor:
        ctx.seconds, ctx.events = seconds, events
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(("B", time.perf_counter()))
        time.sleep(ctx.seconds)
        return gradients[0], None, None


class SleepingStage(nn.Module):
    """A stage that sleeps in both passes, and says when each of them begins."""

    def __init__(self, stage: nn.Module, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.stage, self.forward_s, self.backward_s = stage, forward_s, backward_s
        self.events: Events = []

    def forward(self, x: Tensor) -> Tensor:
        self.events.append(("F", time.perf_counter()))
        time.sleep(self.forward_s)
        return Sleep.apply(self.stage(x), self.backward_s, self.events)  # pyright: ignore[reportReturnType]


def train(
    rank: int, world: int, schedule: str, forward_s: float, backward_s: float, latency_s: float
) -> list[tuple[float, Events]]:
    """Return the end of each step and the beginnings of its phases, in seconds from its start."""
    link = fc.Link(bytes_per_s=SPEED, latency_us=1e6 * latency_s)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(world)))
    machines = [fc.Machine(f"m{i}") for i in range(world)]
    plan = fc.partition(
        model, (torch.zeros(ROWS, WIDTH),), machines=machines, links=link, microbatches=COUNT,
        schedule=schedule, cuts=[f"linear_{i}" for i in range(1, world)],
    )  # fmt: skip
    runner = fc.PipelineRunner(
        plan,
        loss=F.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        compression=None,
        throttle=link,
    )
    (stage,) = runner.stages
    stage.submod = sleeping = SleepingStage(stage.submod, forward_s, backward_s)
    x = torch.randn(COUNT * ROWS, WIDTH)
    steps: list[tuple[float, Events]] = []
    for _ in range(STEPS):
        sleeping.events.clear()
        dist.barrier()
        begin = time.perf_counter()
        runner.step(x, x)
        end = time.perf_counter()
        steps.append((end - begin, [(phase, at - begin) for phase, at in sleeping.events]))
    runner.close()
    return steps


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.sample(4)
def test_a_step_takes_the_simulated_time(world: int, schedule: str, case: str, tmp_path: Path) -> None:
    forward_s, backward_s, latency_s = CASES[case]
    results = run(train, world, tmp_path, world, schedule, *CASES[case])
    assert all(isinstance(result, list) for result in results), results
    message_us = 1e6 * (MESSAGE_S + latency_s)
    simulated = simulate(
        Schedule(schedule),
        [(1e6 * forward_s, 1e6 * backward_s)] * world,
        [(message_us, message_us)] * (world - 1),
        world,
        COUNT,
        latencies=[1e6 * latency_s] * (world - 1),
    )
    # the fastest of a few steps: other processes of a busy machine hold up some of them
    best = min(range(STEPS), key=lambda step: max(result[step][0] for result in results))
    assert max(result[best][0] for result in results) == pytest.approx(simulated.us / 1e6, rel=0.1)
    for stage, result in enumerate(results):
        expected = [(e.phase.value, e.start_us / 1e6) for e in simulated.events if e.stage == stage]
        assert [phase for phase, _ in result[best][1]] == [phase for phase, _ in expected]
        for (_, measured), (_, begin) in zip(result[best][1], expected, strict=True):
            assert measured == pytest.approx(begin, abs=0.1 * simulated.us / 1e6)
