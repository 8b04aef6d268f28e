"""Decompose operators that draw random numbers into numbers by seed and place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from fusion_compiler.ops.decompositions.eager import assert_probabilities
from fusion_compiler.ops.decompositions.tensors import widened
from fusion_compiler.ops.own import random

aten = torch.ops.aten

_FEWER_BITS = (torch.float32, torch.bfloat16, torch.float16)  # than eager has for float64
_NOT_PROBABILITIES = "probability tensor contains `inf`, `nan` or an element < 0, or its sum is not positive"


class RandomOperators:
    """Write the random operators of one capture in uniform numbers. Each call that is traced has another
    salt."""

    def __init__(self) -> None:
        self._salts = itertools.count()

    def table(self) -> dict[OpOverload, Callable[..., Any]]:
        """Return ATen overload -> its decomposition."""
        return {
            aten.exponential.default: self.exponential,
            aten.multinomial.default: self.multinomial,
            aten.native_dropout.default: self.native_dropout,
            aten.bernoulli.default: self.bernoulli,
            aten.bernoulli.p: self.bernoulli_p,
            aten.rand.default: self.rand,
            aten.rand_like.default: self.rand_like,
        }

    def _numbers(self, shape: Sequence[int], device: torch.device) -> Tensor:
        return random.uniform(random.seed(device), shape, next(self._salts))

    def native_dropout(self, x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
        if train is False or p == 0:
            return x.clone(), torch.ones_like(x, dtype=torch.bool)
        if p == 1:
            return torch.zeros_like(x), torch.zeros_like(x, dtype=torch.bool)
        keep = self._numbers(x.shape, x.device) >= p
        return native_dropout_backward(x, keep, 1 / (1 - p)), keep

    def bernoulli_p(self, x: Tensor, p: float = 0.5, *, generator: object = None) -> Any:
        refused = generator or not 0 <= p <= 1
        return NotImplemented if refused else (self._numbers(x.shape, x.device) < p).to(x.dtype)

    def bernoulli(self, x: Tensor, *, generator: object = None) -> Any:
        if generator:
            return NotImplemented
        assert_probabilities(x, "p")
        return (self._numbers(x.shape, x.device) < x).to(x.dtype)

    def rand(
        self, shape: Sequence[int], *, dtype: torch.dtype | None = None, device: Any = None, **_: Any
    ) -> Any:
        # Only float32 has as many random bits as eager gives.
        if (dtype or torch.get_default_dtype()) is not torch.float32:
            return NotImplemented
        return self._numbers(shape, torch.device(device or torch.get_default_device()))

    def rand_like(self, x: Tensor, *, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> Any:
        return self.rand(x.shape, dtype=dtype or x.dtype, device=device or x.device)

    def exponential(self, x: Tensor, lambd: float = 1, *, generator: object = None) -> Any:
        if generator or x.dtype not in _FEWER_BITS:
            return NotImplemented
        u = self._numbers(x.shape, x.device)
        least = 2**-25  # is never 0, as in eager
        return (torch.where(u > 0, -torch.log1p(-u), least) / lambd).to(x.dtype)

    def multinomial(self, p: Tensor, n: int, replacement: bool = False, *, generator: object = None) -> Any:
        """Return the places where exponential variables over p are least. Eager computes the same, and its
        host waits for checks."""
        if generator or p.dtype not in _FEWER_BITS or (replacement and n > 1):
            return NotImplemented
        wide = p.float()
        times = wide / self.exponential(wide)
        finite = (wide.amax(-1) < math.inf) & (wide.amin(-1) >= 0)
        aten._assert_async.msg((finite & (wide.sum(-1) > 0)).all(), _NOT_PROBABILITIES)
        return times.argmax(-1, keepdim=True) if n == 1 else times.topk(n, -1).indices


def native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    wide = widened(grad)
    # A choice between two numbers, and a product.
    return (wide * (mask.to(wide.dtype) * scale)).to(grad.dtype)
