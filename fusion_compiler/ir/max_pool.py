"""Maxima over windows of an image as operators that keep what was taken in a byte.

The forward compares the elements of each window, wherever they come from. The backward asks the few windows
that an element is in which of them took it: it reads a byte for each, where PyTorch's has eight, and fills
and adds to nothing. `formulas` is what a graph holds of both: element-wise operators.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._meta_registrations import pooling_output_shape
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format

aten = torch.ops.aten
NOWHERE = -(1 << 12)  # with any number added no element's number
NAME, BACKWARD = "fusion_compiler::max_pool", "fusion_compiler::max_pool_backward"
_GEOMETRY = "int[2] kernel, int[2] stride, int[2] padding, bool ceil_mode"
torch.library.define(NAME, f"(Tensor input, {_GEOMETRY}) -> (Tensor, Tensor)")
torch.library.define(BACKWARD, f"(Tensor grad, Tensor taken, int[2] image, {_GEOMETRY}) -> Tensor")

max_pool = torch.ops.fusion_compiler.max_pool.default
max_pool_backward = torch.ops.fusion_compiler.max_pool_backward.default


@dataclass(frozen=True)
class Windows:
    """Along one dimension: `count` windows of `kernel` elements, `step` apart, over `size` ones, of which the
    first begins `before` these. No element is between two windows."""

    size: int
    kernel: int
    step: int
    before: int
    count: int

    @property
    def beyond(self) -> int:
        """Elements of the last window behind the image."""
        return max(0, (self.count - 1) * self.step + self.kernel - self.before - self.size)

    @property
    def bits(self) -> int:
        """Of an element's number, those that say where in a row of the window it is, or how far behind."""
        return (max(self.kernel, self.shared * self.step) - 1).bit_length()

    @property
    def shared(self) -> int:
        """Windows that an element is in, at most."""
        return -(-self.kernel // self.step)

    def begins(self, windows: Tensor) -> Tensor:
        return windows * self.step - self.before

    def holding(self, places: Tensor) -> list[tuple[Tensor, Tensor]]:
        """The windows that may hold each element, from the last to the first: (which, and where in it the
        element is; far from all numbers where there is no such window)."""
        ahead = places + self.before
        if not self.step & (self.step - 1):
            last, inside = ahead >> self.step.bit_length() - 1, ahead & self.step - 1
        else:
            last = torch.div(ahead, self.step, rounding_mode="floor")
            inside = ahead - last * self.step
        found: list[tuple[Tensor, Tensor]] = []
        for number in range(self.shared):
            window, at = last - number, inside + number * self.step
            if self.before // self.step < number:
                at = torch.where(window >= 0, at, NOWHERE)
            if (self.size - 1 + self.before) // self.step - number >= self.count:
                at = torch.where(window < self.count, at, NOWHERE)
            found.append((window.clamp(0, self.count - 1), at))
        return found


def windows_of(image: Sequence[int], *geometry: Any) -> tuple[Windows, Windows]:
    """Those along the height and the width of an image. geometry: kernel, stride, padding, ceil_mode."""
    *pairs, ceil_mode = geometry
    high, wide = (
        Windows(size, k, s, p, int(pooling_output_shape(size, k, p, s, 1, ceil_mode)))
        for size, k, s, p in zip(image, *pairs, strict=True)
    )
    return high, wide


def _largest(x: Tensor, *geometry: Any) -> tuple[Tensor, Tensor]:
    """x [..., h, w] -> maxima of its windows, and the number of the element of each, int8."""
    high, wide = windows_of(x.shape[-2:], *geometry)
    filled = F.pad(x, [wide.before, wide.beyond, high.before, high.beyond], value=-math.inf)
    largest = _element(filled, high, wide, 0, 0)
    taken = _first_inside(high, wide, x.device).expand(largest.shape)
    for i, j in itertools.product(range(high.kernel), range(wide.kernel)):
        if i or j:
            element = _element(filled, high, wide, i, j)
            larger = (element > largest) | torch.isnan(element)
            largest = torch.where(larger, element, largest)
            taken = torch.where(larger, (i << wide.bits) + j, taken)
    order = suggest_memory_format(x)
    return largest.contiguous(memory_format=order), taken.to(torch.int8).contiguous(memory_format=order)


def _element(filled: Tensor, high: Windows, wide: Windows, i: int, j: int) -> Tensor:
    """Of each window the one in row i and column j."""
    rows = aten.slice.Tensor(filled, -2, i, i + (high.count - 1) * high.step + 1, high.step)
    return aten.slice.Tensor(rows, -1, j, j + (wide.count - 1) * wide.step + 1, wide.step)


def _first_inside(high: Windows, wide: Windows, device: torch.device) -> Tensor:
    """The number of each window's first element in the image: taken where all are -inf, [h, w], int32."""
    rows, cols = ((-n.begins(_count(n.count, device))).clamp_min(0) for n in (high, wide))
    return (rows[:, None] << wide.bits) + cols


def _count(most: int, device: torch.device) -> Tensor:
    return torch.arange(most, device=device, dtype=torch.int32)


def _sent_back(gradient: Tensor, taken: Tensor, image: Sequence[int], *geometry: Any) -> Tensor:
    """The image's gradient: each element's sum of those of the windows in which it was taken."""
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
    """x [..., rows, cols], laid out in memory as x is."""
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


for _name, _formula in ((NAME, _largest), (BACKWARD, _sent_back)):
    torch.library.impl(_name, "CompositeExplicitAutograd")(_formula)
    torch.library.register_fake(_name)(_formula)
torch.library.register_autograd(NAME, _gradient, setup_context=_save)

FORMULAS: dict[OpOverload, Callable[..., Any]] = {max_pool: _largest, max_pool_backward: _sent_back}
