"""A sequence in transposed memory order is stored by rows once.

    y = elementwise(transpose(conv(x)), ...)   ->   y = contiguous(elementwise(...))

Results of element-wise ops have the strides of their operands: after a convolution over time, the
entire residual stream of a speech encoder lies feature by feature, and every normalization along
the features and every linear reads it with large strides. The copy costs nothing: it is the order
in which the kernel that computes y stores it.
"""

from __future__ import annotations

import functools

import torch
from torch import fx
from torch._ops import OpOverload

from fusion_compiler.ir.decision import Decisions
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.ir.layout import is_view_node
from fusion_compiler.ir.walk import reached
from fusion_compiler.ops.products import factors_of
from fusion_compiler.ops.table import Kind, spec_of
from fusion_compiler.passes.rewrites.engine import Nodes, Site, edited

_aten = torch.ops.aten
RULE = "contiguous activations"
RANK = 3  # (batch, length, features): images keep channels-last, which convolutions ask for


def make_activations_contiguous(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Store by rows the results of element-wise ops of `gm` that would be in another order."""
    starts = [n for n in gm.graph.nodes if _starts_stream(n) and _is_read_by_rows(n) and not shows(n)]
    return edited(gm, [Site(RULE, node.name, functools.partial(_store_by_rows, node)) for node in starts])


def _store_by_rows(stored: fx.Node, nodes: Nodes) -> str:
    node = nodes[stored]
    with node.graph.inserting_after(node):
        ordered = node.graph.call_function(_aten.contiguous.default, (node,))
    ordered.meta = {**node.meta, "val": node.meta["val"].contiguous()}
    node.replace_all_uses_with(ordered, delete_user_cb=lambda user: user is not ordered)
    return f"strides {tuple(node.meta['val'].stride())}"


def _starts_stream(node: fx.Node) -> bool:
    """True for the first element-wise op of a transposed stream: later ones read its result in row order."""
    if not _is_transposed(node) or not _is_elementwise(node):
        return False
    return not any(_is_elementwise(source) and _is_transposed(source) for source in node.all_input_nodes)


def _is_read_by_rows(node: fx.Node) -> bool:
    """True unless each reader takes transposed factors, as bmm does, or is a view in row order."""

    def takes_columns(reader: fx.Node) -> bool:
        factors = factors_of(reader.target)
        if factors is not None and factors.rank is not None:  # matmul and linear copy what they fold
            return True
        return is_view_node(reader) and reader.meta["val"].stride(-1) == 1

    return not all(map(takes_columns, node.users))


def shows(node: fx.Node) -> bool:
    """True if a result of the graph would have other strides if `node` had."""
    readers = reached(node.users, lambda user: user.users if _hands_on(user) else ())
    return any(reader.op == "output" for reader in readers)


def _hands_on(node: fx.Node) -> bool:
    """True if a node's strides may depend on its operands': it is a view, or not in row order."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or not value.is_contiguous():
        return True
    return isinstance(node.target, OpOverload) and any(r.alias_info for r in node.target._schema.returns)


def _is_transposed(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == RANK
        and not any(isinstance(s, torch.SymInt) for s in (*value.shape, *value.stride()))
        and value.shape[-1] > 1
        and value.stride(-1) != 1
        and not value.is_contiguous()
    )


def _is_elementwise(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    spec = spec_of(node.target)
    return spec is not None and spec.kind is Kind.ELEMENTWISE and node.target is not _aten.clone.default


CONTIGUOUS_ACTIVATIONS = Pass(
    RULE,
    make_activations_contiguous,
    does="Store activations by rows that a convolution over time leaves transposed.",
    when="norms or linears read them along the rows",
)
