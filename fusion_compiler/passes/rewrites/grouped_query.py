"""Keys and values of grouped-query attention are not repeated in memory.

    sdpa(q, repeat(k, n), repeat(v, n))   ->   sdpa(q, k, v, enable_gqa=True)

where repeat is unsqueeze-expand-reshape (repeat_kv of transformers) or repeat_interleave over
the heads. It applies only if the flash kernel, which reads each key head for n query heads, takes
the call: 16 bits on CUDA, no mask tensor, head sizes up to 256. Elsewhere PyTorch would repeat
the heads itself, in the slower math path.

    sdpa(q, repeat(k, n), repeat(v, n), mask)   ->   sdpa(q as n queries of a key's head, k, v, mask)

for one query a head, as in decoding, and a mask that is the same for all heads: any kernel reads that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments, emit
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.passes.rewrites.axes import shape_of
from fusion_compiler.passes.rewrites.engine import Replacement, Replacements

_aten = torch.ops.aten
_SDPA = _aten.scaled_dot_product_attention.default
RULE = "grouped queries"
MAX_HEAD = 256


def _look(call: fx.Node, written: set[fx.Node]) -> Replacement | str | None:
    named = arguments(call)
    if repeated(named["key"]) is None or repeated(named["value"]) is None:
        return None
    if not _is_one_query(call) and (reason := _refusal(call)):
        return reason
    return Replacement(lambda nodes: _group(nodes[call]), "repeated key and value heads are read in place")


def _group(call: fx.Node) -> fx.Node:
    named = arguments(call)
    key, value = (repeated(named[n]) for n in ("key", "value"))
    assert key is not None
    named["key"], named["value"] = key, value
    beside = _is_one_query(call)
    named["enable_gqa"] = not beside
    positional = [a.name for a in _SDPA._schema.arguments if not a.kwarg_only]
    shape = [*call.meta["val"].shape]
    if beside:
        heads = key.meta["val"].shape[1]
        apart = [shape[0], heads, shape[1] // heads]
        named["query"] = emit(call, _aten.reshape.default, named["query"], [*apart, -1])
    grouped = emit(call, _SDPA, *(named.pop(name) for name in positional), **named)
    return emit(call, _aten.reshape.default, grouped, shape) if beside else grouped


def _is_one_query(call: fx.Node) -> bool:
    """True if a call has one query for each head, and a mask that is the same for all heads."""
    named = arguments(call)
    query, mask = named["query"].meta["val"], named["attn_mask"]
    if query.dim() != 4 or mask is None or named["is_causal"] or named["enable_gqa"]:
        return False
    sizes = (*query.shape, mask.meta["val"].shape[-3] if mask.meta["val"].dim() > 2 else 1)
    return all(isinstance(n, int) for n in (sizes[1], sizes[3])) and sizes[2] == 1 and sizes[4] == 1


def _refusal(call: fx.Node) -> str:
    named, result = arguments(call), call.meta["val"]
    if named["attn_mask"] is not None:
        return "a mask keeps the call from the flash kernel"
    if result.device.type != "cuda" or result.dtype not in (torch.float16, torch.bfloat16):
        return f"no flash kernel for {result.dtype} on {result.device.type}"
    head = result.shape[-1]
    if not isinstance(head, int) or head > MAX_HEAD or named["query"].meta["val"].shape[-1] != head:
        return f"no flash kernel for heads of {head}"
    return ""


def repeated(heads: fx.Node) -> fx.Node | None:
    """Return the [batch, heads / n, length, size] tensor whose heads `heads` repeats, or None."""
    if heads.target is _aten.repeat_interleave.self_int:
        named = arguments(heads)
        rank = heads.meta["val"].dim()
        return named["self"] if rank == 4 and named["dim"] in (1, -3) else None
    if heads.target not in (_aten.reshape.default, _aten.view.default, _aten._unsafe_view.default):
        return None
    expanded = heads.args[0]
    if not isinstance(expanded, fx.Node) or expanded.target is not _aten.expand.default:
        return None
    unsqueezed = _unsliced(expanded.args[0])
    if unsqueezed.target is not _aten.unsqueeze.default:
        return None
    source = unsqueezed.args[0]
    assert isinstance(source, fx.Node)
    narrow, wide, flat = shape_of(unsqueezed), shape_of(expanded), shape_of(heads)
    if len(narrow) != 5 or narrow[2] != 1 or arguments(unsqueezed)["dim"] % 5 != 2:
        return None
    same_but_repeated = wide == (*narrow[:2], wide[2], *narrow[3:])
    merged = flat == (wide[0], wide[1] * wide[2], *wide[3:])
    return source if same_but_repeated and merged else None


def _unsliced(node: Any) -> fx.Node:
    """Return `node` before slices that take everything, as x[:, :, None] leaves them for symbolic sizes."""
    while node.target is _aten.slice.Tensor and shape_of(node) == shape_of(node.args[0]):
        node = node.args[0]
    return node


GROUPED_QUERIES = Pass(
    RULE,
    Replacements(RULE, (_SDPA,), _look),
    does="Do not repeat the keys and values of grouped-query attention in memory.",
    when="a kernel reads each key head for several query heads",
)
