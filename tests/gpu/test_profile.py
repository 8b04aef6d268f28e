"""Profiles of real kernels: every unit is found, times add up, names are in the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from benchmarks.harness.timing import device_time
from fusion_compiler.capture.module import plan_of
from fusion_compiler.errors import ReplayedGraphError
from fusion_compiler.report.profiling import Profile
from fusion_compiler.stitch.graph_source import Ranged

CUDA = torch.device("cuda")


class Layers(nn.Module):
    """Two equal layers, so that clusters share kernels, and products, so that there are library calls."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, up in zip(self.norms, self.ups, strict=True):
            x = x + F.gelu(up(norm(x)), approximate="tanh")
        return x.float().square().mean()


@pytest.fixture(scope="module")
def profiled() -> tuple[nn.Module, Tensor, Profile]:
    model = fc.compile(Layers().to(CUDA, torch.bfloat16), strict=True)
    x = torch.randn(8192, 1024, device=CUDA, dtype=torch.bfloat16)
    return model, x, fc.profile(model, x, repetitions=5)


def test_every_cluster_and_every_product_is_measured(profiled: tuple[nn.Module, Tensor, Profile]) -> None:
    model, _, result = profiled
    assert result.on_device
    us = {(m.unit.graph, m.unit.name): m.us for m in result.units}
    clusters = [(plan.name, c.name) for plan in plan_of(model) for c in plan.clusters]
    assert clusters and [c for c in clusters if not us.get(c)] == []
    products = [m for m in result.units if m.unit.sort == "library"]
    assert len(products) >= 2 + 3, "forward, and backward of inputs and weights"
    assert all(m.us > 0 and m.bandwidth and m.error is not None for m in products)
    print(result)


def test_the_sum_is_the_steps_device_time(profiled: tuple[nn.Module, Tensor, Profile]) -> None:
    model, x, result = profiled

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(x).backward()

    step_us = device_time(step, CUDA, repetitions=5).seconds * 1e6
    inside = sum(m.us * m.calls for m in result.units)
    assert inside + result.outside_us == pytest.approx(result.work_us, rel=0.05)
    assert result.outside_us <= 0.1 * result.work_us, result.unmatched
    assert result.work_us == pytest.approx(step_us, rel=0.15)


def test_slices_of_the_trace_carry_names(profiled: tuple[nn.Module, Tensor, Profile], tmp_path: Path) -> None:
    _, _, result = profiled
    result.trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    kernels = [e for e in events if e.get("cat") == "kernel" and "cluster" in e.get("args", {})]
    assert {e["args"]["cluster"] for e in kernels} == {m.unit.name for m in result.units if m.us}
    assert any(e["args"]["source"].startswith("norms.1:") for e in kernels)


def test_ranges_are_there_for_nvtx(
    profiled: tuple[nn.Module, Tensor, Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, _ = profiled
    called: list[Ranged] = []
    original = Ranged.__call__

    def counted(self: Ranged, *args: Any) -> Any:
        called.append(self)
        return original(self, *args)

    monkeypatch.setattr(Ranged, "__call__", counted)
    with torch.autograd.profiler.emit_nvtx():
        model(x).backward()
    assert len(called) == 2, "forward and backward"
    model(x).backward()
    assert len(called) == 2


def test_recorded_graphs_are_refused() -> None:
    fast = fc.compile(lambda x: torch.softmax(x, -1), cudagraphs=True, dynamic=False)
    with torch.no_grad(), pytest.raises(ReplayedGraphError, match="without cudagraphs=True"):
        fc.profile(fast, torch.randn(64, 512, device=CUDA), repetitions=2)
