"""A convolution whose windows lie side by side is a product.

    conv2d(x, w, b, stride=kernel)   ->   linear(patches of x as rows, w as a matrix, b)

An example is the patch embedding of a vision transformer, with three channels and windows of 16 x 16. If
channels are not innermost, libraries permute the entire image first, and back; so few channels fill no tensor
unit. To cut the image into rows is one copy, which clusters compute, and its gradient is another.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.passes.rewrites.engine import Rule, Rules, rule
from fusion_compiler.passes.rewrites.pools import each

aten = torch.ops.aten
RULE = "patches"


def _product(x: Any, weight: Any, bias: Any, *sizes: Any) -> Any:
    kernel = [*weight.shape[2:]]
    rank, counts = len(kernel), [s // k for s, k in zip(x.shape[2:], kernel, strict=True)]
    for dim, (count, size) in enumerate(zip(counts, kernel, strict=True), 2):
        if x.shape[dim] != count * size:
            x = aten.slice.Tensor(x, dim, 0, count * size)
    features, channels = weight.shape[:2]
    cut = [n for pair in zip(counts, kernel, strict=True) for n in pair]
    pieces = aten.reshape.default(x, [-1, channels, *cut])
    windows, within = [2 + 2 * d for d in range(rank)], [3 + 2 * d for d in range(rank)]
    ordered = aten.permute.default(pieces, [0, *windows, 1, *within])
    rows = aten.reshape.default(ordered, [-1, channels * math.prod(kernel)])
    result = aten.linear.default(rows, aten.reshape.default(weight, [features, -1]), bias)
    images = aten.view.default(result, [-1, *counts, features])
    return aten.permute.default(images, [0, rank + 1, *range(1, rank + 1)])


def _is_side_by_side(
    result: Any, x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any
) -> bool:
    """True if no element is in two windows."""
    kernel = [*weight.shape[2:]]
    rank = len(kernel)
    if x.dim() != rank + 2 or not all(isinstance(n, int) for n in (*x.shape[1:], *kernel)):
        return False
    plain = not any(each(padding, rank)) and each(dilation, rank) == [1] * rank
    return plain and each(stride, rank) == kernel and math.prod(kernel) > 1


def _has_steps(node: fx.Node) -> bool:
    steps = (n for n in arguments(node)["stride"] if isinstance(n, int))
    return any(n > 1 for n in steps) and node.meta["val"].is_contiguous()


def _pays(result: Any, x: Any, *others: Any) -> bool:
    """True if the channels of an image are images of their own."""
    return x.is_floating_point() and x.stride()[-1] == 1


def _convolution(rank: int, convolution: Callable[..., Any]) -> Rule:
    image, weight = torch.ones(2, 3, *(6, 8, 4)[:rank]), torch.ones(5, 3, *(3, 4, 2)[:rank])
    sizes = [3, 4, 2][:rank], [0] * rank, [1] * rank
    return rule(
        lambda x, weight, bias, s, p, d: convolution(x, weight, bias, s, p, d),
        _product,
        (image, weight, torch.ones(5), *sizes),
        (torch.ones(2, 3, *(7, 9, 5)[:rank]).bfloat16(), weight.bfloat16(), None, *sizes),
        where=_is_side_by_side,
        considers=_has_steps,
        pays=_pays,
        note=lambda result, x, w, *_: (
            f"windows of {' x '.join(map(str, w.shape[2:]))} lie side by side: a product"
        ),
    )


PATCHES = Pass(
    RULE,
    Rules(
        RULE,
        (
            _convolution(1, aten.conv1d.default),
            _convolution(2, aten.conv2d.default),
            _convolution(3, aten.conv3d.default),
        ),
    ),
    does="Replace a convolution of windows side by side by a matrix product.",
    when="the stride is the size of the window, without padding",
)
