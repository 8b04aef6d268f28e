"""Rows that a model computes and drops are not computed.

    linear(x, w, b).float()[:, :-1]   ->   linear(x[:, :-1], w, b).float()

A loss of shifted labels is written so: the last position has nothing to predict. This saves little time, but
the loss and the product then have the same rows, so that the logits can be computed in chunks
(`passes/chunks`). The gradient of the rows that were dropped is zero either way.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments, emit
from fusion_compiler.ir.dag import CONVERSIONS
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.ops.table import Kind, spec_of
from fusion_compiler.passes.rewrites.engine import Nodes, Replacement, Replacements

_aten = torch.ops.aten
RULE = "dropped rows"


def _look(cut: fx.Node, written: set[fx.Node]) -> Replacement | None:
    chain = _chain(cut)
    if not chain or not written.isdisjoint((cut, *chain)):
        return None

    def moved(nodes: Nodes) -> fx.Node:
        return _moved(nodes[cut], [nodes[n] for n in chain])

    return Replacement(moved, _reason(cut, chain[0]))


def _chain(cut: fx.Node) -> list[fx.Node]:
    """Return the linear whose rows are cut and the pointwise calls between it and the slice `cut`.

    Return [] for any other slice, and if other nodes read the linear or one of the calls.
    """
    named = arguments(cut)
    value, operand = cut.meta["val"], named["self"].meta["val"]
    along_rows = named["dim"] % value.dim() != value.dim() - 1
    if not along_rows or named["step"] != 1 or value.shape == operand.shape:
        return []
    chain = [named["self"]]
    while _is_pointwise(chain[0]) and len(chain[0].users) == 1:
        chain.insert(0, chain[0].all_input_nodes[0])
    linear = chain[0]
    if linear.target is not _aten.linear.default or len(linear.users) != 1:
        return []
    features, hidden = (n if isinstance(n, int) else 0 for n in arguments(linear)["weight"].meta["val"].shape)
    return chain if features > hidden else []  # the remaining part of the input may be copied


def _is_pointwise(node: fx.Node) -> bool:
    """True for a call that computes each element from one element of its one operand, of the same shape."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1:
        return False
    spec = spec_of(node.target)
    computes = spec is not None and spec.kind is Kind.ELEMENTWISE and spec.expr is not None
    if not computes and getattr(node.target, "_opname", "") not in CONVERSIONS:
        return False
    result, operand = node.meta["val"], node.all_input_nodes[0].meta["val"]  # the operand may be a size
    return isinstance(operand, torch.Tensor) and result.shape == operand.shape


def _reason(cut: fx.Node, linear: fx.Node) -> str:
    computed, read = (tuple(n.meta["val"].shape[:-1]) for n in (linear, cut))
    return f"of rows {computed} the model reads {read}"


def _moved(cut: fx.Node, chain: list[fx.Node]) -> fx.Node:
    linear, *others = chain
    named = arguments(linear)
    part = emit(cut, _aten.slice.Tensor, named["input"], *cut.args[1:])
    result = emit(linear, _aten.linear.default, part, named["weight"], named["bias"])
    for node in others:
        operands: Any = [result if a in chain else a for a in node.args]
        target: Any = node.target
        result = emit(node, target, *operands, **node.kwargs)
    return result


DROPPED_ROWS = Pass(
    RULE,
    Replacements(RULE, (_aten.slice.Tensor,), _look),
    does="Do not compute rows of a product that nothing reads.",
    when="all readers take the same rows",
    gains="the loss of shifted labels can be computed in chunks",
)
