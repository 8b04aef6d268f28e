"""Convolutions whose windows lie side by side: products, with the same results and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion_compiler as fc

CASES = {
    "vision transformer": (nn.Conv2d(3, 24, 16, stride=16), (2, 3, 32, 48)),
    "rows": (nn.Conv1d(4, 6, 5, stride=5), (3, 4, 20)),
    "video": (nn.Conv3d(3, 8, (2, 4, 4), stride=(2, 4, 4)), (2, 3, 4, 8, 8)),
    "a part is left over": (nn.Conv2d(3, 8, (4, 2), stride=(4, 2)), (2, 3, 10, 9)),
    "no bias": (nn.Conv2d(2, 8, 4, stride=4, bias=False), (2, 2, 8, 8)),
    "a part of a larger image": (nn.Conv2d(3, 8, 4, stride=4), (2, 3, 8, 12)),
}
LEFT = {
    "overlapping": nn.Conv2d(4, 8, 4, stride=2),
    "padded": nn.Conv2d(4, 8, 4, stride=4, padding=2),
    "dilated": nn.Conv2d(4, 8, 2, stride=2, dilation=2),
    "in groups": nn.Conv2d(4, 8, 4, stride=4, groups=2),
    "of single elements": nn.Conv2d(4, 8, 1),
}


def convolutions(fast: Any) -> int:
    return sum("convolution" in n.name for p in fast.plan for n in p.dag.module.graph.nodes)


def results(model: nn.Module, called: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    out = called(x)
    out.sin().sum().backward()
    assert x.grad is not None
    return [out, x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("case", CASES)
def test_it_is_a_product(case: str) -> None:
    convolution, shape = CASES[case]
    model = nn.Sequential(convolution, nn.GELU())
    x = torch.randn(shape)
    if case == "a part of a larger image":
        x = torch.randn(2, 3, 20, 12)[:, :, 3:11]
    fast: Any = fc.compile(model, backend="interpret")
    ours = results(model, fast, x)
    assert not convolutions(fast)
    assert fast.plan[0].notes["patches"].startswith("done")
    wide = results(model.double(), model, x.double())
    model.float()
    for our, true in zip(ours, wide, strict=True):
        torch.testing.assert_close(our.double(), true, rtol=1e-5, atol=1e-4)
        assert our.stride() == true.stride()


@pytest.mark.parametrize("case", LEFT)
def test_others_stay(case: str) -> None:
    fast: Any = fc.compile(LEFT[case], backend="eager")
    fast(torch.randn(2, 4, 9, 9))
    assert convolutions(fast)


def test_channels_that_are_innermost_stay() -> None:
    model = nn.Conv2d(4, 8, 2, stride=2)
    fast: Any = fc.compile(model, backend="eager")
    fast(torch.randn(2, 4, 8, 8).to(memory_format=torch.channels_last))
    assert convolutions(fast)


def test_any_batch() -> None:
    model = nn.Conv2d(3, 8, 4, stride=4)
    fast: Any = fc.compile(model, backend="interpret")
    for batch in (2, 5, 7):
        x = torch.randn(batch, 3, 8, 8)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-5)
    assert not convolutions(fast)
