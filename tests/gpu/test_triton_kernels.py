"""Triton kernels that a model calls itself run as they are written, between what is fused."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

import fusion_compiler as fc


@triton.jit
def doubled(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # noqa: N803
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n) * 2, mask=i < n)


def twice(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    doubled[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), 1024)
    return y


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return twice(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return twice(gradient.contiguous())


def test_a_kernel_between_clusters_forward_and_backward() -> None:
    fast = fc.compile(lambda x: torch.softmax(Twice.apply(x.sin() + 1), -1) * 3, strict=True)
    x = torch.randn(33, 1000, device="cuda", requires_grad=True)
    wide = x.detach().double().requires_grad_()
    sent = torch.randn_like(x)
    result, truth = fast(x), torch.softmax((wide.sin() + 1) * 2, -1) * 3
    torch.testing.assert_close(result.double(), truth, atol=1e-6, rtol=1e-5)
    (ours,) = torch.autograd.grad(result, x, sent)
    (exact,) = torch.autograd.grad(truth, wide, sent.double())
    torch.testing.assert_close(ours.double(), exact, atol=1e-5, rtol=1e-4)
    forward, backward = (len(plan.clusters) for plan in fast.plan)
    assert forward == 2 and backward in (2, 3)  # PyTorch 2.11 has one more


def test_a_kernel_that_writes_into_what_a_cluster_made() -> None:
    def function(x: Tensor) -> Tensor:
        y = x.cos()
        doubled[(triton.cdiv(x.numel(), 1024),)](y, y, x.numel(), 1024)
        return y + 1

    x = torch.randn(5000, device="cuda")
    with torch.no_grad():
        torch.testing.assert_close(fc.compile(function, strict=True)(x), x.cos() * 2 + 1)
