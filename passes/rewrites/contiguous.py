"""A sequence that comes in transposed memory order is laid out by rows once.

    y = elementwise(transpose(conv(x)), ...)   ->   y = contiguous(elementwise(...))

Element-wise ops hand the strides of their operands on: after a convolution over time, the whole
residual stream of a speech encoder lies feature by feature, and every normalization along the
features and every linear reads it across the grain. The copy costs nothing: it is the order in
which the kernel that computes y stores it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fusion_compiler.ops import Kind, spec_of
from fusion_compiler.passes.rewrites.graphs import copied
from fusion_compiler.passes.rewrites.record import Notes, RewriteNote

_aten = torch.ops.aten
RULE = "row order"
RANK = 3  # (batch, length, features): images keep channels-last, which convolutions ask for


def order_rows(gm: fx.GraphModule) -> tuple[fx.GraphModule, Notes]:
    """Store by rows what element-wise ops of `gm` would hand on in another order."""
    found = [node for node in gm.graph.nodes if _starts_stream(node)]
    notes = tuple(RewriteNote(RULE, n.name, True, f"strides {tuple(n.meta['val'].stride())}") for n in found)
    if not found:
        return gm, ()
    new, nodes = copied(gm)
    for old in found:
        node = nodes[old]
        with new.graph.inserting_after(node):
            ordered = new.graph.call_function(_aten.contiguous.default, (node,))
        ordered.meta = {**node.meta, "val": node.meta["val"].contiguous()}
        node.replace_all_uses_with(ordered, delete_user_cb=lambda user, own=ordered: user is not own)
        nodes[old] = ordered
    _return_as_before(gm, found, nodes)
    new.recompile()
    return new, notes


def _return_as_before(
    gm: fx.GraphModule, found: Sequence[fx.Node], nodes: Mapping[fx.Node, fx.Node]
) -> None:
    """Lay out again what is returned and made of the nodes found; a copy only where the order is another."""
    made, stack = set(found), list(found)
    while stack:
        more = [user for user in stack.pop().users if user not in made]
        made.update(more)
        stack += more
    output = gm.graph.output_node()
    for old in made & set(output.all_input_nodes):
        value, node = old.meta.get("val"), nodes[old]
        if not isinstance(value, torch.Tensor) or not _is_dense(value):
            continue
        order = sorted(range(value.dim()), key=lambda d, v=value: (-v.stride(d), d))
        back = sorted(range(value.dim()), key=order.__getitem__)
        (returned,) = (n for n in node.graph.find_nodes(op="output"))
        with node.graph.inserting_before(returned):
            turned = node.graph.call_function(_aten.permute.default, (node, order))
            turned.meta = {**node.meta, "val": value.permute(order)}
            rows = node.graph.call_function(_aten.contiguous.default, (turned,))
            rows.meta = {**node.meta, "val": turned.meta["val"].contiguous()}
            same = node.graph.call_function(_aten.permute.default, (rows, back))
            same.meta = {**node.meta, "val": rows.meta["val"].permute(back)}
        returned.replace_input_with(node, same)


def _is_dense(value: torch.Tensor) -> bool:
    """Whether a tensor of known size fills its memory, each element once."""
    if any(isinstance(s, torch.SymInt) for s in (*value.shape, *value.stride())):
        return False
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _starts_stream(node: fx.Node) -> bool:
    """An element-wise op that itself mixes orders: a later one gets its operands in row order already."""
    if not _is_transposed(node) or not _is_elementwise(node):
        return False
    return not any(_is_elementwise(source) and _is_transposed(source) for source in node.all_input_nodes)


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
