"""Rows of the kernels' benchmark held to their bars: tables, geometric means, cliffs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness import tables
from benchmarks.harness.tables import Row, cell_of, figure, geometric_mean, over, table, value
from benchmarks.kernels.case import BARS, FRIENDLY, NO_CLIFF, PHASES, RATIOS

CONTENDERS = ("eager", "compile", "autotune", "liger", "ours")


def ratio(row: Row, other: str) -> float | None:
    """Time of `other` / our time: above 1, ours is faster."""
    return over(value(row, other, "us"), value(row, "ours", "us"))


def fraction(row: Row, name: str = "ours") -> float | None:
    return value(row, name, "fraction")


def family_of(row: Row) -> str:
    return row.get("family", next(iter(BARS)))


def bar_of(row: Row, rows: Sequence[Row]) -> float | None:
    """The row's own bar; beside a friendly neighbour that is fast, the one that excludes a cliff."""
    if row.get("neighbour") is None:
        return row.get("bar")
    beside = next((r for r in rows if (r["case"], r["phase"]) == (row["neighbour"], row["phase"])), None)
    reached = fraction(beside) if beside else None
    return NO_CLIFF if reached is not None and reached > FRIENDLY else None


def met(row: Row, rows: Sequence[Row]) -> bool | None:
    """None where there is nothing to meet or nothing was measured."""
    bar, reached = bar_of(row, rows), fraction(row)
    if "failed" in cell_of(row, "ours"):
        return False if bar is not None else None
    return None if bar is None or reached is None else reached >= bar


def verdict(row: Row, rows: Sequence[Row]) -> str:
    return {True: "met", False: "MISSED", None: "-"}[met(row, rows)]


def cliffs(rows: Sequence[Row]) -> Iterator[str]:
    """Unfriendly sizes below the bar that their friendly neighbour sets, a line each."""
    for row in rows:
        if row.get("neighbour") is not None and met(row, rows) is False:
            yield (
                f"cliff: {row['case']}, {row['phase']} reaches {figure(fraction(row))}, "
                f"{row['neighbour']} more than {FRIENDLY}"
            )


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: 1 where both are in the same order, -1 where in opposite orders; ties by position."""
    ranks = [{i: rank for rank, i in enumerate(sorted(range(len(v)), key=v.__getitem__))} for v in (a, b)]
    n = len(a)
    return 1 - 6 * sum((ranks[0][i] - ranks[1][i]) ** 2 for i in range(n)) / (n * (n * n - 1))


def mean_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Mean of |predicted / measured - 1|."""
    return sum(abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)) / len(measured)


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
    """Geometric means of how many times faster ours is, per peer and phase; how good predictions are.

    A peer that ran in fewer than half of the cases has no mean over all. "families": for each family and
    phase the bars met of those set, and its own means.
    """
    means: dict[str, Any] = {}
    for phase in PHASES:
        of_phase = [r for r in rows if r["phase"] == phase]
        ran = {peer: sum(ratio(r, peer) is not None for r in of_phase) for peer in CONTENDERS[:-1]}
        common = {p: m for p, m in _means(of_phase).items() if 2 * ran[p] >= len(of_phase)}
        means |= {f"{phase} vs {peer}": mean for peer, mean in common.items()}
    predicted = [c for r in rows if "predicted_us" in (c := cell_of(r, "ours"))]
    if len(predicted) > 2:
        us = [c["predicted_us"] for c in predicted], [c["us"] for c in predicted]
        means["prediction: mean error"] = mean_error(*us)
        means["prediction: rank correlation"] = rank_correlation(*us)
    families = dict.fromkeys(family_of(r) for r in rows)
    return means | {"families": {name: _family(name, rows) for name in families}}


def _means(rows: Sequence[Row]) -> dict[str, float]:
    return tables.means(rows, {peer: functools.partial(ratio, other=peer) for peer in CONTENDERS[:-1]})


def _family(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    phases: dict[str, Any] = {}
    for phase in PHASES:
        members = [r for r in rows if (family_of(r), r["phase"]) == (name, phase)]
        held = [m for r in members if (m := met(r, rows)) is not None]
        reached = geometric_mean(map(fraction, members))
        if members:
            phases[phase] = {"met": sum(held), "of": len(held), "fraction": reached, **_means(members)}
    return phases


def time_of(cell: Mapping[str, Any]) -> str:
    if "us" in cell:
        return f"{cell['us']:.0f} us {cell['fraction']:.2f} /{cell['kernels']}"
    return "failed" if cell else "-"


def label(row: Row) -> str:
    return f"{row['case']}, {'fwd' if row['phase'] == PHASES[0] else 'fwd+bwd'}"


def show(rows: Sequence[Row]) -> str:
    """A table for each family, then the families' means and the means of all."""
    names = sorted({n for r in rows for n in r["cells"]}, key=CONTENDERS.index)
    peers = ("eager", "compile", "autotune")
    header = ["time, fraction / kernels", *names, "bar", "", *(f"x {peer}" for peer in peers), "error"]
    parts: list[str] = []
    for family in dict.fromkeys(family_of(r) for r in rows):
        lines = [
            [
                label(row),
                *(time_of(cell_of(row, name)) for name in names),
                *(figure(bar_of(row, rows)), verdict(row, rows)),
                *(figure(ratio(row, peer)) for peer in peers),
                figure(value(row, "ours", "error_to_eager")),
            ]
            for row in rows
            if family_of(row) == family and row["cells"]
        ]
        if lines:
            parts.append(f"{family}\n{table(header, lines)}")
    return "\n\n".join([*parts, show_summary(summarize(rows))])


def family_lines(summary: Mapping[str, Any], peers: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Header and lines of the families' means: bars met, fractions, and ratios to peers."""
    lines: list[list[str]] = []
    for family, phases in summary["families"].items():
        for phase, of_phase in phases.items():
            held = f"{of_phase['met']} of {of_phase['of']}" if of_phase["of"] else "-"
            ratios = [figure(of_phase.get(peer)) for peer in peers]
            lines.append([f"{family}, {phase}", held, figure(of_phase["fraction"]), *ratios])
    return ["geometric means", "bars met", "fraction", *(f"x {peer}" for peer in peers)], lines


def show_summary(summary: Mapping[str, Any]) -> str:
    text = table(*family_lines(summary, ("compile", "autotune")))
    return "\n".join([text, "", *means_of(summary)])


def means_of(summary: Mapping[str, Any]) -> list[str]:
    """Each number over all cases, with what it should be."""
    numbers = {name: value for name, value in summary.items() if isinstance(value, float)}
    return [f"{name}: {value:.2f}{_wanted(name, value)}" for name, value in numbers.items()]


def _wanted(name: str, value: float) -> str:
    phase, _, peer = name.partition(" vs ")
    if peer not in RATIOS:
        return ""
    least = RATIOS[peer][PHASES.index(phase)]
    return f" (at least {least}: {'met' if value >= least else 'MISSED'})"


def report(row: Row) -> None:
    """One line as soon as a row is done, and the reasons of what failed."""
    done = {n: f"{c['us']:.0f} ({c['fraction']:.2f})" for n, c in row["cells"].items() if "us" in c}
    bar = f", bar {row['bar']}" if row.get("bar") else ""
    print(
        f"{row['case']}, {row['phase']} [us{bar}]:",
        " ".join(f"{n} {us}" for n, us in done.items()),
        flush=True,
    )
    for name, cell in {"all": row, **row["cells"]}.items():
        if "failed" in cell:
            print(f"  {name}: {cell['failed']}", flush=True)
