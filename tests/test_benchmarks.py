"""The yardsticks themselves: errors, bytes, kernel kinds, and that every row runs."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fusion_compiler as fc
from benchmarks.__main__ import parse
from benchmarks.decoding import decode
from benchmarks.decoding.decoders import DECODERS
from benchmarks.harness import record, timing
from benchmarks.harness.accuracy import (
    InFloat64,
    chance,
    error_of,
    not_worse,
    ratios_to_eager,
    rounding_floor,
    worst_ratio,
)
from benchmarks.harness.processes import in_turn
from benchmarks.harness.record import ROOT, Record
from benchmarks.harness.tables import geometric_mean, table
from benchmarks.harness.timing import OverBudgetError, budget, busy, kind_of, median_by_repetition
from benchmarks.kernels import measure as kernels
from benchmarks.kernels.bars import cliffs, rank_correlation, show_summary, summarize, verdict
from benchmarks.kernels.case import Case, copy_of
from benchmarks.kernels.clusters import CAT_CASES, DROPOUT_CASES, ODD_NORM_CASES, SUM_CASES, TRANSPOSING_CASES
from benchmarks.kernels.measure import leaves, run, truth_of
from benchmarks.kernels.sizes import ALL_CASES
from benchmarks.models import measure as steps
from benchmarks.models.nets import NETS
from benchmarks.models.workloads import WORKLOADS, Workload, gradient_for, result_of, step
from benchmarks.optimizer import measure as optimizer
from benchmarks.pages.readme import FIGURES, PLAN, RESULTS, headlines, optimizer_page, plan_text, text_of
from benchmarks.pages.reports import rewritten
from tests.codegen.test_golden import of_pinned_versions


def rounded(noise: float) -> tuple[torch.Tensor, torch.Tensor]:
    truth = torch.randn(4096, dtype=torch.float64)
    return (truth + noise * torch.randn_like(truth)).bfloat16(), truth


def test_error_of_counts_nan_as_infinite() -> None:
    error = error_of(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0], dtype=torch.float64))
    assert error.largest == error.rms == float("inf")


def test_not_worse_accepts_the_rounded_truth_and_refuses_more_noise() -> None:
    eager, truth = rounded(0.01)
    assert not_worse(truth.bfloat16(), eager, truth) is None
    noisy = (truth + 0.02 * torch.randn_like(truth)).bfloat16()
    assert "RMS error" in (not_worse(noisy, eager, truth) or "")


def test_not_worse_refuses_a_single_wrong_element_and_another_dtype() -> None:
    eager, truth = rounded(0.0)
    wrong = truth.bfloat16()
    wrong[17] += 0.25
    assert not_worse(wrong, eager, truth) is not None
    assert "dtype" in (not_worse(truth.float(), eager, truth) or "")


def test_worst_ratio_is_one_for_exact_results() -> None:
    truth = [torch.arange(8, dtype=torch.float64)]
    exact = [truth[0].float()]
    assert worst_ratio(exact, exact, truth) == 1.0
    assert worst_ratio([exact[0] + 1], exact, truth) == float("inf")


def test_ratios_to_eager_count_what_rounding_does_not_explain() -> None:
    truth = {"out": torch.randn(4096).double(), "d w": torch.randn(64, 64).double(), "loss": torch.ones(())}
    truth["d zero"] = torch.randn(64).double() * 1e-12
    eager = {n: (t + 0.01 * torch.randn(t.shape)).bfloat16() for n, t in truth.items()}
    best = {n: t.bfloat16() for n, t in truth.items()}
    assert "loss" not in ratios_to_eager(best, eager, truth)
    assert ratios_to_eager(best, best, truth) == {"out": 1, "d w": 1, "d zero": 1}
    worse = best | {"d w": (truth["d w"] + 0.03 * torch.randn(64, 64)).bfloat16()}
    assert ratios_to_eager(worse, eager, truth)["d w"] == pytest.approx(3, rel=0.1)
    assert chance(truth["d w"]) < 2 < chance(truth["d zero"])
    missing = best | {"out": torch.full_like(best["out"], float("nan"))}
    assert ratios_to_eager(missing, eager, truth)["out"] == float("inf")


def test_the_rounding_floor_is_what_rounding_costs() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        truth = torch.randn(20000, dtype=torch.float64) * 3
        assert error_of(truth.to(dtype), truth).rms == pytest.approx(rounding_floor(dtype, truth), rel=0.05)


LAYOUTS = (*ODD_NORM_CASES, *DROPOUT_CASES, *SUM_CASES, *TRANSPOSING_CASES, *CAT_CASES)
# On a CPU PyTorch's decomposition of batch norm keeps the statistics for backward in the input's dtype.
ON_CPU = {"BatchNorm in training, 128 x 256 x 56 x 56": torch.float32}


@pytest.mark.parametrize("case", LAYOUTS, ids=lambda case: case.name)
def test_families_values_and_gradients_are_as_close_as_eagers(case: Case) -> None:
    inputs = case.inputs("cpu", quick=True, dtype=ON_CPU.get(case.name))
    truth = truth_of(case, inputs, case.differentiate)
    fast = fc.compile(case.without_randomness(), backend="interpret", strict=True)
    tensors = leaves(inputs, case.differentiate)
    results = run(fast, tensors, case.differentiate, truth.gradients, case.state)
    triples = zip(results, truth.eager, truth.exact, strict=True)
    assert not [wrong for ours, eager, exact in triples if (wrong := not_worse(ours, eager, exact))]


def test_a_copy_keeps_strides_and_offset() -> None:
    case = next(c for c in ALL_CASES if c.name == "softmax, 4096 wide, offset by one")
    x = leaves(case.inputs("cpu", quick=True), ("x",))["x"]
    assert x.storage_offset() == 1 and x.is_leaf and x.requires_grad
    turned = torch.randn(3, 4, dtype=torch.float64).t()[1:]
    assert copy_of(turned).stride() == turned.stride()
    assert torch.equal(copy_of(turned), turned)


def test_the_truth_of_code_that_casts_to_float32_is_in_float64() -> None:
    def scaled(x: torch.Tensor) -> torch.Tensor:
        shares = torch.softmax(x, -1, dtype=torch.float32) + x.to(torch.float32) / x.float().square().sum()
        return shares.to(x.dtype)

    x = torch.randn(8, 64, dtype=torch.float64)
    exact = torch.softmax(x, -1) + x / x.square().sum()
    with InFloat64():
        truth = scaled(x)
    assert torch.equal(truth, exact) and not torch.equal(scaled(x), exact)


@pytest.mark.sample(60)
@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_every_cluster_runs_and_its_truth_is_float64(case: Case) -> None:
    inputs = case.inputs("cpu", quick=True)
    truth = truth_of(case, inputs, case.differentiate)
    assert all(t.dtype == torch.float64 for t in truth.exact)
    fn = case.without_randomness()
    again = run(
        fn,
        {
            n: t.double().requires_grad_(n in case.differentiate) if t.is_floating_point() else t
            for n, t in inputs.items()
        },
        case.differentiate,
        [g.double() for g in truth.gradients],
        case.state,
    )
    for result, exact in zip(again, truth.exact, strict=True):
        torch.testing.assert_close(result, exact)


def test_bytes_of_the_second_rms_norm_are_those_of_an_ideal_pair_of_kernels() -> None:
    (case,) = [c for c in ALL_CASES if c.name.startswith("residual add")]
    rows, columns = 16, 256
    inputs = case.inputs("cpu", quick=True)
    outputs = case.fn(*inputs.values())
    matrix, vector = 2 * rows * columns, 2 * columns
    assert case.forward_bytes(inputs, outputs) == 4 * matrix + vector
    # dy, dtotal, total and weight in; one gradient for both addends and the weight's out
    assert case.backward_bytes(inputs, outputs) == 3 * matrix + vector + matrix + vector


@pytest.mark.parametrize("workload", (*WORKLOADS, *NETS), ids=lambda w: w.name)
def test_every_workload_runs_and_is_the_same_twice(workload: Workload) -> None:
    small = dataclasses.replace(workload, dtype=torch.float32)
    results = []
    for _ in range(2):
        model, batch = small.make("cpu", quick=True)
        model.eval()
        gradient = gradient_for(model, batch) if small.train else None
        gradient = None if gradient is None else torch.ones_like(gradient)
        results.append(result_of(step(model, batch, small.train, gradient)))
        if small.train:
            assert all(p.grad is not None for p in model.parameters())
    assert torch.equal(*results)
    assert results[0].isfinite().all()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_hsh_256x128_64x4_1x2_h_bz_coopA_TNT", "contraction"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>", "contraction"),
        ("fmha_cutlassF_bf16_aligned_64x64_rf_sm80", "attention"),
        ("void pytorch_flash::flash_fwd_kernel<...>", "attention"),
        ("triton_poi_fused_add_gelu_0", "rest"),
        ("rms_norm_silu_mul_fwd", "rest"),
    ],
)
def test_kernel_kinds(name: str, kind: str) -> None:
    assert kind_of(name) == kind


def test_median_by_repetition() -> None:
    assert median_by_repetition([1, 2, 10, 20, 1, 3], 3) == 4
    assert median_by_repetition([1, 2, 3], 2) == 3


def test_time_in_which_kernels_overlap_counts_once() -> None:
    assert busy([(0, 2), (3, 5)]) == [2, 2]
    assert busy([(0, 4), (1, 3), (2, 6), (6, 7)]) == [4, 0, 2, 1]


def test_budget_stops_python_code() -> None:
    with pytest.raises(OverBudgetError), budget(0.05):
        time.sleep(5)


def test_a_record_keeps_every_row_as_it_comes(tmp_path: Path) -> None:
    record = Record("kernels", {"commit": "abc"}, tmp_path / "out.json")
    for number in range(2):
        record.add({"row": number})
        read = json.loads((tmp_path / "out.json").read_text())
        assert read["commit"] == "abc" and len(read["rows"]) == number + 1


def test_rank_correlation_and_summary() -> None:
    assert rank_correlation([1, 2, 3], [10, 20, 30]) == 1
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == -1
    rows = [
        {
            "phase": "forward",
            "cells": {"ours": {"us": us, "predicted_us": 1.1 * us}, "eager": {"us": 2 * us}, "compile": {}},
        }
        for us in (1.0, 5.0, 3.0)
    ]
    summary = summarize(rows)
    assert summary["forward vs eager"] == pytest.approx(2)
    assert "forward vs compile" not in summary
    assert summary["prediction: mean error"] == pytest.approx(0.1)
    assert summary["prediction: rank correlation"] == 1


def measured(case: str, fraction: float, **fields: object) -> dict[str, object]:
    cells = {
        "ours": {"us": 1 / fraction, "fraction": fraction, "kernels": 1},
        "compile": {"us": 2 / fraction},
    }
    return {"case": case, "phase": "forward", "family": "sizes", "cells": cells, **fields}


def test_a_neighbour_sets_the_bar_only_where_it_is_fast() -> None:
    rows = [
        measured("even", 0.96, bar=0.95),
        measured("odd", 0.79, bar=None, neighbour="even"),
        measured("slow", 0.90, bar=0.95),
        measured("beside slow", 0.5, bar=None, neighbour="slow"),
    ]
    assert [verdict(row, rows) for row in rows] == ["met", "MISSED", "MISSED", "-"]
    assert [line.split(",")[0] for line in cliffs(rows)] == ["cliff: odd"]
    family = summarize(rows)["families"]["sizes"]["forward"]
    assert (family["met"], family["of"]) == (1, 3)
    assert family["compile"] == pytest.approx(2)
    assert "1 of 3" in show_summary(summarize(rows))


def options(tmp_path: Path, *arguments: str) -> argparse.Namespace:
    common = ("--quick", "--device", "cpu", "--repetitions", "1", "--json", str(tmp_path / "out.json"))
    return parse([*arguments, *common])


@pytest.mark.sample(2, group="long")
def test_a_resumed_run_adds_what_is_missing_and_renews_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [c for c in ALL_CASES if c.family == "sums"][:1]
    monkeypatch.setenv("BENCH_COMMIT", "one")
    kernels.main(options(tmp_path, "kernels", "--only", "eager"), cases)
    monkeypatch.setenv("BENCH_COMMIT", "two")
    again = options(tmp_path, "kernels", "--resume", "--backend", "eager", "--only", "eager|ours")
    for commit in ("two", "three"):
        monkeypatch.setenv("BENCH_COMMIT", commit)
        (row,) = kernels.main(again, cases).rows
        assert {n: c["commit"] for n, c in row["cells"].items()} == {"eager": "one", "ours": commit}
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == [row]
    assert not kernels.main(options(tmp_path, "kernels", "--family", "no such"), cases).rows


@pytest.mark.sample(2, group="long")
def test_processes_compile_ahead_and_write_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = tmp_path / "compiled"
    (tmp_path / "sitecustomize.py").write_text(
        "import fusion_compiler as fc, pathlib\n"
        "compile = fc.compile\n"
        f"fc.compile = lambda *a, **k: (open({str(seen)!r}, 'a').write('x'), compile(*a, **k))[1]\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    chosen = (
        "kernels",
        "--only",
        "ours",
        "--backend",
        "eager",
        "--filter",
        "a . b.t.., forward$",
        "--jobs",
        "2",
    )
    rows = kernels.main(options(tmp_path, *chosen)).rows
    assert [r["case"] for r in rows] == ["a + b.t()", "a * b.t()"]
    assert "0 of them failed" in capsys.readouterr().out
    assert seen.read_text() == "xx"
    assert [r["case"] for r in json.loads((tmp_path / "out.json").read_text())["rows"]] == [
        r["case"] for r in rows
    ]


LIGER = """
import torch
import torch.nn.functional as F

