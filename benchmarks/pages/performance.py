"""The figures of docs/performance.md: what the results say, held to the bars."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.record import figure
from benchmarks.kernels import sweep
from benchmarks.kernels.bars import Row, bar_of, family_of, fraction, means_of, ratio, summarize, verdict
from benchmarks.kernels.case import PHASES

MARK = "figures: written by python -m benchmarks readme"
HEAD = """*Fraction* is the time that a device-to-device copy of the ideal bytes (each input read once, each
output written once) takes in the same run, divided by the GPU time of the cluster's kernels. A *bar* is the
fraction to reach; beside a friendly size that reaches more than .95 an unfriendly one has to reach .80.
Ratios are the peer's time divided by ours."""
PEERS = ("compile", "autotune", "liger")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] + ["---:"] * (len(header) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def origin(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in result["versions"].items() if v)
    return f"`{result['command']}` at {result['commit']} on {result['device']}: {versions}."


def kernels_text(result: Mapping[str, Any]) -> str:
    rows: list[Row] = result["rows"]
    families = list(dict.fromkeys(family_of(r) for r in rows))
    parts = ["## Clusters", families_table(rows), means_text(summarize(rows))]
    for family in families:
        parts += [f"### {family[0].upper()}{family[1:]}", family_table(family, rows)]
    return "\n\n".join([*parts, origin(result)])


def families_table(rows: Sequence[Row]) -> str:
    lines: list[list[str]] = []
    for family, phases in summarize(rows)["families"].items():
        for phase, found in phases.items():
            held = f"{found['met']} of {found['of']}" if found["of"] else "-"
            peers = [figure(found.get(peer)) for peer in PEERS]
            lines.append([f"{family}, {phase}", held, figure(found["fraction"]), *peers])
    return markdown(["geometric means", "bars met", "fraction", *(f"x {p}" for p in PEERS)], lines)


def means_text(summary: Mapping[str, Any]) -> str:
    return "Over all cases: " + ", ".join(means_of(summary)) + "."


def family_table(family: str, rows: Sequence[Row]) -> str:
    own = [r for r in rows if family_of(r) == family]
    peers = [p for p in PEERS if any(p in r["cells"] for r in own)]
    lines: list[list[str]] = []
    for row in own:
        phase = "fwd" if row["phase"] == PHASES[0] else "fwd+bwd"
        cell = row["cells"].get("ours", {})
        reached = "failed" if "failed" in cell else figure(fraction(row))
        verdicts = [figure(bar_of(row, rows)), reached, verdict(row, rows)]
        us = figure(cell.get("us"), ".0f")
        lines.append([f"{row['case']}, {phase}", us, *verdicts, *(figure(ratio(row, p)) for p in peers)])
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
        for c in row["clusters"]:
            if "best" in c:
                first, best = c["first"], c["best"]
                over = figure(first["us"] and first["us"] / best["us"])
                times = [
                    first["schedule"],
                    figure(first["us"], ".1f"),
                    best["schedule"],
                    figure(best["us"], ".1f"),
                ]
                predicted = figure(c["predicted_us"], ".1f")
                lines.append([f"{row['case']}: {c['cluster']}", predicted, *times, over, row["commit"]])
    header = ["cluster", "predicted us", "first choice", "us", "best found", "us", "first / best", "at"]
    means = "\n".join(f"- {name}: {value:.2f}" for name, value in result["summary"].items())
    return "\n\n".join(["## Schedules", means, markdown(header, lines), origin(result)])


def text_of(results: Path) -> str:
    """What stands between the page's marks; a benchmark without a result file has no part in it."""
    parts = [HEAD]
    for name, write in (("kernels", kernels_text), ("sweep", sweep_text), ("schedules", schedules_text)):
        file = results / f"{name}.json"
        if file.exists():
            parts.append(write(json.loads(file.read_text())))
    return "\n\n".join(parts)


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
