"""Show a tensor's memory in other ways, for generated code; autograd sees no views of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import guards


def restrided(
    tensor: torch.Tensor, shape: tuple[int, ...], stride: tuple[int, ...], further: int
) -> torch.Tensor:
    """Return the memory of `tensor` by another shape and other strides, `further` elements on.

    For autograd the result is no view, because one of a forward's two results may have a gradient and the
    other none.
    """
    return torch.as_strided(tensor.detach(), shape, stride, tensor.storage_offset() + further)


# Does the same without the dispatcher; for real tensors, not FakeTensors.
reinterpreted: Callable[..., torch.Tensor] = getattr(guards, "_reinterpret_tensor")  # noqa: B009  no stub


def again(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same values at the same strides, in memory of its own."""
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return empty.copy_(tensor)


def random_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the sizes, strides and dtype of another one, to measure what reads it.

    Floats are normal, and zero in 8 bits; integers are zero, which is in range as an index; conditions hold.
    """
    shape, stride, dtype = tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype
    empty = torch.empty_strided(shape, stride, dtype=dtype, device=tensor.device)
    if dtype.is_floating_point and dtype.itemsize > 1:
        return empty.normal_()
    return empty.fill_(1) if dtype is torch.bool else empty.zero_()


def laid(value: Any, strides: tuple[int, ...] | None) -> Any:
    """Return `value` or a copy of it with these strides. A dimension of one element may have any stride."""
    if strides is None or not isinstance(value, torch.Tensor) or not value.numel():
        return value
    if all(a == b or n == 1 for a, b, n in zip(value.stride(), strides, value.shape, strict=True)):
        return value
    return torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device).copy_(value)


def strides_of(value: Any) -> tuple[int, ...] | None:
    """Return the strides of a traced tensor, or None where any of its sizes or strides is a symbol."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    numbers: tuple[Any, ...] = (*value.shape, *value.stride())
    return value.stride() if all(isinstance(n, int) for n in numbers) else None