def liger_softmax(x):
    return Softmax.apply(x)

def liger_layer_norm(X, W, B, eps):
    return F.layer_norm(X, W.shape, W, B, eps)

class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = torch.softmax(x, -1)
        ctx.save_for_backward(out)
        x.data.zero_()
        return out

    @staticmethod
    def backward(ctx, dy):
        (out,) = ctx.saved_tensors
        return dy.copy_(torch._softmax_backward_data(dy, out, -1, dy.dtype))
"""


@pytest.mark.sample(2, group="long")
def test_ligers_kernels_are_found_in_a_folder_and_may_overwrite_what_they_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "liger_kernel" in sys.modules:
        pytest.skip("another liger_kernel has been imported")
    names = ("softmax", "SwiGLU", "LayerNorm")
    cases = [c for c in ALL_CASES if c.name in names]
    only = ("kernels", "--only", "liger", "--budget", "20")
    monkeypatch.setattr(sys, "path", [p for p in sys.path if not Path(p, "liger_kernel").exists()])
    assert not kernels.main(options(tmp_path, *only), cases).rows
    assert "liger is left out: ModuleNotFoundError" in capsys.readouterr().out
    package = tmp_path / "liger_kernel" / "transformers"
    package.mkdir(parents=True)
    (package / "functional.py").write_text(LIGER)
    monkeypatch.setenv("LIGER_PATH", str(tmp_path))
    try:
        rows = kernels.main(options(tmp_path, *only, "--only", "liger|eager"), cases).rows
    finally:
        for name in [n for n in sys.modules if n.startswith("liger_kernel")]:
            del sys.modules[name]
    cells = {(r["case"], r["phase"]): r["cells"] for r in rows}
    assert "liger_swiglu" in cells["SwiGLU", "forward"]["liger"]["failed"]
    for phase in ("forward", "forward+backward"):
        assert cells["LayerNorm", phase]["liger"]["error_to_eager"] == pytest.approx(1)
        assert cells["softmax", phase]["liger"]["error_to_eager"] == pytest.approx(1)
        assert cells["softmax", phase]["eager"]["error_to_eager"] == pytest.approx(1)


def test_processes_get_ready_together_and_measure_one_by_one() -> None:
    tasks = [{"number": i, "prepares": 0.2 * (2 - i), "measures": 0.2} for i in range(3)]
    results = list(in_turn("tests.turns", tasks, 60, jobs=2))
    assert [f["number"] for f in results] == [0, 1, 2]
    times = sorted((f["began"], f["done"]) for f in results)
    assert all(one["done"] <= other["began"] for one, other in itertools.pairwise(results)), times


@pytest.mark.sample(2, group="long")
def test_a_process_that_fails_or_is_late_is_no_result() -> None:
    tasks = [
        {"number": 0, "measures": 0, "fails": "no such thing"},
        {"number": 1, "prepares": 60, "measures": 0},
        {"number": 2, "measures": 0},
    ]
    failed, late, fine = in_turn("tests.turns", tasks, 10, jobs=3)
    assert failed == {"failed": "no such thing"} and late == {"failed": "over 10 s"} and fine["number"] == 2


def step_row(**other: Any) -> dict[str, Any]:
    """A workload's row in which all bars are met."""
    kinds = {"rest": 1.0, "contraction": 8.0, "attention": 1.0}
    memory = {"between_gb": 1.0, "first_peak_gb": 2.1, "run_peak_gb": 2.5, "recordings_gb": 0.1}
    ours = {"step_ms": 10.5, "gpu_ms": 10.0, "by_kind_ms": kinds, "peak_gb": 2.0, **memory}
    peers = {
        name: {"step_ms": 13.0, "gpu_ms": 12.0, "peak_gb": 2.5, **memory}
        for name in ("compile", "graphs")
    }
    cells = {
        "eager": {**peers["compile"], "step_ms": 20.0},
        **peers,
        "ours": {**ours, "error_to_eager": 0.9, **other},
    }
    return {"workload": "a model", "cells": cells}


