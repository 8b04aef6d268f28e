"""The other nets of the models' table, small: values and every gradient against float64."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

import fusion_compiler as fc
from benchmarks.harness.accuracy import chance, ratios_to_eager
from benchmarks.harness.tables import geometric_mean
from benchmarks.models.measure import cast
from benchmarks.models.nets import NETS
from benchmarks.models.workloads import Batch, Workload, gradient_for, result_of, step
from fusion_compiler.ir.plan_text import eager_ops

# In float32 rounding errors of both are sums of a few; a term that is missing or wrong is thousands of them.
MEAN = 1.25

# Sorts, scans and scatters by data; pooling with places of maxima; statistics written over the module's own.
STAYS = {
    "aten.topk.default", "aten.sort.default", "aten.sort.stable", "aten.searchsorted.Tensor",
    "aten.cumsum.default", "aten.histc.default",
    "aten.scatter.src", "aten.scatter.value", "aten.scatter_add.default", "aten.index_put.default",
    "aten.scatter_.src", "aten.scatter_add_.default", "aten.index_put_.default",
    "aten.embedding_dense_backward.default", "transformers.grouped_mm_fallback.default",
    "transformers.grouped_mm_fallback_backward.default", "aten.max_pool2d_with_indices.default",
    "aten.max_pool2d_with_indices_backward.default", "aten.copy_.default",
}  # fmt: skip


def run(
    model: nn.Module, called: nn.Module, batch: Batch, train: bool, gradient: Tensor | None
) -> dict[str, Tensor]:
    """The result, the statistics that it leaves, and gradients of parameters and inputs."""
    batch = cast(batch, next(model.parameters()).dtype)
    out = step(called, batch, train, gradient)
    tensors = {"result": result_of(out).detach()}
    tensors |= {n: b.detach().clone() for n, b in model.named_buffers() if b.is_floating_point()}
    leaves = dict(model.named_parameters()) | {n: t for n, t in batch.items() if isinstance(t, Tensor)}
    return tensors | {f"d {n}": t.grad for n, t in leaves.items() if t.grad is not None}


def laid_out(model: nn.Module, batch: Batch) -> tuple[nn.Module, Batch]:
    """A copy by rows: PyTorch's backward of channels-last group norms on a CPU reads where nothing is."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.contiguous()
    return copied, {n: t.detach().contiguous().requires_grad_(t.requires_grad) for n, t in batch.items()}


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "workload", NETS, ids=lambda w: w.name.split(",")[0].replace(" ", "-") + f"-{w.train}"
)
def test_nets_are_as_close_to_float64_as_eager(workload: Workload) -> None:
    small = dataclasses.replace(workload, dtype=torch.float32)
    model, batch = small.make("cpu", quick=True)
    torch.manual_seed(torch.initial_seed() % 1000 + 1)
    gradient = gradient_for(model, batch) if workload.train else None
    plain, rows = laid_out(model, batch)
    wide = copy.deepcopy(plain).double()
    if hasattr(getattr(wide, "config", None), "num_local_experts"):
        wide.config._experts_implementation = "batched_mm"  # the grouped product takes no float64
    truth = run(wide, wide, rows, workload.train, None if gradient is None else gradient.double())
    eager = run(plain, plain, rows, workload.train, gradient)
    fast = fc.compile(model, backend="interpret")
    ours = run(model, fast, batch, workload.train, gradient)
    left = {item.target for plan in fast.plan for item in eager_ops(plan)}
    assert left <= STAYS
    assert ours.keys() == eager.keys() == truth.keys()
    ratios = ratios_to_eager(ours, eager, truth)
    beyond = {n: r for n, r in ratios.items() if r > chance(truth[n])}
    assert not beyond
    assert geometric_mean(ratios.values()) <= MEAN
