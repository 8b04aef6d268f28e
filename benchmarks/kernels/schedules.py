"""python -m benchmarks schedules: the model's first choice against the best of a search.

Each cluster of each case, forward and backward, is captured with its real arguments. Timed are the
schedules that the tuner would time, a sample of the grid of all within reason, and then, as long as
that helps, what lies next to the best. Every kernel is compiled beside the timing of the case before.
With `--from FILE` nothing is timed: the present code's choices are looked up in FILE (`ranking.py`).
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.record import Record, begin, reason
from benchmarks.harness.tables import figure, table
from benchmarks.harness.timing import yardstick_of
from benchmarks.kernels import ranking
from benchmarks.kernels.bars import mean_error, rank_correlation
from benchmarks.kernels.case import Case
from benchmarks.kernels.measure import gradients_of, leaves, run
from benchmarks.kernels.schedule_grid import grid, neighbours
from benchmarks.kernels.sizes import ALL_CASES
from fusion_compiler.codegen.emit import program_of
from fusion_compiler.compiler.compiler import Compiler
from fusion_compiler.compiler.runners import Runners, Target
from fusion_compiler.ir.canonical import Canonical, describe
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.kernel import Program
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.options import Options
from fusion_compiler.runtime.binding import Gpu
from fusion_compiler.runtime.builds import compile_builds
from fusion_compiler.runtime.launch import Runner, find_gpu, program_builds
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.row_tiles import RowTile, placement_of

Schedule = ranking.Schedule
GAIN = 0.98  # of the best before: worth another round
CLIMBED = 3  # of the best, whose neighbours are tried


@dataclass
class CapturedCluster:
    """A cluster with what its kernel is made from, and the arguments of its first call."""

    name: str
    key: Canonical
    doc: str
    device: DeviceSpec
    cost: Any
    reference: Callable[..., tuple[Tensor, ...]]
    arguments: tuple[Any, ...] = ()
    programs: dict[Schedule, Program | str] = field(default_factory=dict[Schedule, "Program | str"])

    @functools.cached_property
    def candidates(self) -> tuple[Schedule, ...]:
        """The tuner's, the model's first choice first."""
        return ranking.ranked(self.key.nests[0], self.device)[: ranking.TUNED]

    @functools.cached_property
    def grid(self) -> tuple[Schedule, ...]:
        every = grid(Analysis(self.key.nests[0]), self.device)
        return tuple(dict.fromkeys((*self.candidates, *every)))

    def program(self, schedule: Schedule) -> Program | str:
        """The program under a schedule of the first loop nest, or why there is none."""
        if schedule not in self.programs:
            try:
                self.programs[schedule] = self._built(schedule)
            except Exception as error:
                self.programs[schedule] = reason(error)
        return self.programs[schedule]

    def _built(self, schedule: Schedule) -> Program:
        buffers = {b.name: b for b in self.key.buffers}
        is_tile = isinstance(schedule, RowTile)
        placement = placement_of(Analysis(self.key.nests[0]), schedule) if is_tile else schedule
        return program_of(self.key.nests, placement, self.name, self.doc, buffers, self.device)


class Capturing(Runners):
    """Run every cluster by ATen and keep it with its first arguments."""

    captured: list[CapturedCluster]

    def runner(
        self, cluster: Cluster, form: Canonical, plan: FusionPlan, target: Target, *rest: Any, **more: Any
    ) -> Any:
        by_aten = super().runner(cluster, form, plan, target, *rest, **more)
        doc = describe(cluster, plan.dag)
        captured = CapturedCluster(cluster.name, form, doc, target.device, cluster.cost, by_aten.fallback)
        self.captured.append(captured)

        def call(*arguments: Any) -> tuple[Tensor, ...]:
            captured.arguments = captured.arguments or arguments
            return by_aten(*arguments)

        call.__name__ = call.__qualname__ = cluster.name
        return call


def clusters_of(case: Case, options: argparse.Namespace) -> list[CapturedCluster]:
    """The clusters of a case's training step, or of its forward where it has no gradients."""
    torch._dynamo.reset()
    inputs = case.inputs(options.device, options.quick)
    compiler = Compiler(Options.of(backend="eager"))
    every = compiler.kernels
    capturing = Capturing(every.options, every.store, every.stages, every.debug, every.warned)
    capturing.captured, compiler.kernels = [], capturing
    fast = torch.compile(case.fn, backend=compiler.backend(), dynamic=False)
    gradients = gradients_of(case, inputs) if case.differentiate else ()
    run(fast, leaves(inputs, case.differentiate), case.differentiate, gradients)
    return [cluster for cluster in capturing.captured if cluster.arguments]


