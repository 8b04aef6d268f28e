"""Define maxima over windows of an image as operators that keep what was taken in a byte.

    max_pool(x, ...)                 ->   max_pool_maxima(x, ...), max_pool_places(x, ...)
    max_pool_backward(g, taken, ...) ->   element-wise operators

A cluster reduces windows for the two of the forward. The backward asks the few windows that an element is in
which of them took it: it reads a byte for each, where PyTorch's has eight, and fills and adds to nothing. As
element-wise work it also joins clusters that reduce its result, as the gradient of a norm does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._meta_registrations import pooling_output_shape
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

from fusion_compiler.ops.own.define import define

aten = torch.ops.aten
NOWHERE = -(1 << 12)  # with any number added no element's number
_GEOMETRY = "int[2] kernel, int[2] stride, int[2] padding, bool ceil_mode"


@dataclass(frozen=True)
class Windows:
    """Windows lie along one dimension: there are `count` of `kernel` elements, `step` apart, over `size`
    elements, and the first begins `before` these. No element is between two windows."""

    size: int
    kernel: int
    step: int
    before: int
    count: int

    @property
    def bits(self) -> int:
        """Return how many bits of an element's number say where in a row of the window it is, or how far
        behind."""
        return (max(self.kernel, self.shared * self.step) - 1).bit_length()

    @property
    def shared(self) -> int:
        """Return the most windows in which an element is."""
        return -(-self.kernel // self.step)

    def begins(self, windows: Tensor) -> Tensor:
        return windows * self.step - self.before

    def holding(self, places: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the windows that may hold each element, from the last to the first: (which, and where in it
        the element is; a place far from all numbers if there is no such window)."""
        ahead = places + self.before
        if not self.step & (self.step - 1):
            last, inside = ahead >> self.step.bit_length() - 1, ahead & self.step - 1
        else:
            last = torch.div(ahead, self.step, rounding_mode="floor")
            inside = ahead - last * self.step
        windows: list[tuple[Tensor, Tensor]] = []
        for number in range(self.shared):
            window, at = last - number, inside + number * self.step
            if self.before // self.step < number:
                at = torch.where(window >= 0, at, NOWHERE)
            if (self.size - 1 + self.before) // self.step - number >= self.count:
                at = torch.where(window < self.count, at, NOWHERE)
            windows.append((window.clamp(0, self.count - 1), at))
        return windows


def windows_of(image: Sequence[int], *geometry: Any) -> tuple[Windows, Windows]:
    """Return the windows along the height and the width of an image. geometry: kernel, stride, padding,
    ceil_mode."""
    *pairs, ceil_mode = geometry
    high, wide = (
        Windows(size, k, s, p, int(pooling_output_shape(size, k, p, s, 1, ceil_mode)))
        for size, k, s, p in zip(image, *pairs, strict=True)
    )
    return high, wide


def _maxima(x: Tensor, kernel: Any, stride: Any, padding: Any, ceil_mode: bool) -> Tensor:
    """Return the maxima of the windows of x [..., h, w]."""
    return aten.max_pool2d_with_indices.default(x, kernel, stride, padding, [1, 1], ceil_mode)[0]


def _places(x: Tensor, *geometry: Any) -> Tensor:
    """Return the number, in int8, of the element of x [..., h, w] that is the maximum of each window."""
    kernel, stride, padding, ceil_mode = geometry
    high, wide = windows_of(x.shape[-2:], *geometry)
    index = aten.max_pool2d_with_indices.default(x, kernel, stride, padding, [1, 1], ceil_mode)[1]
    rows, cols = index // wide.size, index % wide.size
    rows = rows - high.begins(_count(high.count, x.device))[:, None]
    return ((rows << wide.bits) + cols - wide.begins(_count(wide.count, x.device))).to(torch.int8)


def _both(x: Tensor, *geometry: Any) -> tuple[Tensor, Tensor]:
    """Return the maxima of the windows of x [..., h, w], and the number of the element of each."""
    return maxima(x, *geometry), places(x, *geometry)


def _count(most: int, device: torch.device) -> Tensor:
    return torch.arange(most, device=device, dtype=torch.int32)


def _sent_back(gradient: Tensor, taken: Tensor, image: Sequence[int], *geometry: Any) -> Tensor:
    """Return the image's gradient: for each element, the sum of the gradients of the windows in which it was
    taken."""
    high, wide = windows_of(image, *geometry)
    rows, cols = (n.holding(_count(n.size, gradient.device)) for n in (high, wide))
    half = gradient.dtype in (torch.float16, torch.bfloat16)
    total: Any = None
    for (row, i), (col, j) in itertools.product(rows, cols):
        was = _picked(taken, row, col) == (i[:, None] << wide.bits) + j
        sent = _picked(gradient, row, col).to(torch.float32 if half else gradient.dtype)
        sent = torch.where(was, sent, 0)
        total = sent if total is None else total + sent
    return total.to(gradient.dtype)


def _picked(x: Tensor, rows: Tensor, cols: Tensor) -> Tensor:
    """Return x [..., rows, cols], laid out in memory as x is."""
    if suggest_memory_format(x) is torch.channels_last:
        inner = aten._unsafe_index.Tensor(x.permute(0, 2, 3, 1), [None, rows[:, None], cols])
        return inner.permute(0, 3, 1, 2)
    return aten._unsafe_index.Tensor(x, [None] * (x.ndim - 2) + [rows[:, None], cols])


def _gradient(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    (taken,) = ctx.saved_tensors
    return max_pool_backward(gradient, taken, *ctx.geometry), None, None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *geometry = inputs
    ctx.geometry = (x.shape[-2:], *geometry)
    ctx.save_for_backward(output[1])


_SCHEMA = f"(Tensor input, {_GEOMETRY}) -> "
maxima = define("max_pool_maxima", f"{_SCHEMA}Tensor", _maxima)
places = define("max_pool_places", f"{_SCHEMA}Tensor", _places)
max_pool = define("max_pool", f"{_SCHEMA}(Tensor, Tensor)", _both, gradient=_gradient, save=_save)
max_pool_backward = define(
    "max_pool_backward", f"(Tensor grad, Tensor taken, int[2] image, {_GEOMETRY}) -> Tensor", _sent_back
)

OPERATORS = (max_pool, maxima, places, max_pool_backward)
FORMULAS: dict[OpOverload, Callable[..., Any]] = {max_pool: _both, max_pool_backward: _sent_back}
