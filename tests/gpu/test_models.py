"""Models at their real widths with two layers, and the other nets: results, gradients, memory."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch

import fusion_compiler as fc
from benchmarks.harness.tables import geometric_mean
from benchmarks.models.measure import cast, compare, results_of
from benchmarks.models.nets import NETS
from benchmarks.models.workloads import WORKLOADS, Workload, gradient_for, step

CUDA = torch.device("cuda")
SHALLOW = tuple(
    dataclasses.replace(w, sizes={**w.sizes, "layers": 2} if "layers" in w.sizes else w.sizes)
    for w in WORKLOADS
)
EVERY = (*SHALLOW, *NETS)
TRAINED = [w for w in EVERY if w.train]
BAR, DRAWS = 1.02, 8
# PyTorch's own warning where a process multiplies first in a backward.
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")
EACH = pytest.mark.parametrize("workload", EVERY, ids=lambda w: w.name)


def errors(workload: Workload, seed: int) -> dict[str, Any]:
    """Our errors beside eager's for one draw of weights and batch."""
    model, batch = workload.make(CUDA, seed=seed)
    gradient = gradient_for(model, batch) if workload.train else None
    model, batch = workload.make(CUDA, seed=seed)
    eager = results_of(model, model, batch, workload.train, gradient)
    wide, _ = workload.make(CUDA, dtype=workload.exact, weights=model.state_dict(), seed=seed)
    exact = results_of(
        wide,
        wide,
        cast(batch, workload.exact),
        workload.train,
        None if gradient is None else gradient.to(workload.exact),
    )
    del wide
    model, batch = workload.make(CUDA, seed=seed)
    ours = results_of(model, fc.compile(model), batch, workload.train, gradient)
    compared = compare(ours, eager, exact)
    assert "missing" not in compared, compared
    assert not compared["beyond_chance"], compared
    return compared


@EACH
def test_results_and_every_gradient_are_as_close_as_eagers(workload: Workload) -> None:
    """Eager rounds more often; where it does not, the mean of some dozen tensors is off by two per cent.

    One expert chosen otherwise, or one rounding in a long scan, moves the errors of all tensors together:
    over twelve draws the ratio was 0.85 to 1.13 for Mixtral and 0.88 to 1.05 for Mamba; means are 0.99. If
    one draw is above the bar, the mean of eight is held to it.
    """
    ratios = [errors(workload, 0)["error_to_eager"]]
    if ratios[0] > BAR:
        ratios += [errors(workload, seed)["error_to_eager"] for seed in range(1, DRAWS)]
    assert geometric_mean(ratios) <= BAR, ratios


def peak(
    called: object, model: torch.nn.Module, batch: dict[str, object], gradient: torch.Tensor | None
) -> int:
    """Bytes at the highest point of the second training step."""
    for _ in range(2):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step(called, batch, True, gradient)
        model.zero_grad(set_to_none=True)
    return torch.cuda.max_memory_allocated()


@pytest.mark.parametrize("workload", TRAINED, ids=lambda w: w.name)
def test_peak_memory_is_not_above_eagers(workload: Workload) -> None:
    model, batch = workload.make(CUDA)
    gradient = gradient_for(model, batch)
    eager = peak(model, model, batch, gradient)
    assert peak(fc.compile(model), model, batch, gradient) <= eager
