"""Decompose norms of rows and of groups, softmax and the losses that follow it, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from fusion_compiler.ops.decompositions.tensors import coordinates, count_of, sum_over, widened, zero_like
from fusion_compiler.ops.own import group_norm

aten = torch.ops.aten


def _normalized(x: Tensor, dims: Sequence[int], eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (x - mean) * rstd over dims, mean and rstd (both with dims kept), of a wide x."""
    count = count_of(x, dims)
    mean = sum_over(x, dims, True) / count
    centred = x - mean
    rstd = torch.rsqrt(sum_over(centred * centred, dims, True) / count + eps)
    return centred * rstd, mean, rstd


def _normalized_backward(grad: Tensor, unit: Tensor, rstd: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the gradient of x, given the gradient of unit = (x - mean) * rstd."""
    count = count_of(unit, dims)
    mean_grad = sum_over(grad, dims, True) / count
    mean_product = sum_over(grad * unit, dims, True) / count
    return (grad - mean_grad - unit * mean_product) * rstd


def _affine(unit: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    scaled = unit if weight is None else unit * widened(weight)
    return scaled if bias is None else scaled + widened(bias)


def _statistics_dtype(x: Tensor, weight: Tensor | None) -> torch.dtype:
    """Return eager's dtype for what a norm of channels returns of its rows, and for layer norm on a CPU."""
    return x.dtype if weight is None else weight.dtype


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    dims = list(range(x.ndim - len(shape), x.ndim))
    unit, mean, rstd = _normalized(widened(x.contiguous()), dims, eps)
    dtype = _statistics_dtype(x, weight) if x.device.type == "cpu" else mean.dtype
    return _affine(unit, weight, bias).to(x.dtype), mean.to(dtype), rstd.to(dtype)


def _layer_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    inner = list(range(x.ndim - len(shape), x.ndim))
    outer = list(range(x.ndim - len(shape)))
    wide_grad = widened(grad.contiguous())
    mean, rstd = widened(mean), widened(rstd)
    unit = (widened(x.contiguous()) - mean) * rstd
    dx = dweight = dbias = None
    if output_mask[0]:
        dx = _normalized_backward(_affine(wide_grad, weight, None), unit, rstd, inner).to(x.dtype)
    if output_mask[1] and weight is not None:
        product = wide_grad * unit
        dweight = (sum_over(product, outer) if outer else product).to(weight.dtype)
    if output_mask[2] and bias is not None:
        dbias = (sum_over(wide_grad, outer) if outer else wide_grad).to(bias.dtype)
    return dx, dweight, dbias


def _rms_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[Tensor, Tensor]:
    wide = widened(x.contiguous())
    dims = list(range(x.ndim - len(shape), x.ndim))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    rstd = torch.rsqrt(sum_over(wide * wide, dims, True) / count_of(x, dims) + eps)
    return _affine(wide * rstd, weight, None).to(x.dtype), rstd


def _rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    shape: Sequence[int],
    rstd: Tensor,
    weight: Tensor | None,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None]:
    inner = list(range(x.ndim - len(shape), x.ndim))
    outer = list(range(x.ndim - len(shape)))
    wide_grad, unit = widened(grad.contiguous()), widened(x.contiguous()) * rstd
    dx = dweight = None
    if output_mask[0]:
        scaled = _affine(wide_grad, weight, None)
        mean_product = sum_over(scaled * unit, inner, True) / count_of(x, inner)
        dx = ((scaled - unit * mean_product) * rstd).to(x.dtype)
    if output_mask[1] and weight is not None:
        product = wide_grad * unit
        dweight = (sum_over(product, outer) if outer else product).to(weight.dtype)
    return dx, dweight


def _per_channel(x: Tensor, values: Tensor | None) -> Tensor | None:
    return None if values is None else values.view([1, -1] + [1] * (x.ndim - 2))


