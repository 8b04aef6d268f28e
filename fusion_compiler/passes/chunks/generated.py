"""Tensors that no kernel has to read, as they are computed from no other: one number, or 0, 1, ..."""

from __future__ import annotations

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments
from fusion_compiler.passes.chunks.rows import VIEWS, shape

aten = torch.ops.aten
_FULL = aten.full.default
_COUNTED = {aten.arange.default, aten.arange.start, aten.arange.start_step, torch.ops.prims.iota.default}
_SHOW = VIEWS | {aten.clone.default}


def chain(node: fx.Node) -> list[fx.Node]:
    """Return the nodes from the one that `node` is a view or a copy of up to `node` itself."""
    nodes = [node]
    while nodes[-1].target in _SHOW and len(nodes[-1].all_input_nodes) == 1:
        nodes += nodes[-1].all_input_nodes
    return nodes[::-1]


def is_generated(node: fx.Node) -> bool:
    source = chain(node)[0]
    return source.target in _COUNTED | {_FULL} and not source.all_input_nodes


def counted(node: fx.Node) -> tuple[int, int] | None:
    """Return (start, step) of a tensor of the integers start, start + step, ... along its one dimension, or
    None for any other tensor."""
    source = chain(node)[0]
    if source.target not in _COUNTED or source.all_input_nodes:
        return None
    value = node.meta["val"]
    if value.is_floating_point() or max(shape(node), default=1) != value.numel():
        return None
    if source.target is torch.ops.prims.iota.default:
        progression = source.kwargs["start"], source.kwargs["step"]
    else:
        named = arguments(source)
        progression = named.get("start", 0), named.get("step", 1)
    start, step = progression
    return (start, step) if isinstance(start, int) and isinstance(step, int) else None
