"""Multiply each row by the matrix that it chooses, as a mixture of experts does.

This is one operator, so that the chosen matrices are never gathered in memory: a cluster that holds it reads
them where they are (`passes.lower.products`), and a call of it is PyTorch's grouped product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion_compiler.ops.own.define import define


def _empty(like: Tensor, count: int, width: int) -> Tensor:
    """Return an empty [count, width], whose rows begin at multiples of 16 bytes, as PyTorch's grouped product
    has them."""
    word = 16 // like.dtype.itemsize
    return like.new_empty_strided((count, width), (-(-width // word) * word, 1))


def _run(rows: Tensor, matrices: Tensor, expert: Tensor) -> Tensor:
    """Return [S, n]: rows[r] @ matrices[expert[r]]. rows: [S, k], matrices: [E, k, n], both of one float
    dtype, expert: int64 [S] within 0 <= e < E."""
    numbers = torch.arange(len(matrices), device=expert.device)
    ends = (expert <= numbers[:, None]).sum(1, dtype=torch.int32)
    order = expert.argsort()
    held = _empty(rows, *rows.shape).copy_(rows[order])
    products = torch._grouped_mm(held, matrices, ends)
    return _empty(products, *products.shape).index_copy_(0, order, products)


expert_mm = define(
    "expert_mm",
    "(Tensor rows, Tensor matrices, Tensor expert) -> Tensor",
    _run,
    lambda rows, matrices, expert: _empty(rows, rows.shape[0], matrices.shape[-1]),
)
