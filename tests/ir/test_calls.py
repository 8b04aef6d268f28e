"""The calls that eager makes, told apart: what it computes in one call is one, however it was taken apart."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc


def calls(model: Any, *shape: int) -> list[Counter[str]]:
    """Count the calls of the forward and of the backward graph."""
    report = fc.explain(model, torch.empty(shape, requires_grad=True))
    return [Counter(call.target for call in plan.calls) for plan in report.plans]


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_an_operator_taken_apart_above_autograd_is_one_call(mode: str) -> None:
    def model(x: Tensor) -> Tensor:
        return torch.tanh(F.interpolate(x, scale_factor=2, mode=mode)) + 1

    name = f"upsample_{mode}2d"
    forward, backward = calls(model, 2, 4, 8, 8)
    assert forward == {name: 1, "tanh": 1, "add": 1}
    assert backward == {"tanh_backward": 1, f"{name}_backward": 1}


def test_gradients_from_elsewhere_between_those_of_its_pieces() -> None:
    def residual(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=1, mode="bilinear") + x + F.interpolate(x, scale_factor=1)

    forward, backward = calls(residual, 2, 4, 8, 8)
    assert forward == {"upsample_bilinear2d": 1, "upsample_nearest2d": 1, "add": 2}
    assert backward == {"upsample_bilinear2d_backward": 1, "upsample_nearest2d_backward": 1, "add": 2}


def test_what_eager_takes_apart_too_is_its_pieces() -> None:
    """The scalar becomes a tensor first; cross-entropy is two calls; a norm and a softmax are one."""

    def model(x: Tensor) -> Tensor:
        y = torch.where(x > 0, x, 0.5).softmax(-1)
        return F.cross_entropy(F.layer_norm(y, (8,)), torch.arange(4))

    forward, _ = calls(model, 4, 8)
    one = ("gt", "where", "_softmax", "native_layer_norm", "_log_softmax", "nll_loss_forward")
    assert {k: n for k, n in forward.items() if k in one} == dict.fromkeys(one, 1)
    assert forward["scalar_tensor"] == 1
