"""The benchmark of uneven models: equal layers, predicted steps, and what becomes of failures."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import fusion_compiler as fc
from benchmarks.__main__ import parse
from benchmarks.machines import steps
from benchmarks.machines.alone import Alone, Parts, step_us
from benchmarks.machines.group import GroupError, Texts, run_group
from benchmarks.machines.steps import Plans, bars_of, batch_of, measure, no_target, runner_of
from benchmarks.machines.uneven import UNEVEN, Trained
from fusion_compiler.machines.plan import Schedule

QUICK = ("uneven", "--quick", "--device", "cpu", "--threads", "1")


def test_equal_layers_are_layers_of_equal_number() -> None:
    with torch.device("meta"):
        model, args = UNEVEN["tied head"]("small")
    machines = tuple(fc.Machine(name, "h200") for name in "abcd")
    plans = Plans((Trained(model), args), machines, fc.Link(1e9, 10.0))
    plan = plans.plan(cuts=plans.equal_cuts())
    layers = [{m.split(".")[2] for m in s.modules if ".layers." in m} for s in plan.stages]
    assert layers == [{"0", "1"}, {"2", "3"}, {"4", "5"}, {"6", "7"}]
    assert [str(d.outcome) for d in plan.decisions if d.rule == "equal layers"] == ["done"]
    assert plans.plan().step_us < plan.step_us


def test_a_step_ends_with_tied_gradients_and_the_optimizer() -> None:
    part = Parts((10.0, 20.0), (0.0, 0.0), 0.0, 0.0)
    schedule = Schedule.ONE_F_ONE_B
    assert step_us(schedule, 4, [part] * 2) == 5 * 30
    # the last stage ends 20 us before the first one
    assert step_us(schedule, 4, [part, Parts((10.0, 20.0), (0.0, 0.0), 0.0, 25.0)]) == 5 * 30 + 5
    tied = [Parts((10.0, 20.0), (0.0, 0.0), 7.0, us) for us in (1.0, 25.0)]
    assert step_us(schedule, 4, tied) == 5 * 30 + 7 + 25


def test_microbatches_differ() -> None:
    (batch,) = batch_of((torch.arange(10).view(1, 10),), 0)
    assert batch.shape == (8, 10) and len({tuple(row.tolist()) for row in batch}) == 8


def measure_between_steps(_rank: int, texts: Texts, _task: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model, args = UNEVEN["tied head"]("small")
    machines = tuple(fc.Machine(f"process {i}", "h200") for i in range(texts.world))
    runner = runner_of(Plans((Trained(model), args), machines, fc.Link(1e9, 10.0)).plan())
    alone = Alone(runner, args, no_target(runner, 1), turns=2)
    alone.listen(lambda: runner.step(batch_of(args, 0), no_target(runner, 8)))
    before = {name: parameter.detach().clone() for name, parameter in runner.parameters.items()}
    for _ in range(2):
        alone.measure()
    assert runner.optimizer is not None and runner.optimizer.param_groups[0]["lr"] == steps.RATE
    changed = [name for name, parameter in runner.parameters.items() if not parameter.equal(before[name])]
    runner.close()
    return {"parts": alone.parts().json, "changed": changed}


def test_parts_are_measured_and_the_parameters_stay_as_they_are() -> None:
    first, last = run_group(measure_between_steps, 2, "gloo", 120, None)
    assert first["changed"] == last["changed"] == []
    assert min(*first["parts"]["stage"], *first["parts"]["link"], first["parts"]["ties"]) > 0
    assert last["parts"]["link"] == [0.0, 0.0] and last["parts"]["optimizer"] > 0


def talk(rank: int, texts: Texts, task: Any) -> Any:
    if task == "fail" and rank == 1:
        raise ValueError("no luck")
    if task in ("fail", "sleep"):
        time.sleep(60)
    return texts.gathered(rank + 1), texts.from_first(f"from {rank}")


def test_processes_talk_and_their_failures_are_told() -> None:
    assert run_group(talk, 2, "gloo", 60, "talk") == [[[1, 2], "from 0"]] * 2
    with pytest.raises(GroupError, match="process 1: ValueError: no luck"):
        run_group(talk, 2, "gloo", 60, "fail")
    with pytest.raises(GroupError, match="over 0 s"):
        run_group(talk, 1, "gloo", 0.1, "sleep")


def test_a_contender_that_fails_is_a_row_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    part = {"stage": (10.0, 20.0), "link": (1.0, 1.0), "ties": 0.0, "optimizer": 0.0}
    report = {
        "plan": {"cuts": []}, "ms": [1.0], "losses": [2.0], "parts": part,
        "link": {}, "device": {}, "cores": [],
        **{f"{name} {unit}": 1.0 for name in ("estimated", "operators") for unit in ("ms", "us")},
    }  # fmt: skip

    def run(_job: object, world: int, _backend: str, _seconds: float, task: steps.Task) -> list[Any]:
        if "ours" in task.contenders:
            raise GroupError("out of memory")
        choices = {c: {"failed": "too few layers"} if c == "equal" else report for c in task.contenders}
        return [choices] * world

    monkeypatch.setattr(steps, "run_group", run)
    options = parse(QUICK)
    rows = list(measure(options, "U-Net", float("inf")))
    assert [(row["contender"], row.get("failed"), row.get("ms")) for row in rows] == [
        ("ours", "out of memory", None), ("measured", None, 1.0), ("equal", "too few layers", None)
    ]  # fmt: skip
    assert [bar.met for row in rows for bar in bars_of(row, {}, options)].count(False) >= 2
