"""Random depthwise convolutions: shapes, strides, paddings, dilations and both orders of memory."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


@dataclass(frozen=True)
class Depthwise:
    """A convolution of images [batch, channels, *size] or sequences; last: which of image, kernel and
    gradient have channels last. seed: of the values, the same for the same case."""

    batch: int
    channels: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    last: tuple[bool, bool, bool]
    seed: int

    @property
    def geometry(self) -> tuple[list[int], list[int], list[int]]:
        return [*self.stride], [*self.padding], [*self.dilation]

    @property
    def result(self) -> tuple[int, ...]:
        sizes = zip(self.size, self.kernel, *self.geometry, strict=True)
        places = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes]
        return self.batch, self.channels, *places

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Image, kernel, and gradient of the result."""
        generator = torch.Generator().manual_seed(self.seed)
        shapes = ((self.batch, self.channels, *self.size), (self.channels, 1, *self.kernel), self.result)
        values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        x, weight, gradient = (
            t.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
            for t, last in zip(values, self.last, strict=True)
        )
        return x, weight, gradient

    def eager(self, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The result, and the gradients of image and kernel, by PyTorch's library."""
        rest: tuple[Any, ...] = (*self.geometry, False, [0] * len(self.size), self.channels)
        y = aten.convolution.default(x, weight, None, *rest)
        gradients = aten.convolution_backward.default(gradient, x, weight, None, *rest, [True, True, False])
        return y, gradients[0], gradients[1]


def depthwise_cases(count: int, ranks: Sequence[int] = (1, 2)) -> Iterator[Depthwise]:
    """Draw cases by the seed that tests have. ranks: dimensions of the windows."""
    draw = random.Random(int(torch.randint(2**31, ())))
    for _ in range(count):
        rank = draw.choice(ranks)

        def sizes(low: int, high: int, rank: int = rank) -> tuple[int, ...]:
            return tuple(draw.randint(low, high) for _ in range(rank))

        kernel, stride, padding, dilation = sizes(1, 4), sizes(1, 3), sizes(0, 4), sizes(1, 3)
        reaches = zip(kernel, dilation, padding, sizes(0, 7), strict=True)
        size = tuple(max(1, d * (k - 1) + 1 - 2 * p) + more for k, d, p, more in reaches)
        last = tuple(rank == 2 and draw.random() < 0.5 for _ in range(3))
        batch, channels, seed = draw.randint(1, 3), draw.randint(1, 5), draw.randrange(2**31)
        yield Depthwise(batch, channels, size, kernel, stride, padding, dilation, last, seed)  # type: ignore[arg-type]
