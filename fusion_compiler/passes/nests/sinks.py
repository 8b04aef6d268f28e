"""Attention sinks: a column of scores that has no value is part of a sum, and no part of a tensor.

    p = softmax(cat([s, sink], -1), -1)[..., :-1]

    m = maximum(amax(s, -1), sink);  e = exp(s - m);  p = e * reciprocal(sum(e, -1) + exp(sink - m))

The gradient takes m for a constant, as the one of softmax does. A row that a mask hides is 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments, emit
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.passes.rewrites.attention_form import SOFTMAXES
from fusion_compiler.passes.rewrites.engine import Nodes, Replacement, Replacements

_aten = torch.ops.aten
RULE = "attention sinks"


def _look(node: fx.Node, written: set[fx.Node]) -> Replacement | None:
    """Return the replacement of a slice that leaves out a column of probabilities."""
    named = arguments(node)
    softmax, last = named["self"], named["self"].meta["val"].dim() - 1
    if softmax.target not in SOFTMAXES or named["dim"] % (last + 1) != last or named["step"] != 1:
        return None
    size = softmax.meta["val"].shape[-1]
    if named["start"] not in (0, None) or named["end"] not in (-1, size - 1) or len(softmax.users) > 1:
        return None
    source = arguments(softmax)["self"]
    joined = _unshifted(source)
    if joined.target is not _aten.cat.default or arguments(softmax)["dim"] % (last + 1) != last:
        return None
    parts, dim = arguments(joined)["tensors"], arguments(joined)["dim"]
    if len(parts) != 2 or dim % (last + 1) != last or parts[1].meta["val"].shape[-1] != 1:
        return None
    if written & {softmax, source, joined, *parts}:
        return None

    def make(nodes: Nodes) -> fx.Node:
        scores, sink = (_wide(nodes[node], nodes[part], softmax) for part in parts)
        return _weights(nodes[node], scores, sink)

    return Replacement(make, f"{parts[1].name} is added to the sums of {parts[0].name}", (softmax,))


def _unshifted(node: fx.Node) -> fx.Node:
    """Return the scores whose largest of each row are subtracted, or the node itself."""
    if node.target is not _aten.sub.Tensor or not all(isinstance(a, fx.Node) for a in node.args[:2]):
        return node
    source, largest = node.args[:2]
    assert isinstance(source, fx.Node) and isinstance(largest, fx.Node)
    most = largest.all_input_nodes[0] if "getitem" in str(largest.target) else largest
    is_largest = most.target in (_aten.max.dim, _aten.amax.default) and most.args[0] is source
    dims = arguments(most).get("dim") if is_largest else None
    last = source.meta["val"].dim() - 1
    along = [dims] if isinstance(dims, int) else dims or []
    return source if [d % (last + 1) for d in along] == [last] else node


def _wide(like: fx.Node, node: fx.Node, softmax: fx.Node) -> fx.Node:
    """Emit a part of the scores in the dtype of the softmax."""
    dtype = softmax.meta["val"].dtype
    return node if node.meta["val"].dtype == dtype else emit(like, _aten.to.dtype, node, dtype)


def _weights(like: fx.Node, scores: fx.Node, sink: fx.Node) -> fx.Node:
    def call(target: Any, *args: Any) -> fx.Node:
        return emit(like, target, *args)

    largest = call(_aten.maximum.default, call(_aten.amax.default, scores, [-1], True), sink)
    largest = call(_aten.detach.default, largest)
    terms = call(_aten.exp.default, call(_aten.sub.Tensor, scores, largest))
    rest = call(_aten.exp.default, call(_aten.sub.Tensor, sink, largest))
    total = call(_aten.add.Tensor, call(_aten.sum.dim_IntList, terms, [-1], True), rest)
    return call(_aten.mul.Tensor, terms, call(_aten.reciprocal.default, total))


ATTENTION_SINKS = Pass(
    RULE,
    Replacements(RULE, (_aten.slice.Tensor,), _look),
    does="Add a column of scores without values to the sums of a softmax.",
    when="the last column of its result is cut off",
    gains="scores and their column are never copied into one tensor",
    rounds_as_eager=False,
)
