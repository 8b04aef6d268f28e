"""python -m benchmarks decode: one token at a time, held to the time in which its bytes are copied.

Each contender runs in a process of its own, as for `models`. Wall time is that of a token in a run of
sixty-four. A share is that of the copy bandwidth that it draws: bytes that a token needs / ms / what a copy
moves in a ms, reads and writes counted. With --jobs 8 eight compile side by side and measure one by one;
--within stops in time, and --resume measures what --json does not have, and ours of another commit.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from benchmarks.harness.processes import in_turn
from benchmarks.harness.record import Record, environment, figure, table
from benchmarks.harness.timing import Yardstick
from benchmarks.models.measure import ALL, Task, tasks_of
from benchmarks.models.steps import CONTENDERS, PEERS, without_empty

Row = Mapping[str, Any]
FIRST = "Llama-1B, batch 1, one token"
MS = 0.72  # of that row
OF_COPY, OF_QUANTISED = 0.80, 0.70
FASTER = 1.4  # than the best form of torch.compile, by wall time
BATCH = 1.1  # times the first row, of up to eight sequences


def share(cell: Row, bandwidth: float) -> float | None:
    """Of the copy bandwidth (bytes a second)."""
    if "token_bytes" not in cell or "step_ms" not in cell:
        return None
    return cell["token_bytes"] / (cell["step_ms"] / 1e3) / bandwidth


def ratio(row: Row) -> float | None:
    """Wall time of the best form of torch.compile over ours."""
    theirs = [c["step_ms"] for n in PEERS if "step_ms" in (c := row["cells"].get(n, {}))]
    ours = row["cells"].get("ours", {})
    return min(theirs) / ours["step_ms"] if theirs and "step_ms" in ours else None


def bars(rows: Sequence[Row], bandwidth: float) -> Iterator[tuple[str, float, bool]]:
    """(what, the figure, whether it is met), for what was measured."""
    first = next((row["cells"].get("ours", {}) for row in rows if row["case"] == FIRST), {})
    for row in rows:
        name, ours = row["case"], row["cells"].get("ours", {})
        drawn = share(ours, bandwidth)
        if drawn is None:
            continue
        if name == FIRST:
            yield f"{name}: ms <= {MS}", ours["step_ms"], ours["step_ms"] <= MS
        if name.startswith("Llama-1B, batch") and name != FIRST and "step_ms" in first:
            over = ours["step_ms"] / first["step_ms"]
            yield f"{name}: times batch 1 <= {BATCH}", over, over <= BATCH
        else:
            least = OF_QUANTISED if any(kind in name for kind in ("int8", "float8", "int4")) else OF_COPY
            yield f"{name}: of the copy bandwidth >= {least}", drawn, drawn >= least
        if (faster := ratio(row)) is not None:
            yield f"{name}: x torch.compile >= {FASTER}", faster, faster >= FASTER
        if "error_to_eager" in ours:
            yield f"{name}: error / eager's <= 1", ours["error_to_eager"], ours["error_to_eager"] <= 1


def described(cell: Row, bandwidth: float) -> str:
    if "failed" in cell:
        return cell["failed"]
    error = f", error/eager {cell['error_to_eager']:.2f}" if "error_to_eager" in cell else ""
    joules = f", {cell['joules']:.3f} J" if "joules" in cell else ""
    times = f"{cell['step_ms']:.3f} ms (GPU {cell['gpu_ms']:.3f}, host {cell['host_ms']:.3f})"
    drawn = f"{cell['kernels']} kernels, {figure(share(cell, bandwidth))} of copy"
    return f"{times}, {drawn}, first {cell['first_step_s']:.1f} s{joules}{error}"


def lines(rows: Sequence[Row], bandwidth: float) -> tuple[list[str], list[list[str]]]:
    """Header and rows of the table, without empty columns."""

    def time(cell: Row) -> str:
        if "failed" in cell:
            return "failed"
        return f"{cell['step_ms']:.3f} ({cell['gpu_ms']:.3f})" if "step_ms" in cell else "-"

    ours = [row["cells"].get("ours", {}) for row in rows]
    table_lines = [
        [
            row["case"],
            *(time(row["cells"].get(n, {})) for n in CONTENDERS),
            figure(own.get("host_ms")),
            figure(share(own, bandwidth)),
            figure(ratio(row)),
            figure(own.get("joules"), ".3f"),
            figure(own.get("error_to_eager")),
        ]
        for row, own in zip(rows, ours, strict=True)
    ]
    names = (f"{n} ms (GPU)" for n in CONTENDERS)
    header = ["a token", *names, "host ms", "of copy", "x best compile", "joules", "error"]
    return without_empty(header, table_lines)


def show(rows: Sequence[Row], bandwidth: float) -> str:
    held = list(bars(rows, bandwidth))
    verdicts = [[what, f"{value:.2f}", "met" if met else "MISSED"] for what, value, met in held]
    counted = f"{sum(met for *_, met in held)} of {len(held)} bars met"
    return "\n\n".join([table(*lines(rows, bandwidth)), table(["bar", "figure", ""], verdicts), counted])


def is_known(record: Record, task: Task) -> bool:
    """Whether a resumed run keeps a cell: a peer's figure, ours of this commit."""
    cell = record.row(ALL[task.workload].name, "token")["cells"].get(task.contender, {})
    return "step_ms" in cell and (
        task.contender != "ours" or cell.get("commit") == record.environment["commit"]
    )


def main(options: argparse.Namespace) -> Record:
    device = torch.device(options.device)
    bandwidth = Yardstick(device, 1 << 24 if options.quick else 1 << 30).bandwidth
    record = Record("decode", environment(device) | {"copy_bandwidth": bandwidth}, options.json)
    if options.resume:
        record.resume()
    tasks = [task for task in tasks_of(options) if not is_known(record, task)]
    given, jobs = [vars(task) for task in tasks], options.jobs or 1
    cells = in_turn("benchmarks.models.measure", given, options.budget, jobs, within=options.within)
    done = 0
    for task, cell in zip(tasks, cells, strict=False):
        name = ALL[task.workload].name
        row = record.row(name, "token")
        row["cells"][task.contender] = cell | {"commit": record.environment["commit"]}
        record.write()
        print(f"{name}, {task.contender}: {described(cell, bandwidth)}", flush=True)
        done += 1
    print("\n" + show(record.rows, bandwidth))
    for task in tasks[done:]:
        print(f"not measured: {ALL[task.workload].name}, {task.contender}")
    return record
