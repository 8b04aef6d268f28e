"""Attention of few queries, as decoding has it, is work for clusters.

    sdpa(q, k, v, mask)   ->   attend(q, k, v, mask, scale, chunk)   (`ops/own/few_queries.py`)

Such a call takes as long as keys and values are read. A library gives each head to a few programs, and a call
with a mask to a kernel that is made for many queries. `ops.decompositions.few_queries` writes the call out in
as many chunks of keys as keep the entire device reading, and the planner makes two kernels of that.
"""

from __future__ import annotations

import math

import torch
from torch import fx

from fusion_compiler.capture.graphs import ancestors, arguments, emit, is_trained, replaced_by
from fusion_compiler.ir.graph_pass import Pass, Refused
from fusion_compiler.ops.decompositions.tensors import hinted
from fusion_compiler.ops.own.few_queries import attend
from fusion_compiler.ops.schema import runs_no_kernel
from fusion_compiler.passes.rewrites.engine import Replacement, Replacements
from fusion_compiler.passes.rewrites.grouped_query import repeated

_aten = torch.ops.aten
_SDPA = _aten.scaled_dot_product_attention.default
RULE = "decode attention"
MOST_QUERIES = 8  # that share a head's keys: each has its scores in registers
MOST_HEAD = 256
KEYS = 2  # dimension of keys and values
TILE = 16384  # elements of a chunk's keys: half of them make twice as many partial results
LEAST_CHUNK, MOST_CHUNKS = 16, 2048  # keys of a chunk; chunks of a head, which one program adds up
PROGRAMS = 264  # two for each multiprocessor of the largest device


def _look(call: fx.Node, written: set[fx.Node]) -> Replacement | str | None:
    if _queries(call) > MOST_QUERIES:
        return None
    return _refusal(call) or Replacement(lambda nodes: _attend(nodes[call]), _described(call))


def _queries(call: fx.Node) -> int:
    """Return how many queries share a head of keys, or more than MOST_QUERIES if that is not known."""
    named = arguments(call)
    query, key = (named[n].meta["val"].shape for n in ("query", "key"))
    sizes = (*query[1:3], key[1]) if len(query) == len(key) == 4 else ()
    if not sizes or not all(isinstance(n, int) for n in sizes) or not query[1] or not key[1]:
        return MOST_QUERIES + 1
    return max(1, query[1] // key[1]) * query[2]


def _refusal(call: fx.Node) -> str:
    named = arguments(call)
    tensors = [named[n].meta["val"] for n in ("query", "key", "value")]
    query, key, value = tensors
    if is_trained(ancestors(call)):
        return "its gradient is wanted"
    sizes = [*query.shape[1:], *(n for t in (key, value) for n in (t.shape[1], t.shape[-1]))]
    if not all(isinstance(n, int) and n > 0 for n in sizes):
        return "its sizes are only known at run time"
    if not all(hinted(n) for n in (query.shape[0], key.shape[KEYS])):
        return "how many queries or keys it has, data decides"
    if not isinstance(key.shape[KEYS], int):
        if hinted(key.shape[KEYS]) <= 2 * LEAST_CHUNK:
            return "how many keys it has is only known at run time, and these are few"
        if _viewed(named["key"]).target is _aten.cat.default:  # no number of chunks would fit for long
            return "its keys grow from call to call"
    if named["dropout_p"] or named["is_causal"]:
        return "its weights are dropped" if named["dropout_p"] else "a causal mask is not written out"
    if query.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"scores of {query.dtype} are not float32"
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0]:
        return "keys and values are not of one shape"
    if query.shape[1] != key.shape[1] and (query.shape[2] > 1 or not named["enable_gqa"]):
        return "heads are not grouped around one query"
    if max(query.shape[-1], value.shape[-1]) > MOST_HEAD:
        return f"heads of {query.shape[-1]} are larger than {MOST_HEAD}"
    mask = named["attn_mask"]
    heads = 1 if mask is None or mask.meta["val"].dim() < 3 else mask.meta["val"].shape[-3]
    if mask is not None and (mask.meta["val"].dim() > 4 or (query.shape[1] != key.shape[1] and heads != 1)):
        return "its mask is not one for each query of a key's head"
    return ""