def test_steps_that_meet_their_bars() -> None:
    assert all(met for *_, met in steps.bars(step_row())) and len(list(steps.bars(step_row()))) == 7
    text = steps.show([step_row()])
    assert "7 of 7 bars met" in text and "10.50 (10.00)" in text and "autotune" not in text
    assert "2.10 (2.50)" in text and "CUDA graphs keep 0.10" in steps.describe(
        {"first_step_s": 1.0, **step_row()["cells"]["eager"], "kernels": 3, "by_kind_ms": {}}
    )
    graphs = step_row()
    graphs["cells"]["graphs"]["step_ms"] = 11.0
    assert steps.missed([graphs]) == ["a model: wall time, x torch.compile >= 1.15: 1.05"]


@pytest.mark.parametrize(
    ("changed", "missed"),
    [
        ({"step_ms": 12.0}, ["x torch.compile", "contractions and attention"]),
        ({"peak_gb": 2.6}, ["peak memory / eager's", "peak memory / best's"]),
        ({"run_peak_gb": 2.6}, ["peak of all steps, the first one included"]),
        ({"between_gb": 1.1}, ["between steps"]),
        ({"error_to_eager": 1.2}, ["error"]),
        ({"gpu_ms": 4.0, "step_ms": 4.5}, ["GPU time"]),
    ],
)
def test_steps_that_miss_their_bars(changed: dict[str, float], missed: list[str]) -> None:
    failed = steps.missed([step_row(**changed)])
    assert len(failed) == len(missed) and all(b in a for a, b in zip(failed, missed, strict=True)), failed


