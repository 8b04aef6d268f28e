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
from torch._ops import OpOverload

from fusion_compiler.ops.own.define import define

_SCHEMA = (
    "(Tensor rows, Tensor? order, Tensor? first, Tensor last, int each=1, int unit=1, int block=0) -> Tensor"
)


def _define(name: str, reduce: str, neutral: float) -> OpOverload:
    """Define an operator, and return it.

    rows: [N, C] of a float dtype, order: int64 [P], each of 0 <= i < N * each, or None for 0, 1, ...,
    first and last: int64 [R] -> [R, C]: result[r] is what rows[order[j] // each] come to over the places j of
    `ends`, sums in float32 at least; `neutral` where there is none.
    """

    def run(
        rows: Tensor, order: Tensor | None, first: Tensor | None, last: Tensor,
        each: int = 1, unit: int = 1, block: int = 0,
    ) -> Tensor:  # fmt: skip
        begins, stops = ends(first, last, unit, block)
        counts = (stops - begins).clamp_min(0)
        numbers = torch.arange(len(last), device=rows.device).repeat_interleave(counts)
        places = torch.arange(len(numbers), device=rows.device)
        places = places + (begins - counts.cumsum(0) + counts)[numbers]
        places = places if order is None else order[places]
        wide = rows[places // each].to(torch.promote_types(rows.dtype, torch.float32))
        total = torch.full((len(last), rows.shape[1]), neutral, dtype=wide.dtype, device=rows.device)
        return total.scatter_reduce_(0, numbers[:, None].expand_as(wide), wide, reduce).to(rows.dtype)

    def fake(rows: Tensor, order: object, first: object, last: Tensor, *_: int) -> Tensor:
        return rows.new_empty((last.shape[0], rows.shape[1]))

    return define(name, _SCHEMA, run, fake)


def ends(first: Tensor | None, last: Tensor, unit: int, block: int) -> tuple[Tensor, Tensor]:
    """Return where the places of each result begin and end, [R] each.

    first and last count places of `unit` rows, rounded up. With a block, places end before the next multiple
    of it; without `first`, result r begins at r * block.
    """
    stops = up(last, unit)
    if first is None:
        begins = torch.arange(len(last), device=last.device) * block
        return begins, torch.minimum(stops, begins + block)
    begins = up(first, unit)
    return begins, torch.minimum(stops, up(begins, block) * block) if block else stops


def up(places: Tensor, unit: int) -> Tensor:
    return (places + (unit - 1)) // unit


sum_rows = _define("sum_rows", "sum", 0.0)
largest_rows = _define("largest_rows", "amax", -math.inf)
smallest_rows = _define("smallest_rows", "amin", math.inf)
COMBINES = {sum_rows: "sum", largest_rows: "max", smallest_rows: "min"}
