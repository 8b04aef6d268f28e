"""Define attention of few queries, which takes as long as its keys and values are read.

This is one operator, so that a graph says so until `ops.decompositions.few_queries` writes it out in
chunks of keys.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fusion_compiler.ops.own.define import define


def _run(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    chunk: int,
    capped: float | None,
) -> Tensor:
    """Return the attention [batch, heads, queries, width]. query: [batch, heads, queries, size], key: [batch,
    heads, keys, size], value: [batch, heads, keys, width], mask: [batch or 1, heads or 1, queries or 1,
    keys], of bool or added. capped: scores are scale * tanh(capped * q k')."""
    if capped is None:
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(query, key, value, mask, scale=scale).contiguous()
    scores = scale * torch.tanh(capped * (query.float() @ key.float().transpose(-1, -2)))
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    hidden = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.softmax(-1).masked_fill(hidden, 0)
    return (weights @ value.float()).to(query.dtype)


attend = define(
    "attend",
    "(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, int chunk, float? capped) -> Tensor",
    _run,
    lambda query, key, value, *_: query.new_empty((*query.shape[:-1], value.shape[-1])),
)