def test_readme_quotes_the_results(tmp_path: Path) -> None:
    cell = {"us": 10.0, "kernels": 1, "fraction": 0.987}
    result = {
        "command": "python -m benchmarks kernels",
        "commit": "0123abc",
        "device": "GPU",
        "versions": {"torch": "2.11"},
        "summary": {"forward vs eager": 3.456},
        "rows": [
            {"case": "softmax", "phase": "forward", "cells": {"ours": cell, "eager": {"failed": "no"}}},
        ],
    }
    (tmp_path / "kernels.json").write_text(json.dumps(result))
    begin, end = f"<!-- {FIGURES} -->", "<!-- end of figures -->"
    text = rewritten(f"before\n{begin}\nold\n{end}\nafter", FIGURES, text_of(tmp_path))
    assert text.startswith(f"before\n{begin}\n") and text.endswith(f"{end}\nafter")
    assert "old" not in text
    assert "| softmax | failed | - | 0.99 | - | - | - |" in text
    assert "3.46x (forward vs eager)" in text and "at 0123abc on GPU: torch 2.11" in text
    with pytest.raises(ValueError, match="needs the lines"):
        rewritten("no marks", FIGURES, "")


def test_the_readme_is_what_the_results_say() -> None:
    readme = (ROOT / "README.md").read_text()
    assert rewritten(readme, FIGURES, headlines(RESULTS)) == readme
    page = (ROOT / "docs" / "optimizer.md").read_text()
    assert rewritten(page, FIGURES, optimizer_page(RESULTS)) == page


