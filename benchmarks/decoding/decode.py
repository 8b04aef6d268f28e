"""python -m benchmarks decode: one token at a time, held to the time in which its bytes are copied.

Each contender runs in a process of its own, as for `models`. Wall time is that of a token in a run of
sixty-four. A share is that of the copy bandwidth that it draws: bytes that a token needs / ms / what a copy
moves in a ms, reads and writes counted. With --jobs 8 eight compile side by side and measure one by one;
--within stops in time, and --resume measures what --json does not have, and ours of another commit.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness import tables
from benchmarks.harness.record import Record, begin, fill
from benchmarks.harness.tables import Bar, Column, Row, at_least, at_most, cell_of, figure, over, timed, value
from benchmarks.harness.timing import yardstick_of
from benchmarks.models.measure import CONTENDERS, PEERS, cells_of

FIRST = "Llama-1B, batch 1, one token"
MS = 0.72  # of that row
OF_COPY, OF_QUANTISED = 0.80, 0.70
FASTER = 1.4  # than the best form of torch.compile, by wall time
BATCH = 1.1  # times the first row, of up to eight sequences


def share(cell: Mapping[str, Any], bandwidth: float) -> float | None:
    """Return the share of the copy bandwidth (bytes a second) that a step reaches, or None without a
    figure."""
    if "token_bytes" not in cell or "step_ms" not in cell:
        return None
    return cell["token_bytes"] / (cell["step_ms"] / 1e3) / bandwidth


def ratio(row: Row) -> float | None:
    """Wall time of the best form of torch.compile over ours."""
    return over(value(row, PEERS, "step_ms"), value(row, "ours", "step_ms"))


def bars(rows: Sequence[Row], bandwidth: float) -> Iterator[Bar]:
    first = next((cell_of(row, "ours") for row in rows if row["case"] == FIRST), {})
    for row in rows:
        name, ours = row["case"], cell_of(row, "ours")
        drawn = share(ours, bandwidth)
        if drawn is None:
            continue
        if name == FIRST:
            yield from at_most(f"{name}: ms", ours["step_ms"], MS)
        if name.startswith("Llama-1B, batch") and name != FIRST and "step_ms" in first:
            yield from at_most(f"{name}: times batch 1", ours["step_ms"] / first["step_ms"], BATCH)
        else:
            least = OF_QUANTISED if any(kind in name for kind in ("int8", "float8", "int4")) else OF_COPY
            yield from at_least(f"{name}: of the copy bandwidth", drawn, least)
        yield from at_least(f"{name}: x torch.compile", ratio(row), FASTER)
        yield from at_most(f"{name}: error / eager's", ours.get("error_to_eager"), 1)


def described(cell: Mapping[str, Any], bandwidth: float) -> str:
    if "failed" in cell:
        return cell["failed"]
    error = f", error/eager {cell['error_to_eager']:.2f}" if "error_to_eager" in cell else ""
    joules = f", {cell['joules']:.3f} J" if "joules" in cell else ""
    times = f"{cell['step_ms']:.3f} ms (GPU {cell['gpu_ms']:.3f}, host {cell['host_ms']:.3f})"
    drawn = f"{cell['kernels']} kernels, {figure(share(cell, bandwidth))} of copy"
    return f"{times}, {drawn}, first {cell['first_step_s']:.1f} s{joules}{error}"


def columns(bandwidth: float) -> tuple[Column, ...]:
    return (
        ("a token", lambda row: row["case"]),
        *((f"{n} ms (GPU)", lambda row, n=n: timed(cell_of(row, n), ".3f")) for n in CONTENDERS),
        ("host ms", lambda row: figure(value(row, "ours", "host_ms"))),
        ("of copy", lambda row: figure(share(cell_of(row, "ours"), bandwidth))),
        ("x best compile", lambda row: figure(ratio(row))),
        ("joules", lambda row: figure(value(row, "ours", "joules"), ".3f")),
        ("error", lambda row: figure(value(row, "ours", "error_to_eager"))),
    )


def show(rows: Sequence[Row], bandwidth: float) -> str:
    text = tables.table(*tables.lines_of(columns(bandwidth), rows))
    return text + "\n\n" + tables.verdicts(bars(rows, bandwidth))


def main(options: argparse.Namespace) -> Record:
    bandwidth = yardstick_of(options).bandwidth
    record = begin("decode", options, copy_bandwidth=bandwidth)
    describe = functools.partial(described, bandwidth=bandwidth)
    fill(record, cells_of(options), "step_ms", "benchmarks.models.measure", options, describe)
    return record.finish({}, show(record.rows, bandwidth))
