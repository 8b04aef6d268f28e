"""Decompose convolutions and other operators on images into rows of the operator table.

cuDNN's convolutions add no bias: ATen adds the bias in a pass over the result, and sums the bias's gradient
in another pass over the result's gradient. As nodes of the graph, both join the clusters around the
convolution. ATen and cuDNN also copy an operand whose memory order does not suit the convolution. Here such a
copy is a node of the graph, too, and the kernel that computes the operand stores it in that order instead.
Depthwise convolutions are operators that clusters hold (`ops/own/depthwise.py`). On a CPU a convolution adds
its bias itself, with a single rounding, and is not decomposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fusion_compiler.ops.convolution_times import convolution_of, faster_is_last
from fusion_compiler.ops.decompositions.tensors import on_gpu, widened
from fusion_compiler.ops.own import depthwise
from fusion_compiler.ops.own.channel_order import copy_in_order, order_of_result, to_memory_format
from fusion_compiler.ops.schema import HALVES

aten = torch.ops.aten

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def _on_gpu(x: Tensor) -> bool:
    return on_gpu(x) and x.is_floating_point()


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """Rewrite conv(x [n, c, ...], weight, bias [o]) -> conv(x, weight) + bias on CUDA, where the convolution
    has its faster order of channels."""
    if not _on_gpu(x):
        return NotImplemented
    order = order_of_result(x, weight)
    faster = _faster_order(x, weight, geometry, "forward", order)
    operands = _in_order((x, weight), faster)
    beside = bias if bias is not None and bias.dtype == x.dtype else None
    alone = _is_depthwise(x, weight, geometry) and bias is beside
    if beside is None and operands is None and not alone:
        return NotImplemented
    image, kernel = operands or (x, weight)
    if alone:
        result = depthwise.depthwise(image, kernel, *_per_dimension(x, geometry))
    else:
        result = aten.convolution.default(image, kernel, bias if beside is None else None, *geometry)
    result = _returned(result, x, faster, order)
    if beside is None:
        return result
    return result + beside.view([-1 if d == 1 else 1 for d in range(result.ndim)])


def convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *rest: Any
) -> Gradients:
    """Compute the gradients of image and weight, each in its faster order of channels, and return them in the
    orders of image and weight; sum the bias's over all but the channels, in float32. On CUDA."""
    *geometry, wanted = rest
    if not _on_gpu(gradient):
        return NotImplemented
    order, calls = order_of_result(x, weight), [wanted[:2]]
    faster = [_faster_order(x, weight, geometry, name, order) for name in ("dgrad", "wgrad")]
    gradients: list[Tensor | None] = [None, None, _bias_gradient(gradient) if wanted[2] else None]
    if _is_depthwise(x, weight, geometry):
        of_image, of_weight = _depthwise_gradients(gradient, x, weight, geometry, faster, wanted)
        return of_image, of_weight, gradients[2]
    if wanted[0] and wanted[1] and faster[0] is not faster[1]:
        calls = [[True, False], [False, True]]
    for mask in calls:
        if not any(mask):
            continue
        runs = faster[0 if mask[0] else 1]
        operands = _in_order((gradient, x, weight), runs)
        if operands is None and not wanted[2] and len(calls) == 1:
            return NotImplemented
        results = aten.convolution_backward.default(
            *(operands or (gradient, x, weight)), bias_sizes, *geometry, [*mask, False]
        )
        for i, operand in enumerate((x, weight)):
            if mask[i]:
                gradients[i] = _returned(results[i], operand, runs, suggest_memory_format(operand))
    return gradients[0], gradients[1], gradients[2]


def _is_depthwise(x: Tensor, weight: Tensor, geometry: Sequence[Any]) -> bool:
    *_, transposed, _, groups = geometry
    return depthwise.is_depthwise(x, weight, transposed, groups)


def _per_dimension(x: Tensor, geometry: Sequence[Any]) -> list[list[int]]:
    """Return stride, padding and dilation with a number for each dimension; a single number holds for all."""
    return [list(n) * (x.ndim - 2) if len(n) == 1 else list(n) for n in geometry[:3]]


