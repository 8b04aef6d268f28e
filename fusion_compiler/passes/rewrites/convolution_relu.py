"""ReLU behind a convolution, and a sum between them, are computed before the convolution stores its result.

    relu(conv2d(x, w, b))       ->   convolution_relu(x, w, b)
    relu(conv2d(x, w, b) + z)   ->   convolution_relu(x, w, b, z)

cuDNN computes it in 16 bits with channels innermost, if no gradient is wanted
(`ops/own/convolution_relu.py`). Measured on an H200 over the convolutions of a ResNet-50 with 128 images: the
first takes as long as the convolution alone, the second less than the convolution and a kernel behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.ops.own.convolution_relu import convolution_relu, is_one_kernel
from fusion_compiler.passes.rewrites.engine import Rule, Rules, rule
from fusion_compiler.passes.rewrites.innermost_channels import has_tensor_units

aten = torch.ops.aten
RULE = "convolution and ReLU"


def _is_16_bits(node: fx.Node) -> bool:
    return has_tensor_units(node.meta["val"])


def _alone(relu: Callable[..., Any]) -> Rule:
    return rule(
        lambda x, w, b, s, p, d: relu(aten.conv2d.default(x, w, b, s, p, d)),
        lambda x, w, b, s, p, d: convolution_relu(x, w, b, None, s, p, d),
        (torch.ones(2, 3, 8, 6), torch.ones(4, 3, 3, 2), torch.ones(4), [2, 1], [1, 0], [1, 2]),
        pays=lambda result, x, w, *others: _is_one_kernel(x, w),
        considers=_is_16_bits,
        note="one call",
    )


def _sum(relu: Callable[..., Any], add: Callable[..., Any]) -> Rule:
    return rule(
        lambda x, w, b, z, s, p, d: relu(add(aten.conv2d.default(x, w, b, s, p, d), z)),
        lambda x, w, b, z, s, p, d: convolution_relu(x, w, b, z, s, p, d),
        (torch.ones(2, 3, 5, 7), torch.ones(4, 3, 1, 1), None, torch.ones(2, 4, 5, 7), [1], [0], [1]),
        where=lambda result, x, w, b, z, *sizes: _form(z) == _form(result),
        pays=lambda result, x, w, b, z, *sizes: _is_one_kernel(x, w) and z.stride() == result.stride(),
        considers=_is_16_bits,
        note="one call",
    )


def _form(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else None


def _is_one_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True if cuDNN has such a kernel for a convolution."""
    innermost = all(t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last) for t in (x, weight))
    return innermost and is_one_kernel()


_RELUS = (aten.relu.default, aten.relu_.default)
CONVOLUTION_RELU = Pass(
    RULE,
    Rules(
        RULE,
        (
            *(_sum(relu, add) for relu in _RELUS for add in (aten.add.Tensor, aten.add_.Tensor)),
            *map(_alone, _RELUS),
        ),
        inference=True,
    ),
    does="Compute a ReLU, and a sum before it, in the convolution before them.",
    when="inference in 16 bits with channels last, by cuDNN",
    gains="the ReLU takes no time",
    rounds_as_eager=False,
)
