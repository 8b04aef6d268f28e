"""Which kernel of a profiler's trace belongs to which unit: a pure function of the trace's events.

Names of kernels do not tell: identical clusters share one kernel, and library calls have names of cuBLAS.
What tells is the launch: it carries the kernel's correlation and lies, on its thread, inside the range of its
unit. Where a trace lacks the launch (some profilers leave out those made through the driver) or knows its
thread by another number, the range that the profiler itself drew on the kernel's stream takes its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion_compiler.errors import ReplayedGraphError

Event = Mapping[str, Any]  # of a Chrome trace, times in microseconds
Thread = tuple[object, object]  # process and thread, or device and stream

WORK = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")
STEP = "fusion_compiler step"  # the range around each repetition


@dataclass(frozen=True)
class Run:
    """A unit in one repetition. range: the unit's. calls: how often it ran. us: of all of them."""

    range: str
    step: int
    calls: int
    us: float


@dataclass(frozen=True)
class Outside:
    """A kernel that ran outside of every unit."""

    kernel: str
    step: int
    us: float


@dataclass(frozen=True)
class Timeline:
    """runs: of units. outside: device work of no unit. steps: host microseconds of each repetition.

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
    """Device work by unit. ranges: the texts of all units; repetitions are ranges called STEP.

    Raises ReplayedGraphError where kernels were launched together as a CUDA graph.
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
    """Host time of each unit's range, the profiler's own cost inside it included."""
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
    """The events, each kernel of a unit with the unit's range before its name and in its arguments."""
    for i, event in enumerate(events):
        new = dict(event)
        if i in owners:
            unit, _, source = owners[i].partition(" [")
            graph, _, cluster = unit.partition("/")
            more = {"graph": graph, "cluster": cluster, "source": source.rstrip("]"), "kernel": event["name"]}
            new |= {"name": f"{cluster}: {event['name']}", "args": {**event.get("args", {}), **more}}
        yield new


def _calls(spans: Mapping[Thread, Sequence[_Span]], steps: Sequence[_Span]) -> dict[tuple[str, int], int]:
    """How often each unit ran in each repetition."""
    counts: dict[tuple[str, int], int] = {}
    for span in sorted((s for group in spans.values() for s in group), key=lambda s: s.start):
        step = _step(steps, span.start)
        if step is not None:
            counts[span.name, step] = counts.get((span.name, step), 0) + 1
    return counts


def _spans(events: Sequence[Event], category: str, names: Collection[str]) -> dict[Thread, list[_Span]]:
    """The ranges of some names, by thread, the earliest and of these the longest first."""
    found: dict[Thread, list[_Span]] = {}
    for e in events:
        if e.get("cat") == category and e.get("ph") == "X" and e["name"] in names:
            start = float(e["ts"])
            found.setdefault(_thread(e), []).append(_Span(str(e["name"]), start, start + float(e["dur"])))
    return {thread: sorted(spans, key=lambda s: (s.start, -s.end)) for thread, spans in found.items()}


def _steps(events: Sequence[Event]) -> list[_Span]:
    spans = _spans(events, "user_annotation", (STEP,))
    return sorted((s for group in spans.values() for s in group), key=lambda s: s.start)


def _lengths(steps: Sequence[_Span]) -> tuple[float, ...]:
    return tuple(step.end - step.start for step in steps)


def _step(steps: Sequence[_Span], time: float) -> int | None:
    """The repetition that a time lies in; autograd's threads work within the caller's."""
    return next((i for i, step in enumerate(steps) if step.start <= time <= step.end), None)


def _inside(spans: Sequence[_Span], points: Iterable[tuple[float, int]]) -> dict[int, str]:
    """For each (time, key) the innermost range around it, if any. spans: sorted as by `_spans`."""
    found: dict[int, str] = {}
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
            found[key] = stack[-1].name
    return found


def _thread(event: Event) -> Thread:
    return event.get("pid"), event.get("tid")


def _correlation(event: Event) -> object:
    return event.get("args", {}).get("correlation")
