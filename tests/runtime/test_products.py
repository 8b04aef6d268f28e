"""Both ways of a product with what is behind it are timed once on a device, and the faster one is kept.

The device is `tests.fake_gpu`'s, which computes in Triton's interpreter and says what times it measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.compiler import products
from fusion_compiler.compiler.products import _Trial
from fusion_compiler.ir.plan import FusionPlan
from tests.fake_gpu import FakeGpu, use


@dataclass
class Timed(FakeGpu):
    """`ways`: the times of one kernel, of the library's product and a kernel, and of the product alone."""

    ways: tuple[float, float, float] = (10.0, 20.0, 12.0)
    measured: int = 0

    def times(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        if self.out_of_memory:
            raise torch.OutOfMemoryError("no memory")
        for call in calls:
            call()
        if any(isinstance(getattr(getattr(c, "func", None), "__self__", None), _Trial) for c in calls):
            self.measured += 1
            return list(self.ways)
        return [1.0 + i for i in range(len(calls))]


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.gelu(F.linear(x, w, b)) @ w)


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FusionPlan]:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(products, "compile_all", lambda *_: False)

    def run(gpu: FakeGpu, **options: Any) -> FusionPlan:
        use(gpu, monkeypatch)
        torch._dynamo.reset()
        x, w, b = (torch.randn(shape).bfloat16() for shape in ((20, 32), (32, 32), (32,)))
        chosen: dict[str, Any] = {"products": "measured", "cudagraphs": False, "tune": False, **options}
        fast = fc.compile(gelu, **chosen)
        result, truth = fast(x, w, b), gelu(x.double(), w.double(), b.double())
        eager = gelu(x, w, b)
        assert (result - truth).square().mean() <= 1.05 * (eager - truth).square().mean()
        (plan,) = fast.plan
        return plan

    return run


def test_the_faster_way_is_taken_and_what_was_measured_is_kept(compiled: Callable[..., FusionPlan]) -> None:
    gpu = Timed()
    plan = compiled(gpu)
    assert gpu.measured == 2 and not plan.leftovers and len(plan.clusters) == 2
    assert "10 us against 12 + 8 us (measured on fake)" in plan.notes["products"]
    again = Timed(ways=(99.0, 20.0, 12.0))
    text = compiled(again).notes["products"]  # the plan comes from disk
    assert again.measured == 0 and text == plan.notes["products"]
    other = compiled(again, graph_memory=0.25)  # another plan, of the same kernels
    assert again.measured == 0 and other.notes["products"] == text


def test_the_library_is_left_alone_where_it_is_faster(compiled: Callable[..., FusionPlan]) -> None:
    gpu = Timed(ways=(20.0, 20.0, 12.0))
    plan = compiled(gpu)
    assert gpu.measured == 2 and len(plan.leftovers) == 2
    assert any("20 us against 12 + 8 us (measured on fake)" in d.reason for d in plan.refusals)


def test_what_cannot_be_measured_stays_with_the_library(compiled: Callable[..., FusionPlan]) -> None:
    plan = compiled(Timed(out_of_memory=True))
    assert len(plan.leftovers) == 2
    reasons = [d.reason for d in plan.refusals if d.rule == "products"]
    assert reasons == ["nothing was measured: the device has too little memory"] * 2


def test_nothing_is_measured_on_a_device_of_which_nothing_is_known(
    compiled: Callable[..., FusionPlan],
) -> None:
    gpu = Timed()
    plan = compiled(gpu, products="auto")
    assert gpu.measured == 0 and len(plan.leftovers) == 2 and "products" not in str(plan)
