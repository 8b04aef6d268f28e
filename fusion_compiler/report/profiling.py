"""`profile`, which measures the units of a compiled model with torch's profiler, beside the predictions."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

from fusion_compiler.capture.module import CompiledFunction, CompiledModule, plan_of
from fusion_compiler.capture.symbolic_trace import autograd_nodes
from fusion_compiler.errors import (
    InvalidOptionError,
    NotCompiledError,
    NothingToProfileError,
    ReplayedGraphError,
)
from fusion_compiler.ir.decision import Outcome
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.passes.fuse.why import cost_of_call
from fusion_compiler.report.explanation import starts_of
from fusion_compiler.report.profile_data import Measured, ProfileData, Unmatched
from fusion_compiler.report.report import Report
from fusion_compiler.report.timeline import STEP, Event, Timeline, device_timeline, host_timeline, named
from fusion_compiler.runtime.boxed import unrecorded
from fusion_compiler.runtime.pairs import RULE as CUDA_GRAPH
from fusion_compiler.stitch.units import Unit, units_of

WARM = 3  # steps before the measurement: one compiles and tunes, one settles the allocator


class Profile(ProfileData):
    """A profile holds the time of each unit of a step; it prints, and becomes a report or a trace."""

    def __repr__(self) -> str:
        return f"<Profile of {self.model} on {self.device}: {self.step_us:.1f} us a step>"

    def _repr_html_(self) -> str:
        """Return the page of the report, as a notebook shows it."""
        return self.report()._repr_html_()

    def report(self) -> Report:
        """Return the report of the same plans with the measured times in it, for its page for example."""
        return Report(self.model, self.planned, self.plans, measured=self.json(), breaks=self.breaks)

    def trace(self, path: str | Path) -> None:
        """Write the last repetition for Perfetto or chrome://tracing; slices carry cluster and source.

        Raises OSError if `path` cannot be written.
        """
        text = json.dumps({"displayTimeUnit": "ms", "traceEvents": list(self.events)})
        Path(path).write_text(text, encoding="utf-8")


def profile(compiled: Callable[..., Any], *args: Any, repetitions: int = 10, **kwargs: Any) -> Profile:
    """Run `compiled(*args, **kwargs)`, and its backward pass if it has one, and measure its units.

    compiled: the result of compile(); if it has not been called yet, it is compiled first.
    The backward pass starts from the scalars among the results (a loss), or from all results if none is a
    scalar, with gradients of ones. Earlier gradients are put back; state that the model's own calls change
    (batch statistics, the state of random numbers) is changed as by `repetitions` x 2 + 3 calls.

    Raises NotCompiledError, InvalidOptionError, NothingToProfileError, and ReplayedGraphError if the step is
    replayed as a CUDA graph.
    """
    if not isinstance(compiled, CompiledFunction | CompiledModule):
        raise NotCompiledError(got=type(compiled).__name__)
    if isinstance(repetitions, bool) or repetitions < 1:
        raise InvalidOptionError(option="repetitions", value=repetitions, expected="a number of at least 1")
    plans = plan_of(compiled)
    check_not_recorded(plans)
    with unrecorded(), _Step(compiled, args, kwargs) as step:
        step()
        check_not_recorded(plans)
        for _ in range(WARM - 1):
            step()
        on_device = any(_is_on_gpu(plan) for plan in plans)
        wait = torch.cuda.synchronize if on_device else _nothing
        walls = [_wall_us(step, wait) for _ in range(repetitions)]
        events = _traced(step, wait, repetitions, on_device)
    name = getattr(compiled, "__name__", type(compiled).__name__)
    result = profile_of(name, plans, events, on_device=on_device, step_us=statistics.median(walls))
    return replace(result, breaks=plans.breaks)


def profile_of(
    model: str, plans: Sequence[FusionPlan], events: Sequence[Event], *, on_device: bool, step_us: float
) -> Profile:
    """Return the profile of a model with these plans, from the events of a trace.

    Raises NothingToProfileError, ReplayedGraphError.
    """
    units = {unit.range: (unit, plan) for plan in plans for unit in units_of(plan).values()}
    line = device_timeline(events, units) if on_device else host_timeline(events, units)
    if not line.runs:
        raise NothingToProfileError(model=model)
    measured = tuple(_measured(line, units, on_device))
    work = [0.0] * len(line.steps)
    outside = [0.0] * len(line.steps)
    for run in line.runs:
        work[run.step] += run.us
    for kernel in line.outside:
        outside[kernel.step] += kernel.us
    if on_device:
        work = [a + b for a, b in zip(work, outside, strict=True)]
    else:
        outside = [step - us for step, us in zip(line.steps, work, strict=True)]
    return Profile(
        model=model,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() and on_device else "the host",
        planned=plans[0].device,
        on_device=on_device,
        repetitions=len(line.steps),
        step_us=step_us,
        work_us=statistics.median(work),
        outside_us=statistics.median(outside),
        units=measured,
        unmatched=_unmatched(line),
        plans=tuple(plans),
        events=tuple(_last_step(events, line)),
    )


def check_not_recorded(plans: Iterable[FusionPlan]) -> None:
    """Raise ReplayedGraphError if a graph is replayed."""
    if any(d.rule == CUDA_GRAPH and d.outcome is Outcome.FORCED for plan in plans for d in plan.decisions):
        raise ReplayedGraphError(launch="cudagraphs=True")


def _measured(
    line: Timeline, units: Mapping[str, tuple[Unit, FusionPlan]], on_device: bool
) -> Iterable[Measured]:
    """Return the units that ran, in order, without calls that launch nothing."""
    samples: dict[str, list[float]] = {}
    calls: dict[str, int] = {}
    for run in line.runs:
        samples.setdefault(run.range, []).append(run.us / run.calls)
        calls[run.range] = run.calls
    for name, taken in samples.items():
        unit, plan = units[name]
        us = statistics.median(taken)
        if us or unit.sort == "cluster":
            yield Measured(unit, calls[name], us, predicted(unit, plan), on_device)


def predicted(unit: Unit, plan: FusionPlan) -> Cost:
    """Return the cost that the cost model predicts for a unit."""
    for cluster in plan.clusters:
        if cluster.name == unit.name:
            return cluster.cost
    return cost_of_call(plan, unit.name)


def _unmatched(line: Timeline) -> tuple[Unmatched, ...]:
    total: dict[str, tuple[int, float]] = {}
    for kernel in line.outside:
        calls, us = total.get(kernel.kernel, (0, 0.0))
        total[kernel.kernel] = (calls + 1, us + kernel.us)
    steps = len(line.steps)
    ranked = sorted(total.items(), key=lambda item: -item[1][1])
    return tuple(Unmatched(name, calls / steps, us / steps) for name, (calls, us) in ranked)


def _last_step(events: Sequence[Event], line: Timeline) -> Iterable[Event]:
    """Return the events of the last repetition, and those that name processes and threads."""
    begins = max(float(e["ts"]) for e in events if e.get("name") == STEP and e.get("ph") == "X")
    for event in named(events, line.owners):
        if event.get("ph") == "M" or float(event.get("ts", 0.0)) >= begins:
            yield event


class _Step:
    """A `_Step` runs forward and backward; as a context, it puts earlier gradients aside until its exit."""

    def __init__(self, compiled: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._compiled, self._args, self._kwargs = compiled, args, kwargs
        self._gradients: list[Tensor] = []
        self._leaves: dict[Tensor, Tensor | None] = {}

    def __enter__(self) -> _Step:
        return self

    def __exit__(self, *_: object) -> None:
        for leaf, gradient in self._leaves.items():
            leaf.grad = gradient

    def __call__(self) -> None:
        starts = starts_of(self._compiled(*self._args, **self._kwargs))
        if not starts or not torch.is_grad_enabled():
            return
        if [g.shape for g in self._gradients] != [r.shape for r in starts]:
            self._gradients = [torch.ones_like(r) for r in starts]
        for leaf in _leaves(starts):
            self._leaves.setdefault(leaf, leaf.grad)
            leaf.grad = None  # accumulation into it would take another kernel
        torch.autograd.backward(starts, self._gradients)


def _leaves(results: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors whose .grad a backward pass from `results` fills."""
    accumulating = (node.variable for node in autograd_nodes(results) if hasattr(node, "variable"))
    return list(dict.fromkeys((*(r for r in results if r.is_leaf), *accumulating)))


def _is_on_gpu(plan: FusionPlan) -> bool:
    dag = plan.dag
    return any(m.device.startswith("cuda") for name in dag.order for m in dag.op(name).outputs)


def _nothing() -> None:
    pass


def _wall_us(step: Callable[[], None], wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter()
    step()
    wait()
    return (time.perf_counter() - start) * 1e6


def _traced(
    step: Callable[[], None], wait: Callable[[], None], repetitions: int, on_device: bool
) -> list[Event]:
    """Trace `repetitions` steps and return the events."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with torch.profiler.profile(activities=activities, acc_events=True) as traced:
        for _ in range(repetitions):
            with record_function(STEP):
                step()
                wait()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        traced.export_chrome_trace(str(file))
        return json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