def _described(call: fx.Node) -> str:
    keys, chunk = _keys(call), _chunk(call)
    count = keys if isinstance(keys, int) else f"{keys} (now {hinted(keys)})"
    return f"{count} keys of each head in {-(-hinted(keys) // chunk)} chunks of {chunk}: clusters"


def _keys(call: fx.Node) -> int | torch.SymInt:
    return arguments(call)["key"].meta["val"].shape[KEYS]


def _viewed(node: fx.Node) -> fx.Node:
    """Return the tensor that a node is a view of, if need be through several views."""
    while runs_no_kernel(node.target) and isinstance(source := node.args[0], fx.Node):
        node = source
    return node


def _floor(n: int) -> int:
    """Return the largest power of two that is no larger than n, or 1."""
    return 1 << max(0, n.bit_length() - 1)


def _ceiling(n: int) -> int:
    """Return the smallest power of two that is no smaller than n."""
    return 1 << max(0, n - 1).bit_length()


def _chunk(call: fx.Node) -> int:
    """Return the keys of a chunk: few enough to keep every multiprocessor reading, and to fit a tile."""
    named = arguments(call)
    batch, heads, *_ = named["key"].meta["val"].shape
    keys = hinted(_keys(call))
    size = max(named[n].meta["val"].shape[-1] for n in ("key", "value"))
    fair = max(LEAST_CHUNK, _floor(hinted(batch) * heads * keys // PROGRAMS))
    chunk = min(fair, max(LEAST_CHUNK, TILE // _ceiling(size)), max(LEAST_CHUNK, _ceiling(keys)))
    if not isinstance(_keys(call), int):  # a graph for one chunk would not fit other numbers of chunks
        chunk = min(chunk, _floor(keys // 2))
    return max(chunk, _ceiling(-(-keys // MOST_CHUNKS)))


def _attend(call: fx.Node, capped: float | None = None) -> fx.Node:
    """Emit the operator's call, in which each head of the keys has all of its queries."""
    named, shape = arguments(call), call.meta["val"].shape
    query, mask = named["query"], named["attn_mask"]
    batch, heads, _, size = named["key"].meta["val"].shape
    batch = batch if isinstance(batch, int) else -1
    scale = 1 / math.sqrt(size) if named["scale"] is None else named["scale"]
    grouped = emit(call, _aten.reshape.default, query, [batch, heads, _queries(call), size])
    for _ in range(0 if mask is None else 4 - mask.meta["val"].dim()):
        mask = emit(call, _aten.unsqueeze.default, mask, 0)
    if mask is not None and mask.meta["val"].shape[-1] == 1:
        keys = named["key"].meta["val"].shape[2]
        mask = emit(call, _aten.expand.default, mask, [-1, -1, -1, keys])
    result = emit(call, attend, grouped, named["key"], named["value"], mask, scale, _chunk(call), capped)
    return emit(call, _aten.reshape.default, result, [batch, *shape[1:]])


def capped_attention(call: fx.Node, capped: float) -> fx.Node:
    """Replace an attention call that nothing reads by the operator, with scores scale * tanh(capped * q k').

    Raises Refused if it has many queries, or would stay a call for another reason.
    """
    named = arguments(call)
    key, value = (repeated(named[n]) for n in ("key", "value"))
    if key is not None and value is not None and named["query"].meta["val"].shape[2] == 1:
        call.args = (call.args[0], key, value, *call.args[3:])
        call.kwargs = {**call.kwargs, "enable_gqa": True}
    if _queries(call) > MOST_QUERIES:
        raise Refused("tanh of the scores of many queries")
    if reason := _refusal(call):
        raise Refused(f"tanh of the scores, and {reason}")
    return replaced_by(call, _attend(call, capped))


DECODE_ATTENTION = Pass(
    RULE,
    Replacements(RULE, (_SDPA,), _look),
    does="Compute attention of up to eight queries a head of keys in clusters.",
    when="inference with keys of a known length",
    rounds_as_eager=False,
)
