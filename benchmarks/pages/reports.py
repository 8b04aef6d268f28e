"""The pages of docs/ that a report fills: what stands between their marks is written here.

docs/data-movement.md: the analysis of Ivanov et al. (2021) for their encoder layer, beside their figures.
docs/reading-a-plan.md: a plan and answers about it, as `explain` prints them.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusion_compiler as fc
from benchmarks.harness.tables import markdown
from examples.encoder_layer import EncoderLayer
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.plan_data import Call

MARK = "{}: written by python -m benchmarks readme"
SIZES = ((8, 512), (96, 128))
# Ivanov et al., section 3 and table 1: of the flop and of PyTorch's run time, batch 8, length 512.
PUBLISHED_FLOP = {"contraction": 99.80, "normalization": 0.17, "element-wise": 0.03}
PUBLISHED_TIME = {"contraction": 61.0, "normalization": 25.5, "element-wise": 13.5}
PUBLISHED_MWORDS = {"contraction": 491, "normalization": 327, "element-wise": 398}
PUBLISHED_LESS = 22.91  # per cent of the data movement saved by their fusions
QUESTIONS = (
    ("softmax", "dropout"),
    ("F.relu", "norm2"),
    ("mm_3", "norm1"),
    ("add_12", "mul_softmax_dropout"),
)


def rewritten(text: str, mark: str, inner: str) -> str:
    """`text` with what stands between a mark and its end replaced. Raises ValueError where one is missing."""
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark.partition(':')[0]} -->"
    head, opened, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not opened or not closed:
        raise ValueError(f"the file needs the lines {begin} and {end}")
    return f"{head}{begin}\n{inner}\n{end}{tail}" if inner else f"{head}{begin}\n{end}{tail}"


@cache
def report(batch: int, length: int) -> fc.Report:
    """The paper's layer, BERT-large's, in float16 with dropout, training; nothing is computed.

    Its attention stays as it is written, as it was for the paper.
    """
    x = torch.empty(batch, length, 1024, dtype=torch.half, requires_grad=True)
    with sdpa_kernel([SDPBackend.MATH]):
        return fc.explain(EncoderLayer().half(), x, disable=("general attention",))


def classes(batch: int, length: int) -> str:
    """One row a class, ours and theirs where they give one."""
    ours_only = (batch, length) != SIZES[0]
    header = ["class", "calls", "flop %", "Mwords", "time %", "us eager", "us fused", "bytes saved"]
    rows: list[list[str]] = []
    for row in report(batch, length).json()["movement"]["classes"]:
        if not row["calls"]:
            continue
        kind = row["class"]
        words = row["input_mwords"] + row["output_mwords"]
        before, after = row["bytes_before"], row["bytes_after"]
        cells = [f"{100 * row['flop_share']:.2f}", f"{words:.0f}", f"{100 * row['share']:.1f}"]
        if not ours_only and kind in PUBLISHED_FLOP:
            published = (PUBLISHED_FLOP[kind], PUBLISHED_MWORDS[kind], PUBLISHED_TIME[kind])
            cells = [f"{cell} ({theirs})" for cell, theirs in zip(cells, published, strict=True)]
        times = [f"{row['us_before']:.0f}", f"{row['us_after']:.0f}", f"{100 * (1 - after / before):.0f}%"]
        rows.append([kind, str(row["calls"]), *cells, *times])
    return markdown(header, rows)


def totals(batch: int, length: int) -> str:
    t = report(batch, length).json()["totals"]
    less = 100 * (1 - t["bytes_after"] / t["bytes_before"])
    return (
        f"{t['launches_before']} calls of eager become {t['launches_after']}; "
        f"{t['bytes_before'] / 1e9:.2f} GB become {t['bytes_after'] / 1e9:.2f} GB, {less:.1f}% less "
        f"(published: {PUBLISHED_LESS}%); {t['intermediates']} tensors are never stored; "
        f"{t['us_before']:.0f} us become {t['us_after']:.0f} us, predicted for an H200."
    )


def operators(batch: int, length: int) -> str:
    """One row an operator of eager, forward and backward apart."""
    header = ["operator", "class", "calls", "Gflop", "in", "out", "MB", "flop/B", "us", "time %", "MUE"]
    plans = report(batch, length).plans
    us = sum(call.cost.us for plan in plans for call in plan.calls)
    rows: list[list[str]] = []
    for plan in plans:
        phase = plan.name.rpartition(".")[2]
        rows.append([f"*{phase}*", *[""] * (len(header) - 1)])
        for (target, kind), calls in _by_target(plan.calls).items():
            rows.append(_operator(target, kind, calls, us))
    return markdown(header, rows)


def _by_target(calls: Iterable[Call]) -> dict[tuple[str, str], list[Call]]:
    groups: dict[tuple[str, str], list[Call]] = {}
    for call in calls:
        groups.setdefault((call.target, call.kind), []).append(call)
    return groups


def _operator(target: str, kind: str, calls: list[Call], us: float) -> list[str]:
    moved = sum(c.cost.moved for c in calls)
    flops, mine = sum(c.flops for c in calls), sum(c.cost.us for c in calls)
    usage = moved / device_spec("h200").copy_bandwidth * 1e6 / mine
    return [
        f"`{target}`",
        kind,
        str(len(calls)),
        f"{flops / 1e9:.3f}",
        f"{sum(c.words_read for c in calls) / 1e6:.1f}",
        f"{sum(c.words_written for c in calls) / 1e6:.1f}",
        f"{moved / 1e6:.0f}",
        f"{flops / moved:.1f}" if moved else "",
        f"{mine:.1f}",
        f"{100 * mine / us:.1f}",
        f"{min(1.0, usage):.2f}",
    ]


def quoted(text: str) -> str:
    """As a block of a page, without the times of planning, which are another's matter."""
    untimed = re.sub(r"\nseconds: .*", "", text)
    return f"```\n{untimed}\n```"


