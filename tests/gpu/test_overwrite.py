"""Results over operands that nobody reads any more, on the device: values, graphs that are kept, memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from tests.exactness import not_as_close
from tests.passes.test_overwrite import PLACED, Gated, close, gradients, placed

CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns"), [(4096, 512), (512, 4096), (64, 100_000), (999, 1001)])
@pytest.mark.parametrize("name", PLACED)
def test_values(name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
    fast = fc.compile(PLACED[name], strict=True)
    x = torch.randn(rows - rows % 2, 64, device=CUDA, dtype=dtype)
    w = torch.randn(64, columns - columns % 2, device=CUDA, dtype=dtype)
    want, truth = PLACED[name](x, w), PLACED[name](x.double(), w.double())
    for _ in range(4):  # tuned, then replayed
        close(fast(x, w), want, truth)
    assert placed(fast)


@pytest.mark.parametrize("rows", [40, 8000])
@pytest.mark.parametrize("cudagraphs", ["auto", False, True])
def test_graphs_that_are_kept(rows: int, cudagraphs: bool | str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with and without recording: launches take longest where there are few rows."""
    monkeypatch.setattr("fusion_compiler.stitch.order.LEAST_PLACED", 1)
    model = Gated().to(CUDA)
    wide = copy.deepcopy(model).double()
    fast = fc.compile(model, cudagraphs=cudagraphs, strict=True)
    for keeps in ([False], [True, False], [False], [True, True, False], [False]):
        x = torch.randn(rows, 24, device=CUDA)
        loss = fast(x).square().mean()
        both = [gradients(model, loss, keep) for keep in keeps]
        eager = gradients(model, model(x).square().mean(), keep=False)
        truth = gradients(wide, wide(x.double()).square().mean(), keep=False)
        for ours in both:
            for results in zip(ours, eager, truth, strict=True):
                assert not_as_close(*results) is None
    saved = {argument for _, argument in placed(fast)}
    assert cudagraphs is True or any(not saved.isdisjoint(plan.dag.inputs) for plan in fast.plan)


def test_memory() -> None:
    """The gradients of gate and up lie where these did."""

    def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return (torch.nn.functional.silu(x @ gate) * (x @ up)).sum(-1)

    x, gate, up = (
        torch.randn(n, m, device=CUDA, requires_grad=True) for n, m in ((8192, 256), (256, 8192), (256, 8192))
    )
    fast = fc.compile(gated, strict=True)

    def peak() -> int:
        loss = fast(x, gate, up).sum()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        return torch.cuda.max_memory_allocated()

    held = [peak() for _ in range(4)][-1]
    saved = 8192 * 8192 * 4
    assert held < 2.5 * saved, f"{held / saved:.2f} times what is saved of each"
