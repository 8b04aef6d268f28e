"""Define running maxima and minima as operators of one result each.

ATen's cummax and cummin have two results, and a cluster's operators have one: the value and the place where
it stands, that of the last among equals, are operators of their own. What computes both shares the maxima.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload

from fusion_compiler.ops.own.define import define

_CALLS = {"largest": torch.cummax, "smallest": torch.cummin}


def _define(name: str, call: str, result: int) -> OpOverload:
    def run(x: Tensor, dim: int) -> Tensor:
        return _CALLS[call](x, dim)[result]

    def fake(x: Tensor, dim: int) -> Tensor:
        dtype = torch.int64 if result else x.dtype
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    return define(name, "(Tensor self, int dim) -> Tensor", run, fake)


largest = _define("running_largest", "largest", 0)
smallest = _define("running_smallest", "smallest", 0)
where_largest = _define("where_largest", "largest", 1)
where_smallest = _define("where_smallest", "smallest", 1)
