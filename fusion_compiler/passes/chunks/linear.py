"""A proof, read from the graph step by step, that gradients are proportional to a factor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fusion_compiler.ops.table import Kind, spec_of
from fusion_compiler.passes.chunks.rows import of_sizes

aten = torch.ops.aten

_SAME = frozenset({
    aten._to_copy.default, aten.clone.default, aten.neg.default, aten.expand.default, aten.sum.default,
    aten.sum.dim_IntList,
})  # fmt: skip
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
_TIMES = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.mm.default})
_QUOTIENTS = frozenset({aten.div.Tensor, aten.div.Scalar})


def linear(graph: fx.Graph, factor: fx.Node) -> set[fx.Node]:
    """Return `factor` and the nodes that are proportional to it."""
    proportional = {factor}
    after = {factor}
    for node in graph.nodes:
        if not of_sizes(node) and not after.isdisjoint(node.all_input_nodes):
            after.add(node)
            if _is_linear(node, {n: n in proportional for n in node.all_input_nodes if n in after}):
                proportional.add(node)
    return proportional


def _is_linear(node: fx.Node, reads: Mapping[fx.Node, bool]) -> bool:
    """True if a node is proportional to the factor.

    reads: the operands that depend on the factor, and whether they are proportional to it.
    """
    if not all(reads.values()) or node.op != "call_function":
        return False
    target, operands = node.target, [a for a in node.args if isinstance(a, fx.Node)]
    if target in _SAME:
        value = node.meta["val"]
        return value.is_floating_point()
    if target in _SUMS:
        return len(operands) == 2 and all(is_zero(n) or n in reads for n in operands)
    if target in _TIMES:
        return sum(n in reads for n in operands) == 1
    if target in _QUOTIENTS:
        return node.args[0] in reads and node.args[1] not in reads and not node.kwargs
    if target is aten.where.self:
        return node.args[0] not in reads and all(is_zero(a) or a in reads for a in node.args[1:])
    if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        return node.args[1] not in reads and is_zero(node.args[2])
    if target in (aten.scatter.src, aten.scatter_add.default):
        base, _, index, source = node.args
        return index not in reads and source in reads and (base in reads or is_zero(base))
    spec = spec_of(target)
    if target is aten.constant_pad_nd.default:
        return len(node.args) < 3 or is_zero(node.args[2])
    moves = (Kind.LAYOUT,)
    return spec is not None and spec.kind in moves and len(operands) == 1 and not _puts_together(node)


def _puts_together(node: fx.Node) -> bool:
    return node.target in (
        aten.cat.default,
        aten.stack.default,
        aten.slice_scatter.default,
        aten.select_scatter.default,
    )


def is_zero(value: Any) -> bool:
    """True for the number zero, and for a tensor that is filled with it."""
    if isinstance(value, fx.Node):
        if value.target in (aten.expand.default, aten.zeros_like.default):
            return value.target is aten.zeros_like.default or is_zero(value.args[0])
        if value.target is aten.scalar_tensor.default:
            return is_zero(value.args[0])
        return value.target in (aten.full.default, aten.full_like.default) and is_zero(value.args[1])
    return isinstance(value, int | float) and value == 0
