"""The yardsticks themselves: errors, bytes, kernel kinds, and that every row runs."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import pytest
import torch

from benchmarks.accuracy import error_of, not_worse, worst_ratio
from benchmarks.clusters import CASES, Case
from benchmarks.kernels import rank_correlation, run, summarize, truth_of
from benchmarks.readme import FIGURES, PLAN, RESULTS, plan_text, rewritten, text_of
from benchmarks.record import ROOT, Record, geometric_mean, table
from benchmarks.timing import OverBudgetError, budget, kind_of, median_by_repetition
from benchmarks.workloads import WORKLOADS, Workload, gradient_for, result_of, step


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


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
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
    )
    assert worst_ratio(again, truth.eager, truth.exact) <= 1e-6


def test_bytes_of_the_second_rms_norm_are_those_of_an_ideal_pair_of_kernels() -> None:
    (case,) = [c for c in CASES if c.name.startswith("residual add")]
    rows, columns = 16, 256
    inputs = case.inputs("cpu", quick=True)
    outputs = case.fn(*inputs.values())
    whole, vector = 2 * rows * columns, 2 * columns
    assert case.forward_bytes(inputs, outputs) == 4 * whole + vector
    # dy, dtotal, total and weight in; one gradient for both addends and the weight's out
    assert case.backward_bytes(inputs, outputs) == 3 * whole + vector + whole + vector


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
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
    assert rewritten(readme, FIGURES, text_of(RESULTS)) == readme


def test_the_readme_has_the_plan_of_the_encoder_layer() -> None:
    begin = f"<!-- {PLAN} -->\n"
    shown = (ROOT / "README.md").read_text().split(begin)[1]
    made = plan_text()
    assert made.splitlines()[1] == shown.splitlines()[1]  # of the same graph, for the same device
    assert "iteration space" in made and "iteration space" in shown


def test_table_and_geometric_mean() -> None:
    assert table(["a", "b"], [["long", "1"]]) == "a     b\n-------\nlong  1"
    assert geometric_mean([2, 8]) == pytest.approx(4)
    assert geometric_mean([]) is None
