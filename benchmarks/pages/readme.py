"""python -m benchmarks readme: write the plan and the figures of README.md and of pages in docs/.

A person writes nothing between the marks of these files. The plan in README.md is what the program in
README.md prints. Figures come from benchmarks/results/*.json: README.md has one table of headlines,
docs/figures.md has every table with the command and the commit that measured it. A benchmark without a result
file has no table.
"""

from __future__ import annotations

import argparse
import functools
import json
import textwrap
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.decoding import decode
from benchmarks.harness import tables
from benchmarks.harness.record import ROOT
from benchmarks.harness.tables import (
    Row,
    cell_of,
    counted,
    figure,
    geometric_mean,
    lines_of,
    markdown,
    over,
    value,
)
from benchmarks.kernels import bars, sweep
from benchmarks.kernels.case import FIRST_TABLE, PHASES
from benchmarks.models import measure as steps
from benchmarks.optimizer import measure as optimizer
from benchmarks.pages import reports as pages
from benchmarks.pages.programs import module_of, programs, run
from benchmarks.pages.reports import rewritten
from fusion_compiler.errors import FusionWarning

FIGURES = "figures: written by python -m benchmarks readme"
PLAN = "plan: written by python -m benchmarks readme"
RESULTS = ROOT / "benchmarks" / "results"


