"""A profile for people and for programs."""

from __future__ import annotations

import statistics
from typing import Any

from fusion_compiler.ir.dag import Source
from fusion_compiler.ir.plan_text import WIDTH, aligned, count, human_bytes, place, shortened, wrapped
from fusion_compiler.report.profile_data import Measured, ProfileData

ROWS = 24  # of the table; units that take less time are summed up
OTHERS = 8  # rows of kernels outside of every unit
HOST = (
    "Times of units are the host's, in the range of each and with the profiler's own cost in them: nothing "
    "ran on a GPU, so that no prediction is compared."
)


def format_profile(profile: ProfileData) -> str:
    """Return a profile as text: totals, one row for units that are the same work in several layers, and
    the kernels outside of units."""
    what = "of work on the device" if profile.on_device else "in units"
    lines = [
        f"profile of {profile.model} on {profile.device}, {count(profile.repetitions, 'repetition')}",
        f"  step {profile.step_us:.1f} us, {profile.work_us:.1f} us {what}, {profile.outside_us:.1f} us "
        "outside of any unit",
    ]
    if profile.on_device:
        lines += _prediction(profile)
    else:
        lines += wrapped("  ", HOST)
    lines += ["", *_table(profile)]
    if profile.unmatched:
        lines += ["", f"outside of any unit: {profile.outside_us:.1f} us a step"]
        for other in profile.unmatched[:OTHERS]:
            lines.append(f"  {other.us:>8.1f} us  x{other.calls:g}  {shortened(other.kernel, WIDTH - 24)}")
        if rest := profile.unmatched[OTHERS:]:
            lines.append(f"  {sum(o.us for o in rest):>8.1f} us  in {count(len(rest), 'other')}")
    return "\n".join(lines)


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


def profile_json(profile: ProfileData) -> dict[str, Any]:
    """Return a profile as plain data for json.dumps.

    measured: {device, repetitions, clock ("device" or "host"), step_us, work_us, outside_us,
        unmatched: [{kernel, calls, us}]}.
    units: {graph: {unit: {us, bandwidth, error}}}: us of one call; bandwidth in bytes a second; error is
        predicted over measured time less one. bandwidth and error are null if `clock` is "host".
    """
    units: dict[str, dict[str, Any]] = {}
    for m in profile.units:
        row = {"us": m.us, "bandwidth": m.bandwidth, "error": m.error}
        units.setdefault(m.unit.graph, {})[m.unit.name] = row
    measured = {
        "device": profile.device,
        "repetitions": profile.repetitions,
        "clock": "device" if profile.on_device else "host",
        "step_us": profile.step_us,
        "work_us": profile.work_us,
        "outside_us": profile.outside_us,
        "unmatched": [{"kernel": o.kernel, "calls": o.calls, "us": o.us} for o in profile.unmatched],
    }
    return {"measured": measured, "units": units}
