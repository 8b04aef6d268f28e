"""A convolution whose windows lie side by side is a product.

    conv2d(x, w, b, stride=kernel)   ->   linear(patches of x as rows, w as a matrix, b)

The patch embedding of a vision transformer, say, with three channels and windows of 16 x 16. Where channels
are not innermost, libraries turn the whole image first, and back; so few channels fill no tensor unit. To cut
it into rows is one copy, which clusters make, and its gradient another.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments, copied, emit, refuse_strides, trace_strides
from fusion_compiler.ir.decision import Decision, Decisions, Outcome
from fusion_compiler.ir.graph_pass import Pass, Refused

_aten = torch.ops.aten
RULE = "patches"
_RANKS: dict[object, int] = {
    _aten.conv1d.default: 1,
    _aten.conv2d.default: 2,
    _aten.conv3d.default: 3,
}


def multiply_patches(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Put products in the place of such convolutions in `gm` (ATen above autograd)."""
    found = [node for node in gm.graph.nodes if _side_by_side(node)]
    if not found:
        return gm, ()
    new, nodes = copied(gm)
    for node in (nodes[old] for old in found):
        with new.graph.inserting_before(node):
            made = _product(node)
        node.replace_all_uses_with(made)
        new.graph.erase_node(node)
        _lay_out(made, node.meta["val"])
    new.recompile()
    return new, tuple(Decision(RULE, node.name, Outcome.DONE, _described(node)) for node in found)


def _side_by_side(node: fx.Node) -> bool:
    """Whether no element is in two windows, and the channels of an image are images of their own."""
    rank = _RANKS.get(node.target)
    if rank is None:
        return False
    named = arguments(node)
    x, kernel = named["input"].meta["val"], named["weight"].meta["val"].shape[2:]
    sizes = (*x.shape[1:], *kernel)
    if x.dim() != rank + 2 or not x.is_floating_point() or not all(isinstance(n, int) for n in sizes):
        return False
    plain = not any(named["padding"]) and all(n == 1 for n in (*named["dilation"], named["groups"]))
    windows = _each(named["stride"], rank) == tuple(kernel) and math.prod(kernel) > 1
    return plain and windows and x.stride()[-1] == 1 and node.meta["val"].is_contiguous()


def _product(node: fx.Node) -> fx.Node:
    named = arguments(node)
    x, weight, kernel = named["input"], named["weight"], tuple(named["weight"].meta["val"].shape[2:])
    rank, counts = len(kernel), [s // k for s, k in zip(x.meta["val"].shape[2:], kernel, strict=True)]
    for dim, (count, size) in enumerate(zip(counts, kernel, strict=True), 2):
        if x.meta["val"].shape[dim] != count * size:
            x = emit(node, _aten.slice.Tensor, x, dim, 0, count * size)
    channels, features = weight.meta["val"].shape[1], weight.meta["val"].shape[0]
    cut = [n for pair in zip(counts, kernel, strict=True) for n in pair]
    pieces = emit(node, _aten.view.default, x, [-1, channels, *cut])
    windows, within = [2 + 2 * d for d in range(rank)], [3 + 2 * d for d in range(rank)]
    ordered = emit(node, _aten.permute.default, pieces, [0, *windows, 1, *within])
    rows = emit(node, _aten.reshape.default, ordered, [-1, channels * math.prod(kernel)])
    matrix = emit(node, _aten.reshape.default, weight, [features, -1])
    made = emit(node, _aten.linear.default, rows, matrix, named["bias"])
    images = emit(node, _aten.view.default, made, [-1, *counts, features])
    return emit(node, _aten.permute.default, images, [0, rank + 1, *range(1, rank + 1)])


def _lay_out(made: fx.Node, like: torch.Tensor) -> None:
    """Lets the readers of an image take its features as the product leaves them, innermost; a copy in eager's
    order where that would be seen."""
    own, made.meta["val"] = made.meta["val"], like
    try:
        trace_strides(made, refuse_strides)
    except (Refused, RuntimeError, ValueError):
        made.meta["val"] = own
        with made.graph.inserting_after(made):
            ordered = emit(made, _aten.contiguous.default, made)
        made.replace_all_uses_with(ordered, delete_user_cb=lambda user: user is not ordered)


def _each(value: Any, rank: int) -> tuple[int, ...]:
    return tuple(value) * rank if len(value) == 1 else tuple(value)


def _described(node: fx.Node) -> str:
    kernel = " x ".join(map(str, arguments(node)["weight"].meta["val"].shape[2:]))
    return f"windows of {kernel} lie side by side: a product"


PATCHES = Pass(
    RULE,
    multiply_patches,
    does="Replace a convolution of windows side by side by a matrix product.",
    when="the stride is the size of the window, without padding",
)