def origin(result: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{n} {v}" for n, v in result["versions"].items() if v)
    return f"`{result['command']}` at {result['commit']} on {result['device']}: {versions}."


def parts_of(results: Path, writers: Mapping[str, Callable[[dict[str, Any]], str]]) -> list[str]:
    """Return what is written of each benchmark; one without a result file has no part."""
    files = {write: results / f"{name}.json" for name, write in writers.items()}
    return [write(json.loads(file.read_text())) for write, file in files.items() if file.exists()]


def kernels_text(result: dict[str, Any]) -> str:
    """Fractions of the copy bandwidth, forward and forward + backward."""

    def reached(row: Row | None, name: str) -> str:
        if row is None:
            return "-"
        return "failed" if "failed" in cell_of(row, name) else figure(bars.fraction(row, name))

    named = {(r["case"], r["phase"]): r for r in result["rows"] if bars.family_of(r) == FIRST_TABLE}
    columns = [(phase, name) for phase in PHASES for name in ("eager", "compile", "ours")]
    lines = [
        [case, *(reached(named.get((case, phase)), name) for phase, name in columns)]
        for case in dict.fromkeys(case for case, _ in named)
    ]
    header = ["cluster", *(f"{name} {'fwd' if phase == PHASES[0] else 'fwd+bwd'}" for phase, name in columns)]
    summary = result.get("summary", {})
    means = [f"{mean:.2f}x ({name})" for name, mean in summary.items() if " vs " in name]
    if "prediction: mean error" in summary:
        means.append(
            f"predicted times are off by {summary['prediction: mean error']:.0%} on average, "
            f"rank correlation {summary['prediction: rank correlation']:.2f}"
        )
    lead = (
        "## Twelve kernels\n\n"
        "Fraction of the device's copy bandwidth, with each input read once and each output written once:"
    )
    mean = f"Geometric means of the peer's time divided by ours: {', '.join(means)}. {origin(result)}"
    return "\n\n".join([lead, markdown(header, lines), mean])


STEPS = (
    "## Training and inference steps\n\n"
    "Wall time of a step (GPU time of its kernels), memory at the peak (between steps), and our error "
    "divided by eager's, both against a run in a wider dtype:"
)
NETS = "### Other networks\n\nMeasured in the same way:"


def models_text(result: dict[str, Any], lead: str = STEPS) -> str:
    """Wall and GPU time of whole steps, memory, how errors compare, and which bars are not met."""
    rows = result["rows"]
    missed = [f"- {line}" for line in steps.missed(rows)]
    return "\n\n".join(
        [
            lead,
            markdown(*lines_of(steps.COLUMNS, rows)),
            *(["Bars that are not met:", "\n".join(missed)] if missed else []),
            "Geometric means of the peer's figure divided by ours:",
            means_table(rows),
            origin(result),
        ]
    )


def means_table(rows: Sequence[Row]) -> str:
    """Return a table of means: a line for each figure, a column for each peer."""
    means = steps.means(rows)
    figures = {
        "GPU time": "gpu_ms", "wall time": "step_ms", "memory at the peak": "peak_gb", "energy": "joules"
    }  # fmt: skip
    measured = [peer for peer in ("eager", "best") if any(name.endswith(f"vs {peer}") for name in means)]
    lines = [[name, *(figure(means.get(f"{key} vs {p}")) for p in measured)] for name, key in figures.items()]
    header = ["", *({"eager": "x eager", "best": "x best compile"}[peer] for peer in measured)]
    return markdown(header, lines)


def decode_text(result: dict[str, Any]) -> str:
    """Wall and GPU time of a token, and its share of the copy bandwidth."""
    rows, bandwidth = result["rows"], result["copy_bandwidth"]
    held = counted(decode.bars(rows, bandwidth))
    return "\n\n".join(
        [
            "## One token\n\n"
            "Wall time of a token after a prompt in a static cache, in a run of 64 tokens (GPU time of its "
            "kernels, which overlap). *Host* is the time of the host, and *of copy* the reached share of the "
            "copy bandwidth. *Graphs* is torch.compile with its CUDA graphs, and *autotune* its mode "
            "max-autotune:",
            markdown(*lines_of(decode.columns(bandwidth), rows)),
            f"{held}; [performance.md](performance.md#one-token-at-a-time) says what limits the others.",
            origin(result),
        ]
    )


def optimizer_text(result: dict[str, Any]) -> str:
    """Updates and whole steps for each optimizer, and the bars that are missed."""
    held = list(optimizer.bars(result["rows"], optimizer.LIST))
    missed = [f"- {line}" for line in tables.missed(held)]
    header, lines = lines_of(optimizer.COLUMNS, result["rows"])
    return "\n\n".join(
        [
            "Updates alone: ms, and the share of that time which a copy of the same bytes takes. Whole "
            "steps: ms of wall time, and GB at the peak. In the column torch.compile, torch.compile "
            "compiled the model, and PyTorch's fused optimizer updates it (Adagrad has none on a GPU). In "
            "all other columns, `fc.compile` compiled the model:",
            markdown(["", *header[1:]], lines),
            f"{counted(held)}. {origin(result)}",
            *(["Bars that are not met:", "\n".join(missed)] if missed else []),
        ]
    )


def text_of(results: Path) -> str:
    """Return the tables of twelve kernels, of steps and of tokens."""
    nets_text = functools.partial(models_text, lead=NETS)
    writers = {"kernels": kernels_text, "models": models_text, "nets": nets_text, "decode": decode_text}
    return "\n\n".join(parts_of(results, writers))


def optimizer_page(results: Path) -> str:
    """Return the block between the marks of docs/optimizer.md."""
    return "".join(parts_of(results, {"optimizer": optimizer_text}))


# README.md


def plan_text(page: str) -> str:
    """Run the program of README.md, which is saved as model.py, and return what it prints."""
    program = [programs(page)[0].lstrip("\n")]
    with module_of("program_of_readme", {}) as module, warnings.catch_warnings():
        warnings.simplefilter("ignore", FusionWarning)  # without a GPU: that no kernel runs
        return pages.quoted(run(program, "model.py", module).strip())


def headline(name: str, rows: Sequence[Row], key: str, peers: Sequence[str]) -> list[str]:
    """Return a line of the table of README.md: cases, and the times of peers and eager over ours."""
    pairs = [(over(value(r, peers, key), ours), over(value(r, "eager", key), ours))
             for r in rows if (ours := value(r, "ours", key))]  # fmt: skip
    compiled = [ratio for ratio, _ in pairs if ratio is not None]
    eager = [ratio for _, ratio in pairs if ratio is not None]
    ends = [min(compiled, default=None), max(compiled, default=None)]
    mean = geometric_mean(eager) if len(eager) == len(compiled) else None
    return [name, str(len(compiled)), *map(figure, (geometric_mean(compiled), *ends, mean))]


COMPILED = ("compile", "graphs", "autotune")  # the forms of torch.compile
HEADLINES: tuple[tuple[str, str, str, Callable[[Row], bool]], ...] = (
    ("kernels, forward", "kernels", "us", lambda row: row["phase"] == PHASES[0]),
    ("kernels, forward and backward", "kernels", "us", lambda row: row["phase"] == PHASES[1]),
    ("attention in other forms, with gradients", "chains", "ms", lambda row: row["phase"] != "forward"),
    ("steps of language and vision models", "models", "step_ms", lambda row: True),
    ("steps of other networks", "nets", "step_ms", lambda row: True),
    ("one generated token", "decode", "step_ms", lambda row: True),
)


def headlines(results: Path) -> str:
    """Return the table of README.md with device and versions."""
    lines: list[list[str]] = []
    measured: dict[str, None] = {}
    for name, benchmark, key, chosen in HEADLINES:
        file = results / f"{benchmark}.json"
        if not file.exists():
            continue
        result = json.loads(file.read_text())
        lines.append(headline(name, [r for r in result["rows"] if chosen(r)], key, COMPILED))
        versions = ", ".join(f"{n} {v}" for n, v in result["versions"].items() if v)
        measured[f"{result['device']} with {versions}"] = None
    said = (
        f"Measured on {'; '.join(measured)}: GPU times of kernels, wall times of steps and tokens. Means are "
        "geometric, against the fastest form of torch.compile that was measured for the case."
    )
    header = ["time of the peer / our time", "cases", "x torch.compile", "least", "most", "x eager"]
    return "\n\n".join(
        [
            markdown(header, lines),
            textwrap.fill(said, 118),
        ]
    )


# docs/figures.md

HEAD = """The *fraction* of a cluster is the time of a copy on the device, divided by the GPU time of the
cluster's kernels in the same run. The copy moves each input and each output once. A *bar* is the fraction to
reach. Where a size reaches more than 0.95, the unfriendly sizes beside it have to reach 0.80. Ratios are the
peer's time divided by ours."""
SCHEDULES = """These are the results of an exhaustive search. A schedule is named by the rows x columns of
its tile: *grid* is one program for each tile, *whole* a tile with all columns of a row, and *loop* a loop
over the columns of a row. With *8 parts*, eight programs share a row; with *264 programs*, these loop over
the rows."""
PEERS = ("compile", "autotune", "liger")


def clusters_text(result: Mapping[str, Any]) -> str:
    rows: list[Row] = result["rows"]
    families = list(dict.fromkeys(bars.family_of(r) for r in rows))
    summary = bars.summarize(rows)
    means = f"Over all cases: {', '.join(bars.means_of(summary))}."
    parts = ["## All kernels", HEAD, markdown(*bars.family_lines(summary, PEERS)), means]
    for family in families:
        parts += [f"### {family[0].upper()}{family[1:]}", family_table(family, rows)]
    return "\n\n".join([*parts, origin(result)])


def family_table(family: str, rows: Sequence[Row]) -> str:
    of_family = [r for r in rows if bars.family_of(r) == family]
    peers = [p for p in PEERS if any(p in r["cells"] for r in of_family)]
    lines: list[list[str]] = []
    for row in of_family:
        reached = "failed" if "failed" in cell_of(row, "ours") else figure(bars.fraction(row))
        verdicts = [figure(bars.bar_of(row, rows)), reached, bars.verdict(row, rows)]
        us = figure(value(row, "ours", "us"), ".0f")
        lines.append([bars.label(row), us, *verdicts, *(figure(bars.ratio(row, p)) for p in peers)])
    return markdown(["cluster", "us", "bar", "fraction", "", *(f"x {p}" for p in peers)], lines)


def sweep_text(result: Mapping[str, Any]) -> str:
    lines = list(sweep.cliffs(result["rows"]))
    listed = "\n\n" + "\n".join(f"- {line}" for line in lines) if lines else " none."
    text = f"Neighbouring widths where one fraction is less than {sweep.CLIFF} of the other:{listed}"
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
    summary = result["summary"].items()
    means = "\n".join(f"- {name}: {n if isinstance(n, int) else figure(n)}" for name, n in summary)
    return "\n\n".join(["## Schedules", SCHEDULES, means, markdown(header, lines), origin(result)])


def page_of(results: Path) -> str:
    """Return what is between the marks of docs/figures.md."""
    writers = {"kernels": clusters_text, "sweep": sweep_text, "schedules": schedules_text}
    return "\n\n".join([text_of(results), *parts_of(results, writers)])


def write_figures(results: Path, folder: Path) -> None:
    """Write the figures of docs/figures.md between its marks, and the picture that it shows."""
    page = folder / "figures.md"
    page.write_text(rewritten(page.read_text(), FIGURES, page_of(results)))
    file = results / "sweep.json"
    if file.exists():
        (folder / "sweep.svg").write_text(sweep.figure_of(json.loads(file.read_text())["rows"]))


def main(options: argparse.Namespace) -> None:
    results = options.json.parent if options.json else RESULTS
    page = ROOT / "README.md"
    readme = rewritten(page.read_text(), FIGURES, headlines(results))
    page.write_text(rewritten(readme, PLAN, plan_text(readme)))
    write_figures(results, ROOT / "docs")
    page = ROOT / "docs" / "optimizer.md"
    page.write_text(rewritten(page.read_text(), FIGURES, optimizer_page(results)))
    pages.write(ROOT / "docs")
