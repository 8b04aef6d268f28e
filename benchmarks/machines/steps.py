"""Measured steps of uneven models: ours beside equal layers on each stage.

Each process is a machine of the pipeline: some threads of the CPU, or a GPU. It trains the four models of
`benchmarks/machines/uneven.py` with their losses, by SGD. Nothing slows the messages down.

- `ours` is the plan of `fc.partition`; a CPU's rates are measured while all processes measure theirs.
- `measured` is its plan with `measured=True`: each operator has run once.
- `equal` has as many layers on each stage.

`step` is the median of a few steps of the slowest process. Three predictions stand beside it. `estimated` and
`operators` are the plan's, before a stage has run: by the device's rates, and by the measured operators.
`phases` simulates the schedule with the phases of each stage, the messages, the sums of tied gradients and
the optimizer's step, each measured alone. The contenders take turns, step by step, and so do steps and parts:
a host whose speed changes is as fast for all of them.

--processes: 4 on a CPU, else as many as there are GPUs. --threads: of each process on a CPU; the default
leaves one core of its share for messages. --size: small, middle or large. --backend: gloo or nccl; the
default is nccl if each process has a GPU. --only: only contenders whose name matches. --budget: seconds for
one model, and again for each contender if the processes of all fail. --within: seconds for everything.
"""

from __future__ import annotations

import argparse
import copy
import os
import re
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import fusion_compiler as fc
from benchmarks.harness.record import Record, environment
from benchmarks.harness.tables import Bar, at_least, at_most, counted, missed, over, table
from benchmarks.harness.timing import synchronize
from benchmarks.machines.alone import Alone, Parts, step_us
from benchmarks.machines.group import GroupError, Texts, device_of, link_of, run_group, take_cores
from benchmarks.machines.uneven import UNEVEN, Example, Trained
from fusion_compiler.errors import MachinesError
from fusion_compiler.ir.device import DeviceSpec, device_spec
from fusion_compiler.machines import partition as partition_module
from fusion_compiler.machines.cut import Place
from fusion_compiler.machines.estimate import Times, spec_of
from fusion_compiler.machines.estimate import measure as measure_operators
from fusion_compiler.machines.layout import Layout
from fusion_compiler.machines.plan import Schedule
from fusion_compiler.machines.reasons import equal_layers
from fusion_compiler.machines.workload import Workload, workload