def _depthwise_gradients(
    gradient: Tensor, x: Tensor, weight: Tensor, geometry: Sequence[Any],
    orders: Sequence[torch.memory_format], wanted: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of image and weight that are wanted, each computed in its order of `orders`."""
    gradients: list[Tensor | None] = []
    image = (depthwise.depthwise_input_gradient, weight, x, x.shape)
    kernel = (depthwise.depthwise_weight_gradient, x, weight, weight.shape[2:])
    for (operator, other, like, size), order, wish in zip((image, kernel), orders, wanted[:2], strict=True):
        if not wish:
            gradients.append(None)
            continue
        operands = _in_order((gradient, other), order) or (gradient, other)
        result = operator(*operands, size, *_per_dimension(x, geometry))
        gradients.append(_returned(result, like, order, suggest_memory_format(like)))
    return gradients


def _bias_gradient(gradient: Tensor) -> Tensor:
    dims = [d for d in range(gradient.ndim) if d != 1]
    half = gradient.dtype in HALVES
    return torch.sum(gradient, dims, dtype=torch.float32 if half else None).to(gradient.dtype)


def _faster_order(
    x: Tensor, weight: Tensor, geometry: Sequence[Any], name: str, order: torch.memory_format
) -> torch.memory_format:
    """Return the order in which to run a pass whose operands and result are to lie in `order`."""
    stride, _, dilation, transposed, _, groups = geometry
    shape = None
    if x.dtype in HALVES and not transposed:
        shape = convolution_of(x.shape, weight.shape, stride, dilation, groups)
    if shape is None:
        return order
    last = faster_is_last(shape, name, order is torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _in_order(tensors: Sequence[Tensor], order: torch.memory_format) -> tuple[Tensor, ...] | None:
    """Return the tensors in an order of memory; None if all of them lie in it."""
    if all(t.is_contiguous(memory_format=order) for t in tensors):
        return None
    return tuple(t if t.is_contiguous(memory_format=order) else t.clone(memory_format=order) for t in tensors)


def _returned(result: Tensor, like: Tensor, runs: torch.memory_format, order: torch.memory_format) -> Tensor:
    """Return in `order` the result of a call that ran in another; `like` tells if its shape lies in both."""
    both = all(like.is_contiguous(memory_format=f) for f in (runs, order))
    return result if runs is order or both else result.clone(memory_format=order)


def nearest_backward(
    gradient: Tensor, output_size: Sequence[int], input_size: Sequence[int], *scales: float | None
) -> Tensor:
    """Return the sums of gradient [n, c, *output_size] over the blocks to which input elements were copied.

    Return NotImplemented unless sizes grow by powers of two, where eager's positions are exact in float32.
    """
    sizes = input_size[2:]
    if not all(type(s) is int and s for s in (*output_size, *input_size)):
        return NotImplemented
    factors = [out // size for out, size in zip(output_size, sizes, strict=True)]
    stated = [
        factor if s is None else s for factor, s in zip(factors, scales or [None] * len(factors), strict=True)
    ]
    divides = all(size * f == out for size, f, out in zip(sizes, factors, output_size, strict=True))
    if not divides or stated != factors or any(f & (f - 1) for f in factors):
        return NotImplemented
    blocks = [n for size, factor in zip(sizes, factors, strict=True) for n in (size, factor)]
    wide = widened(gradient.reshape([*input_size[:2], *blocks]))
    total = wide.sum(list(range(3, wide.ndim, 2))).to(gradient.dtype)
    return total.contiguous(memory_format=suggest_memory_format(gradient))


def avg_pool2d_backward(gradient: Tensor, x: Tensor, *geometry: Any) -> Tensor:
    """Compute the gradient of `x` without saving `x`.

    The operator reads nothing of `x` but the shape, so an expanded element takes the place of `x`.
    """
    moves = zip(x.shape, x.stride(), strict=True)
    if all(statically_known_true(step == 0) or statically_known_true(size == 1) for size, step in moves):
        return NotImplemented
    shape = torch.zeros((), dtype=x.dtype, device=x.device).expand(x.shape)
    result = aten.avg_pool2d_backward.default(gradient, shape, *geometry)
    return result.contiguous(memory_format=suggest_memory_format(x))


TABLE: dict[OpOverload, Callable[..., Any]] = {
    to_memory_format: copy_in_order,
    aten.convolution.default: convolution,
    aten.convolution_backward.default: convolution_backward,
    aten.avg_pool2d_backward.default: avg_pool2d_backward,
    aten.upsample_nearest1d_backward.default: nearest_backward,
    aten.upsample_nearest2d_backward.default: nearest_backward,
    aten.upsample_nearest3d_backward.default: nearest_backward,
}