@of_pinned_versions
def test_the_program_of_the_readme_prints_the_plan_of_the_readme(request: pytest.FixtureRequest) -> None:
    file = ROOT / "README.md"
    now = rewritten(file.read_text(), PLAN, plan_text(file.read_text()))
    if request.config.getoption("--update-golden"):
        file.write_text(now)
    assert "iteration space" in now and file.read_text() == now


def test_headlines_are_means_of_the_cases_that_were_measured(tmp_path: Path) -> None:
    def row(ours: float, eager: float, **compiled: float) -> dict[str, Any]:
        times = {"ours": ours, "eager": eager, **compiled}
        return {"case": "token", "cells": {name: {"step_ms": ms} for name, ms in times.items()}}

    rows = [row(1.0, 8.0, compile=4.0, graphs=2.0), row(1.0, 2.0, compile=8.0)]
    result = {"device": "GPU", "versions": {"torch": "2.11", "liger": None}, "rows": rows}
    (tmp_path / "decode.json").write_text(json.dumps(result))
    text = headlines(tmp_path)
    assert "| one generated token | 2 | 4.00 | 2.00 | 8.00 | 4.00 |" in text
    assert "GPU with torch 2.11: " in text and "kernels" not in text.splitlines()[2]


def test_table_and_geometric_mean() -> None:
    assert table(["a", "b"], [["long", "1"]]) == "a     b\n-------\nlong  1"
    assert geometric_mean([2, 8]) == pytest.approx(4)
    assert geometric_mean([]) is None