CONTENDERS = ("ours", "measured", "equal")
SCHEDULE, MICROBATCHES = Schedule.ONE_F_ONE_B, 8
WARM, TIMED, TURNS = 3, 10, 4  # steps that do not count, steps that do, and turns of a part behind each
RATE = 1e-3  # of SGD
PATIENCE_S = 60.0  # for a process that compiles its stages
SAME = {torch.float32: 1e-3, torch.bfloat16: 2e-2}  # relative difference of the losses after all steps
DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A task is what the processes do for one model. device: its type. steps: those that count. turns: how
    often each part is measured behind each of these steps."""

    name: str
    size: str
    device: str
    threads: int
    contenders: tuple[str, ...]
    steps: int
    turns: int


@dataclass(frozen=True)
class Plans:
    """Plan a model for machines of one kind. The model is exported once for all its plans."""

    example: Example
    machines: tuple[fc.Machine, ...]
    link: fc.Link

    @cached_property
    def work(self) -> Workload:
        model, args = self.example
        return workload(model, args, {}, training=True)

    @cached_property
    def operators(self) -> Times:
        args = self.example[1]
        return measure_operators(self.work, args, {}, args[0].device)

    def plan(self, **options: Any) -> fc.Pipeline:
        shared = {"workload": lambda *_, **__: self.work, "measure": lambda *_: self.operators}
        with patch.multiple(partition_module, **shared):
            return fc.partition(
                *self.example, machines=self.machines, links=self.link, microbatches=MICROBATCHES,
                schedule=SCHEDULE, **options,
            )  # fmt: skip

    def equal_cuts(self) -> list[str]:
        """Return the operators before which equal layers are cut. Raise MachinesError for too few layers."""
        free = ((0.0, 0.0),) * len(self.work.order)
        layout = Layout.of(self.work, (free,), frozenset(), 0)
        places = [Place(s, 0, None, float("inf"), 1) for s in range(len(self.machines))]
        cuts = equal_layers(layout, places)
        if cuts is None:
            raise MachinesError(detail="fewer layers than stages", todo="use fewer machines")
        return [self.work.order[layout.borders[group]] for group in cuts.at]

    def chosen(self, contender: str) -> Row:
        """Return the cuts of a contender and its predicted steps, or why it has none."""
        try:
            if contender == "equal":
                plan = self.plan(cuts=self.equal_cuts())
            else:
                plan = self.plan(measured=contender == "measured")
        except MachinesError as error:
            return {"failed": str(error)}
        cuts = {"cuts": plan.cuts, "repeated": sorted(plan.repeated)}
        row: Row = {"plan": cuts}
        for name, measured in (("estimated", False), ("operators", True)):
            plan = self.plan(measured=measured, **cuts)
            row[f"{name} ms"] = plan.step_us / 1e3
            row[f"{name} us"] = [(stage.forward_us, stage.backward_us) for stage in plan.stages]
        return row


def process(rank: int, texts: Texts, task: Task) -> dict[str, Row]:
    """Measure the contenders in a process of the group. Return what is reported of each."""
    warnings.filterwarnings("ignore", ".isinstance.treespec, LeafSpec", FutureWarning)  # copies of graphs
    device = device_of(task.device, rank)
    cores = take_cores(rank, texts.world, task.threads) if device.type == "cpu" else []
    if device.type == "cuda":
        torch.cuda.set_device(device)
    row = row_here(texts, device)
    machines = tuple(fc.Machine(f"process {i}", row) for i in range(texts.world))
    example = example_of(task, device)
    plans = Plans(example, machines, link_of(texts, device))
    chosen = {c: texts.from_first(plans.chosen(c)) for c in task.contenders}
    facts = {"device": asdict(row), "link": asdict(plans.link), "cores": cores}
    runners: dict[str, fc.PipelineRunner] = {}
    for contender, choice in chosen.items():
        if "plan" in choice:
            plan = plans.plan(**choice["plan"])
            runners[contender] = runner_of(replace(plan, graph=copy.deepcopy(plan.graph)))
    reports = timed_steps(runners, example[1], task)
    for runner in runners.values():
        runner.close()
    return {c: facts | choice | reports.get(c, {}) for c, choice in chosen.items()}


def row_here(texts: Texts, device: torch.device) -> DeviceSpec:
    """Return the hardware numbers of a machine: of a CPU, the middle row of those that all processes measure
    at the same time."""
    if device.type == "cuda":
        return device_spec(device)
    dist.barrier()
    rows = texts.gathered(asdict(spec_of("cpu")) | {"patterns": ()})
    rows.sort(key=lambda row: row["clock"])
    return DeviceSpec(**rows[len(rows) // 2] | {"patterns": ()})


def example_of(task: Task, device: torch.device) -> Example:
    """Return a model with its loss, the same in each process, and the arguments of a microbatch."""
    torch.manual_seed(0)
    dtype = DTYPES[device.type]
    with device:
        model, args = UNEVEN[task.name](task.size)
    return Trained(model).to(dtype), tuple(x.to(dtype) if x.is_floating_point() else x for x in args)


def runner_of(plan: fc.Pipeline) -> fc.PipelineRunner:
    return fc.PipelineRunner(
        plan,
        loss=lambda loss, _: loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
        compression=None,
        patience_s=PATIENCE_S,
    )


def batch_of(args: tuple[Tensor, ...], number: int) -> tuple[Tensor, ...]:
    """Return the arguments of a step: each microbatch has the same numbers in other places."""
    first = MICROBATCHES * number
    return tuple(torch.cat([x.roll(first + m, -1) for m in range(MICROBATCHES)]) for x in args)


def timed_steps(
    runners: Mapping[str, fc.PipelineRunner], args: tuple[Tensor, ...], task: Task
) -> dict[str, Row]:
    """Return the milliseconds of each step that counts, the parts of a step, and in the last process the
    losses of all steps."""
    reports: dict[str, Row] = {contender: {"ms": [], "losses": []} for contender in runners}
    alone = {c: Alone(runner, args, no_target(runner, 1), task.turns) for c, runner in runners.items()}
    for number in range(WARM + task.steps):
        batch = batch_of(args, number)
        for contender, runner in runners.items():
            step = partial(runner.step, batch, no_target(runner, MICROBATCHES))
            synchronize(runner.device)
            dist.barrier()
            begin = time.perf_counter()
            loss = alone[contender].listen(step) if number == 0 else step()
            synchronize(runner.device)
            if number >= WARM:
                reports[contender]["ms"].append(1e3 * (time.perf_counter() - begin))
            if loss is not None:
                reports[contender]["losses"].append(float(loss))
        if number >= WARM:
            for each in alone.values():
                each.measure()
    return {c: report | {"parts": alone[c].parts().json} for c, report in reports.items()}


def no_target(runner: fc.PipelineRunner, microbatches: int) -> Tensor:
    """Return a target that no loss reads: the models compute their losses."""
    return torch.zeros(microbatches, device=runner.device)


def measure(options: argparse.Namespace, name: str, until: float) -> Iterator[Row]:
    """Yield a row for each contender. If the processes fail, each contender has processes of its own."""
    kind, world = torch.device(options.device).type, processes_of(options)
    contenders = tuple(c for c in CONTENDERS if re.search(options.only, c))
    task = Task(
        name, size_of(options), kind, threads_of(options), contenders,
        *((1, 2) if options.quick else (TIMED, TURNS)),
    )  # fmt: skip

    def rows(task: Task) -> list[Row]:
        seconds = min(options.budget, until - time.monotonic())
        reports = run_group(process, world, backend_of(options), seconds, task)
        return [row_of(name, c, [report[c] for report in reports]) for c in task.contenders]

    try:
        yield from rows(task)
        return
    except GroupError as error:
        failure = str(error)
    for contender in contenders:
        if len(contenders) > 1 and time.monotonic() < until:
            try:
                yield from rows(replace(task, contenders=(contender,)))
                continue
            except GroupError as error:
                failure = str(error)
        yield {"name": name, "contender": contender, "failed": failure}


def row_of(name: str, contender: str, reports: Sequence[Row]) -> Row:
    """Return what was measured of a contender in all processes, and what was predicted."""
    first, row = reports[0], {"name": name, "contender": contender}
    if "failed" in first:
        return row | {"failed": first["failed"]}
    parts = [Parts(**report["parts"]) for report in reports]
    steps = [max(each) for each in zip(*(report["ms"] for report in reports), strict=True)]
    predicted = {key: first[key] for key in ("estimated ms", "estimated us", "operators ms", "operators us")}
    return row | predicted | {
        "ms": statistics.median(steps),
        "steps ms": steps,
        "phases ms": step_us(SCHEDULE, MICROBATCHES, parts) / 1e3,
        "parts us": [part.json for part in parts],
        "loss": reports[-1]["losses"][-1],
        "losses": reports[-1]["losses"],
        "cuts": first["plan"]["cuts"],
        "link": first["link"],
        "device": first["device"],
        "cores": [report["cores"] for report in reports],
    }  # fmt: skip


def main(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    facts = {
        "processes": processes_of(options), "backend": backend_of(options), "size": size_of(options),
        "threads": threads_of(options), "cores": os.cpu_count(),
    }  # fmt: skip
    record = Record("uneven", environment(torch.device(options.device)) | facts, options.json)
    until = time.monotonic() + options.within
    for name in UNEVEN:
        if re.search(options.filter, name) and time.monotonic() < until:
            for row in measure(options, name, until):
                record.add(row)
    rows = record.rows
    bars = [bar for row in rows for bar in bars_of(row, equal_of(row, rows), options)]
    record.summary = {"bars": counted(bars), "missed": missed(bars)}
    record.write()
    print(", ".join(f"{name}: {fact}" for name, fact in facts.items()))
    print(table([*COLUMNS], [[f(row, equal_of(row, rows)) for f in COLUMNS.values()] for row in rows]))
    for row in rows:
        if "failed" in row:
            print(f"{row['name']}, {row['contender']} failed: {row['failed']}")
    print(counted(bars), *missed(bars), sep="\n  ")


def size_of(options: argparse.Namespace) -> str:
    return "small" if options.quick else options.size


def processes_of(options: argparse.Namespace) -> int:
    gpus = torch.cuda.device_count() if torch.device(options.device).type == "cuda" else 0
    return options.processes or (2 if options.quick else gpus or 4)


def threads_of(options: argparse.Namespace) -> int:
    """Return the threads of each process: its share of the cores but one, which is for its messages."""
    return options.threads or max(1, (os.cpu_count() or 1) // processes_of(options) - 1)


def backend_of(options: argparse.Namespace) -> str:
    if options.backend != "auto":
        return options.backend
    gpus = torch.cuda.device_count() if torch.device(options.device).type == "cuda" else 0
    return "nccl" if gpus >= processes_of(options) else "gloo"


def equal_of(row: Row, rows: Sequence[Row]) -> Row:
    """Return the row of equal layers of the same model; an empty one if that was not measured."""
    return next((r for r in rows if r["name"] == row["name"] and r["contender"] == "equal"), {})


def gain(row: Row, equal: Row, key: str = "ms") -> float | None:
    """Return how many times as fast as equal layers a contender is; None for equal layers themselves."""
    return None if row["contender"] == "equal" else over(equal.get(key), row.get(key))


def off(row: Row, key: str) -> float | None:
    """Return by which share a prediction is too long."""
    ratio = over(row.get(key), row.get("ms"))
    return None if ratio is None else ratio - 1


def bars_of(row: Row, equal: Row, options: argparse.Namespace) -> Iterator[Bar]:
    """Yield the bars of a row; that of the gain is for four machines or more."""
    label = f"{row['name']}, {row['contender']}"
    yield from at_most(f"{label}: failed", float("failed" in row), 0)
    wrong = off(row, "phases ms")
    yield from at_most(f"{label}: |predicted / measured - 1|", None if wrong is None else abs(wrong), 0.1)
    if row["contender"] == "ours" and processes_of(options) >= 4:
        yield from at_least(f"{label}: over equal layers", gain(row, equal), 1.1)
    if row["contender"] != "equal" and (loss := over(row.get("loss"), equal.get("loss"))) is not None:
        same = SAME[DTYPES[torch.device(options.device).type]]
        yield from at_most(f"{label}: |loss / loss of equal layers - 1|", abs(loss - 1), same)


def predicted(key: str) -> Callable[[Row, Row], str]:
    def text(row: Row, equal: Row) -> str:
        if (wrong := off(row, key)) is None:
            return "-"
        ratio = gain(row, equal, key)
        return f"{row[key]:.1f} ({wrong:+.0%})" + (f" {ratio:.2f}x" if ratio is not None else "")

    return text


def measured_gain(row: Row, equal: Row) -> str:
    ratio = gain(row, equal)
    return "-" if ratio is None else f"{ratio:.2f}x"


COLUMNS: dict[str, Callable[[Row, Row], str]] = {
    "model": lambda row, _: row["name"],
    "plan": lambda row, _: row["contender"],
    "step ms": lambda row, _: f"{row['ms']:.1f}" if "ms" in row else "failed",
    "over equal": measured_gain,
    "estimated ms": predicted("estimated ms"),
    "operators ms": predicted("operators ms"),
    "phases ms": predicted("phases ms"),
    "loss": lambda row, _: f"{row['loss']:.4f}" if "loss" in row else "-",
}
