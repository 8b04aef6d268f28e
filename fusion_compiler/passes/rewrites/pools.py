"""Pooling as operators that clusters hold.

    adaptive_avg_pool2d(x, 1)           ->   mean(x, [-1, -2], keepdim=True)
    avg_pool2d(x, [*x.shape[-2:]])      ->   the same

ATen also computes the first as a mean, and then gives a channels-last result its strides in place, by
`as_strided`: no cluster holds that, and its gradient scatters. Only strides of dimensions of size 1 differ.

    max_pool2d(x, ...)         ->   max_pool(x, ...)[0]
    max_pool2d(relu(x), ...)   ->   relu(max_pool(x, ...)[0])

ATen's kernels read an image and write one, forward and backward; these operators (`ops.own.max_pool`) join
the norms and activations around them. ReLU keeps the order of elements: it is computed for each window
instead of each element, and its gradient needs nothing of the image. Windows of many elements stay ATen's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.ops.own.max_pool import max_pool
from fusion_compiler.passes.rewrites.engine import Rule, Rules, rule

aten = torch.ops.aten
MOST = 16  # elements of a window: more are read faster one after the other than all at once


def each(value: Any, rank: int) -> list[int]:
    """Return a number for each of `rank` dimensions, as operators take one for all."""
    several = [*value] if isinstance(value, Sequence) else [value]
    return several * rank if len(several) == 1 else several


def _average(pool: Callable[..., Any], rank: int, is_whole: Callable[..., bool], *others: Any) -> Rule:
    """Return the rule for a pool of `rank` dimensions. others: arguments after the image, for example."""
    sizes = (4, 6, 2)[:rank]
    narrow = torch.bfloat16 if rank < 3 else torch.float64  # CPUs average no volumes in 16 bits
    images = torch.ones(2, 3, *sizes), torch.ones(3, *sizes, dtype=narrow)
    return rule(
        pool,
        lambda x, *arguments: aten.mean.dim(x, [-1 - d for d in range(rank)], True),
        *((image, *others) for image in images),
        where=lambda result, *arguments: is_whole(rank, result, *arguments),
        note="a mean",
    )


def _is_one_element(rank: int, result: Any, *arguments: Any) -> bool:
    return all(n == 1 for n in result.shape[-rank:])


def _is_one_window(
    rank: int, result: Any, x: Any, kernel: Any, stride: Any, padding: Any, ceil: Any, pads: Any, by: Any = 0
) -> bool:
    sizes, kernel = [*x.shape[-rank:]], each(kernel, rank)
    static = all(type(n) is int for n in (*sizes, *kernel)) and x.is_floating_point()
    return static and sizes == kernel and not any(each(padding, rank)) and not by


def _is_small(result: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> bool:
    kernel = each(kernel, 2)
    static = all(isinstance(n, int) and n for n in x.shape[-2:])
    dense = all(s <= k for s, k in zip(each(stride or kernel, 2), kernel, strict=True))
    few = math.prod(kernel) <= MOST and each(dilation, 2) == [1, 1]
    return static and dense and few and x.is_floating_point()


def _largest(x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> Any:
    kernel = each(kernel, 2)
    return max_pool(x, kernel, each(stride or kernel, 2), each(padding, 2), ceil)[0]


def _maximum(relu: Callable[..., Any] | None) -> Rule:
    """Return the rule for a pool behind `relu`, or for one alone."""
    image = torch.ones(2, 3, 8, 6)
    return rule(
        lambda x, k, s, p, d, c: aten.max_pool2d.default(x if relu is None else relu(x), k, s, p, d, c),
        lambda *a: _largest(*a) if relu is None else aten.relu.default(_largest(*a)),
        (image, [3, 2], [2, 2], [1, 1], [1, 1], True),
        (image.bfloat16(), [2], [], [0], [1], False),
        where=_is_small,
        note=lambda result, x, k, *others: f"windows of {' x '.join(map(str, each(k, 2)))} in a cluster",
    )


GLOBAL_AVERAGE_POOL = Pass(
    "global average pool",
    Rules(
        "global average pool",
        (
            _average(aten.adaptive_avg_pool1d.default, 1, _is_one_element, [1]),
            _average(aten.adaptive_avg_pool2d.default, 2, _is_one_element, [1, 1]),
            _average(aten.adaptive_avg_pool3d.default, 3, _is_one_element, [1, 1, 1]),
            _average(aten.avg_pool1d.default, 1, _is_one_window, [4], [], [0], False, True),
            _average(aten.avg_pool2d.default, 2, _is_one_window, [4, 6], [], [0], False, True, None),
            _average(aten.avg_pool3d.default, 3, _is_one_window, [4, 6, 2], [], [0], False, True, None),
        ),
    ),
    does="Replace average pooling to one element by a mean.",
    when="the window is the whole image",
)
MAX_POOL = Pass(
    "max-pool lowering",
    Rules("max-pool lowering", (*map(_maximum, (aten.relu.default, aten.relu_.default, None)),)),
    does="Replace max pooling by an operator that clusters hold.",
    when="windows have few elements",
    gains="the image is read and written once less",
)
