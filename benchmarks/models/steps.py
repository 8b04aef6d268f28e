"""Whole steps held to their bars: wall time, what is beside contractions, memory, host time, errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.record import figure, geometric_mean, table

Row = Mapping[str, Any]
CONTENDERS = ("eager", "compile", "graphs", "autotune", "ours")
PEERS = CONTENDERS[1:-1]  # forms of torch.compile
FASTER = 1.15  # than the best form of torch.compile, by wall time
NET_FASTER = 1.1  # of a row that is a "net", which is held to this and to the memory of others
BESIDE = 1.2  # times what contractions and attention take, by wall time
SHORT_MS = 5.0  # of GPU time: below, the host decides
HOST = 1.1  # times the GPU time, where the host decides
ERROR = 1.0  # of eager's, geometric mean over all results


def cell_of(row: Row, name: str, key: str) -> Mapping[str, Any]:
    """A contender's cell; "best" is the form of torch.compile that has least of `key`."""
    if name != "best":
        return row["cells"].get(name, {})
    ran = [cell for peer in PEERS if key in (cell := row["cells"].get(peer, {}))]
    return min(ran, key=lambda cell: cell[key], default={})


def ratio(row: Row, other: str, key: str = "gpu_ms") -> float | None:
    """A peer's figure over ours: above 1, ours takes less."""
    ours, theirs = row["cells"].get("ours", {}), cell_of(row, other, key)
    return theirs[key] / ours[key] if key in ours and key in theirs else None


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Geometric means of the peers' figures over ours, where both were measured."""
    found: dict[str, float] = {}
    for key in ("gpu_ms", "step_ms", "peak_gb", "joules"):
        for other in ("eager", "compile", "best"):
            mean = geometric_mean(v for row in rows if (v := ratio(row, other, key)) is not None)
            if mean is not None:
                found[f"{key} vs {other}"] = mean
    return found


def bars(row: Row) -> Iterator[tuple[str, float, bool]]:
    """(what, the figure, whether it is met), for what was measured."""
    ours = row["cells"].get("ours", {})
    bar = NET_FASTER if row.get("net") else FASTER
    if (faster := ratio(row, "best", "step_ms")) is not None:
        yield f"wall time, x torch.compile >= {bar}", faster, faster >= bar
    if "by_kind_ms" in ours and "step_ms" in ours and not row.get("net"):
        least = sum(ms for kind, ms in ours["by_kind_ms"].items() if kind != "rest")
        if ours["gpu_ms"] < SHORT_MS:
            host = ours["step_ms"] / ours["gpu_ms"]
            yield f"wall time / GPU time <= {HOST}", host, host <= HOST
        elif least:
            over = ours["step_ms"] / least
            yield f"wall time / contractions and attention <= {BESIDE}", over, over <= BESIDE
    for other in ("eager", "best"):
        if (less := ratio(row, other, "peak_gb")) is not None:
            yield f"peak memory / {other}'s <= 1", 1 / less, less >= 1
    if (ours_most := ours.get("run_peak_gb")) is not None:
        peers = [
            cell["run_peak_gb"]
            for name in CONTENDERS[:-1]
            if "run_peak_gb" in (cell := row["cells"].get(name, {}))
        ]
        if peers:
            most = ours_most / min(peers)
            yield "peak of all steps, the first one included / the best peer's <= 1", most, most <= 1
    if (less := ratio(row, "eager", "between_gb")) is not None:
        yield "memory between steps / eager's <= 1", 1 / less, less >= 1
    if "error_to_eager" in ours:
        error = ours["error_to_eager"]
        yield f"error / eager's <= {ERROR}", error, error <= ERROR


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
    if "peak_gb" in cell:
        parts.append(f"peak {cell['peak_gb']:.2f} GB, between steps {cell['between_gb']:.2f}")
    if "reserved_gb" in cell:
        parts.append(f"reserved {cell['reserved_gb']:.2f}")
    if "first_peak_gb" in cell:
        first, most, kept = (cell[key] for key in ("first_peak_gb", "run_peak_gb", "recordings_gb"))
        parts.append(f"first step's peak {first:.2f}, of all steps {most:.2f}, CUDA graphs keep {kept:.2f}")
    if "joules" in cell:
        parts.append(f"{cell['joules']:.2f} J")
    if "error_to_eager" in cell:
        parts.append(f"error/eager {cell['error_to_eager']:.2f} (worst {cell['worst_error_to_eager']:.2f})")
    if cell.get("missing"):
        parts.append(f"MISSING {cell['missing'][:4]}")
    return ", ".join(parts)


HEADER = [
    "workload", *(f"{n} ms (GPU)" for n in CONTENDERS), *(f"{n} GB (held)" for n in CONTENDERS),
    *(f"{n} GB in step 1 (any step)" for n in ("eager", "compile", "ours")),
    "x best compile", "x eager", "joules x compile", "error",
]  # fmt: skip


def lines(rows: Sequence[Row]) -> list[list[str]]:
    """Under `HEADER`: wall times beside GPU times, peak memory and what is held between steps."""

    def time(cell: Mapping[str, Any]) -> str:
        if "failed" in cell:
            return "failed"
        return f"{cell['step_ms']:.2f} ({cell['gpu_ms']:.2f})" if "step_ms" in cell else "-"

    def memory(cell: Mapping[str, Any]) -> str:
        held = f" ({cell['between_gb']:.2f})" if "between_gb" in cell else ""
        return f"{cell['peak_gb']:.2f}{held}" if "peak_gb" in cell else "-"

    def early(cell: Mapping[str, Any]) -> str:
        figures = [cell.get(key) for key in ("first_peak_gb", "run_peak_gb")]
        return "-" if None in figures else "{:.2f} ({:.2f})".format(*figures)

    return [
        [
            row["workload"],
            *(time(row["cells"].get(n, {})) for n in CONTENDERS),
            *(memory(row["cells"].get(n, {})) for n in CONTENDERS),
            *(early(row["cells"].get(n, {})) for n in ("eager", "compile", "ours")),
            figure(ratio(row, "best", "step_ms")),
            figure(ratio(row, "eager", "step_ms")),
            figure(ratio(row, "compile", "joules")),
            figure(row["cells"].get("ours", {}).get("error_to_eager")),
        ]
        for row in rows
    ]


def without_empty(header: Sequence[str], rows: Sequence[Sequence[str]]) -> tuple[list[str], list[list[str]]]:
    """The columns in which anything stands."""
    kept = [i for i, _ in enumerate(header) if i == 0 or any(line[i] != "-" for line in rows)]
    return [header[i] for i in kept], [[line[i] for i in kept] for line in rows]


def missed(rows: Sequence[Row]) -> list[str]:
    """Bars that are not met, a line each."""
    return [
        f"{row['workload']}: {what}: {value:.2f}" for row in rows for what, value, met in bars(row) if not met
    ]


def show(rows: Sequence[Row]) -> str:
    held = [met for row in rows for *_, met in bars(row)]
    parts = [table(*without_empty(HEADER, lines(rows))), f"{sum(held)} of {len(held)} bars met"]
    return "\n".join([*parts, *(f"  not {line}" for line in missed(rows))])
