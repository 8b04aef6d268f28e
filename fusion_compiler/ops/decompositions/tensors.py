"""Compute with tensors as every decomposition does: wide, over dimensions, from coordinates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fusion_compiler.ops.schema import HALVES


def on_gpu(x: Tensor) -> bool:
    return x.device.type == "cuda"


def widened(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype in HALVES else x


def count_of(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[dim] for dim in dims)


def sum_over(x: Tensor, dims: Sequence[int], keepdim: bool = False) -> Tensor:
    return torch.sum(x, list(dims), keepdim=keepdim) if x.ndim else x


def zero_like(like: Tensor) -> Tensor:
    return torch.zeros((), dtype=like.dtype, device=like.device)


def coordinates(size: int, dim: int, like: Tensor) -> Tensor:
    """Return 0 .. size - 1 along `dim`, to be broadcast against `like`."""
    return torch.arange(size, device=like.device).view([-1 if d == dim else 1 for d in range(like.ndim)])


def hinted(size: int | torch.SymInt) -> int:
    """Return the size in the captured call, which decides what is fast, not what is right; 0 if it is
    unknown."""
    return int(size if isinstance(size, int) else size.node.hint or 0)
