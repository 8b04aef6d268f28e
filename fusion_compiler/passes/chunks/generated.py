"""Tensors that no kernel has to read, as they are computed from no other: one number, or 0, 1, ..."""

from __future__ import annotations

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments
from fusion_compiler.ir.layout import view_of_node
from fusion_compiler.ops.facts import filled_with
from fusion_compiler.ops.table import Form, form_of
from fusion_compiler.ops.views import Reshaped
from fusion_compiler.passes.chunks.rows import shape

_COPY = torch.ops.aten.clone.default


def number_in(node: fx.Node) -> float | None:
    """Return the number that a node fills a new tensor with, or None for any other node."""
    return filled_with(node.target, arguments(node)) if form_of(node.target) is Form.FILL else None


def of_sizes(node: fx.Node) -> bool:
    """True for a call that reads only the shape of its operand, no element, if the shape is static."""
    return number_in(node) is not None and all(type(n) is int for n in shape(node))


def chain(node: fx.Node) -> list[fx.Node]:
    """Return the nodes from the one that `node` is a view or a copy of up to `node` itself."""
    nodes = [node]
    while nodes[-1].target is _COPY or isinstance(view_of_node(nodes[-1]), Reshaped):
        nodes.append(nodes[-1].all_input_nodes[0])
    return nodes[::-1]


def is_generated(node: fx.Node) -> bool:
    source = chain(node)[0]
    is_new = number_in(source) is not None or form_of(source.target) is Form.COUNT
    return is_new and not source.all_input_nodes


def counted(node: fx.Node) -> tuple[int, int] | None:
    """Return (start, step) of a tensor of the integers start, start + step, ... along its one dimension, or
    None for any other tensor."""
    source, value = chain(node)[0], node.meta["val"]
    if form_of(source.target) is not Form.COUNT or source.all_input_nodes:
        return None
    if value.is_floating_point() or max(shape(node), default=1) != value.numel():
        return None
    named = arguments(source)
    start, step = named.get("start", 0), named.get("step", 1)
    return (start, step) if isinstance(start, int) and isinstance(step, int) else None
