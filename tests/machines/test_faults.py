"""Processes that are lost, that disagree or that never come: an error that names them, in bounded time."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_compiler.errors import (
    PipelineArgumentError,
    StageLostError,
    StageMissingError,
    StagesDisagreeError,
)
from fusion_compiler.machines.run import PipelineRunner
from tests.machines.processes import run
from tests.machines.test_run import (
    compare_tensors,
    data,
    model_of,
    pipeline_of,
    plan_of,
    seeded_stages,
    uncut,
)

STEPS, KILLED_AT = 5, 3


def pipeline_for(world: int, **options: Any) -> PipelineRunner:
    model = model_of(dropout=0.5)
    return pipeline_of(plan_of(model, world), **options)


def go_on(
    rank: int, world: int, folder: str, victim: int, stop: int
) -> dict[str, Tensor] | tuple[str, float]:
    """Train to the end from the last checkpoint; the victim gets a signal before one of the steps."""
    pipeline = pipeline_for(world, patience_s=6.0)
    pipeline.resume(folder)
    started = time.monotonic()
    try:
        while pipeline.steps < STEPS:
            if rank == victim and pipeline.steps == KILLED_AT:
                os.kill(os.getpid(), stop)
            started = time.monotonic()
            pipeline.step(*data(pipeline.steps))
            pipeline.save(folder)
    except StageLostError as error:
        return str(error), time.monotonic() - started
    pipeline.close()
    return {name: p.detach() for name, p in {**pipeline.parameters, **pipeline.buffers}.items()}


@pytest.mark.parametrize(("victim", "stop"), [(2, "SIGKILL"), (0, "SIGKILL"), (1, "SIGSTOP")])
@pytest.mark.sample(1)
def test_the_others_name_a_lost_stage_and_training_goes_on(victim: int, stop: str, tmp_path: Path) -> None:
    world = 4
    folder = str(tmp_path / "checkpoints")
    results = run(go_on, world, tmp_path / "one", world, folder, victim, getattr(signal, stop), victim=victim)
    assert results.pop(victim) is None
    for text, seconds in results:
        assert f"has lost stage {victim} (process {victim}, machine m{victim})" in text
        assert seconds < 30
    again = run(go_on, world, tmp_path / "two", world, folder, -1, 0)
    assert all(isinstance(tensors, dict) for tensors in again), again
    model = model_of(dropout=0.5)
    uncut(seeded_stages(model, world, seed=0), model, STEPS)
    compare_tensors(again, model)


def fail(rank: int, world: int) -> str:
    pipeline = pipeline_for(world)
    words, target = data(0)
    if rank == 1:
        target = target - 100
    with pytest.raises((StageLostError, IndexError)) as raised:
        pipeline.step(words, target)
    return str(raised.value)


def test_an_error_of_one_stage_is_named_by_the_others(tmp_path: Path) -> None:
    first, second = run(fail, 2, tmp_path, 2)
    assert "out of bounds" in second and "lost" not in second
    assert "has lost stage 1 (process 1, machine m1): it raised IndexError" in first


def disagree(rank: int, what: str) -> str:
    model = model_of()
    plan = plan_of(model, 2, "gpipe" if what == "plan" and rank else "1f1b")
    if what == "torch" and rank:
        torch.__version__ = "2.0.0"
    with pytest.raises(StagesDisagreeError) as raised:
        pipeline_of(plan, seed=rank if what == "seed" else 0)
    return str(raised.value)


@pytest.mark.parametrize("what", ["plan", "torch", "seed"])
@pytest.mark.sample(1)
def test_processes_that_disagree_refuse_to_start(what: str, tmp_path: Path) -> None:
    for text in run(disagree, 2, tmp_path, what):
        assert f"processes 0 and 1 disagree about {what}:" in text


def come_alone(rank: int) -> str:
    if rank == 1:
        time.sleep(6)
        return ""
    with pytest.raises(StageMissingError) as raised:
        pipeline_for(2, start_s=1.0)
    return str(raised.value)


def test_a_process_that_does_not_come_is_named(tmp_path: Path) -> None:
    assert "process 1 of the pipeline did not start within 1.0 s" in run(come_alone, 2, tmp_path)[0]


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    for text in run(load_other, 2, tmp_path, str(tmp_path / "checkpoints")):
        assert "belongs to another plan" in text


def load_other(rank: int, folder: str) -> str:
    model = model_of()
    one = pipeline_of(plan_of(model, 2))
    one.steps = 7
    one.save(folder)
    other = pipeline_of(plan_of(model, 2, "gpipe"))
    with pytest.raises(PipelineArgumentError) as raised:
        other.resume(folder)
    one.close()
    other.close()
    return str(raised.value)
