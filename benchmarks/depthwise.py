"""python -m benchmarks depthwise: depthwise convolutions and their gradients beside the library's.

Images lie channels last. The shapes are those of EfficientNet-B0 and MobileNetV3 with 128 images, of
ConvNeXt-T with 64, and of a Conformer's 32 sequences.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import kernels
from benchmarks.case import Case
from benchmarks.record import Record

DEPTHWISE = "depthwise"
# images, their height and width, channels, kernel, stride
IMAGES = (
    (128, 112, 32, 3, 1), (128, 112, 96, 3, 2), (128, 56, 144, 3, 1), (128, 56, 144, 5, 2),
    (128, 28, 240, 5, 1), (128, 28, 240, 3, 2), (128, 14, 480, 3, 1), (128, 14, 672, 5, 1),
    (128, 14, 672, 5, 2), (128, 7, 1152, 5, 1), (128, 112, 16, 3, 1), (128, 28, 120, 5, 1),
    (128, 14, 200, 3, 1), (128, 7, 960, 5, 1), (64, 56, 96, 7, 1), (64, 28, 192, 7, 1),
    (64, 14, 384, 7, 1), (64, 7, 768, 7, 1),
)  # fmt: skip


def images(n: int, side: int, channels: int, kernel: int) -> dict[str, Tensor]:
    x = torch.randn(n, channels, side, side).contiguous(memory_format=torch.channels_last)
    return {"x": x, "weight": torch.randn(channels, 1, kernel, kernel) / kernel}


def sequences(n: int, length: int, channels: int, kernel: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, channels, length), "weight": torch.randn(channels, 1, kernel) / kernel}


def convolution(stride: int, kernel: int) -> Callable[[Tensor, Tensor], Tensor]:
    def silu_of_convolution(x: Tensor, weight: Tensor) -> Tensor:
        function = F.conv1d if x.ndim == 3 else F.conv2d
        return F.silu(function(x, weight, None, stride, kernel // 2, 1, x.shape[1]))

    return silu_of_convolution


def _image_case(n: int, side: int, channels: int, kernel: int, stride: int) -> Case:
    name = f"{n} x {side} x {side} x {channels}, {kernel} x {kernel}, stride {stride}"
    sizes = {"n": n, "side": side, "channels": channels, "kernel": kernel}
    return Case(
        name, convolution(stride, kernel), images, sizes, sizes | {"n": 2}, ("x", "weight"), ("x", "weight"),
        family=DEPTHWISE,
    )  # fmt: skip


SIZES = {"n": 32, "length": 1000, "channels": 512, "kernel": 31}
CASES = (
    *(_image_case(*shape) for shape in IMAGES),
    Case(
        "32 x 512 x 1000, 31", convolution(1, 31), sequences, SIZES, SIZES | {"n": 1}, ("x", "weight"),
        ("x", "weight"), family=DEPTHWISE,
    ),
)  # fmt: skip


def main(options: argparse.Namespace) -> Record:
    return kernels.main(options, CASES, "depthwise")