def test_energy_is_that_of_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, used = torch.device("cpu"), [0.0]

    def call() -> None:
        used[0] += 2.5

    assert timing.energy_of(call, cpu) is None
    monkeypatch.setattr(timing, "counter_of", lambda device: lambda: used[0])
    assert timing.energy_of(call, cpu, seconds=0.01) == 2.5


@pytest.mark.sample(2, group="long")
def test_updates_and_steps_are_timed_for_each_optimizer(tmp_path: Path) -> None:
    chosen = (
        "--filter",
        "(Llama-1B parameters|MobileNetV2).*AdamW",
        "--only",
        "^ours$|forward|hooks",
        "--jobs",
        "3",
    )
    rows = optimizer.main(options(tmp_path, "optimizer", *chosen, "--backend", "eager")).rows
    assert [(row["case"][:9], row["phase"]) for row in rows] == [
        ("Llama-1B ", "AdamW"),
        ("MobileNet", "AdamW"),
    ]
    assert set(rows[0]["cells"]) == {"ours"}
    assert set(rows[1]["cells"]) == {"hooks", "ours", "ours, forward"}
    for row in rows:
        assert all(cell.get("ms", 0) > 0 for cell in row["cells"].values()), row


def test_a_run_that_was_cut_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun: list[str] = []

    def in_turn(_: str, tasks: list[dict[str, Any]], *__: Any, **___: Any) -> Iterator[dict[str, Any]]:
        for task in tasks[:2]:  # the time is over
            begun.append(task["contender"])
            yield {"ms": 1.0, "of copy": 0.9, "launches": 1}

    monkeypatch.setattr(record, "in_turn", in_turn)
    monkeypatch.setenv("BENCH_COMMIT", "one")
    chosen = ("--filter", "parameters.*AdamW", "--json", str(tmp_path / "cells.json"), "--resume")
    for left in (3, 1, 0):
        optimizer.main(options(tmp_path, "optimizer", *chosen))
        assert capsys.readouterr().out.count("not measured: Llama-1B parameters, AdamW") == left
    assert begun == ["compiled step", "for-loop", "foreach", "fused", "ours"]
    monkeypatch.setenv("BENCH_COMMIT", "another")
    optimizer.main(options(tmp_path, "optimizer", *chosen))
    assert begun[5:] == ["ours"]