def plan_of(batch: int, length: int) -> str:
    """Return the text of `print(report)` without the times of planning."""
    return quoted(str(report(batch, length)))


def answers(batch: int, length: int) -> str:
    lines: list[str] = []
    for a, b in QUESTIONS:
        answer = report(batch, length).why(a, b)[0]
        lines += [f">>> print(report.why({a!r}, {b!r})[0])", str(answer)]
    return quoted("\n".join(lines))


def picture(file: Path) -> None:
    """The page of the report with a cluster chosen, by a Chromium that is on the machine, if there is one."""
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None or importlib.util.find_spec("playwright") is None:
        print(f"{file.name} is left as it is: that needs Chromium and Playwright")
        return
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        report(*SIZES[0]).html(Path(folder) / "plan.html")
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox", "--disable-gpu"])
        page = chromium.new_page(viewport={"width": 1400, "height": 900})
        page.goto((Path(folder) / "plan.html").as_uri())
        page.wait_for_selector("[data-ready]", state="attached")
        page.keyboard.press("/")
        page.keyboard.type("mul_softmax_dropout")
        page.keyboard.press("Enter")
        page.wait_for_timeout(1000)  # until it has moved there
        page.screenshot(path=file)
        chromium.close()


def write(folder: Path) -> None:
    """Fill the marks of docs/data-movement.md and docs/reading-a-plan.md."""
    picture(folder / "plan.png")
    movement = folder / "data-movement.md"
    text = movement.read_text()
    for batch, length in SIZES:
        for name, make in (("classes", classes), ("totals", totals), ("operators", operators)):
            text = rewritten(text, MARK.format(f"{name} {batch} x {length}"), make(batch, length))
    movement.write_text(text)
    reading = folder / "reading-a-plan.md"
    text = rewritten(reading.read_text(), MARK.format("report"), plan_of(*SIZES[0]))
    reading.write_text(rewritten(text, MARK.format("answers"), answers(*SIZES[0])))
