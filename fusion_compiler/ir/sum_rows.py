"""Rows that have a number each, added up or compared by it, as operators of one result.

    index_put(base, [index], rows, accumulate=True)   ->   base + sum_rows(rows, order, bounds)
    scatter_reduce(base, 0, index, rows, "amax")      ->   maximum(base, largest_rows(rows, order, bounds))

with order, the rows' numbers sorted by index, and bounds, where those of each index begin among them. ATen's
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

    rows: [N, C] of a float dtype, order: int64 [N], each of 0 <= i < N once, bounds: int64 [R + 1], rising
    from 0 to N -> [R, C]: result[r] is what rows[order[j]] come to over bounds[r] <= j < bounds[r + 1], sums
    in float32 at least; `neutral` where there is no such j.
    """
    torch.library.define(f"fusion_compiler::{name}", "(Tensor rows, Tensor order, Tensor bounds) -> Tensor")

    def run(rows: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
        numbers = torch.arange(len(bounds) - 1, device=rows.device)
        own = numbers.repeat_interleave(bounds.diff(), output_size=len(order))
        wide = rows[order].to(torch.promote_types(rows.dtype, torch.float32))
        total = torch.full((len(numbers), rows.shape[1]), neutral, dtype=wide.dtype, device=rows.device)
        return total.scatter_reduce_(0, own[:, None].expand_as(wide), wide, reduce).to(rows.dtype)

    def fake(rows: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
        return rows.new_empty((bounds.shape[0] - 1, rows.shape[1]))

    torch.library.impl(f"fusion_compiler::{name}", "CompositeExplicitAutograd")(run)
    torch.library.register_fake(f"fusion_compiler::{name}")(fake)


for _name, (_reduce, _neutral) in _REDUCES.items():
    _define(_name, _reduce, _neutral)

sum_rows = torch.ops.fusion_compiler.sum_rows.default
largest_rows = torch.ops.fusion_compiler.largest_rows.default
smallest_rows = torch.ops.fusion_compiler.smallest_rows.default
COMBINES = {sum_rows: "sum", largest_rows: "max", smallest_rows: "min"}