def test_what_compiles_goes_first(tmp_path: Path) -> None:
    order = optimizer.in_order(optimizer.cells_of(options(tmp_path, "optimizer", "--filter", "AdamW")))
    first = [(cell.task["workload"], cell.contender) for cell in order[:16]]
    assert {(n, c) for n in range(5) for c in ("torch.compile", "for-loop")} == set(first[:10])
    assert {c for _, c in first[10:]} == {"compiled step"} and len(order) == 50


def test_nothing_is_begun_when_the_time_is_over() -> None:
    assert list(in_turn("benchmarks.optimizer.measure", [{}, {}], 1.0, within=-1.0)) == []


def optimizer_row(case: str, **ms: float) -> dict[str, Any]:
    cells = {n: {"ms": v, "gpu_ms": v, "peak_gb": 8.0, "gradients_gb": 1.5} for n, v in ms.items()}
    return {"case": case, "phase": "AdamW", "cells": cells}


def test_bars_of_optimizers() -> None:
    short = optimizer_row("Llama, train, 1 x 1024", **{"torch.compile": 13.0, "ours": 11.0, "for-loop": 11.5})
    short["cells"]["ours, backward"] = {"ms": 10.0, "gpu_ms": 9.0, "peak_gb": 6.6, "gradients_gb": 1.5}
    slow = optimizer_row("ViT", **{"torch.compile": 10.0, "ours": 11.0, "for-loop": 15.0})
    update = {"case": "list", "phase": "AdamW", "cells": {"ours": {"ms": 1.0, "of copy": 0.9, "launches": 1}}}
    bars = {what: (value, met) for what, value, met in optimizer.bars([short, slow, update], "list")}
    assert [met for _, met in bars.values()] == [True, True, False, False, True]
    assert [round(value, 2) for value, _ in bars.values()] == [1.3, 0.93, 0.91, 0.9, 0.5]
    text = optimizer.show([short, slow, update], "list")
    assert "3 of 5 bars met" in text and text.count("  met") == 3
    assert re.search(r"ViT, AdamW: x torch.compile and fused >= 1.0 +0.91  MISSED", text)
    assert optimizer.means([short, slow])["vs torch.compile"] == pytest.approx((1.3 * 10 / 11) ** 0.5)


