"""Decompose operators so that eager's checks and its layout of results are kept, where PyTorch's lose
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, _refs
from torch._decomp import get_decompositions
from torch._ops import OpOverload
from torch._prims_common import (
    compute_elementwise_output_strides,
    make_contiguous_strides_for,
    suggest_memory_format,
)
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._mode_utils import no_dispatch

from fusion_compiler.ops.eager_checks import checks_of, refuses

aten = torch.ops.aten

# Scatters that read their indices as ATen does, with an error of their own for one that is outside.
WHOLE = (aten.max_unpool2d.default, aten.max_unpool3d.default)

_THEIRS = get_decompositions([aten.binary_cross_entropy, aten.channel_shuffle])
_binary_cross_entropy = _THEIRS[aten.binary_cross_entropy.default]
_channel_shuffle = _THEIRS[aten.channel_shuffle.default]


def unless_refused(target: OpOverload, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the decomposition, which leaves calls whole that eager refuses, so that ATen raises its
    error."""
    if not checks_of(target):
        return function

    @functools.wraps(function)
    def decomposition(*args: Any, **kwargs: Any) -> Any:
        return NotImplemented if refuses(target, args, kwargs) else function(*args, **kwargs)

    return decomposition


def assert_probabilities(x: Tensor, name: str) -> None:
    """Raise an error when the graph runs unless all elements of x are in [0, 1]. No host waits for it."""
    inside = (x >= 0) & (x <= 1)
    aten._assert_async.msg(inside.all(), f"all elements of {name} should be between 0 and 1")


def binary_cross_entropy(x: Tensor, target: Tensor, *rest: Any) -> Tensor:
    """Compute PyTorch's loss with the check that eager makes on the device: x, and on a CPU the target, is in
    [0, 1]."""
    assert_probabilities(x, "input")
    if x.device.type == "cpu":
        assert_probabilities(target, "target")
    return _binary_cross_entropy(x, target, *rest)


def _overlaps(x: Tensor) -> bool:
    """True if elements of an expanded tensor share memory."""
    sizes = zip(x.shape, x.stride(), strict=True)
    return any(
        type(stride) is int and stride == 0 and not (type(size) is int and size < 2) for size, stride in sizes
    )


def _into_copy(target: OpOverload, x: Tensor, *rest: Any) -> Any:
    """Scatter into a copy of an expanded tensor, as eager does. PyTorch 2.11 expects an expanded result."""
    return target(x.clone(memory_format=torch.contiguous_format), *rest) if _overlaps(x) else NotImplemented


def _laid_out(x: Tensor, strides: Sequence[Any]) -> Tensor:
    """Return x, copied unless its elements lie behind each other and its dimensions in the order of
    `strides`."""
    ones = [statically_known_true(size == 1) for size in x.shape]
    order = sorted(range(x.dim()), key=lambda d: (strides[d], ones[d]), reverse=True)
    if order == sorted(order):
        return x.contiguous()
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.dim())])


def index_fill(x: Tensor, dim: int, index: Tensor, value: Any) -> Tensor:
    """Fill as PyTorch does, in the layout of a copy of x. PyTorch 2.11 copies into uninitialised memory in
    place."""
    strides = torch.empty_like(x).stride()
    if x.stride() != make_contiguous_strides_for(x.shape):  # others are restored by an eager prim
        x = x.clone(memory_format=torch.contiguous_format)
    return _laid_out(_refs.index_fill(x, dim, index, value), strides)


def _strides_of(function: Callable[..., Any], tensors: Sequence[Tensor]) -> tuple[int, ...] | None:
    """Return the strides of what a function returns for meta tensors, None where sizes are symbols."""
    if any(type(n) is not int for t in tensors for n in (*t.shape, *t.stride())):
        return None
    with no_dispatch():  # nothing of it becomes part of the graph
        forms = [torch.empty_strided(t.shape, t.stride(), device="meta") for t in tensors]
        return function(*forms).stride()


def _elementwise(*tensors: Tensor) -> Tensor:
    """Return a meta tensor that is laid out as eager lays out an element-wise result."""
    shape = torch.broadcast_shapes(*(t.shape for t in tensors))
    strides = compute_elementwise_output_strides(*(t.expand(shape) for t in tensors))
    return torch.empty_strided(shape, strides, device="meta")