def _group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, n: int, c: int, hw: int, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    shape = _group_shape(x, groups)
    inner = list(range(2, len(shape)))
    unit, mean, rstd = _normalized(widened(x).reshape(shape), inner, eps)
    out = _affine(unit.reshape(x.shape), _per_channel(x, weight), _per_channel(x, bias)).to(x.dtype)
    dtype = _statistics_dtype(x, weight)
    out = out.contiguous(memory_format=suggest_memory_format(x))
    return out, mean.squeeze(inner).to(dtype), rstd.squeeze(inner).to(dtype)


def _group_norm_as_it_lies_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor, ...]:
    sizes = group_norm.sizes(x)
    gradients = _group_norm_backward(grad, x, mean, rstd, weight, *sizes, groups, output_mask)
    return tuple(x.new_empty(0) if t is None else t for t in gradients)


def _group_shape(x: Tensor, groups: int) -> tuple[int, ...]:
    """Return the shape in which x [n, c, ...] is a view with a group's values last: in one dimension if they
    lie together."""
    if x.is_contiguous():
        return x.shape[0], groups, x.shape[1] // groups * math.prod(x.shape[2:])
    return x.shape[0], groups, x.shape[1] // groups, *x.shape[2:]


def _group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    n: int,
    c: int,
    hw: int,
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    shape = _group_shape(x, groups)
    inner = list(range(2, len(shape)))
    wide_grad = widened(grad)
    mean, rstd = (widened(v).view([n, groups] + [1] * len(inner)) for v in (mean, rstd))
    unit = (widened(x).reshape(shape) - mean) * rstd
    dx = dweight = dbias = None
    if output_mask[0]:
        scaled = _affine(wide_grad, _per_channel(x, weight), None).reshape(shape)
        dx = _normalized_backward(scaled, unit, rstd, inner).reshape(x.shape).to(x.dtype)
        dx = dx.contiguous(memory_format=suggest_memory_format(x))
    rest = [dim for dim in range(x.ndim) if dim != 1]
    dtype = x.dtype if weight is None else weight.dtype
    if output_mask[1]:
        dweight = sum_over(wide_grad * unit.reshape(x.shape), rest).to(dtype)
    if output_mask[2]:
        dbias = sum_over(wide_grad, rest).to(dtype)
    return dx, dweight, dbias


# Softmax and losses


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    wide = widened(x.contiguous())
    if wide.numel() == 0:
        return wide if half_to_float else wide.to(x.dtype)
    exp = torch.exp(wide - torch.amax(wide, dim, keepdim=True))
    out = exp / torch.sum(exp, dim, keepdim=True)
    return out if half_to_float else out.to(x.dtype)


def _safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """Compute a softmax that is zero, and has no gradient, in rows whose elements all are -inf."""
    wide = widened(x.contiguous()) if dtype is None else widened(x.to(dtype))
    if wide.numel() == 0:
        return wide.to(dtype or x.dtype)
    most = torch.clamp_min(torch.amax(wide, dim, keepdim=True), torch.finfo(wide.dtype).min)
    exp = torch.exp(wide - most)
    total = torch.clamp_min(torch.sum(exp, dim, keepdim=True), torch.finfo(wide.dtype).tiny)
    return (exp / total).to(dtype or x.dtype)


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
    aten.native_layer_norm.default: _layer_norm,
    aten.native_layer_norm_backward.default: _layer_norm_backward,
    aten._fused_rms_norm.default: _rms_norm,
    aten._fused_rms_norm_backward.default: _rms_norm_backward,
    aten.native_group_norm.default: _group_norm,
    group_norm.group_norm: lambda x, weight, bias, groups, eps: (
        _group_norm(x, weight, bias, *group_norm.sizes(x), groups, eps)
    ),
    group_norm.group_norm_backward: _group_norm_as_it_lies_backward,
    aten.native_group_norm_backward.default: _group_norm_backward,
    aten._softmax.default: _softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax.default: _log_softmax,
    aten._log_softmax_backward_data.default: _log_softmax_backward,
    aten.nll_loss_forward.default: _nll_loss_forward,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_forward.default: _nll_loss_forward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
}
