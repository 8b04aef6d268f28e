"""Clusters that end in a block-scaled quantisation to float8, as their users write it in torch.

Groups of 128 with any scale: DeepSeek-V3's activations (its technical report, section 3.3). Groups of 32 with
powers of two: the OCP's Microscaling Formats (MX) specification, version 1.0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import BLOCK_SCALED, Case, Outputs, tensors
from benchmarks.kernels.clusters import ROW, swiglu

F8 = torch.float8_e4m3fn
LARGEST = 448.0  # that it holds


def widened(y: Tensor) -> Tensor:
    return y if y.dtype is torch.float64 else y.float()


def stored(x: Tensor) -> Tensor:
    """As float8; in float64 the numbers themselves, with which those are compared."""
    return x if x.dtype is torch.float64 else x.to(F8)


def groups_of_128(y: Tensor) -> Outputs:
    groups = widened(y).unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-4) / LARGEST
    return stored(groups / scale).flatten(-2), scale.squeeze(-1)


def mx(y: Tensor) -> Outputs:
    groups = widened(y).unflatten(-1, (-1, 32))
    largest = groups.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    scale = torch.exp2(torch.floor(torch.log2(largest)) - 8)
    return stored((groups / scale).clamp(-LARGEST, LARGEST)).flatten(-2), scale.squeeze(-1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, 1e-6)


def layer_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), weight, None, 1e-6)


def quantised(
    function: Callable[..., Tensor], quantise: Callable[[Tensor], Outputs]
) -> Callable[..., Outputs]:
    return lambda *inputs: quantise(function(*inputs))


WEIGHTED = tensors(x=ROW, weight="columns")
BLOCK_SCALED_CASES: tuple[Case, ...] = tuple(
    Case(
        f"{name} + {format_name}", quantised(function, quantise), make, {"rows": 16384, "columns": columns},
        {"rows": 6, "columns": 256}, family=BLOCK_SCALED,
    )
    for format_name, quantise in (("float8 by 128", groups_of_128), ("MX float8", mx))
    for name, function, make, columns in (
        ("RMSNorm", rms_norm, WEIGHTED, 4096),
        ("LayerNorm", layer_norm, WEIGHTED, 4096),
        ("SwiGLU", swiglu, tensors(gate=ROW, up=ROW), 11264),
        ("GELU", F.gelu, tensors(x=ROW), 8192),
    )
)  # fmt: skip
