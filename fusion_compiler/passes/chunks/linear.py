"""A proof, read from the graph step by step, that gradients are proportional to a factor."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from fusion_compiler.capture.graphs import arguments
from fusion_compiler.ir.layout import view_of_node
from fusion_compiler.ops.facts import linear_in
from fusion_compiler.passes.chunks.generated import number_in
from fusion_compiler.passes.chunks.region import dependents


def linear(graph: fx.Graph, factor: fx.Node) -> set[fx.Node]:
    """Return `factor` and the nodes that are proportional to it."""
    after, proportional = dependents(graph, [factor]), {factor}
    for node in graph.nodes:
        reads = after.intersection(node.all_input_nodes)
        if node in after and reads <= proportional and _is_linear(node, reads):
            proportional.add(node)
    return proportional


def _is_linear(node: fx.Node, reads: set[fx.Node]) -> bool:
    """True if a node is proportional to the factor. reads: its operands that depend on the factor, all of
    which are proportional to it."""
    groups = linear_in(node.target)
    if not groups or not node.meta["val"].is_floating_point():
        return False
    named = arguments(node)
    for group in groups:
        inside = tree_leaves([named[name] for name in group])
        others = tree_leaves([value for name, value in named.items() if name not in group])
        if all(is_zero(n) or n in reads for n in inside) and not any(n in reads for n in others):
            return True
    return False


def is_zero(value: Any) -> bool:
    """True for the number zero, and for a tensor that is filled with it."""
    if not isinstance(value, fx.Node):
        return isinstance(value, int | float) and value == 0
    return number_in(value) == 0 if view_of_node(value) is None else is_zero(value.args[0])
