"""Recurrent layers on cuDNN: one library call each, whose results and gradients are float64's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fusion_compiler as fc
from tests.capture.test_recurrent import CASES, Tagger, check, layers


@pytest.fixture(autouse=True)
def whole_float32() -> Any:
    """cuDNN multiplies in TF32 otherwise."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


@pytest.mark.parametrize(("kind", "options", "shape"), CASES)
def test_a_layer_is_one_call_forward_and_backward(
    kind: str, options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    model = Tagger(kind, **options).cuda()
    compiled = fc.compile(model, strict=True)
    check(model, compiled, torch.randn(shape, device="cuda", requires_grad=True))
    assert not compiled.plan.breaks and len(layers(compiled)) == 2 and all(layers(compiled))


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_call_without_gradients(kind: str) -> None:
    model = Tagger(kind, num_layers=2, batch_first=True).cuda().eval()
    compiled, wide = fc.compile(model, strict=True), copy.deepcopy(model).double()
    for batch in (3, 5):
        x = torch.randn(batch, 7, 5, device="cuda")
        with torch.no_grad():
            for ours, theirs in zip(compiled(x), wide(x.double()), strict=True):
                torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-5)