@dataclass(frozen=True)
class Clock:
    """Run and time the programs of a cluster: on a GPU, or in the interpreter to try the harness."""

    gpu: Gpu | None = None

    def compile(self, programs: Sequence[Program]) -> None:
        if self.gpu is not None:
            builds = [b for program in programs for b in program_builds(program, self.gpu.target)]
            compile_builds(builds, workers=max(1, (os.cpu_count() or 2) - 2))  # two are left to the timing

    def runner(self, cluster: CapturedCluster, program: Program) -> Runner:
        where: Any = {"gpus": lambda _: self.gpu} if self.gpu is not None else {"backend": "interpret"}
        return Runner((program,), cluster.reference, name=cluster.name, strict=True, **where)

    def times(self, cluster: CapturedCluster, programs: Sequence[Program]) -> list[float | str]:
        """Return the microseconds of each program, or the reason why there are none."""
        calls: dict[int, Callable[[], object]] = {}
        results: list[float | str] = []
        for i, program in enumerate(programs):
            call = functools.partial(self.runner(cluster, program), *cluster.arguments)
            start = time.perf_counter()
            try:
                call()
                calls[i] = call
                results.append((time.perf_counter() - start) * 1e6)
            except Exception as error:  # does not compile, needs more than the device has
                results.append(reason(error))
        if calls and self.gpu is not None:
            for i, us in zip(calls, self.gpu.times(list(calls.values())), strict=True):
                results[i] = us
        return results


@dataclass
class Search:
    """The timings of one cluster. limit: schedules of the first round beside the tuner's."""

    cluster: CapturedCluster
    clock: Clock
    limit: int
    times: dict[Schedule, float] = field(default_factory=dict[Schedule, float])
    failed: dict[Schedule, str] = field(default_factory=dict[Schedule, str])

    def first_round(self) -> tuple[Schedule, ...]:
        """Return the tuner's candidates and a sample of the grid, the same every time."""
        rest = [s for s in self.cluster.grid if s not in self.cluster.candidates]
        sample = random.Random(0).sample(rest, min(self.limit, len(rest)))
        return (*self.cluster.candidates, *sample)

    def prepare(self) -> None:
        """Compile the first round."""
        programs = map(self.cluster.program, self.first_round())
        self.clock.compile([p for p in programs if isinstance(p, Program)])

    def measure(self, schedules: Iterable[Schedule]) -> None:
        built = {schedule: self.cluster.program(schedule) for schedule in schedules}
        programs = {s: program for s, program in built.items() if isinstance(program, Program)}
        self.clock.compile(list(programs.values()))
        timed = self.clock.times(self.cluster, list(programs.values()))
        for schedule, result in (built | dict(zip(programs, timed, strict=True))).items():
            if isinstance(result, str):
                self.failed[schedule] = result
            elif not isinstance(result, Program):
                self.times[schedule] = result

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.measure(self.first_round())
        best = min(self.times.values(), default=0.0)
        while self.times and time.monotonic() < end:
            leading = sorted(self.times, key=self.times.__getitem__)[:CLIMBED]
            tiles = tuple(s for s in self.cluster.grid if isinstance(s, RowTile))
            near = dict.fromkeys(n for s in leading if isinstance(s, RowTile) for n in neighbours(s, tiles))
            new = [s for s in near if s not in self.times and s not in self.failed]
            if not new:
                return
            self.measure(new)
            before, best = best, min(self.times.values())
            if best > GAIN * before:
                return

    def error(self, best: Schedule) -> float:
        """Largest difference of a schedule's results to ATen's, relative to the largest value."""
        program = self.cluster.program(best)
        assert isinstance(program, Program), "it has been timed"
        ours = self.clock.runner(self.cluster, program)(*self.cluster.arguments)
        pairs = zip(ours, self.cluster.reference(*self.cluster.arguments), strict=True)
        return max((relative(a, b) for a, b in pairs if b.is_floating_point() and b.numel()), default=0.0)

    def result(self, bandwidth: float) -> dict[str, Any]:
        """Return the record of a cluster: the first choice, the tuner's best, the fastest, and every
        timing."""
        cost = self.cluster.cost
        ideal = cost.moved / bandwidth * 1e6
        shown: dict[str, Any] = {
            "cluster": self.cluster.name,
            "predicted_us": cost.us,
            "grid": len(self.cluster.grid),
            "failed": {str(s): why for s, why in self.failed.items()},
        }
        if not self.times:
            return shown
        tuned = [s for s in self.cluster.candidates if s in self.times]
        best = min(self.times, key=self.times.__getitem__)
        named = {"first": self.cluster.candidates[0], "best": best}
        if tuned:
            named["tuned"] = min(tuned, key=self.times.__getitem__)
        for label, schedule in named.items():
            shown[label] = {"schedule": str(schedule), "us": self.times.get(schedule)}
        shown["fraction"] = ideal / self.times[best]
        shown["error"] = self.error(best)
        shown["all"] = [[str(s), us] for s, us in sorted(self.times.items(), key=lambda item: item[1])]
        return shown


