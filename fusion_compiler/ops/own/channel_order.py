"""Copy a tensor into another memory format, so that its gradient comes back with the tensor's own strides.

PyTorch's `contiguous` passes a gradient on in whatever order it has. The gradient of a parameter would then
leave the compiled backward pass with other strides than the parameter, and autograd would copy it, one launch
for each parameter. The copies here are part of the graph, and so of the kernels around them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._prims_common import suggest_memory_format

from fusion_compiler.ops.own.define import define


def copy_in_order(x: Tensor, memory_format: torch.memory_format) -> Tensor:
    """Return a copy of `x` in `memory_format`."""
    return x.clone(memory_format=memory_format)


def dimensions_in_memory(x: Tensor) -> list[int]:
    """Return the dimensions of `x` from the outermost in memory to the innermost."""
    return sorted(range(x.dim()), key=lambda d: -x.stride(d))


def order_of_result(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Return the order of an eager convolution's result: channels last if either operand has them last."""
    orders = (suggest_memory_format(x), suggest_memory_format(weight))
    return next((order for order in orders if order is not torch.contiguous_format), orders[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.dims = dimensions_in_memory(inputs[0])


def _gradient(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
    back = [ctx.dims.index(d) for d in range(len(ctx.dims))]
    return gradient.permute(ctx.dims).contiguous().permute(back), None


to_memory_format = define(
    "to_memory_format",
    "(Tensor input, MemoryFormat memory_format) -> Tensor",
    copy_in_order,
    gradient=_gradient,
    save=_save,
)
