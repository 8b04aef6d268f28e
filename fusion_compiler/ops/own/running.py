"""Define running maxima and minima as operators of one result each.

ATen's cummax and cummin have two results, and a cluster's operators have one: the value and the place where
it stands, that of the last among equals, are operators of their own. What computes both shares the maxima.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CALLS = {"largest": torch.cummax, "smallest": torch.cummin}


def _define(name: str, call: str, result: int) -> None:
    torch.library.define(f"fusion_compiler::{name}", "(Tensor self, int dim) -> Tensor")

    def run(x: Tensor, dim: int) -> Tensor:
        return _CALLS[call](x, dim)[result]

    def fake(x: Tensor, dim: int) -> Tensor:
        dtype = torch.int64 if result else x.dtype
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    torch.library.impl(f"fusion_compiler::{name}", "CompositeExplicitAutograd")(run)
    torch.library.register_fake(f"fusion_compiler::{name}")(fake)


for _call in _CALLS:
    _define(f"running_{_call}", _call, 0)
    _define(f"where_{_call}", _call, 1)

largest = torch.ops.fusion_compiler.running_largest.default
smallest = torch.ops.fusion_compiler.running_smallest.default
where_largest = torch.ops.fusion_compiler.where_largest.default
where_smallest = torch.ops.fusion_compiler.where_smallest.default
