"""Products with many rows in one kernel with what is behind them, on a device."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

import fusion_compiler as fc
from tests.passes.test_products import Mlp, Swiglu, held, step


@pytest.mark.parametrize("model", [Mlp(256, 512, "none"), Swiglu(256, 384)], ids=["gelu", "swiglu"])
@pytest.mark.parametrize("products", ["always", "measured"])
def test_values_and_gradients_are_as_close_as_eagers(
    model: torch.nn.Module, products: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    eager = copy.deepcopy(model).to("cuda", torch.bfloat16)
    truth, compiled = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    fast = fc.compile(compiled, strict=True, products=products)
    x, weights = (torch.randn(4, 197, 256, device="cuda").bfloat16() for _ in range(2))
    both = zip(step(fast, x, weights), step(eager, x, weights), strict=True)
    for (ours, theirs), right in zip(both, step(truth, x.double(), weights), strict=True):
        assert (ours.double() - right).norm() <= 1.1 * (theirs.double() - right).norm()
    texts = [d.reason for plan in fast.plan for d in plan.decisions if d.rule == "products"]
    if products == "always":
        assert all(held(plan) for plan in fast.plan)
    else:
        assert any("measured on" in text for text in texts) and "nothing was measured" not in str(texts)
