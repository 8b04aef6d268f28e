"""Weights that torchao quantized: read as they are stored, by the product's own kernel.

Skipped where torchao is not installed. It is no requirement of the other tests, as transformers imports it
wherever it is there.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import fusion_compiler as fc
from tests.exactness import not_as_close

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchao's own
    quantization = pytest.importorskip("torchao.quantization", reason="pip install torchao==0.18.0")

WIDTH, INNER = 1024, 1536


def quantized(config: str) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.SiLU(), nn.Linear(INNER, WIDTH, bias=False))
    quantization.quantize_(model.to(torch.bfloat16).eval(), getattr(quantization, config)())
    return model


def exact(model: nn.Sequential, x: Tensor) -> Tensor:
    first, second = (model[i].weight.dequantize(torch.float32).double() for i in (0, 2))  # type: ignore[operator]
    return nn.functional.silu(x.double() @ first.T) @ second.T


@pytest.mark.filterwarnings("ignore")  # torchao's own
@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig"])
def test_one_kernel_a_product(config: str) -> None:
    model, x = quantized(config), torch.randn(1, WIDTH, dtype=torch.bfloat16)
    compiled = fc.compile(model, backend="interpret", device="h200")
    with torch.no_grad():
        ours, eager = compiled(x), model(x)
        assert not_as_close(ours, eager, exact(model, x)) is None
    (plan,) = compiled.plan
    assert len(plan.clusters) == 2 and not plan.leftovers, str(plan)
    moved = sum(c.cost.bytes_read + c.cost.bytes_written for c in plan.clusters)
    assert moved < 1.1 * (2 * WIDTH * INNER), "a byte for each weight, once"
