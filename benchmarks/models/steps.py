"""Whole steps held to their bars: wall time, what is beside contractions, memory, host time, errors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness import tables
from benchmarks.harness.tables import Bar, Column, Row, at_least, at_most, cell_of, figure, over, timed, value

CONTENDERS = ("eager", "compile", "graphs", "autotune", "ours")
PEERS = CONTENDERS[1:-1]  # forms of torch.compile
FASTER = 1.15  # than the best form of torch.compile, by wall time
NET_FASTER = 1.1  # of a row that is a "net", which is held to this and to the memory of others
BESIDE = 1.2  # times what contractions and attention take, by wall time
SHORT_MS = 5.0  # of GPU time: below, the host decides
HOST = 1.1  # times the GPU time, where the host decides
ERROR = 1.0  # of eager's, geometric mean over all results


def ratio(row: Row, other: str, key: str = "gpu_ms") -> float | None:
    """A peer's figure over ours: above 1, ours takes less. "best" is torch.compile's best form by `key`."""
    return over(value(row, PEERS if other == "best" else other, key), value(row, "ours", key))


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Geometric means of the peers' figures over ours, where both were measured."""
    pairs = itertools.product(("gpu_ms", "step_ms", "peak_gb", "joules"), ("eager", "compile", "best"))
    return tables.means(
        rows, {f"{key} vs {other}": functools.partial(ratio, other=other, key=key) for key, other in pairs}
    )


def bars(row: Row) -> Iterator[Bar]:
    ours = cell_of(row, "ours")
    bar = NET_FASTER if row.get("net") else FASTER
    yield from at_least("wall time, x torch.compile", ratio(row, "best", "step_ms"), bar)
    if "by_kind_ms" in ours and "step_ms" in ours and not row.get("net"):
        least = sum(ms for kind, ms in ours["by_kind_ms"].items() if kind != "rest")
        if ours["gpu_ms"] < SHORT_MS:
            yield from at_most("wall time / GPU time", ours["step_ms"] / ours["gpu_ms"], HOST)
        elif least:
            yield from at_most("wall time / contractions and attention", ours["step_ms"] / least, BESIDE)
    for other in ("eager", "best"):
        yield from at_most(f"peak memory / {other}'s", over(1, ratio(row, other, "peak_gb")), 1)
    most = over(value(row, "ours", "run_peak_gb"), value(row, CONTENDERS[:-1], "run_peak_gb"))
    yield from at_most("peak of all steps, the first one included / the best peer's", most, 1)
    yield from at_most("memory between steps / eager's", over(1, ratio(row, "eager", "between_gb")), 1)
    yield from at_most("error / eager's", ours.get("error_to_eager"), ERROR)


def describe(cell: Mapping[str, Any]) -> str:
    if "failed" in cell:
        return cell["failed"]
    parts: list[str] = []
    if "gpu_ms" in cell:
        kinds = ", ".join(f"{kind} {ms:.2f}" for kind, ms in sorted(cell["by_kind_ms"].items()))
        host = f", host {cell['host_ms']:.2f}" if "host_ms" in cell else ""
        parts.append(f"step {cell['step_ms']:.2f} ms, GPU {cell['gpu_ms']:.2f} ({kinds}){host}")
        parts.append(f"{cell['kernels']} kernels")
    parts.append(f"first {cell['first_step_s']:.1f} s")
    optional = (
        ("peak_gb", "peak {peak_gb:.2f} GB, between steps {between_gb:.2f}"),
        ("reserved_gb", "reserved {reserved_gb:.2f}"),
        (
            "first_peak_gb",
            "first step's peak {first_peak_gb:.2f}, of all steps {run_peak_gb:.2f}, "
            "CUDA graphs keep {recordings_gb:.2f}",
        ),
        ("joules", "{joules:.2f} J"),
        ("error_to_eager", "error/eager {error_to_eager:.2f} (worst {worst_error_to_eager:.2f})"),
        ("missing", "MISSING {missing}"),
    )
    return ", ".join([*parts, *(text.format(**cell) for key, text in optional if cell.get(key) is not None)])


def memory(cell: Mapping[str, Any]) -> str:
    held = f" ({cell['between_gb']:.2f})" if "between_gb" in cell else ""
    return f"{cell['peak_gb']:.2f}{held}" if "peak_gb" in cell else "-"


def early(cell: Mapping[str, Any]) -> str:
    figures = [cell.get(key) for key in ("first_peak_gb", "run_peak_gb")]
    return "-" if None in figures else "{:.2f} ({:.2f})".format(*figures)


# Wall times beside GPU times, peak memory and what is held between steps.
COLUMNS: tuple[Column, ...] = (
    ("workload", lambda row: row["workload"]),
    *((f"{n} ms (GPU)", lambda row, n=n: timed(cell_of(row, n))) for n in CONTENDERS),
    *((f"{n} GB (held)", lambda row, n=n: memory(cell_of(row, n))) for n in CONTENDERS),
    *(
        (f"{n} GB in step 1 (any step)", lambda row, n=n: early(cell_of(row, n)))
        for n in ("eager", "compile", "ours")
    ),
    ("x best compile", lambda row: figure(ratio(row, "best", "step_ms"))),
    ("x eager", lambda row: figure(ratio(row, "eager", "step_ms"))),
    ("joules x compile", lambda row: figure(ratio(row, "compile", "joules"))),
    ("error", lambda row: figure(value(row, "ours", "error_to_eager"))),
)


def missed(rows: Sequence[Row]) -> list[str]:
    """Bars that are not met, a line each."""
    return [f"{row['workload']}: {line}" for row in rows for line in tables.missed(bars(row))]


def show(rows: Sequence[Row]) -> str:
    held = tables.counted(bar for row in rows for bar in bars(row))
    text = tables.table(*tables.lines_of(COLUMNS, rows))
    return "\n".join([text, held, *(f"  not {line}" for line in missed(rows))])
