"""The data of a profile, for people and for programs: the measured units of a step, and the work outside of
them."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Any

from fusion_compiler.ir.breaks import GraphBreak
from fusion_compiler.ir.dag import Source
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.ir.plan_text import WIDTH, aligned, count, human_bytes, place, shortened, wrapped
from fusion_compiler.report.timeline import Event
from fusion_compiler.stitch.units import Unit

ROWS = 24  # of the table; units that take less time are summed up
OTHERS = 8  # rows of kernels outside of every unit
HOST = (
    "Times of units are the host's, in the range of each and with the profiler's own cost in them: nothing "
    "ran on a GPU, so that no prediction is compared."
)


@dataclass(frozen=True)
class Measured:
    """A `Measured` is one unit. calls: their number in a step. us: the time of one call, the median over the
    repetitions; on a device that of the unit's kernels alone, on the host that of its range. predicted: the
    plan's cost of one call."""

    unit: Unit
    calls: int
    us: float
    predicted: Cost
    on_device: bool = True

    @property
    def bandwidth(self) -> float | None:
        """Return predicted bytes over measured time, in bytes a second, or None for host times."""
        return self.predicted.moved / (self.us * 1e-6) if self.on_device and self.us else None

    @property
    def error(self) -> float | None:
        """Return predicted over measured time less one, or None for host times."""
        return self.predicted.us / self.us - 1 if self.on_device and self.us else None


@dataclass(frozen=True)
class Unmatched:
    """An `Unmatched` is a kernel that ran outside of every unit. calls, us: averages of a step, us in
    microseconds."""

    kernel: str
    calls: float
    us: float


@dataclass(frozen=True)
class ProfileData:
    """The data of a profile describe one step. All times are microseconds, medians over the repetitions.

    device: the device that ran the step. planned: the DeviceSpec of the predictions.
    on_device: True if times of units and work are those of kernels on the device. False if nothing ran on a
        GPU: times are the host's in each unit's range, including the profiler's own cost, and no prediction
        is compared.
    step_us: from the call until the device is done, without a profiler. work_us: all kernels, or all ranges.
    units: those that ran, in order. outside_us: work outside of every unit, or host time outside of ranges.
    """

    model: str
    device: str
    planned: str
    on_device: bool
    repetitions: int
    step_us: float
    work_us: float
    outside_us: float
    units: tuple[Measured, ...]
    unmatched: tuple[Unmatched, ...]
    plans: tuple[FusionPlan, ...] = field(default=(), repr=False, compare=False)
    events: tuple[Event, ...] = field(default=(), repr=False, compare=False)
    breaks: tuple[GraphBreak, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        """Return totals, a table, the units that took longest first, and the kernels outside of units; at
        most 110 columns wide. Units that are the same work in several layers have one row."""
        what = "of work on the device" if self.on_device else "in units"
        lines = [
            f"profile of {self.model} on {self.device}, {count(self.repetitions, 'repetition')}",
            f"  step {self.step_us:.1f} us, {self.work_us:.1f} us {what}, {self.outside_us:.1f} us "
            "outside of any unit",
        ]
        if self.on_device:
            lines += _prediction(self)
        else:
            lines += wrapped("  ", HOST)
        lines += ["", *_table(self)]
        if self.unmatched:
            lines += ["", f"outside of any unit: {self.outside_us:.1f} us a step"]
            for other in self.unmatched[:OTHERS]:
                name = shortened(other.kernel, WIDTH - 24)
                lines.append(f"  {other.us:>8.1f} us  x{other.calls:g}  {name}")
            if rest := self.unmatched[OTHERS:]:
                lines.append(f"  {sum(o.us for o in rest):>8.1f} us  in {count(len(rest), 'other')}")
        return "\n".join(lines)

    def json(self) -> dict[str, Any]:
        """Return a profile as plain data for json.dumps.

        measured: {device, repetitions, clock ("device" or "host"), step_us, work_us, outside_us,
            unmatched: [{kernel, calls, us}]}.
        units: {graph: {unit: {us, bandwidth, error}}}: us of one call; bandwidth in bytes a second; error is
            predicted over measured time less one. bandwidth and error are null if `clock` is "host".
        """
        units: dict[str, dict[str, Any]] = {}
        for m in self.units:
            row = {"us": m.us, "bandwidth": m.bandwidth, "error": m.error}
            units.setdefault(m.unit.graph, {})[m.unit.name] = row
        measured = {
            "device": self.device,
            "repetitions": self.repetitions,
            "clock": "device" if self.on_device else "host",
            "step_us": self.step_us,
            "work_us": self.work_us,
            "outside_us": self.outside_us,
            "unmatched": [{"kernel": o.kernel, "calls": o.calls, "us": o.us} for o in self.unmatched],
        }
        return {"measured": measured, "units": units}


def _prediction(profile: ProfileData) -> list[str]:
    measured = sum(m.us * m.calls for m in profile.units)
    foreseen = sum(m.predicted.us * m.calls for m in profile.units)
    errors = [abs(m.error) for m in profile.units if m.error is not None and m.unit.sort == "cluster"]
    text = f"  predicted for {profile.planned}: {foreseen:.1f} us"
    text += f" ({foreseen / measured - 1:+.0%})" if measured else ""
    return [text + (f"; a cluster is off by {statistics.fmean(errors):.0%} on average" if errors else "")]


def _table(profile: ProfileData) -> list[str]:
    """Return two lines for each distinct unit: its times, and its place in the model."""
    groups: dict[tuple[object, ...], list[Measured]] = {}
    for measured in profile.units:
        groups.setdefault((measured.unit.graph, measured.unit.same), []).append(measured)
    ranked = sorted(groups.values(), key=lambda same: -_total(same))
    head = ("unit", "runs", "us", "share", "each", "predicted", "error", "bandwidth")
    rows: list[tuple[str, ...]] = [head if profile.on_device else head[:5]]
    below = [""]
    for same in ranked[:ROWS]:
        first = same[0]
        row = [
            shortened(first.unit.name, 40),
            f"x{n}" if (n := sum(m.calls for m in same)) > 1 else "",
            f"{_total(same):.1f}",
            f"{_total(same) / profile.work_us:.1%}" if profile.work_us else "",
            f"{statistics.fmean(m.us for m in same):.1f}",
        ]
        if profile.on_device:
            errors = [m.error for m in same if m.error is not None]
            speeds = [m.bandwidth for m in same if m.bandwidth is not None]
            row += [
                f"{first.predicted.us:.1f}",
                f"{statistics.fmean(errors):+.0%}" if errors else "",
                f"{human_bytes(int(statistics.fmean(speeds)))}/s" if speeds else "",
            ]
        rows.append(tuple(row))
        below.append(shortened(f"    {first.unit.graph}{_where(first.unit.source)}", WIDTH - 2))
    table = aligned(rows, left=(0,))
    lines = [f"  {line}" for pair in zip(table, below, strict=True) for line in pair if line]
    if rest := ranked[ROWS:]:
        lines.append(f"  and {count(len(rest), 'smaller one')}: {sum(map(_total, rest)):.1f} us")
    return lines


def _where(source: Source | None) -> str:
    if source is None:
        return ""
    return f" at {place(source)}" if source.line else f" in {source.module}"


def _total(same: list[Measured]) -> float:
    """Return the microseconds that units take in a step."""
    return sum(m.us * m.calls for m in same)
