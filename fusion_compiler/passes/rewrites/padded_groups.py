"""Grouped convolutions are padded with zeros to groups of a width that has fast kernels.

    conv2d(x, w, groups=g)   ->   cut(conv2d(pad(x), pad(w), groups=g))

cuDNN's kernels for groups of 8, 16, 32 and 64 channels take a third of the time that groups of 24 take
(`ops/convolution_times.py`). The padded channels of the result are zeros times zeros, and no other channel
reads them, so that the values stay the same. The padding and the cut are element-wise: the kernel before
stores padded channels, the kernel behind skips them, and autograd derives the same for the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from fusion_compiler.capture.graphs import arguments, emit
from fusion_compiler.ops.convolution_times import Convolution

_aten = torch.ops.aten
RULE = "padded groups"
MOST_KEPT = 1.5  # times the elements of a convolution that are kept for backward with their padding
_LAST, _FIRST = [0, 2, 3, 1], [0, 3, 1, 2]  # channels as the last dimension, and back


def pad_weight(like: fx.Node, weight: fx.Node, pads: Sequence[int]) -> fx.Node:
    """Emit a padded copy of a weight. Backward copies the weight again, as saving the copy would keep it in
    memory twice."""
    padded = emit(like, _aten.constant_pad_nd.default, weight, [*pads])
    padded.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    return padded


def convolve_padded(node: fx.Node, x: fx.Node, weight: fx.Node, shape: Convolution) -> fx.Node:
    """Emit the convolution `node` with groups as wide as those of `shape.padded`; return its result, cut.

    x: [n, c, h, w]; weight: [o, c / groups, h, w]; both with channels last, as the result is.
    """
    assert shape.padded is not None
    named, groups = arguments(node), shape.groups
    inner, outer = (b - a for a, b in zip(shape.widths, shape.padded.widths, strict=True))
    bias = named["bias"]
    if inner:
        split = emit(node, _aten.unflatten.int, emit(node, _aten.permute.default, x, _LAST), 3, [groups, -1])
        x = _joined(node, emit(node, _aten.constant_pad_nd.default, split, [0, inner]), 3)
    split = emit(node, _aten.unflatten.int, emit(node, _aten.permute.default, weight, _LAST), 0, [groups, -1])
    weight = _joined(node, pad_weight(node, split, [0, inner, 0, 0, 0, 0, 0, outer]), 0)
    if bias is not None and outer:
        split = emit(node, _aten.unflatten.int, bias, 0, [groups, -1])
        bias = emit(node, _aten.flatten.using_ints, pad_weight(node, split, [0, outer]))
    geometry = (named[name] for name in ("stride", "padding", "dilation"))
    result = emit(node, _aten.conv2d.default, x, weight, bias, *geometry, groups)
    if outer:
        split = emit(node, _aten.permute.default, result, _LAST)
        split = emit(node, _aten.unflatten.int, split, 3, [groups, -1])
        part = emit(node, _aten.slice.Tensor, split, 4, 0, shape.widths[1])
        cut = emit(node, _aten.flatten.using_ints, part, 3, 4)
        # Backward cuts the convolution's stored result again: saving the cut as well would store it twice. If
        # a large part is padding, the cut alone is saved instead.
        if shape.padded.elements <= MOST_KEPT * shape.elements:
            cut.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
        result = emit(node, _aten.permute.default, cut, _FIRST)
    return result


def _joined(node: fx.Node, split: fx.Node, dim: int) -> fx.Node:
    """Join the dimensions `dim` and `dim + 1`, and put the last one second."""
    flat = emit(node, _aten.flatten.using_ints, split, dim, dim + 1)
    return emit(node, _aten.permute.default, flat, _FIRST)
