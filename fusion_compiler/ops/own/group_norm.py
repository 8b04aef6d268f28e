"""Define a GroupNorm that takes images in any order of memory, forward and backward.

PyTorch's GroupNorm copies its operands into the order of channels first, once in its forward and, under
autograd, twice in its backward. This one is for nets whose convolutions have channels innermost.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fusion_compiler.ops.own.define import define

_aten = torch.ops.aten


def sizes(x: Tensor) -> tuple[int, int, int]:
    """Return images, channels and the elements of a channel, as arguments of ATen's operators."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def _run(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    out, mean, rstd = _aten.native_group_norm.default(x, weight, bias, *sizes(x), groups, eps)
    return torch.empty_like(x).copy_(out), mean, rstd


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    statistics = x.new_empty((x.shape[0], groups))
    return torch.empty_like(x), statistics, torch.empty_like(statistics)


def _run_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    mean, rstd, weight, groups, mask = rest
    plain, ordered = grad.contiguous(), x.contiguous()
    dx, *others = _aten.native_group_norm_backward.default(
        plain, ordered, mean, rstd, weight, *sizes(x), groups, mask
    )
    none = x.new_empty(0)
    return none if dx is None else torch.empty_like(x).copy_(dx), *(none if t is None else t for t in others)


def _fake_backward(grad: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    *_, weight, _, mask = rest
    channels = x.new_empty(x.shape[1]) if weight is None else torch.empty_like(weight)
    like = (x, channels, channels)
    return tuple(torch.empty_like(t) if on else x.new_empty(0) for t, on in zip(like, mask, strict=True))


def _saved(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.groups, _ = inputs
    ctx.mask = [t is not None and t.requires_grad for t in (x, weight, bias)]
    ctx.save_for_backward(x, weight, *output[1:])


def _gradient(ctx: Any, grad: Tensor, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    gradients = group_norm_backward(grad, x, mean, rstd, weight, ctx.groups, ctx.mask)
    return *(t if on else None for t, on in zip(gradients, ctx.mask, strict=True)), None, None


group_norm = define(
    "group_norm",
    "(Tensor input, Tensor? weight, Tensor? bias, int num_groups, float eps) -> (Tensor, Tensor, Tensor)",
    _run,
    _fake,
    gradient=_gradient,
    save=_saved,
)
group_norm_backward = define(
    "group_norm_backward",
    "(Tensor grad, Tensor input, Tensor mean, Tensor rstd, Tensor? weight, int num_groups, bool[3] mask)"
    " -> (Tensor, Tensor, Tensor)",
    _run_backward,
    _fake_backward,
)
