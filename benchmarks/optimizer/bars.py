"""Optimizers held to their bars: whole steps beside torch.compile and PyTorch's own, memory, copies."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness import tables
from benchmarks.harness.tables import Bar, Column, Row, at_least, cell_of, figure, over, value

WHOLE = "torch.compile"  # with PyTorch's fused optimizer
PEERS = ("for-loop", "foreach", "fused", "compiled step", "hooks")
OURS = ("ours", "ours, backward", "ours, forward")
CONTENDERS = (WHOLE, *PEERS, *OURS)
FASTER = {"1 x 1024": 1.25, "4 x 2048": 1.05}  # than `WHOLE`, by the workload's name; elsewhere not slower
PAPER = 1.2  # times as fast as the for-loop and foreach, on half of the rows
OF_COPY = 0.93  # of the copy bandwidth, of the update alone
FREED = 0.9  # of the gradients' bytes, which the peak is lower by where updates are in the backward pass


def ratio(row: Row, peer: str) -> float | None:
    """A peer's wall time over that of our fastest."""
    return over(value(row, peer, "ms"), value(row, OURS, "ms"))


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Geometric means over the rows that have both."""
    return tables.means(rows, {f"vs {peer}": functools.partial(ratio, peer=peer) for peer in (WHOLE, *PEERS)})


def bars(rows: Sequence[Row], update: str) -> Iterator[Bar]:
    """update: the case that is no whole step."""
    for row in rows:
        name, ours = f"{row['case']}, {row['phase']}", cell_of(row, "ours")
        if row["case"] == update:
            yield from at_least(f"{name}: of the copy bandwidth", ours.get("of copy"), OF_COPY)
            continue
        least = next((bar for part, bar in FASTER.items() if part in row["case"]), 1.0)
        yield from at_least(f"{name}: x torch.compile and fused", ratio(row, WHOLE), least)
        freeing = cell_of(row, "ours, backward")
        if ours.get("peak_gb") and freeing.get("peak_gb") and "1 x 1024" in row["case"]:
            part = (ours["peak_gb"] - freeing["peak_gb"]) / ours["gradients_gb"]
            yield from at_least(f"{name}: freed of the gradients, at the peak", part, FREED)
    for peer in ("for-loop", "foreach"):
        ratios = [r for row in rows if row["case"] != update and (r := ratio(row, peer)) is not None]
        if ratios:
            part = sum(r >= PAPER for r in ratios) / len(ratios)
            yield Bar(f"rows of whole steps {PAPER} x as fast as {peer} >= .5", part, part >= 0.5)


def describe(cell: Mapping[str, Any]) -> str:
    if "failed" in cell:
        return cell["failed"]
    if "of copy" in cell:
        return f"{cell['ms']:.3f} ms, {cell['of copy']:.2f} of copy, {cell['launches']} launches"
    return f"{cell['ms']:.2f} ms (GPU {cell['gpu_ms']:.2f}), peak {cell['peak_gb']:.2f} GB"


def shown(cell: Mapping[str, Any]) -> str:
    if "failed" in cell:
        return "failed"
    other = cell.get("of copy", cell.get("peak_gb"))
    return f"{figure(cell.get('ms'))} ({figure(other)})" if cell else "-"


COLUMNS: tuple[Column, ...] = (
    ("ms (updates: of a copy; steps: peak GB)", lambda row: f"{row['case']}, {row['phase']}"),
    *((name, lambda row, name=name: shown(cell_of(row, name))) for name in CONTENDERS),
    *((f"x {peer}", lambda row, peer=peer: figure(ratio(row, peer))) for peer in (WHOLE, "fused")),
)


def show(rows: Sequence[Row], update: str) -> str:
    return tables.table(*tables.lines_of(COLUMNS, rows)) + "\n\n" + tables.verdicts(bars(rows, update))
