"""Rows that have a number each, added up or compared by it, as operators of one result.

    index_put(x, [index], rows, accumulate=True)   ->   x + sum_rows(rows, order, first, last)
    scatter_reduce(x, 0, index, rows, "amax")      ->   maximum(x, largest_rows(rows, order, first, last))

with order, the rows' numbers sorted by index, and where those of each number begin and end among them. ATen's
operators are a library's, whose kernels no cluster has a part in; these are a cluster's.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_REDUCES = {
    "sum_rows": ("sum", 0.0),
    "largest_rows": ("amax", -math.inf),
    "smallest_rows": ("amin", math.inf),
}


def _define(name: str, reduce: str, neutral: float) -> None:
    """Define an operator.

    rows: [N, C] of a float dtype, order: int64 [P], each of 0 <= i < N, first and last: int64 [R], each of
    0 <= i <= P -> [R, C]: result[r] is what rows[order[j]] come to over first[r] <= j < last[r], sums in
    float32 at least; `neutral` where there is no such j.
    """
    schema = "(Tensor rows, Tensor order, Tensor first, Tensor last) -> Tensor"
    torch.library.define(f"fusion_compiler::{name}", schema)

    def run(rows: Tensor, order: Tensor, first: Tensor, last: Tensor) -> Tensor:
        counts = (last - first).clamp_min(0)
        numbers = torch.arange(len(first), device=rows.device).repeat_interleave(counts)
        begins = first - counts.cumsum(0) + counts
        places = begins[numbers] + torch.arange(len(numbers), device=rows.device)
        wide = rows[order[places]].to(torch.promote_types(rows.dtype, torch.float32))
        total = torch.full((len(first), rows.shape[1]), neutral, dtype=wide.dtype, device=rows.device)
        return total.scatter_reduce_(0, numbers[:, None].expand_as(wide), wide, reduce).to(rows.dtype)

    def fake(rows: Tensor, order: Tensor, first: Tensor, last: Tensor) -> Tensor:
        return rows.new_empty((first.shape[0], rows.shape[1]))

    torch.library.impl(f"fusion_compiler::{name}", "CompositeExplicitAutograd")(run)
    torch.library.register_fake(f"fusion_compiler::{name}")(fake)


for _name, (_reduce, _neutral) in _REDUCES.items():
    _define(_name, _reduce, _neutral)

sum_rows = torch.ops.fusion_compiler.sum_rows.default
largest_rows = torch.ops.fusion_compiler.largest_rows.default
smallest_rows = torch.ops.fusion_compiler.smallest_rows.default
COMBINES = {sum_rows: "sum", largest_rows: "max", smallest_rows: "min"}
