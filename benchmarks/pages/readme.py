"""python -m benchmarks readme: the plan and figures of the README, and of pages of docs, rewritten.

Between its marks README.md holds nothing that a person wrote. The plan is that of
BERT-large's encoder layer, planned here and now. The figures come from benchmarks/results/*.json: tables,
means, and the command and commit that made them; a benchmark without a result file has no table.
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

from benchmarks.decoding import decode
from benchmarks.harness import tables
from benchmarks.harness.record import ROOT
from benchmarks.harness.tables import Row, cell_of, counted, figure, lines_of, markdown
from benchmarks.kernels.bars import family_of, fraction
from benchmarks.kernels.case import FIRST_TABLE, PHASES
from benchmarks.models import steps
from benchmarks.optimizer import bars as optimizer_bars
from benchmarks.optimizer import measure as optimizer
from benchmarks.pages import performance
from benchmarks.pages import reports as pages
from benchmarks.pages.performance import MARK as FIGURES
from benchmarks.pages.performance import origin, parts_of, rewritten

PLAN = "plan: written by python -m benchmarks readme"
RESULTS = ROOT / "benchmarks" / "results"


def kernels_text(result: dict[str, Any]) -> str:
    """Fractions of the copy bandwidth, forward and forward + backward."""

    def reached(row: Row | None, name: str) -> str:
        return "failed" if row and "failed" in cell_of(row, name) else figure(row and fraction(row, name))

    named = {(r["case"], r["phase"]): r for r in result["rows"] if family_of(r) == FIRST_TABLE}
    columns = [(phase, name) for phase in PHASES for name in ("eager", "compile", "ours")]
    lines = [
        [case, *(reached(named.get((case, phase)), name) for phase, name in columns)]
        for case in dict.fromkeys(case for case, _ in named)
    ]
    header = ["cluster", *(f"{name} {'fwd' if phase == PHASES[0] else 'fwd+bwd'}" for phase, name in columns)]
    summary = result["summary"]
    means = [f"{mean:.2f}x ({name})" for name, mean in summary.items() if " vs " in name]
    if "prediction: mean error" in summary:
        means.append(
            f"predicted times are off by {summary['prediction: mean error']:.0%} on average, "
            f"rank correlation {summary['prediction: rank correlation']:.2f}"
        )
    lead = "Fraction of the device's copy bandwidth (each input read once, each output written once):"
    mean = f"Geometric mean of time saved: {', '.join(means)}. {origin(result)}"
    return "\n\n".join([lead, markdown(header, lines), mean])


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
            markdown(*lines_of(steps.COLUMNS, rows)),
            *(["Not met of the bars that the benchmark sets:", "\n".join(missed)] if missed else []),
            f"Geometric means: {', '.join(means)}. {origin(result)}",
        ]
    )


def decode_text(result: dict[str, Any]) -> str:
    """Wall and GPU time of a token, and its share of the copy bandwidth."""
    rows, bandwidth = result["rows"], result["copy_bandwidth"]
    held = counted(decode.bars(rows, bandwidth))
    return "\n\n".join(
        [
            "Wall time of one token, after a prompt in a static cache, in a run of sixty-four (GPU time of "
            "its kernels, which overlap), the host's part, and the share of the copy bandwidth that the "
            "bytes of a token draw; `graphs` is torch.compile with its own CUDA graphs, `autotune` its "
            "max-autotune with them:",
            markdown(*lines_of(decode.columns(bandwidth), rows)),
            f"{held}; why others are not, says "
            f"[docs/performance.md](docs/performance.md#one-token-at-a-time). {origin(result)}",
        ]
    )


def optimizer_text(result: dict[str, Any]) -> str:
    """Updates and whole steps for each optimizer, and the bars that are missed."""
    held = list(optimizer_bars.bars(result["rows"], optimizer.LIST))
    missed = [f"- {line}" for line in tables.missed(held)]
    header, lines = lines_of(optimizer_bars.COLUMNS, result["rows"])
    return "\n\n".join(
        [
            "Updates alone: ms, and what part of that a copy of their bytes takes. Whole steps: ms of wall "
            "time, and GB at the peak. `torch.compile` is its model with PyTorch's fused optimizer (Adagrad "
            "has none on a GPU); all other columns have the model that `fc.compile` compiled:",
            markdown(["", *header[1:]], lines),
            f"{counted(held)}. {origin(result)}",
            *(["Not met:", "\n".join(missed)] if missed else []),
        ]
    )


def text_of(results: Path) -> str:
    """The block between the marks."""
    nets_text = functools.partial(models_text, lead=NETS)
    writers = {"kernels": kernels_text, "models": models_text, "nets": nets_text, "decode": decode_text}
    return "\n\n".join(parts_of(results, writers))


def optimizer_page(results: Path) -> str:
    """The block between the marks of docs/optimizer.md."""
    return "".join(parts_of(results, {"optimizer": optimizer_text}))


def plan_text() -> str:
    """What explain says of BERT-large's encoder layer, up to the end of its forward pass."""
    head, _, _ = str(pages.report(*pages.SIZES[0])).partition("\n\nplan graph0.backward")
    return pages.quoted(head)


def main(options: argparse.Namespace) -> None:
    results = options.json.parent if options.json else RESULTS
    file = ROOT / "README.md"
    readme = rewritten(file.read_text(), FIGURES, text_of(results))
    file.write_text(rewritten(readme, PLAN, plan_text()))
    performance.write(results, ROOT / "docs")
    page = ROOT / "docs" / "optimizer.md"
    page.write_text(rewritten(page.read_text(), FIGURES, optimizer_page(results)))
    pages.write(ROOT / "docs")
