"""Define a convolution of images with what its library does to the result before it is stored: a sum, and
ReLU.

Any device has this operator; cuDNN has one kernel for it. It has no gradient, because what ReLU hides is not
kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fusion_compiler.ops.own.define import define


def _written_out(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    addend: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> Tensor:
    """Return relu(convolution(input, weight) + bias + addend). input: [n, c, h, w], weight: [k, c, r, s],
    bias: [k], addend: of the result's shape, all of one float dtype."""
    result = torch.ops.aten.convolution.default(
        input, weight, bias, stride, padding, dilation, False, [0] * len(stride), 1
    )
    return torch.relu(result if addend is None else result + addend)


convolution_relu = define(
    "convolution_relu",
    "(Tensor input, Tensor weight, Tensor? bias, Tensor? addend, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation) -> Tensor",
    _written_out,
)


def is_one_kernel() -> bool:
    """True if the library that this PyTorch has computes all of it at once."""
    return torch.version.hip is None and torch._C._get_cudnn_enabled()


@torch.library.impl("fusion_compiler::convolution_relu", "CUDA")
def _run(input: Tensor, weight: Tensor, bias: Tensor | None, addend: Tensor | None, *sizes: Any) -> Tensor:
    """Return the result on a GPU. The sum is rounded once, behind ReLU."""
    if not is_one_kernel():
        return _written_out(input, weight, bias, addend, *sizes)
    library: Any = torch
    if addend is None:
        return library.cudnn_convolution_relu(input, weight, bias, *sizes, 1)
    return library.cudnn_convolution_add_relu(input, weight, addend, 1.0, bias, *sizes, 1)
