"""Optimizers held to their bars: whole steps beside torch.compile and PyTorch's own, memory, copies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.record import figure, geometric_mean, table

Row = Mapping[str, Any]
WHOLE = "torch.compile"  # with PyTorch's fused optimizer
PEERS = ("for-loop", "foreach", "fused", "compiled step", "hooks")
OURS = ("ours", "ours, backward", "ours, forward")
CONTENDERS = (WHOLE, *PEERS, *OURS)
FASTER = {"1 x 1024": 1.25, "4 x 2048": 1.05}  # than `WHOLE`, by the workload's name; elsewhere not slower
PAPER = 1.2  # times as fast as the for-loop and foreach, on half of the rows
OF_COPY = 0.93  # of the copy bandwidth, of the update alone
FREED = 0.9  # of the gradients' bytes, which the peak is lower by where updates are in the backward pass


def best(row: Row) -> Mapping[str, Any]:
    """Of our ways the fastest."""
    ran = [cell for name in OURS if "ms" in (cell := row["cells"].get(name, {}))]
    return min(ran, key=lambda cell: cell["ms"], default={})


def ratio(row: Row, peer: str) -> float | None:
    """A peer's wall time over that of our fastest."""
    ours, theirs = best(row), row["cells"].get(peer, {})
    return theirs["ms"] / ours["ms"] if "ms" in ours and "ms" in theirs else None


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Geometric means over the rows that have both."""
    found = {peer: geometric_mean(v for row in rows if (v := ratio(row, peer))) for peer in (WHOLE, *PEERS)}
    return {f"vs {peer}": mean for peer, mean in found.items() if mean is not None}


def bars(rows: Sequence[Row], update: str) -> Iterator[tuple[str, float, bool]]:
    """(what, the figure, whether it is met). update: the case that is no whole step."""
    steps = [row for row in rows if row["case"] != update]
    for row in rows:
        name = f"{row['case']}, {row['phase']}"
        ours = row["cells"].get("ours", {})
        if row["case"] == update:
            if "of copy" in ours:
                yield (
                    f"{name}: of the copy bandwidth >= {OF_COPY}",
                    ours["of copy"],
                    ours["of copy"] >= OF_COPY,
                )
            continue
        if (faster := ratio(row, WHOLE)) is not None:
            least = next((bar for part, bar in FASTER.items() if part in row["case"]), 1.0)
            yield f"{name}: x torch.compile and fused >= {least}", faster, faster >= least
        freeing = row["cells"].get("ours, backward", {})
        if ours.get("peak_gb") and freeing.get("peak_gb") and "1 x 1024" in row["case"]:
            part = (ours["peak_gb"] - freeing["peak_gb"]) / ours["gradients_gb"]
            yield f"{name}: freed of the gradients, at the peak >= {FREED}", part, part >= FREED
    for peer in ("for-loop", "foreach"):
        found = [value for row in steps if (value := ratio(row, peer)) is not None]
        if found:
            part = sum(value >= PAPER for value in found) / len(found)
            yield f"rows of whole steps {PAPER} x as fast as {peer} >= .5", part, part >= 0.5


def describe(cell: Mapping[str, Any]) -> str:
    if "failed" in cell:
        return cell["failed"]
    if "of copy" in cell:
        return f"{cell['ms']:.3f} ms, {cell['of copy']:.2f} of copy, {cell['launches']} launches"
    return f"{cell['ms']:.2f} ms (GPU {cell['gpu_ms']:.2f}), peak {cell['peak_gb']:.2f} GB"


def lines(rows: Sequence[Row]) -> list[list[str]]:
    def shown(cell: Mapping[str, Any]) -> str:
        if "failed" in cell:
            return "failed"
        other = cell.get("of copy", cell.get("peak_gb"))
        return f"{figure(cell.get('ms'))} ({figure(other)})" if cell else "-"

    return [
        [
            f"{row['case']}, {row['phase']}",
            *(shown(row["cells"].get(name, {})) for name in CONTENDERS),
            *(figure(ratio(row, peer)) for peer in (WHOLE, "fused")),
        ]
        for row in rows
    ]


def show(rows: Sequence[Row], update: str) -> str:
    header = ["ms (updates: of a copy; steps: peak GB)", *CONTENDERS, f"x {WHOLE}", "x fused"]
    held = list(bars(rows, update))
    verdicts = [[what, f"{value:.2f}", "met" if met else "MISSED"] for what, value, met in held]
    counted = f"{sum(met for *_, met in held)} of {len(held)} bars met"
    return "\n\n".join([table(header, lines(rows)), table(["bar", "figure", ""], verdicts), counted])
