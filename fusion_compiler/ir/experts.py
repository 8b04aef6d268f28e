"""Rows times matrices of which each row chooses one, as a mixture of experts has them.

An operator of its own, so that what is chosen is never gathered in memory: a cluster that holds it reads the
chosen matrices where they are (`passes.lower.products`), and a call of it is PyTorch's grouped product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

NAME = "fusion_compiler::expert_mm"
torch.library.define(NAME, "(Tensor rows, Tensor matrices, Tensor expert) -> Tensor")

expert_mm = torch.ops.fusion_compiler.expert_mm.default


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def _run(rows: Tensor, matrices: Tensor, expert: Tensor) -> Tensor:
    """rows: [S, k], matrices: [E, k, n], both of one float dtype, expert: int64 [S] within 0 <= e < E that
    never falls -> [S, n]: rows[r] @ matrices[expert[r]]."""
    numbers = torch.arange(len(matrices), device=expert.device)
    ends = (expert <= numbers[:, None]).sum(1, dtype=torch.int32)
    return torch._grouped_mm(rows, matrices, ends)


@torch.library.register_fake(NAME)
def _fake(rows: Tensor, matrices: Tensor, expert: Tensor) -> Any:
    """Rows begin at multiples of 16 bytes, as those of PyTorch's grouped product do."""
    count, width = rows.shape[0], matrices.shape[-1]
    word = 16 // rows.dtype.itemsize
    return rows.new_empty_strided((count, width), (-(-width // word) * word, 1))
