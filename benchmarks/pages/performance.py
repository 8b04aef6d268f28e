"""The figures of docs/performance.md: what the results say, held to the bars."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.tables import Row, cell_of, figure, markdown, value
from benchmarks.kernels import sweep
from benchmarks.kernels.bars import (
    bar_of,
    family_lines,
    family_of,
    fraction,
    label,
    means_of,
    ratio,
    summarize,
    verdict,
)

MARK = "figures: written by python -m benchmarks readme"
HEAD = """*Fraction* is the time that a device-to-device copy of the ideal bytes (each input read once, each
output written once) takes in the same run, divided by the GPU time of the cluster's kernels. A *bar* is the
fraction to reach; beside a friendly size that reaches more than .95 an unfriendly one has to reach .80.
Ratios are the peer's time divided by ours."""
PEERS = ("compile", "autotune", "liger")


def origin(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in result["versions"].items() if v)
    return f"`{result['command']}` at {result['commit']} on {result['device']}: {versions}."


def kernels_text(result: Mapping[str, Any]) -> str:
    rows: list[Row] = result["rows"]
    families = list(dict.fromkeys(family_of(r) for r in rows))
    summary = summarize(rows)
    means = f"Over all cases: {', '.join(means_of(summary))}."
    parts = ["## Clusters", markdown(*family_lines(summary, PEERS)), means]
    for family in families:
        parts += [f"### {family[0].upper()}{family[1:]}", family_table(family, rows)]
    return "\n\n".join([*parts, origin(result)])


def family_table(family: str, rows: Sequence[Row]) -> str:
    of_family = [r for r in rows if family_of(r) == family]
    peers = [p for p in PEERS if any(p in r["cells"] for r in of_family)]
    lines: list[list[str]] = []
    for row in of_family:
        reached = "failed" if "failed" in cell_of(row, "ours") else figure(fraction(row))
        verdicts = [figure(bar_of(row, rows)), reached, verdict(row, rows)]
        us = figure(value(row, "ours", "us"), ".0f")
        lines.append([label(row), us, *verdicts, *(figure(ratio(row, p)) for p in peers)])
    return markdown(["cluster", "us", "bar", "fraction", "", *(f"x {p}" for p in peers)], lines)


def sweep_text(result: Mapping[str, Any]) -> str:
    found = list(sweep.cliffs(result["rows"]))
    listed = "\n\n" + "\n".join(f"- {line}" for line in found) if found else " none."
    text = f"Neighbours of which one reaches less than {sweep.CLIFF} of the other:{listed}"
    return "\n\n".join(
        ["## Every width", "![fraction over the width of a row](sweep.svg)", text, origin(result)]
    )


def schedules_text(result: Mapping[str, Any]) -> str:
    """Per cluster the first choice and the best found; how often the rules are right."""
    lines: list[list[str]] = []
    for row in result["rows"]:
        for c in (c for c in row["clusters"] if "best" in c):
            first, best = c["first"], c["best"]
            times = [text for n in (first, best) for text in (n["schedule"], figure(n["us"], ".1f"))]
            over = figure(first["us"] and first["us"] / best["us"])
            cluster = [f"{row['case']}: {c['cluster']}", figure(c["predicted_us"], ".1f")]
            lines.append([*cluster, *times, over, row["commit"]])
    header = ["cluster", "predicted us", "first choice", "us", "best found", "us", "first / best", "at"]
    means = "\n".join(f"- {name}: {value:.2f}" for name, value in result["summary"].items())
    return "\n\n".join(["## Schedules", means, markdown(header, lines), origin(result)])


def parts_of(results: Path, writers: Mapping[str, Callable[[dict[str, Any]], str]]) -> list[str]:
    """What is written of each benchmark; one without a result file has no part."""
    files = {write: results / f"{name}.json" for name, write in writers.items()}
    return [write(json.loads(file.read_text())) for write, file in files.items() if file.exists()]


def text_of(results: Path) -> str:
    """What stands between the page's marks."""
    writers = {"kernels": kernels_text, "sweep": sweep_text, "schedules": schedules_text}
    return "\n\n".join([HEAD, *parts_of(results, writers)])


def rewritten(text: str, mark: str, inner: str) -> str:
    """`text` with what stands between a mark and its end replaced. Raises ValueError where one is missing."""
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark.partition(':')[0]} -->"
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"the file needs the lines {begin} and {end}")
    return f"{head}{begin}\n{inner}\n{end}{tail}" if inner else f"{head}{begin}\n{end}{tail}"


def write(results: Path, folder: Path) -> None:
    """The page's figures between its marks, and the picture that it shows."""
    page = folder / "performance.md"
    page.write_text(rewritten(page.read_text(), MARK, text_of(results)))
    file = results / "sweep.json"
    if file.exists():
        (folder / "sweep.svg").write_text(sweep.figure_of(json.loads(file.read_text())["rows"]))
