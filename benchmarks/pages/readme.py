"""python -m benchmarks readme: the plan and figures of the README, and of pages of docs, rewritten.

Between its marks README.md holds nothing that a person wrote. The plan is that of
BERT-large's encoder layer, planned here and now. The figures come from benchmarks/results/*.json: tables,
means, and the command and commit that made them; a benchmark without a result file has no table.
"""

from __future__ import annotations

import argparse
import functools
import json
from pathlib import Path
from typing import Any

from benchmarks.decoding import decode
from benchmarks.harness.record import ROOT, figure
from benchmarks.kernels.bars import family_of
from benchmarks.kernels.case import FIRST_TABLE, PHASES
from benchmarks.models import steps
from benchmarks.optimizer import bars as optimizer_bars
from benchmarks.optimizer import measure as optimizer
from benchmarks.pages import performance
from benchmarks.pages import reports as pages
from benchmarks.pages.performance import MARK as FIGURES
from benchmarks.pages.performance import markdown, origin, rewritten
from fusion_compiler.report.report import missed_text

PLAN = "plan: written by python -m benchmarks readme"
MISSED = 3  # fusions that the README shows
RESULTS = ROOT / "benchmarks" / "results"


def best_of(cell: dict[str, Any]) -> str:
    return figure(cell.get("fraction")) if "failed" not in cell else "failed"


def kernels_text(result: dict[str, Any]) -> str:
    """Fractions of the copy bandwidth, forward and forward + backward."""
    rows: list[list[str]] = []
    for case in dict.fromkeys(r["case"] for r in result["rows"] if family_of(r) == FIRST_TABLE):
        line = [case]
        for phase in PHASES:
            row = next((r for r in result["rows"] if (r["case"], r["phase"]) == (case, phase)), None)
            cells = row["cells"] if row else {}
            line += [best_of(cells.get(name, {})) for name in ("eager", "compile", "ours")]
        rows.append(line)
    phases = [f"{name} {phase}" for phase in ("fwd", "fwd+bwd") for name in ("eager", "compile", "ours")]
    summary = result["summary"]
    means = [f"{mean:.2f}x ({name})" for name, mean in summary.items() if " vs " in name]
    if "prediction: mean error" in summary:
        means.append(
            f"predicted times are off by {summary['prediction: mean error']:.0%} on average, "
            f"rank correlation {summary['prediction: rank correlation']:.2f}"
        )
    return "\n\n".join(
        [
            "Fraction of the device's copy bandwidth (each input read once, each output written once):",
            markdown(["cluster", *phases], rows),
            f"Geometric mean of time saved: {', '.join(means)}. {origin(result)}",
        ]
    )


STEPS = (
    "Wall time of one step and GPU time of its kernels, memory at the peak and between steps, and our error "
    "over eager's (both against a wider run):"
)
NETS = "Other nets, the same way:"


def models_text(result: dict[str, Any], lead: str = STEPS) -> str:
    """Wall and GPU time of whole steps, memory, how errors compare, and which bars are not met."""
    rows = result["rows"]
    means = [f"{mean:.2f}x ({name})" for name, mean in steps.means(rows).items()]
    missed = [f"- {line}" for line in steps.missed(rows)]
    return "\n\n".join(
        [
            lead,
            markdown(*steps.without_empty(steps.HEADER, steps.lines(rows))),
            *(["Not met of the bars that the benchmark sets:", "\n".join(missed)] if missed else []),
            f"Geometric means: {', '.join(means)}. {origin(result)}",
        ]
    )


def decode_text(result: dict[str, Any]) -> str:
    """Wall and GPU time of a token, and its share of the copy bandwidth."""
    rows, bandwidth = result["rows"], result["copy_bandwidth"]
    held = [met for *_, met in decode.bars(rows, bandwidth)]
    return "\n\n".join(
        [
            "Wall time of one token, after a prompt in a static cache, in a run of sixty-four (GPU time of "
            "its kernels, which overlap), the host's part, and the share of the copy bandwidth that the "
            "bytes of a token draw; `graphs` is torch.compile with its own CUDA graphs, `autotune` its "
            "max-autotune with them:",
            markdown(*decode.lines(rows, bandwidth)),
            f"{sum(held)} of {len(held)} bars met; why others are not, says "
            f"[docs/performance.md](docs/performance.md#one-token-at-a-time). {origin(result)}",
        ]
    )


def optimizer_text(result: dict[str, Any]) -> str:
    """Updates and whole steps for each optimizer, and the bars that are missed."""
    held = list(optimizer_bars.bars(result["rows"], optimizer.LIST))
    missed = [f"- {what}: {value:.2f}" for what, value, met in held if not met]
    header = ["", *optimizer_bars.CONTENDERS, *(f"x {name}" for name in (optimizer_bars.WHOLE, "fused"))]
    return "\n\n".join(
        [
            "Updates alone: ms, and what part of that a copy of their bytes takes. Whole steps: ms of wall "
            "time, and GB at the peak. `torch.compile` is its model with PyTorch's fused optimizer (Adagrad "
            "has none on a GPU); all other columns have the model that `fc.compile` compiled:",
            markdown(header, optimizer_bars.lines(result["rows"])),
            f"{len(held) - len(missed)} of {len(held)} bars met. {origin(result)}",
            *(["Not met:", "\n".join(missed)] if missed else []),
        ]
    )


def text_of(results: Path) -> str:
    """The block between the marks."""
    parts: list[str] = []
    nets_text = functools.partial(models_text, lead=NETS)
    writers = {"kernels": kernels_text, "models": models_text, "nets": nets_text, "decode": decode_text}
    for name, write in writers.items():
        file = results / f"{name}.json"
        if file.exists():
            parts.append(write(json.loads(file.read_text())))
    return "\n\n".join(parts)


def optimizer_page(results: Path) -> str:
    """The block between the marks of docs/optimizer.md."""
    file = results / "optimizer.json"
    return optimizer_text(json.loads(file.read_text())) if file.exists() else ""


def plan_text() -> str:
    """What explain says of the forward pass of BERT-large's encoder layer, and the first missed fusions."""
    report = pages.report(*pages.SIZES[0])
    head, _, _ = str(report).partition("\n\nplan graph0.backward")
    text = f"{head}\n\n{missed_text(report.missed[:MISSED])}"
    return pages.quoted(text)


def main(options: argparse.Namespace) -> None:
    results = options.json.parent if options.json else RESULTS
    file = ROOT / "README.md"
    readme = rewritten(file.read_text(), FIGURES, text_of(results))
    file.write_text(rewritten(readme, PLAN, plan_text()))
    performance.write(results, ROOT / "docs")
    page = ROOT / "docs" / "optimizer.md"
    page.write_text(rewritten(page.read_text(), FIGURES, optimizer_page(results)))
    pages.write(ROOT / "docs")