def relative(ours: Tensor, reference: Tensor) -> float:
    difference = (ours.double() - reference.double()).abs().max().item()
    return difference / max(reference.double().abs().max().item(), 1e-30)


def prepared(
    cases: Iterable[Case], clock: Clock, options: argparse.Namespace
) -> Iterator[tuple[Case, list[Search] | str]]:
    """Yield cases with their searches; the first kernels of each compile while the case before is timed."""
    seen: set[Canonical] = set()

    def searches_of(case: Case) -> list[Search] | str:
        searches: list[Search] = []
        try:
            clusters = clusters_of(case, options)
        except Exception as error:
            return reason(error)
        for cluster in clusters:
            if cluster.key not in seen:
                seen.add(cluster.key)
                searches.append(Search(cluster, clock, options.limit))
        return searches

    def prepare(searches: list[Search] | str) -> None:
        for search in searches if isinstance(searches, list) else ():
            search.prepare()

    with ThreadPoolExecutor(1) as pool:
        before: tuple[Case, list[Search] | str, Future[None]] | None = None
        for case in (*cases, None):
            searches = searches_of(case) if case is not None else []
            compiling = pool.submit(prepare, searches)
            if before is not None:
                before[2].result()
                yield before[:2]
            before = (case, searches, compiling) if case is not None else None


def summarize(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """How often the rules are right, and how well times are predicted."""
    clusters = [c for r in rows for c in r["clusters"] if c.get("tuned") and c["first"]["us"]]
    if len(clusters) < 3:
        return {}
    us = [c["predicted_us"] for c in clusters], [c["tuned"]["us"] for c in clusters]
    first, tuned = ([c[name]["us"] / c["best"]["us"] for c in clusters] for name in ("first", "tuned"))
    return {
        "clusters": len(clusters),
        **ranking.over_best(first, tuned, "best of the tuned"),
        "prediction against the tuned: mean error": mean_error(*us),
        "prediction against the tuned: rank correlation": rank_correlation(*us),
    }


def line_of(case: str, c: Mapping[str, Any]) -> list[str]:
    """A cluster's first choice, the tuner's best and the best of the search, in microseconds."""
    first, tuned, best = (c.get(n, {}) for n in ("first", "tuned", "best"))
    over = first["us"] and first["us"] / best["us"]
    chosen = [first["schedule"], figure(first["us"], ".1f"), figure(tuned.get("us"), ".1f")]
    searched = [best["schedule"], figure(best["us"], ".1f"), figure(over), figure(c["fraction"])]
    return [f"{case}: {c['cluster'][:28]}", figure(c["predicted_us"], ".1f"), *chosen, *searched]


def show(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        line_of(row["case"], c)
        if "best" in c
        else [f"{row['case']}: {c['cluster'][:28]}", *["-"] * 7, f"{len(c['failed'])} failed"]
        for row in rows
        for c in row["clusters"]
    ]
    header = ["cluster [us]", "predicted", "first choice", "", "tuned", "best found", "", "first/best"]
    return table([*header, "fraction"], lines)


def clock_of(device: torch.device) -> Clock:
    return Clock(find_gpu(device) if device.type == "cuda" else None)


def main(options: argparse.Namespace, cases: Sequence[Case] = ALL_CASES) -> Record | ranking.Summary:
    if options.timed is not None:
        return ranking.main(options.timed, cases)
    bandwidth = yardstick_of(options).bandwidth
    record = begin("schedules", options, copy_bandwidth=bandwidth)
    commit = record.environment["commit"]
    done = {r["case"] for r in record.rows if r.get("done") and r["commit"] == commit}
    wanted = [
        c
        for c in cases
        if re.search(options.family, c.family) and re.search(options.filter, c.name) and c.name not in done
    ]
    for case, searches in prepared(wanted, clock_of(torch.device(options.device)), options):
        key = {"case": case.name, "phase": "schedules"}
        row = record.row(key, family=case.family, commit=commit, clusters=[])
        if isinstance(searches, str):
            row["failed"] = searches
            print(f"{case.name}: {searches}", flush=True)
            searches = []
        for search in searches:
            try:
                search.run(options.budget)
                row["clusters"].append(search.result(bandwidth))
                record.summary = summarize(record.rows)
            except Exception as error:
                row["clusters"].append({"cluster": search.cluster.name, "failed": {"search": reason(error)}})
            record.write()
        row["done"] = True
        record.write()
        if row["clusters"]:
            print(show([row]), flush=True)
    return record.finish(summarize(record.rows), show(record.rows))
