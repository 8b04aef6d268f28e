"""Attention of few queries, which takes as long as its keys and values are read.

An operator of its own, so that a graph says so until `capture.few_queries` writes it out in chunks of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAME = "fusion_compiler::attend"
torch.library.define(
    NAME, "(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale, int chunk) -> Tensor"
)

attend = torch.ops.fusion_compiler.attend.default


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def _run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, chunk: int) -> Tensor:
    """query: [batch, heads, queries, size], key: [batch, heads, keys, size], value: [batch, heads, keys,
    width], mask: [batch or 1, heads or 1, queries or 1, keys], of bool or added -> [batch, heads, queries,
    width]."""
    result = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale)
    return result.contiguous()


@torch.library.register_fake(NAME)
def _fake(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, chunk: int) -> Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))
