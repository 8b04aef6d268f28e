"""Copies beside a nest, which needs none: it reads operands as they lie, and stores results as they are read.

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
from fusion_compiler.ops.views import Permuted
from fusion_compiler.passes.nests.region import is_pointwise
from fusion_compiler.passes.rewrites.axes import COPIES, rearrangement
from fusion_compiler.passes.rewrites.mask_algebra import expression

_aten = torch.ops.aten


def is_free_copy(node: fx.Node) -> bool:
    """True of a copy in another order, if a nest reads its operand as well: that one's elements lie side by
    side along one of the last two dimensions, which a tile has. Copies that repeat elements are another
    matter: to a chain of products, repeated heads are an axis that keys do not have."""
    if node.target not in COPIES:
        return False
    strides = node.all_input_nodes[0].meta["val"].stride()
    numbers = [stride for stride in strides if isinstance(stride, int)]
    return 1 in numbers[-2:] and 0 not in numbers


def copy_behind(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the views of a result up to the one copy that the graph makes of it, the copy included. Return
    () if there is no such copy, or if others than element-wise operators read the result too."""
    path, tag = list[fx.Node](), node.meta.get("partitioner_tag")
    current = node
    while not path or path[-1].target not in COPIES - {_aten.alias.default}:
        moved = [u for u in current.users if rearrangement(u) is not None]
        others = [u for u in current.users if u not in moved]
        if len(moved) != 1 or moved[0].meta.get("partitioner_tag") != tag:
            return ()
        if others and (path or not all(is_pointwise(u) and not is_view_node(u) for u in others)):
            return ()
        if sizes(node.graph, current.meta["val"].shape) is None:
            return ()
        path.append(current := moved[0])
    return tuple(path)


def before_copy(path: Sequence[fx.Node], copy: fx.Node, reader: fx.Node) -> fx.Node:
    """Emit, before a reader, the result from the copy at the end of a path, and return it."""
    tag = {k: v for k, v in reader.meta.items() if k == "partitioner_tag"}

    def call(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        emitted = emit(reader, target, *args, **kwargs)
        emitted.meta.update(tag)
        return emitted

    with reader.graph.inserting_before(reader):
        for node in reversed(path):
            how, operand = rearrangement(node), node.all_input_nodes[0]
            if not isinstance(how, Permuted):
                shape = sizes(reader.graph, operand.meta["val"].shape)
                copy = call(_aten.clone.default, copy, memory_format=torch.contiguous_format)
                copy = call(_aten.view.default, copy, shape)
            elif (order := [how.order.index(d) for d in range(len(how.order))]) != sorted(order):
                copy = call(_aten.permute.default, copy, order)
    return copy


def sizes(graph: fx.Graph, shape: Sequence[Any]) -> list[Any] | None:
    """Return sizes for a call: numbers, and the nodes that have the others; None if a size has no node."""
    nodes = {expression(n.meta["val"]): n for n in graph.nodes if isinstance(n.meta.get("val"), torch.SymInt)}
    result = [n if isinstance(n, int) else nodes.get(expression(n)) for n in shape]
    return None if None in result else result
