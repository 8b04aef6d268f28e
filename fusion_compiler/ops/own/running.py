"""Define running maxima and minima as operators of one result each.

ATen's cummax and cummin have two results, and a cluster's operators have one: the value and the place where
it stands, that of the last among equals, are operators of their own. What computes both shares the maxima.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload

from fusion_compiler.ops.own.define import define


def _define(name: str, call: Callable[[Tensor, int], Sequence[Tensor]], result: int) -> OpOverload:
    def run(x: Tensor, dim: int) -> Tensor:
        return call(x, dim)[result]

    def fake(x: Tensor, dim: int) -> Tensor:
        dtype = torch.int64 if result else x.dtype
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)

    return define(name, "(Tensor self, int dim) -> Tensor", run, fake)


largest = _define("running_largest", torch.cummax, 0)
smallest = _define("running_smallest", torch.cummin, 0)
where_largest = _define("where_largest", torch.cummax, 1)
where_smallest = _define("where_smallest", torch.cummin, 1)
