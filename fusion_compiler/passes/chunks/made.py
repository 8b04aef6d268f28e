"""Tensors that are made of no other: one number everywhere, or 0, 1, ...; nobody has to read them."""

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
    """What a node is a view or a copy of, and what is in between, up to itself."""
    found = [node]
    while found[-1].target in _SHOW and len(found[-1].all_input_nodes) == 1:
        found += found[-1].all_input_nodes
    return found[::-1]


def made_of_nothing(node: fx.Node) -> bool:
    source = chain(node)[0]
    return source.target in _COUNTED | {_FULL} and not source.all_input_nodes


def counted(node: fx.Node) -> tuple[int, int] | None:
    """(start, step) of the integers start, start + step, ... along the one dimension of a tensor; None of all
    else."""
    source = chain(node)[0]
    if source.target not in _COUNTED or source.all_input_nodes:
        return None
    value = node.meta["val"]
    if value.is_floating_point() or max(shape(node), default=1) != value.numel():
        return None
    if source.target is torch.ops.prims.iota.default:
        found = source.kwargs["start"], source.kwargs["step"]
    else:
        named = arguments(source)
        found = named.get("start", 0), named.get("step", 1)
    start, step = found
    return (start, step) if isinstance(start, int) and isinstance(step, int) else None
