"""Weights that torchao quantized: read as they are stored, by the product's own kernel."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion_compiler as fc
from tests.exactness import not_as_close

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torchao's own
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

WIDTH, INNER = 1024, 1536


def quantized(config: Any) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(WIDTH, INNER, bias=False), nn.SiLU(), nn.Linear(INNER, WIDTH, bias=False))
    quantize_(model.to(torch.bfloat16).eval(), config)
    return model


def exact(model: nn.Sequential, x: Tensor) -> Tensor:
    first, second = (model[i].weight.dequantize(torch.float32).double() for i in (0, 2))  # type: ignore[operator]
    return nn.functional.silu(x.double() @ first.T) @ second.T


@pytest.mark.filterwarnings("ignore")  # torchao's own
@pytest.mark.parametrize("config", [Int8WeightOnlyConfig, Float8WeightOnlyConfig])
def test_one_kernel_a_product(config: Any) -> None:
    model, x = quantized(config()), torch.randn(1, WIDTH, dtype=torch.bfloat16)
    compiled = fc.compile(model, backend="interpret", device="h200")
    with torch.no_grad():
        ours, eager = compiled(x), model(x)
        assert not_as_close(ours, eager, exact(model, x)) is None
    (plan,) = compiled.plan
    assert len(plan.clusters) == 2 and not plan.leftovers, str(plan)
    moved = sum(c.cost.bytes_read + c.cost.bytes_written for c in plan.clusters)
    assert moved < 1.1 * (2 * WIDTH * INNER), "a byte for each weight, once"
