"""Define convolutions of each channel with its own kernel, and their gradients, as operators of one result.

    convolution(x, w, None, *geometry, False, _, channels)   ->   depthwise(x, w, *geometry)
    convolution_backward(g, x, w, ..., [True, True, _])      ->   depthwise_input_gradient(g, w, ...),
                                                                  depthwise_weight_gradient(g, x, ...)

x: [n, c, length] or [n, c, height, width], weight: [c, 1, *kernel], gradient: as the result. ATen's operators
are a library's, whose kernels no cluster has a part in. These are a cluster's: each element is a sum over a
window of one channel. An operator that no cluster takes calls the library.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from fusion_compiler.ops.own.channel_order import order_of_result
from fusion_compiler.ops.own.define import define

DTYPES = (torch.float16, torch.bfloat16, torch.float32)  # dtypes whose library results have these strides

_aten = torch.ops.aten
_GEOMETRY = "SymInt[] stride, SymInt[] padding, SymInt[] dilation"


def _convolve(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """Return the sums of x[n, c, stride * i - padding + dilation * r] * weight[c, 0, r] over r."""
    sums = _aten.convolution.default(
        _wide(x), _wide(weight), None, stride, padding, dilation, False, [0] * len(stride), x.shape[1]
    )
    return _stored(sums, x, weight)


def _input_gradient(
    gradient: Tensor, weight: Tensor, size: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return the gradient of x, which has the shape `size`."""
    like = gradient if gradient.shape == torch.Size(size) else _empty(size, gradient, weight)
    gradients = _backward(gradient, like, weight, (stride, padding, dilation), [True, False, False])
    return _stored(gradients[0], gradient, weight)


def _weight_gradient(
    gradient: Tensor, x: Tensor, kernel: Sequence[int],
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
) -> Tensor:  # fmt: skip
    """Return the gradient of the weight [c, 1, *kernel]."""
    like = _empty((x.shape[1], 1, *kernel), gradient, x)
    gradients = _backward(gradient, x, like, (stride, padding, dilation), [False, True, False])
    return _stored(gradients[1], gradient, x)


def _backward(
    gradient: Tensor, x: Tensor, weight: Tensor, geometry: Sequence[Sequence[int]], wanted: list[bool]
) -> Sequence[Tensor]:
    """Call the library, which reads nothing but the shape of an operand whose gradient is wanted."""
    operands = (_wide(gradient), _wide(x), _wide(weight))
    rest = (False, [0] * len(geometry[0]), x.shape[1], wanted)
    return _aten.convolution_backward.default(*operands, None, *geometry, *rest)


def _wide(x: Tensor) -> Tensor:
    """Return `x` in the dtype in which its products are added up; a GPU's library takes 16 bits itself."""
    return x if x.is_cuda else x.to(torch.promote_types(x.dtype, torch.float32))


def _stored(sums: Tensor, x: Tensor, other: Tensor) -> Tensor:
    """Return sums as eager stores them, in the operands' dtype and order; a GPU's library does so itself."""
    return sums if sums.is_cuda else sums.to(x.dtype).contiguous(memory_format=order_of_result(x, other))


def _empty(size: Sequence[int], x: Tensor, other: Tensor) -> Tensor:
    """Return an uninitialized tensor as `_stored` returns one."""
    return torch.empty(size, dtype=x.dtype, device=x.device, memory_format=order_of_result(x, other))


def _empty_result(x: Tensor, weight: Tensor, *geometry: Sequence[int]) -> Tensor:
    sizes = zip(x.shape[2:], weight.shape[2:], *geometry, strict=True)
    out = [(size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes]
    return _empty((*x.shape[:2], *out), x, weight)


depthwise = define(
    "depthwise", f"(Tensor x, Tensor weight, {_GEOMETRY}) -> Tensor", _convolve, _empty_result
)
depthwise_input_gradient = define(
    "depthwise_input_gradient",
    f"(Tensor gradient, Tensor weight, SymInt[] size, {_GEOMETRY}) -> Tensor",
    _input_gradient,
    lambda gradient, weight, size, *_: _empty(size, gradient, weight),
)
depthwise_weight_gradient = define(
    "depthwise_weight_gradient",
    f"(Tensor gradient, Tensor x, SymInt[] kernel, {_GEOMETRY}) -> Tensor",
    _weight_gradient,
    lambda gradient, x, kernel, *_: _empty((x.shape[1], 1, *kernel), gradient, x),
)
# The functions behind the operators: to call them costs the host less than PyTorch's dispatcher does.
CALLS: dict[OpOverload, Callable[..., Tensor]] = {
    depthwise: _convolve,
    depthwise_input_gradient: _input_gradient,
    depthwise_weight_gradient: _weight_gradient,
}


def is_depthwise(x: Tensor, weight: Tensor, transposed: bool, groups: int) -> bool:
    """True for a convolution of one or two dimensions that convolves each channel with its own kernel."""
    alone = groups == x.shape[1] == weight.shape[0] and weight.shape[1] == 1
    has_form = x.ndim in (3, 4) and not transposed and all(type(size) is int for size in weight.shape)
    return alone and has_form and x.dtype == weight.dtype and x.dtype in DTYPES
