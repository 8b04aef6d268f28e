"""python -m benchmarks depthwise: depthwise convolutions, pooling and their gradients beside the library's.

Images lie channels last. The shapes of convolutions are those of EfficientNet-B0 and MobileNetV3 with 128
images, of ConvNeXt-T with 64, and of a Conformer's 32 sequences. Those of pooling are of ResNet-50, VGG-16,
DenseNet-121, Inception v3 and PoolFormer-S12, behind a norm with fixed statistics and ReLU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness.record import Record
from benchmarks.kernels import measure as kernels
from benchmarks.kernels.case import Case, Make

DEPTHWISE, POOLING = "depthwise", "pooling"
# images, their height and width, channels, kernel, stride
IMAGES = (
    (128, 112, 32, 3, 1), (128, 112, 96, 3, 2), (128, 56, 144, 3, 1), (128, 56, 144, 5, 2),
    (128, 28, 240, 5, 1), (128, 28, 240, 3, 2), (128, 14, 480, 3, 1), (128, 14, 672, 5, 1),
    (128, 14, 672, 5, 2), (128, 7, 1152, 5, 1), (128, 112, 16, 3, 1), (128, 28, 120, 5, 1),
    (128, 14, 200, 3, 1), (128, 7, 960, 5, 1), (64, 56, 96, 7, 1), (64, 28, 192, 7, 1),
    (64, 14, 384, 7, 1), (64, 7, 768, 7, 1),
)  # fmt: skip


def convolution(stride: int, kernel: int) -> Callable[[Tensor, Tensor], Tensor]:
    def silu_of_convolution(x: Tensor, weight: Tensor) -> Tensor:
        function = F.conv1d if x.ndim == 3 else F.conv2d
        return F.silu(function(x, weight, None, stride, kernel // 2, 1, x.shape[1]))

    return silu_of_convolution


def images(n: int, side: int, channels: int, kernel: int) -> dict[str, Tensor]:
    x = torch.randn(n, channels, side, side).contiguous(memory_format=torch.channels_last)
    return {"x": x, "weight": torch.randn(channels, 1, kernel, kernel) / kernel}


def sequences(n: int, length: int, channels: int, kernel: int) -> dict[str, Tensor]:
    return {"x": torch.randn(n, channels, length), "weight": torch.randn(channels, 1, kernel) / kernel}


def depthwise_case(name: str, make: Make, stride: int, sizes: dict[str, int], quick_n: int) -> Case:
    both = ("x", "weight")
    fn = convolution(stride, sizes["kernel"])
    return Case(name, fn, make, sizes, sizes | {"n": quick_n}, both, both, family=DEPTHWISE)


def image_case(n: int, side: int, channels: int, kernel: int, stride: int) -> Case:
    name = f"{n} x {side} x {side} x {channels}, {kernel} x {kernel}, stride {stride}"
    sizes = {"n": n, "side": side, "channels": channels, "kernel": kernel}
    return depthwise_case(name, images, stride, sizes, 2)


Pool = Callable[[Tensor], Tensor]
# images, their height and width, channels, what pools them
POOLS: dict[str, tuple[int, int, int, Pool]] = {
    "maxima 3 x 3 by 2, ResNet": (128, 112, 64, lambda x: F.max_pool2d(x, 3, 2, 1)),
    "maxima 2 x 2, VGG": (128, 112, 128, lambda x: F.max_pool2d(x, 2)),
    "maxima 3 x 3 by 2, Inception": (128, 35, 288, lambda x: F.max_pool2d(x, 3, 2)),
    "averages 2 x 2, DenseNet": (128, 56, 128, lambda x: F.avg_pool2d(x, 2)),
    "averages 3 x 3, Inception": (128, 35, 192, lambda x: F.avg_pool2d(x, 3, 1, 1)),
    "averages 3 x 3, PoolFormer": (128, 56, 64, lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)),
    "averages 3 x 3, PoolFormer, small": (
        128, 14, 320, lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)
    ),
}  # fmt: skip


def pictures(n: int, side: int, channels: int) -> dict[str, Tensor]:
    x = torch.randn(n, channels, side, side).contiguous(memory_format=torch.channels_last)
    return {"x": x, "scale": torch.randn(channels), "shift": torch.randn(channels)}


def behind_norm(pool: Pool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def pooled(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        y = torch.addcmul(shift.view(1, -1, 1, 1), x, scale.view(1, -1, 1, 1))  # a norm in inference
        return pool(F.relu(y))

    return pooled


def pooling_case(name: str, gradient: bool) -> Case:
    n, side, channels, pool = POOLS[name]
    sizes = {"n": n, "side": side, "channels": channels}
    wanted = ("x",) if gradient else ()
    read = wanted if "averages" in name else ()  # by ReLU's gradient; a byte for each maximum says the rest
    label = f"{name}, {'training' if gradient else 'inference'}"
    return Case(label, behind_norm(pool), pictures, sizes, sizes | {"n": 2}, wanted, read, family=POOLING)


SEQUENCES = {"n": 32, "length": 1000, "channels": 512, "kernel": 31}
CASES = (
    *(image_case(*shape) for shape in IMAGES),
    depthwise_case("32 x 512 x 1000, 31", sequences, 1, SEQUENCES, 1),
    *(pooling_case(name, gradient) for name in POOLS for gradient in (False, True)),
)


def main(options: argparse.Namespace) -> Record:
    return kernels.main(options, CASES, "depthwise")
