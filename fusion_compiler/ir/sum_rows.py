"""Rows added up by a number that each has, as an operator of one result.

    index_put(base, [index], rows, accumulate=True)   ->   base + sum_rows(rows, order, bounds)

with order, the rows' numbers sorted by index, and bounds, where those of each index begin among them. ATen's
operator is a library's, whose kernel no cluster has a part in; this one is a cluster's.
"""

from __future__ import annotations

import torch
from torch import Tensor

NAME = "fusion_compiler::sum_rows"
torch.library.define(NAME, "(Tensor rows, Tensor order, Tensor bounds) -> Tensor")

sum_rows = torch.ops.fusion_compiler.sum_rows.default


@torch.library.impl(NAME, "CompositeExplicitAutograd")
def _run(rows: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
    """rows: [N, C] of a float dtype, order: int64 [N], each of 0 <= i < N once, bounds: int64 [R + 1], rising
    from 0 to N -> [R, C]: result[r] is the sum of rows[order[j]] over bounds[r] <= j < bounds[r + 1], added
    up in float32 at least."""
    numbers = torch.arange(len(bounds) - 1, device=rows.device)
    own = numbers.repeat_interleave(bounds.diff(), output_size=len(order))
    wide = torch.promote_types(rows.dtype, torch.float32)
    total = torch.zeros(len(numbers), rows.shape[1], dtype=wide, device=rows.device)
    return total.index_add_(0, own, rows[order].to(wide)).to(rows.dtype)


@torch.library.register_fake(NAME)
def _fake(rows: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
    return rows.new_empty((bounds.shape[0] - 1, rows.shape[1]))
