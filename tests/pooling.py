"""Random windows of pooling: sizes, strides, paddings, both orders of memory, and all options of averages."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion_compiler.ops.own import max_pool

aten = torch.ops.aten


@dataclass(frozen=True)
class Pooling:
    """Windows over images [batch, channels, *size]. last: which of image and gradient have channels last.
    seed: of the values, the same for the same case."""

    batch: int
    channels: int
    size: tuple[int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    ceil_mode: bool
    count_include_pad: bool
    divisor_override: int | None
    last: tuple[bool, bool]
    seed: int

    @property
    def windows(self) -> tuple[list[int], list[int], list[int], bool]:
        return [*self.kernel], [*self.stride], [*self.padding], self.ceil_mode

    @property
    def averages(self) -> tuple[Any, ...]:
        return *self.windows, self.count_include_pad, self.divisor_override

    def tensors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return an image and a gradient of the result."""
        generator = torch.Generator().manual_seed(self.seed)
        image = torch.randn(self.batch, self.channels, *self.size, generator=generator)
        gradient = torch.randn(F.avg_pool2d(image, *self.windows).shape, generator=generator)
        x, g = (
            t.to(dtype).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
            for t, last in zip((image, gradient), self.last, strict=True)
        )
        return x, g


def average(case: Pooling, x: Tensor, gradient: Tensor) -> Tensor:
    return F.avg_pool2d(x, *case.averages)


def average_gradient(case: Pooling, x: Tensor, gradient: Tensor) -> Tensor:
    return aten.avg_pool2d_backward.default(gradient, x, *case.averages)


def maximum(case: Pooling, x: Tensor, gradient: Tensor) -> Tensor:
    return max_pool.maxima(x, *case.windows)


def place(case: Pooling, x: Tensor, gradient: Tensor) -> Tensor:
    return max_pool.places(x, *case.windows)


POOLINGS = {"average": average, "average gradient": average_gradient, "maximum": maximum, "place": place}


def pooling_cases(count: int) -> Iterator[Pooling]:
    """Draw cases by the seed that tests have."""
    draw = random.Random(int(torch.randint(2**31, ())))
    for _ in range(count):
        kernel = draw.randint(1, 4), draw.randint(1, 4)
        stride = kernel if draw.random() < 0.3 else (draw.randint(1, 4), draw.randint(1, 4))
        padding = draw.randint(0, kernel[0] // 2), draw.randint(0, kernel[1] // 2)
        high, wide = (max(1, k - 2 * p) + draw.randint(0, 7) for k, p in zip(kernel, padding, strict=True))
        last = draw.random() < 0.5, draw.random() < 0.5
        flags = draw.random() < 0.5, draw.random() < 0.5, draw.choice([None, None, 1, 3, -2])
        batch, channels, seed = draw.randint(1, 3), draw.randint(1, 5), draw.randrange(2**31)
        yield Pooling(batch, channels, (high, wide), kernel, stride, padding, *flags, last, seed)
