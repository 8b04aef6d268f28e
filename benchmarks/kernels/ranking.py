"""python -m benchmarks schedules --from FILE: how the present code ranks the schedules that FILE has timed.

No GPU is needed: every cluster of FILE is planned again on FakeTensors for its device, and what the code
would choose now is looked up among the timings. A choice that was never timed is listed, and judged nowhere.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_compiler as fc
from benchmarks.harness.tables import figure, table
from benchmarks.kernels.case import Case
from benchmarks.kernels.measure import leaves, run
from fusion_compiler.ir.canonical import Canonical, canonical
from fusion_compiler.ir.device import DeviceSpec, device_spec
from fusion_compiler.ir.loops import LoopNest
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.cost import Roofline
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.row_tiles import RowTile
from fusion_compiler.schedule.space import buffers_of, row_tiles, schedules

TUNED = 4  # schedules that the tuner times
Schedule = RowTile | Placement
NEAR = 1.05  # times the best: as good
Summary = dict[str, float]


@dataclass(frozen=True)
class Choice:
    """One cluster: microseconds by schedule, as timed, and the schedules of the present code, best first."""

    case: str
    cluster: str
    times: Mapping[str, float]
    ranked: tuple[Schedule, ...]

    @property
    def best(self) -> float:
        return min(self.times.values())

    @property
    def first(self) -> float | None:
        """The first choice's time; None where it was not timed."""
        return self.times.get(str(self.ranked[0]))

    @property
    def tuned(self) -> float | None:
        """The best time of those that the tuner would try."""
        return min((self.times[str(s)] for s in self.ranked[:TUNED] if str(s) in self.times), default=None)


def plans_of(case: Case, device: str) -> tuple[FusionPlan, ...]:
    """The plans of a case's training step, or of its forward, at its real sizes; nothing is computed."""
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        inputs = leaves(case.inputs("cpu"), case.differentiate)
        fast = fc.compile(case.fn, backend="eager", device=device)
        if not case.differentiate:
            run(fast, inputs, (), ())
        else:
            outputs = fast(*inputs.values())
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            wanted = [inputs[n] for n in case.differentiate]
            torch.autograd.grad(outputs, wanted, [torch.empty_like(o) for o in outputs])
    return tuple(fast.plan)


def clusters_of(case: Case, device: str) -> Iterator[tuple[str, Canonical]]:
    """The clusters of a case by name, each kernel once."""
    keys = (
        (cluster.name, canonical(cluster, plan.dag))
        for plan in plans_of(case, device)
        for cluster in plan.clusters
    )
    seen: set[Canonical] = set()
    for name, key in keys:
        if key not in seen:
            seen.add(key)
            yield name, key


def ranked(loops: LoopNest, device: DeviceSpec) -> tuple[Schedule, ...]:
    """The tiles of rows and columns of a nest, best first, or the placements of one that has none."""
    a = Analysis(loops)
    if not a.in_rows:
        return schedules(loops, device)
    return row_tiles(a, Roofline(a, device, buffers_of(loops)))


def choices(rows: Sequence[Mapping[str, Any]], cases: Iterable[Case], device: DeviceSpec) -> Iterator[Choice]:
    """The timed clusters that the present code still makes."""
    by_name = {case.name: case for case in cases}
    for row in rows:
        timed: dict[str, list[Mapping[str, Any]]] = {}
        for cluster in row["clusters"]:
            if "all" in cluster:
                timed.setdefault(cluster["cluster"], []).append(cluster)
        for name, key in clusters_of(by_name[row["case"]], device.name):
            if timed.get(name):
                best_first = ranked(key.nests[0], device)
                yield Choice(row["case"], name, dict(timed[name].pop(0)["all"]), best_first)


def over_best(first: Sequence[float], tuned: Sequence[float], tuner: str) -> Summary:
    """How good first choices and the tuner's are; both are times over the best time."""
    return {
        "first choice within 5% of the best": sum(r <= NEAR for r in first) / len(first),
        "first choice / best, median": statistics.median(first),
        "first choice / best, worst": max(first),
        f"{tuner} within 5% of the best": sum(r <= NEAR for r in tuned) / len(tuned),
    }


def summarize(choices: Sequence[Choice]) -> Summary:
    """How good the first choices are and the best of the tuner's; ratios are to the best that was timed."""
    first = [c.first / c.best for c in choices if c.first is not None]
    tuned = [c.tuned / c.best for c in choices if c.tuned is not None]
    if not first:
        return {}
    untimed = {"clusters": len(choices), "first choices that were not timed": len(choices) - len(first)}
    return untimed | over_best(first, tuned, f"best of the first {TUNED}")


def show(choices: Sequence[Choice]) -> str:
    """The first choices that are not timed, or not as good as the best."""
    lines = [
        [
            f"{c.case}: {c.cluster[:28]}",
            str(c.ranked[0]),
            "not timed" if c.first is None else figure(c.first, ".1f"),
            figure(c.tuned, ".1f"),
            min(c.times, key=c.times.__getitem__),
            figure(c.best, ".1f"),
        ]
        for c in choices
        if c.first is None or c.first > NEAR * c.best
    ]
    return table(["cluster [us]", "first choice", "", "tuned", "best found", ""], lines)


def main(path: Path, cases: Iterable[Case], device: str = "h200") -> Summary:
    measured = list(choices(json.loads(path.read_text())["rows"], cases, device_spec(device)))
    print(show(measured))
    summary = summarize(measured)
    for name, value in summary.items():
        print(f"{name}: {value:.4g}")
    return summary