@pytest.mark.sample(2, group="long")
def test_a_decoding_step_is_measured_and_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = ("decode", "--filter", "1B, batch 1", "--backend", "eager", "--only", "eager|ours", "--resume")
    monkeypatch.setenv("BENCH_COMMIT", "one")
    (row,) = decode.main(options(tmp_path, *chosen)).rows
    assert set(row["cells"]) == {"eager", "ours"}
    for cell in row["cells"].values():
        assert cell["step_ms"] > 0 and cell["commit"] == "one", cell
        assert cell["error_to_eager"] == pytest.approx(1, abs=0.1), "both compute by ATen"
    assert row["cells"]["eager"]["recorded"] is None
    assert row["cells"]["ours"]["recorded"] == {"graph0.inference": None}, "nothing is on a CPU"
    assert "Llama-1B, batch 1, one token" in capsys.readouterr().out
    begun: list[str] = []

    def in_turn(_: str, tasks: list[dict[str, Any]], *__: Any, **___: Any) -> Iterator[dict[str, Any]]:
        begun.extend(task["contender"] for task in tasks)
        return iter(())

    monkeypatch.setattr(record, "in_turn", in_turn)
    decode.main(options(tmp_path, *chosen))
    assert begun == []
    monkeypatch.setenv("BENCH_COMMIT", "two")
    decode.main(options(tmp_path, *chosen))
    assert begun == ["ours"] and "not measured: Llama-1B, batch 1, one token, ours" in capsys.readouterr().out


def test_bytes_of_a_token() -> None:
    """Weights once, of embeddings a row, of experts the chosen; the context's keys and values."""
    by_name = {w.name.partition(",")[0]: w for w in DECODERS}
    llama, _ = by_name["Llama-8B 8 layers"].make("cpu", quick=True)
    model: Any = llama
    weights = sum(p.nbytes for p in model.parameters())
    rotations = sum(b.nbytes for b in model.model.buffers())
    kept = 2 * 2 * 2 * 8 * 16 * 2  # layers, keys and values, heads, tokens, elements, bytes
    assert model.token_bytes() == weights + rotations + kept
    mixtral: Any = by_name["Mixtral 4 layers"].make("cpu", quick=True)[0]
    experts = sum(p.nbytes for p in mixtral.parameters() if p.dim() == 3)
    table = mixtral.model.get_input_embeddings().weight.nbytes
    rest = sum(p.nbytes for p in mixtral.parameters()) - experts - table
    rotations = sum(b.nbytes for b in mixtral.model.buffers())
    assert mixtral.token_bytes() == rest + rotations + experts // 4 + table // 128 + kept


def test_a_decoder_is_rewound() -> None:
    decoder: Any = DECODERS[0].make("cpu", quick=True)[0]
    token = torch.zeros(1, 1, dtype=torch.long)
    with torch.no_grad():
        first = decoder(token)
        assert not torch.equal(decoder(token), first)
        decoder.rewind()
        assert torch.equal(decoder(token), first)


def test_bars_of_decoding() -> None:
    def row(case: str, ours: float, peer: float, read: float) -> dict[str, Any]:
        cell = {"step_ms": ours, "gpu_ms": ours, "host_ms": 0.1, "token_bytes": read}
        cells = {"ours": cell, "graphs": {"step_ms": peer, "gpu_ms": peer}}
        return {"case": case, "phase": "token", "cells": cells}

    rows = [
        row(decode.FIRST, 0.7, 1.2, 2.4e9),
        row("Llama-1B, batch 8, one token", 0.8, 1.0, 2.4e9),
        row("Llama-1B int8, one token", 0.4, 1.2, 1.4e9),
    ]
    bars = {what: (value, met) for what, value, met in decode.bars(rows, 4.28e12)}
    assert [met for _, met in bars.values()] == [True, True, True, False, False, True, True]
    assert bars[f"{decode.FIRST}: of the copy bandwidth >= 0.8"][0] == pytest.approx(
        2.4e9 / 0.7e-3 / 4.28e12
    )
    assert "5 of 7 bars met" in decode.show(rows, 4.28e12)
