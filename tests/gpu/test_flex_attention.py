"""FlexAttention inside a compiled model runs PyTorch's kernel, forward and backward, and stores no scores."""

from __future__ import annotations

import pytest
import torch

import fusion_compiler as fc
from tests.stitch.test_higher_order import attention, dense


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients(dtype: torch.dtype) -> None:
    leaves = [torch.randn(2, 4, 512, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(2, 4, 512, 64, device="cuda", dtype=dtype)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    fast = fc.compile(attention(512, "cuda"), strict=True)

    def results(function: object, inputs: list[torch.Tensor], sent: torch.Tensor) -> list[torch.Tensor]:
        result = function(*inputs)  # type: ignore[operator]
        return [result.detach(), *torch.autograd.grad(result, inputs, sent)]

    ours = results(fast, leaves, gradient)
    eager = results(dense, leaves, gradient)
    truth = results(dense, wide, gradient.double())
    for a, b, exact in zip(ours, eager, truth, strict=True):
        error, allowed = ((x.double() - exact).square().mean().sqrt() for x in (a, b))
        assert error <= 2 * allowed + torch.finfo(dtype).eps * exact.square().mean().sqrt()


def test_scores_are_never_stored() -> None:
    length = 8192
    q, k, v = (torch.randn(1, 1, length, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    fast = fc.compile(attention(length, "cuda"), strict=True)
    with torch.no_grad():
        fast(q, k, v)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fast(q, k, v)
    assert torch.cuda.max_memory_allocated() - before < length * length
