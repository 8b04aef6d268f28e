"""Decompose element-wise operators that would cancel or change the dtype in one expression, and cuts."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload

from fusion_compiler.ops.decompositions.tensors import widened, zero_like

aten = torch.ops.aten

_ROOT_HALF = math.sqrt(0.5)
_GELU_SCALE, _GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


def _normal_cdf(wide: Tensor) -> Tensor:
    return 0.5 * (1 + torch.erf(wide * _ROOT_HALF))


def _gelu_argument(wide: Tensor) -> Tensor:
    """Return 2u of the approximation (1 + tanh(u)) / 2 = sigmoid(2u), which does not cancel where x is
    negative."""
    return wide * (2 * _GELU_SCALE + 2 * _GELU_SCALE * _GELU_CUBE * (wide * wide))


def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    wide = widened(x)
    part = torch.sigmoid(_gelu_argument(wide)) if approximate == "tanh" else _normal_cdf(wide)
    return (wide * part).to(x.dtype)


def _gelu_backward(grad: Tensor, x: Tensor, *, approximate: str = "none") -> Tensor:
    wide = widened(x)
    if approximate == "tanh":
        argument = _gelu_argument(wide)
        part, rest = torch.sigmoid(argument), torch.sigmoid(-argument)  # 1 - part would cancel
        rise = 2 * _GELU_SCALE + 6 * _GELU_SCALE * _GELU_CUBE * (wide * wide)
        slope = part + part * rest * wide * rise
    else:
        density = math.sqrt(0.5 / math.pi) * torch.exp(wide * wide * -0.5)
        slope = _normal_cdf(wide) + wide * density
    return (widened(grad) * slope).to(grad.dtype)


def _softplus_backward(grad: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    scaled = widened(x) * beta
    wide = widened(grad)
    return torch.where(scaled > threshold, wide, wide * torch.sigmoid(scaled)).to(grad.dtype)


def _soft_margin_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int = 1) -> Tensor:
    wide, sign = widened(x), widened(target)
    slope = -sign * torch.sigmoid(-(sign * wide))
    slope = slope / x.numel() if reduction == 1 else slope
    return (widened(grad) * slope).to(torch.promote_types(x.dtype, grad.dtype))


def _elu_backward(
    grad: Tensor, alpha: float, scale: float, input_scale: float, is_result: bool, value: Tensor
) -> Tensor:
    """Return the gradient of elu. value: the result of the forward pass or its input."""
    wide, wide_value = widened(grad), widened(value)
    rise = wide_value + alpha * scale if is_result else alpha * scale * torch.exp(wide_value * input_scale)
    return torch.where(wide_value > 0, wide * scale, wide * input_scale * rise).to(grad.dtype)


def _hardswish_backward(grad: Tensor, x: Tensor) -> Tensor:
    wide, wide_x = widened(grad), widened(x)
    inner = wide * (wide_x / 3 + 0.5)
    return torch.where(wide_x <= -3, zero_like(wide), torch.where(wide_x >= 3, wide, inner)).to(grad.dtype)


def _smooth_l1_loss_backward(grad: Tensor, x: Tensor, target: Tensor, reduction: int, beta: float) -> Tensor:
    off = widened(x) - widened(target)
    scaled = widened(grad) / x.numel() if reduction == 1 else widened(grad)
    slope = torch.sign(off) if beta == 0 else torch.where(off.abs() >= beta, torch.sign(off), off / beta)
    return (scaled * slope).to(torch.promote_types(x.dtype, grad.dtype))


def _tanh_of_softplus(wide: Tensor) -> Tensor:
    """Return tanh(log(1 + e)) = n / (n + 2) with n = e (e + 2), which is 1 in float64 too from x = 20 on."""
    e = torch.exp(torch.clamp_max(wide, 20))
    n = e * (e + 2)
    return n / (n + 2)


def _mish(x: Tensor) -> Tensor:
    wide = widened(x)
    return (wide * _tanh_of_softplus(wide)).to(x.dtype)


def _mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    wide = widened(x)
    part = _tanh_of_softplus(wide)
    slope = part + wide * torch.sigmoid(wide) * (1 - part * part)
    return (widened(grad) * slope).to(grad.dtype)


def _of_bools(instead: Callable[..., Tensor], x: Any, y: Any, *, alpha: Any = 1) -> Any:
    """Compute with bools by a logical operator. Operands of other dtypes have a row."""
    bools = all(isinstance(operand, Tensor) and operand.dtype is torch.bool for operand in (x, y))
    return instead(x, y) if bools and alpha else NotImplemented


def _not_unsigned(x: Tensor) -> Any:
    unsigned = not x.dtype.is_signed and x.dtype is not torch.bool
    return torch.bitwise_xor(x, torch.iinfo(x.dtype).max) if unsigned else NotImplemented


def _whole_number(x: Tensor, **_: Any) -> Any:
    """Round integers, which leaves them as they are."""
    return NotImplemented if x.is_floating_point() else x.clone()


def _relu_whole(x: Tensor) -> Any:
    """Keep the dtype of integers, which a comparison with a float would change."""
    return NotImplemented if x.is_floating_point() else torch.clamp_min(x, 0)


def _pow_zero(x: Tensor, exponent: float) -> Any:
    return torch.ones_like(x) if exponent == 0 and not isinstance(exponent, float) else NotImplemented


def _shrink_backward(grad: Tensor, x: Tensor, lambd: float) -> Tensor:
    return torch.where((x >= -lambd) & (x <= lambd), zero_like(grad), grad)


# Layout


def _pad(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [before, after])


def _cut(x: Tensor, pads: Sequence[int | torch.SymInt], value: float = 0) -> Tensor:
    """Return a copy of a range of `x` for pads that are all negative, which is how a padding's gradient is
    written: clusters read a view where it lies."""
    if not all(isinstance(pad, int) and pad <= 0 for pad in pads):
        return NotImplemented
    for i in range(len(pads) // 2):
        dim = x.ndim - 1 - i
        x = x.narrow(dim, -pads[2 * i], x.shape[dim] + pads[2 * i] + pads[2 * i + 1])
    return x.clone()


def _slice_backward(grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    dim %= len(sizes)
    size, length = sizes[dim], grad.shape[dim]
    if step != 1:
        return torch.slice_scatter(grad.new_zeros(sizes), grad, dim, start, end, step)
    start = min(max(start + size if start < 0 else start, 0), size)
    return _pad(grad, dim, start, size - start - length)


def _select_backward(grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    dim %= len(sizes)
    index = index + sizes[dim] if index < 0 else index
    return _pad(grad.unsqueeze(dim), dim, index, sizes[dim] - index - 1)


def _split_with_sizes(x: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    starts = [0, *itertools.accumulate(sizes)]
    return [x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]


def _repeat(x: Tensor, repeats: Sequence[int]) -> Tensor:
    sizes = [1] * (len(repeats) - x.ndim) + list(x.shape)
    spread = x.view([extent for size in sizes for extent in (1, size)])
    spread = spread.expand([extent for pair in zip(repeats, sizes, strict=True) for extent in pair])
    return spread.clone(memory_format=torch.contiguous_format).view(
        [times * size for times, size in zip(repeats, sizes, strict=True)]
    )


TABLE: dict[OpOverload, Callable[..., Any]] = {
    aten.gelu.default: _gelu,
    aten.gelu_backward.default: _gelu_backward,
    aten.softplus_backward.default: _softplus_backward,
    aten.log_sigmoid_backward.default: lambda grad, x, buffer: (
        (widened(grad) * torch.sigmoid(-widened(x))).to(grad.dtype)
    ),
    aten.soft_margin_loss_backward.default: _soft_margin_loss_backward,
    aten.elu_backward.default: _elu_backward,
    aten.hardswish_backward.default: _hardswish_backward,
    aten.smooth_l1_loss_backward.default: _smooth_l1_loss_backward,
    aten.mish.default: _mish,
    aten.mish_backward.default: _mish_backward,
    aten.hardshrink_backward.default: _shrink_backward,
    aten.softshrink_backward.default: _shrink_backward,
    aten.add.Tensor: functools.partial(_of_bools, torch.logical_or),
    aten.mul.Tensor: functools.partial(_of_bools, torch.logical_and),
    aten.maximum.default: functools.partial(_of_bools, torch.logical_or),
    aten.minimum.default: functools.partial(_of_bools, torch.logical_and),
    aten.neg.default: lambda x: NotImplemented if x.dtype.is_signed else aten.rsub.Scalar(x, 0),
    aten.bitwise_not.default: _not_unsigned,
    aten.floor.default: _whole_number,
    aten.ceil.default: _whole_number,
    aten.trunc.default: _whole_number,
    aten.round.default: _whole_number,
    aten.round.decimals: _whole_number,
    aten.relu.default: _relu_whole,
    aten.pow.Tensor_Scalar: _pow_zero,
    aten.constant_pad_nd.default: _cut,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.repeat.default: _repeat,
}
