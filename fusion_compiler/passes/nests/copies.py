"""Copies beside a nest. It needs none: it reads operands as they lie, and stores results as they are read.

    clone(view(permute(view(qkv))))     before: heads stand before tokens for a batched product
    clone(permute(view(o)))             behind: tokens stand before heads again
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import emit
from fusion_compiler.ir.layout import is_view_node
from fusion_compiler.ops.schema import is_cast
from fusion_compiler.ops.views import Permuted
from fusion_compiler.passes.nests.region import is_pointwise
from fusion_compiler.passes.rewrites.axes import COPIES, rearrangement
from fusion_compiler.passes.rewrites.mask_algebra import expression

_aten = torch.ops.aten


def is_free_copy(node: fx.Node) -> bool:
    """True of a copy in another order, if a nest reads the copy's operand as fast: its elements lie side by
    side along one of the last two dimensions, which a tile has. False of a copy that repeats elements: to a
    chain of products, repeated heads are an axis that keys do not have."""
    if node.target not in COPIES:
        return False
    strides = node.all_input_nodes[0].meta["val"].stride()
    numbers = [stride for stride in strides if isinstance(stride, int)]
    return 1 in numbers[-2:] and 0 not in numbers


def stored_behind(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return what a nest computes of a result before it stores it: products with numbers and views, up to the
    one copy that the graph makes of them, or up to the last number. Return () if there is nothing such.

    Element-wise operators may read the result too, if nothing on the way to the copy changes its numbers.
    """
    others = [u for u in node.users if rearrangement(u) is None and not _is_scaled(u)]
    if not all(is_pointwise(u) and not is_view_node(u) for u in others):
        return ()
    path, last, current = list[fx.Node](), 0, node
    while sizes(node.graph, current.meta["val"].shape) is not None:
        after = [u for u in current.users if u not in others]
        if len(after) != 1 or after[0].meta.get("partitioner_tag") != node.meta.get("partitioner_tag"):
            break
        (current,) = after
        is_scaled = _is_scaled(current)
        if (is_scaled and others) or (not is_scaled and rearrangement(current) is None):
            break
        path.append(current)
        is_copied = current.target in COPIES - {_aten.alias.default}
        if is_scaled or is_copied:
            last = len(path)
        if is_copied:
            break
    return tuple(path[:last])


def _is_scaled(node: fx.Node) -> bool:
    """True of a product with a number."""
    by_number = node.target in (_aten.mul.Tensor, _aten.mul.Scalar) and isinstance(node.args[1], int | float)
    return by_number and node.meta["val"].dtype == node.all_input_nodes[0].meta["val"].dtype


def read_copy(path: Sequence[fx.Node], copy: fx.Node, reader: fx.Node) -> None:
    """Let a reader of a result read the copy at the end of a path, in place. If the reader converts the
    result to another dtype, the copy is converted first: a backward pass then saves the smaller copy."""
    tag = {k: v for k, v in reader.meta.items() if k == "partitioner_tag"}
    result = path[0].all_input_nodes[0]

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        emitted = emit(reader, target, *args, **kwargs)
        emitted.meta.update(tag)
        return emitted

    with reader.graph.inserting_before(reader):
        if is_cast(reader.target):
            copy = call(reader.target, copy, *reader.args[1:], **reader.kwargs)
        for node in reversed(path):
            how, operand = rearrangement(node), node.all_input_nodes[0]
            if not isinstance(how, Permuted):
                shape = sizes(reader.graph, operand.meta["val"].shape)
                copy = call(_aten.clone.default, copy, memory_format=torch.contiguous_format)
                copy = call(_aten.view.default, copy, shape)
            elif (order := [how.order.index(d) for d in range(len(how.order))]) != sorted(order):
                copy = call(_aten.permute.default, copy, order)
    if is_cast(reader.target):
        reader.replace_all_uses_with(copy)
    else:
        reader.replace_input_with(result, copy)


def sizes(graph: fx.Graph, shape: Sequence[Any]) -> list[Any] | None:
    """Return sizes for a call: numbers, and the nodes that have the others; None if a size has no node."""
    if all(isinstance(n, int) for n in shape):
        return list(shape)
    nodes = {expression(n.meta["val"]): n for n in graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)}
    result = [n if isinstance(n, int) else nodes.get(expression(n)) for n in shape]
    return None if None in result else result
