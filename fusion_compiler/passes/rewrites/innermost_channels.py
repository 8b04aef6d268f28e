"""Convolutions in 16 bits read and write channels as the innermost dimension.

    conv2d(x, w)   ->   conv2d(x with channels innermost, w likewise)

Tensor units want them so: given images channel by channel, cuDNN turns each of them before a convolution and
back behind it. Element-wise work, norms and pooling between convolutions hand the order on, so that what is
left to turn are a net's first image, its weights, and what it returns. Sequences, which PyTorch has no such
order for, are images of one row.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from fusion_compiler.capture.graphs import (
    aliases,
    arguments,
    copied,
    emit,
    mutated_nodes,
    refuse_strides,
    trace_again,
)
from fusion_compiler.ir.group_norm import group_norm
from fusion_compiler.ir.rewrite_note import Notes, Refused, RewriteNote

_aten = torch.ops.aten
RULE = "channels innermost"
_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
_TARGETS: dict[object, OpOverload] = {
    _aten.conv1d.default: _aten.conv2d.default,
    _aten.conv2d.default: _aten.conv2d.default,
    _aten.conv3d.default: _aten.conv3d.default,
}
_VIEWS = {_aten.view.default, _aten._unsafe_view.default}
FEWEST = 8  # channels: fewer fill no tensor unit


def turn_channels(gm: fx.GraphModule) -> tuple[fx.GraphModule, Notes]:
    """Turn what convolutions of `gm` (ATen above autograd) read, where the device has tensor units for it."""
    found = [node for node in gm.graph.nodes if _can_turn(node)]
    if not any(map(_gains, found)):
        return gm, ()
    new, nodes = copied(gm)
    turned = {_turn(nodes[node]): node.meta["val"] for node in found}
    norms = [node for node in _behind(new.graph, turned) if node.target is _aten.group_norm.default]
    turned |= {_keep_order(node): node.meta["val"] for node in norms}
    behind = _behind(new.graph, turned)
    try:
        for node in behind:
            if node.op == "call_function":
                refuse_strides(node)
        _copy_views(behind)
        _restore_results(new.graph, {n: turned.get(n, n.meta.get("val")) for n in behind})
        trace_again(behind)
    except (Refused, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        return gm, tuple(RewriteNote(RULE, node.name, False, reason) for node in found)
    new.recompile()
    return new, tuple(RewriteNote(RULE, node.name, True, "its channels are innermost") for node in found)


def _can_turn(node: fx.Node) -> bool:
    if node.target not in _TARGETS:
        return False
    named = arguments(node)
    x, weight = named["input"].meta["val"], named["weight"].meta["val"]
    known = x.dim() == weight.dim() and all(isinstance(n, int) for n in (*x.shape[1:], *weight.shape))
    return known and has_tensor_units(x) and named["groups"] == 1


def has_tensor_units(x: torch.Tensor) -> bool:
    return x.device.type == "cuda" and x.dtype in (torch.float16, torch.bfloat16)


def _gains(node: fx.Node) -> bool:
    named = arguments(node)
    x, weight = named["input"].meta["val"], named["weight"].meta["val"]
    return min(weight.shape[:2]) >= FEWEST and max(weight.shape[2:]) > 1 and x.stride(1) != 1


def _behind(graph: fx.Graph, sources: Collection[fx.Node]) -> list[fx.Node]:
    """Some nodes, and all that is made of them, in order."""
    found = dict.fromkeys(sources)
    for node in graph.nodes:
        if not found.keys().isdisjoint(node.all_input_nodes):
            found[node] = None
    return [node for node in graph.nodes if node in found]


def _turn(node: fx.Node) -> fx.Node:
    """Puts a convolution of turned operands in `node`'s place; the node that has its shape."""
    named = arguments(node)
    x, weight, bias = named["input"], named["weight"], named["bias"]
    geometry = [list(named[n]) for n in ("stride", "padding", "dilation")]
    with node.graph.inserting_before(node):
        if one_row := weight.meta["val"].dim() == 3:
            x, weight = (emit(node, _aten.unsqueeze.default, n, 2) for n in (x, weight))
            geometry = [[fill, *given] for fill, given in zip((1, 0, 1), geometry, strict=True)]
        options = {"memory_format": _FORMATS[weight.meta["val"].dim()]}
        x, weight = (emit(node, _aten.contiguous.default, n, **options) for n in (x, weight))
        made = emit(node, _TARGETS[node.target], x, weight, bias, *geometry, named["groups"])
        if one_row:
            made = emit(node, _aten.squeeze.dim, made, 2)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    return made


def _keep_order(node: fx.Node) -> fx.Node:
    """Puts a norm of groups that takes its input as it lies in `node`'s place."""
    named = arguments(node)
    with node.graph.inserting_before(node):
        norm = emit(node, group_norm, *(named[n] for n in ("input", "weight", "bias", "num_groups", "eps")))
        made = emit(node, operator.getitem, norm, 0)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    return made


def _copy_views(behind: Sequence[fx.Node]) -> None:
    """A view of what lies in another order may have to be a copy; none is, where a write would show in it."""
    written = mutated_nodes(behind)
    for i, node in enumerate(behind):
        if node.target not in _VIEWS:
            continue
        shown = aliases(node)
        if shown.isdisjoint(written) or shown.isdisjoint(mutated_nodes(behind[i + 1 :])):
            node.target = _aten.reshape.default


def _restore_results(graph: fx.Graph, values: Mapping[fx.Node, Any]) -> None:
    """Results of the graph are laid out as before. Raises Refused where they show only a part of a tensor."""
    output = graph.output_node()
    for node in set(output.all_input_nodes) & values.keys():
        value = values[node]
        if not isinstance(value, torch.Tensor) or value.dim() < 3:
            continue
        order = sorted(range(value.dim()), key=lambda d: -value.stride(d))
        with graph.inserting_before(output):
            turned = emit(node, _aten.permute.default, node, order)
            ordered = emit(node, _aten.contiguous.default, turned)
            back = emit(node, _aten.permute.default, ordered, [order.index(d) for d in range(value.dim())])
        if _steps(back.meta["val"]) != _steps(value):
            raise Refused(f"{node.name} is a part of a larger tensor")
        output.replace_input_with(node, back)


def _steps(value: torch.Tensor) -> list[Any]:
    return [step for step, size in zip(value.stride(), value.shape, strict=True) if size != 1]
