"""The match of kernels in a profiler's trace to units: a pure function of the trace's events.

Names of kernels do not identify a unit: identical clusters share one kernel, and library calls have names of
cuBLAS. The launch does: it carries the kernel's correlation and lies, on its thread, inside the range of its
unit. If a trace lacks the launch (some profilers leave out launches through the driver) or has another number
for its thread, the range that the profiler itself drew on the kernel's stream takes its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_compiler.errors import ReplayedGraphError

Event = Mapping[str, Any]  # an event of a Chrome trace, with times in microseconds
Thread = tuple[object, object]  # process and thread, or device and stream

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
STEP = "fusion_compiler step"  # the range around each repetition


@dataclass(frozen=True)
class Run:
    """A `Run` is a unit in one repetition. range: the unit's. calls: how often it ran. us: of all calls."""

    range: str
    step: int
    calls: int
    us: float


@dataclass(frozen=True)
class Outside:
    """An `Outside` is a kernel that ran outside of every unit."""

    kernel: str
    step: int
    us: float


@dataclass(frozen=True)
class Timeline:
    """A timeline assigns device work to units.

    runs: those of units. outside: device work of no unit. steps: host microseconds of each repetition.
    owners: position among the events of each kernel of a unit -> the unit's range.
    """

    runs: tuple[Run, ...]
    outside: tuple[Outside, ...]
    steps: tuple[float, ...]
    owners: Mapping[int, str]


@dataclass(frozen=True)
class _Span:
    name: str
    start: float
    end: float


def device_timeline(events: Sequence[Event], ranges: Collection[str]) -> Timeline:
    """Return device work by unit. ranges: the texts of all units; repetitions are ranges called STEP.

    Raises ReplayedGraphError if kernels were launched together as a CUDA graph.
    """
    spans, steps = _spans(events, "user_annotation", ranges), _steps(events)
    launches = {_correlation(e): e for e in events if e.get("cat") in LAUNCHES}
    launched: dict[Thread, list[tuple[float, int]]] = {}
    others: dict[Thread, list[tuple[float, int]]] = {}
    when: dict[int, float] = {}
    for i, event in enumerate(events):
        if event.get("cat") not in WORK or event.get("ph") != "X":
            continue
        launch = launches.get(_correlation(event)) if _correlation(event) is not None else None
        if launch is not None and "GraphLaunch" in str(launch["name"]):
            raise ReplayedGraphError(launch=launch["name"])
        when[i] = float((launch or event)["ts"])
        if launch is not None and _thread(launch) in spans:
            launched.setdefault(_thread(launch), []).append((when[i], i))
        else:
            others.setdefault(_thread(event), []).append((float(event["ts"]), i))
    owners: dict[int, str] = {}
    for thread, points in launched.items():
        owners |= _inside(spans.get(thread, []), points)
    drawn = _spans(events, "gpu_user_annotation", ranges)
    for stream, points in others.items():
        owners |= _inside(drawn.get(stream, []), points)
    us: dict[tuple[str, int], float] = {}
    outside: list[Outside] = []
    for i, time in when.items():
        step, took = _step(steps, time), float(events[i]["dur"])
        if step is not None and i in owners:
            us[owners[i], step] = us.get((owners[i], step), 0.0) + took
        elif step is not None:
            outside.append(Outside(str(events[i]["name"]), step, took))
    calls = _calls(spans, steps)
    runs = tuple(Run(name, step, n, us.get((name, step), 0.0)) for (name, step), n in calls.items())
    return Timeline(runs, tuple(outside), _lengths(steps), owners)


def host_timeline(events: Sequence[Event], ranges: Collection[str]) -> Timeline:
    """Return the host time of each unit's range, including the profiler's own cost inside it."""
    spans, steps = _spans(events, "user_annotation", ranges), _steps(events)
    us: dict[tuple[str, int], float] = {}
    for span in (s for group in spans.values() for s in group):
        step = _step(steps, span.start)
        if step is not None:
            us[span.name, step] = us.get((span.name, step), 0.0) + span.end - span.start
    calls = _calls(spans, steps)
    runs = tuple(Run(name, step, n, us[name, step]) for (name, step), n in calls.items())
    return Timeline(runs, (), _lengths(steps), {})


def named(events: Iterable[Event], owners: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Return the events; each kernel of a unit has the cluster before its name, and the unit's range in its
    arguments."""
    for i, event in enumerate(events):
        new = dict(event)
        if i in owners:
            unit, _, source = owners[i].partition(" [")
            graph, _, cluster = unit.partition("/")
            more = {"graph": graph, "cluster": cluster, "source": source.rstrip("]"), "kernel": event["name"]}
            new |= {"name": f"{cluster}: {event['name']}", "args": {**event.get("args", {}), **more}}
        yield new


def _calls(spans: Mapping[Thread, Sequence[_Span]], steps: Sequence[_Span]) -> dict[tuple[str, int], int]:
    """Count how often each unit ran in each repetition."""
    ordered = sorted((s for group in spans.values() for s in group), key=lambda s: s.start)
    runs = ((span.name, _step(steps, span.start)) for span in ordered)
    return Counter((name, step) for name, step in runs if step is not None)


def _spans(events: Sequence[Event], category: str, names: Collection[str]) -> dict[Thread, list[_Span]]:
    """Return the ranges of some names by thread, ordered by start; of equal starts the longest is first."""
    by_thread: dict[Thread, list[_Span]] = {}
    for e in events:
        if e.get("cat") == category and e.get("ph") == "X" and e["name"] in names:
            start = float(e["ts"])
            span = _Span(str(e["name"]), start, start + float(e["dur"]))
            by_thread.setdefault(_thread(e), []).append(span)
    return {thread: sorted(spans, key=lambda s: (s.start, -s.end)) for thread, spans in by_thread.items()}


def _steps(events: Sequence[Event]) -> list[_Span]:
    spans = _spans(events, "user_annotation", (STEP,))
    return sorted((s for group in spans.values() for s in group), key=lambda s: s.start)


def _lengths(steps: Sequence[_Span]) -> tuple[float, ...]:
    return tuple(step.end - step.start for step in steps)


def _step(steps: Sequence[_Span], time: float) -> int | None:
    """Return the repetition that contains a time; autograd's threads work within the caller's repetition."""
    return next((i for i, step in enumerate(steps) if step.start <= time <= step.end), None)


def _inside(spans: Sequence[_Span], points: Iterable[tuple[float, int]]) -> dict[int, str]:
    """Return, for each (time, key), the innermost range around it, if any. spans: sorted as by `_spans`."""
    innermost: dict[int, str] = {}
    stack: list[_Span] = []
    waiting = iter(spans)
    following = next(waiting, None)
    for time, key in sorted(points):
        while following is not None and following.start <= time:
            stack.append(following)
            following = next(waiting, None)
        while stack and stack[-1].end < time:
            stack.pop()
        if stack:
            innermost[key] = stack[-1].name
    return innermost


def _thread(event: Event) -> Thread:
    return event.get("pid"), event.get("tid")


def _correlation(event: Event) -> object:
    return event.get("args", {}).get("correlation")