def in_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lay out the result of an element-wise decomposition as eager does, whichever operand it reads first."""

    @functools.wraps(function)
    def decomposition(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        tensors = [a for a in args if isinstance(a, Tensor)]
        shapes = [t.shape for t in tensors]
        if not isinstance(result, Tensor) or result.shape != torch.broadcast_shapes(*shapes):
            return result
        strides = _strides_of(_elementwise, tensors)
        return result if strides is None or strides == result.stride() else _laid_out(result, strides)

    return decomposition


def _laid_out_first(
    target: OpOverload, reference: Callable[..., Any], x: Any, y: Any, **rounding: Any
) -> Any:
    """Lay out both operands as eager does the result, where PyTorch's meta kernel lays it out differently.

    reference: PyTorch's definition of the operator, which is its meta kernel.
    """
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or x.stride() == y.stride():
        return NotImplemented
    strides = _strides_of(_elementwise, (x, y))
    if strides is None or rounding.get("rounding_mode", "floor") != "floor":
        return NotImplemented
    shape, of_reference = torch.broadcast_shapes(x.shape, y.shape), _strides_of(reference, (x, y))
    assert of_reference is not None
    if all(size == 1 or a == b for size, a, b in zip(shape, strides, of_reference, strict=True)):
        return NotImplemented
    return target(_laid_out(x.expand(shape), strides), _laid_out(y.expand(shape), strides), **rounding)


def channel_shuffle(x: Tensor, groups: int) -> Tensor:
    """Shuffle as PyTorch does. As in eager, the result keeps channels-last on a CPU."""
    shuffled = _channel_shuffle(x, groups)
    return shuffled.contiguous(memory_format=suggest_memory_format(x)) if x.is_cpu else shuffled


def max_unpool2d(x: Tensor, indices: Tensor, size: Sequence[int]) -> Any:
    """Keep channels-last on a CPU, as eager does and PyTorch's meta kernel does not say; else stay whole."""
    form = suggest_memory_format(x)
    if form is torch.contiguous_format or not x.is_cpu:
        return NotImplemented
    return aten.max_unpool2d.default(x.contiguous(), indices, size).contiguous(memory_format=form)


def pow_of_number(base: Any, x: Tensor) -> Any:
    """Return a contiguous result as eager does, whatever the layout of the exponent."""
    return NotImplemented if x.is_contiguous() else aten.pow.Scalar(base, x.contiguous())


def ldexp(x: Tensor, exponent: Tensor) -> Tensor:
    """Return x * 2**exponent, as eager computes it."""
    return x * aten.pow.Scalar(2.0, exponent.contiguous())


def unique(x: Tensor, sorted: bool = True, return_inverse: bool = False) -> tuple[Tensor, Tensor]:
    """Say that the number of results depends on data. PyTorch 2.11's fake tensors have one result."""
    values, inverse, _ = aten._unique2.default(x, sorted, return_inverse)
    return values, inverse


def dense_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """Lay out the first result of a batch norm as eager does on a CPU: contiguous, or with channels last."""

    @functools.wraps(function)
    def decomposition(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, *rest = function(x, *args, **kwargs)
        return out.contiguous(memory_format=suggest_memory_format(x)) if x.is_cpu else out, *rest

    return decomposition


BATCH_NORMS = (
    aten.native_batch_norm.default,
    aten._native_batch_norm_legit.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit_no_training.default,
    aten._batch_norm_with_update_functional.default,
    aten._batch_norm_no_update.default,
)

# Element-wise operators whose decompositions do not begin with all operands.
ELEMENTWISE = (
    aten.binary_cross_entropy.default,
    aten.heaviside.default,
    aten.huber_loss.default,
    aten.logaddexp.default,
    aten.logaddexp2.default,
    aten.special_xlog1py.default,
    aten.xlogy.Tensor,
)

TABLE: dict[OpOverload, Callable[..., Any]] = {
    aten.channel_shuffle.default: channel_shuffle,
    aten.max_unpool2d.default: max_unpool2d,
    aten.binary_cross_entropy.default: binary_cross_entropy,
    aten._unique.default: unique,
    aten.ldexp.Tensor: ldexp,
    aten.pow.Scalar: pow_of_number,
    aten.index_fill.int_Scalar: index_fill,
    aten.index_fill.int_Tensor: index_fill,
    **{
        target: functools.partial(_laid_out_first, target, reference)
        for target, reference in (
            (aten.floor_divide.default, _refs.floor_divide),
            (aten.div.Tensor_mode, _refs.floor_divide),
            (aten.copysign.Tensor, _refs.copysign),
            (aten.logical_and.default, _refs.logical_and),
            (aten.logical_or.default, _refs.logical_or),
            (aten.logical_xor.default, _refs.logical_xor),
        )
    },
    **{
        target: functools.partial(_into_copy, target)
        for target in (
            aten.slice_scatter.default,
            aten.select_scatter.default,
            aten.diagonal_scatter.default,
        )
    },
}
