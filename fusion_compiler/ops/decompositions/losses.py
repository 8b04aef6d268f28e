"""Decompose softmax and the losses that follow it, and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fusion_compiler.ops.decompositions.tensors import coordinates, widened, zero_like

aten = torch.ops.aten


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = widened(x.contiguous())
    if wide.numel() == 0:
        return wide if half_to_float else wide.to(x.dtype)
    exp = torch.exp(wide - torch.amax(wide, dim, keepdim=True))
    out = exp / torch.sum(exp, dim, keepdim=True)
    return out if half_to_float else out.to(x.dtype)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = widened(x.contiguous())
    if wide.numel() == 0:
        return wide if half_to_float else wide.to(x.dtype)
    shifted = wide - torch.amax(wide, dim, keepdim=True)
    out = shifted - torch.log(torch.sum(torch.exp(shifted), dim, keepdim=True))
    return out if half_to_float else out.to(x.dtype)


def _softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    product = widened(grad.contiguous()) * widened(out)
    return (product - widened(out) * torch.sum(product, dim, keepdim=True)).to(input_dtype)


def _log_softmax_backward(grad: Tensor, out: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    wide = widened(grad.contiguous())
    return (wide - torch.exp(widened(out)) * torch.sum(wide, dim, keepdim=True)).to(input_dtype)


def _nll_loss_forward(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """Return the loss and its total weight. x: [N, C, ...] or [C]; target: the same without C. reduction: 0
    none, 1 mean, 2 sum."""
    dim = 0 if x.ndim < 2 else 1
    counts = target != ignore_index
    safe = torch.where(counts, target, zero_like(target))
    loss = -widened(torch.gather(x, dim, safe.unsqueeze(dim)).squeeze(dim))
    scale = torch.ones_like(loss) if weight is None else aten.index.Tensor(widened(weight), [safe])
    loss = torch.where(counts, loss if weight is None else loss * scale, zero_like(loss))
    if reduction == 0:
        return loss.contiguous().to(x.dtype), zero_like(loss)
    total_weight = torch.sum(torch.where(counts, scale, zero_like(scale)))
    total = torch.sum(loss)
    return (total / total_weight if reduction == 1 else total).to(x.dtype), total_weight


def _nll_loss_backward(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Tensor:
    dim = 0 if x.ndim < 2 else 1
    wide = -widened(grad)
    if reduction == 1:
        wide = wide / total_weight
    counts = target != ignore_index
    if weight is not None:
        wide = wide * aten.index.Tensor(widened(weight), [torch.where(counts, target, zero_like(target))])
    row = torch.where(counts, wide, zero_like(wide)).unsqueeze(dim)
    hit = coordinates(x.shape[dim], dim, row) == target.unsqueeze(dim)
    return torch.where(hit, row, zero_like(row)).to(x.dtype)


TABLE: dict[OpOverload, Callable[..., Any]] = {
    aten._softmax.default: _softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.nll_loss_forward.default: _nll_loss_forward,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_forward.default: _nll_loss_forward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
}
