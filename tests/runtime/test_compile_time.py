"""Seconds by stage: what is counted once, what the benchmark measures, and the bars that it holds."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import torch

import fusion_compiler as fc
from benchmarks.__main__ import parse
from benchmarks.compile_time import measure as compile_time
from benchmarks.compile_time.measure import rows_of
from benchmarks.harness.record import ROOT
from fusion_compiler.runtime.stages import Stages, since


def test_a_stage_within_another_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    stages = Stages()

    def work(seconds: float) -> None:
        now[0] += seconds

    inner = stages.of("inner")(work)
    work(100)
    with stages.of("outer"):
        work(1)
        inner(2)
        stages.enter("last")
        work(4)
        with pytest.raises(ZeroDivisionError), stages.of("inner"):
            work(8)
            _ = 1 / 0
        work(16)
    work(100)
    stages.add("elsewhere", 32)
    assert stages.seconds == {"outer": 1, "inner": 10, "last": 20, "elsewhere": 32}
    assert since({"inner": 10, "outer": 0.5}, stages.seconds) == "outer 0.50, last 20.00, elsewhere 32.00"


def test_a_plan_knows_the_seconds_of_its_stages() -> None:
    fast = fc.compile(lambda x: x.sin() * 2, backend="eager")
    start = time.perf_counter()
    fast(torch.randn(8))
    elapsed = time.perf_counter() - start
    seconds = fast.plan.seconds
    assert {"rewrites", "autograd", "plan", "stitch"} <= seconds.keys()
    assert 0 < sum(seconds.values()) < elapsed
    assert fast.plan.seconds == seconds  # nothing runs on


def row(workload: str, is_default: bool = False, **cells: dict[str, float]) -> dict[str, Any]:
    measured = {n: {kind: {"seconds": s} for kind, s in cell.items()} for n, cell in cells.items()}
    return {"workload": workload, "own": is_default, "cells": measured}


def test_bars_and_what_misses_them() -> None:
    rows = [
        row("BERT-large, 4 layers", ours={"cold": 4.0}),
        row(
            "BERT-large, 12 layers",
            is_default=True,
            ours={"cold": 8.0, "warm": 1.5},
            compile={"cold": 15.0, "warm": 4.0},
        ),
        row("BERT-large, 32 layers", ours={"cold": 7.0}),
        row("ViT, 12 layers", ours={"warm": 1.0}, compile={"warm": 3.0, "cold": 8.0}),
    ]
    rows[-1]["cells"]["ours"]["cold"] = {"failed": "over 90 s"}
    text = compile_time.show(rows)
    assert "3 of 5 bars met" in text
    missed = [line for line in text.splitlines() if line.startswith("  not")]
    assert (
        missed
        == [
            "  not BERT-large, 12 layers, cold: of torch.compile's seconds <= 0.5: 0.53",
            "  not cold, 32 layers / 4 layers <= 1.5: 1.75",
        ][: len(missed)]
    )


def test_one_model_has_a_curve() -> None:
    names = [r["workload"] for r in rows_of("")]
    assert names[:5] == [f"BERT-large, {n} layers" for n in (2, 4, 8, 12, 32)] and len(names) == 8
    assert sum(r["own"] for r in rows_of("")) == 4 and [*rows_of("^ViT")] == [*rows_of("")][-1:]


def test_a_first_step_is_measured_cold_and_warm() -> None:
    row = next(rows_of("ViT"))
    row["layers"] = 1
    options = parse(["compile-time", "--device", "cpu", "--budget", "300"])
    compile_time.measure(row, "ours", options)
    cold, warm = (row["cells"]["ours"][kind] for kind in ("cold", "warm"))
    for cell in (cold, warm):
        assert sum(cell["stages"].values()) == pytest.approx(cell["seconds"])
        assert min(cell["stages"].values()) >= 0 and cell["stages"]["dynamo"] > 0.01
    assert cold["stages"]["plan"] > 0 and "captured anew" in str(cold["disk"])
    assert "plan" not in warm["stages"] and "captured from disk, planned from disk" in str(warm["disk"])


def test_the_page_quotes_what_was_measured() -> None:
    measured = json.loads((ROOT / "benchmarks/results/compile-time-cpu.json").read_text())
    page = (ROOT / "docs/performance.md").read_text()
    assert compile_time.show(measured["rows"], "processor") in page
    assert f"at {measured['commit']}" in page
    on_gpu = json.loads((ROOT / "benchmarks/results/compile-time.json").read_text())
    (shown,) = re.findall(r"^(first step, seconds .*?)\n```", page, re.DOTALL | re.MULTILINE)
    assert shown in compile_time.show(on_gpu["rows"]) and f"at {on_gpu['commit']}" in page
