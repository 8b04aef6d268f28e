"""Calls of attention with a mask that no flash kernel takes are written out, for one nest forward and a few
backward (`passes.nests.attention`).

    sdpa(q, k, v, mask)   ->   safe_softmax(q @ k^T * scale, masked) @ v

PyTorch computes such a call with a kernel that reads the mask for all scores. A nest computes a mask from
what it is made of, and leaves out the keys that it hides.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments, emit, stored_in_order
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.ir.loops import MOST_FEATURES
from fusion_compiler.ops.decompositions.tensors import hinted
from fusion_compiler.ops.schema import HALVES
from fusion_compiler.passes.rewrites.engine import Replacement, Replacements, steps

_aten = torch.ops.aten
_SDPA = _aten.scaled_dot_product_attention.default
RULE = "masked attention"
LEAST_GAIN = 2  # in a nest, scores have at least so many times the elements of queries and keys
DEVICES = ("cuda",)  # on a CPU, PyTorch's call with a mask is the better one


def _look(call: fx.Node, written: set[fx.Node]) -> Replacement | str | None:
    named = arguments(call)
    if named["attn_mask"] is None or call.meta["val"].device.type not in DEVICES:
        return None
    if named["is_causal"]:
        return "it has a mask, and is causal beside that"
    reason = refusal(*(named[n] for n in ("query", "key", "value")))
    return reason or Replacement(lambda nodes: _write_out(nodes[call]), "written out for a nest")


def refusal(query: fx.Node, key: fx.Node, value: fx.Node) -> str:
    """Return why a library's call computes attention with a mask, or "" if a nest does."""
    q, k, v = (n.meta["val"] for n in (query, key, value))
    if q.device.type not in DEVICES:
        return f"on {q.device.type} a library computes it"
    if q.dtype not in HALVES or not q.dtype == k.dtype == v.dtype:
        return f"scores of {q.dtype} are multiplied by a library"
    if q.dim() != 4 or k.dim() != 4:
        return "it has no four dimensions"
    (rows, keys), width = (hinted(x.shape[2]) for x in (q, k)), hinted(k.shape[3])
    if (widest := max(width, hinted(v.shape[3]))) > MOST_FEATURES:
        return f"heads of {widest} are wider than {MOST_FEATURES}"
    if rows * keys < LEAST_GAIN * (rows + keys) * width:
        return "its scores are few beside queries and keys"
    return ""


def _write_out(call: fx.Node) -> fx.Node:
    named = arguments(call)
    query, key, value, mask = (named[n] for n in ("query", "key", "value", "attn_mask"))
    scale = 1 / math.sqrt(query.meta["val"].shape[-1]) if named["scale"] is None else named["scale"]
    heads, shared = query.meta["val"].shape[1], key.meta["val"].shape[1]
    if heads != shared:
        repeat = _aten.repeat_interleave.self_int
        key, value = (emit(call, repeat, x, heads // shared, 1) for x in (key, value))
    scores = emit(call, _aten.matmul.default, query, emit(call, _aten.transpose.int, key, -2, -1))
    scores = emit(call, _aten.mul.Tensor, scores, scale)
    if mask.meta["val"].dtype is torch.bool:
        scores = emit(call, _aten.where.ScalarOther, mask, scores, -math.inf)
    else:
        scores = emit(call, _aten.add.Tensor, scores, mask)
    weights = emit(call, _aten._safe_softmax.default, scores, -1)
    if named["dropout_p"]:
        weights = emit(call, _aten.dropout.default, weights, named["dropout_p"], True)
    result, called = emit(call, _aten.matmul.default, weights, value), call.meta["val"]
    return result if steps(result.meta["val"]) == steps(called) else stored_in_order(call, result, called)


MASKED_ATTENTION = Pass(
    RULE,
    Replacements(RULE, (_SDPA,), _look),
    does="Write out attention calls whose mask no flash kernel takes, so that they become nests.",
    when="16-bit dtypes on a GPU, and more scores than elements of queries and keys",
    gains="no mask is stored, and keys that it hides are not read",
    rounds_as_eager=False,
    needs="general attention",
)
