"""How long convolutions of images take in 16 bits, with channels first and with channels last.

The rows are what `python -m benchmarks channel-order` printed on one H200 with PyTorch 2.11.0, CUDA 13.0 and
cuDNN 9.19, bfloat16, on 2026-11-27. A convolution that was not measured takes as long as the most similar one
that was, times the ratio of their elements. Depthwise convolutions with channels first are PyTorch's own
kernels; everything else is cuDNN's, which copies operands and result if its kernel wants channels last.
float16 was measured for eight rows: the faster order was the same in each of their passes.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isqrt, log2
from typing import Any

PASSES = ("forward", "dgrad", "wgrad")
COPY = 3e12  # bytes per second, read and written, of a copy to the other order
GAIN = 0.9  # an order is given up for one that takes this share of its time, copies included
USUAL_BATCH = 64  # assumed where the batch is a symbol


@dataclass(frozen=True)
class Convolution:
    """Images [batch, inputs, side, side] by kernels [outputs, inputs / groups, kernel, kernel].

    side: of images that are not square, that of a square of as many pixels. kernel, stride, dilation: the
    largest along a dimension.
    """

    batch: int
    inputs: int
    outputs: int
    side: int
    kernel: int
    stride: int
    groups: int
    dilation: int = 1

    @property
    def kind(self) -> tuple[bool, ...]:
        """What the most similar measured convolution must share: dense, depthwise, multiplied, dilated."""
        one = self.inputs == self.groups
        return self.groups == 1, one and self.outputs == self.groups, one, self.dilation > 1

    @property
    def elements(self) -> int:
        """Elements of the image and of the result."""
        return self.batch * (self.inputs * self.side**2 + self.outputs * (self.side // self.stride) ** 2)

    @property
    def copy_us(self) -> float:
        """Microseconds in which the image and the result are copied to the other order."""
        return 1e6 * 2 * 2 * self.elements / COPY

    def distance(self, other: Convolution) -> float:
        """How unlike two convolutions of a kind are: what selects a kernel counts more than sizes do."""

        def apart(a: float, b: float) -> float:
            return abs(log2(max(a, 1)) - log2(max(b, 1)))

        inner = apart(self.inputs / self.groups, other.inputs / other.groups)
        outer = apart(self.outputs / self.groups, other.outputs / other.groups)
        window = apart(self.kernel, other.kernel) + apart(self.stride, other.stride)
        size = apart(self.side, other.side) / 2 + apart(self.elements, other.elements) / 8
        return 3 * (inner + outer) + 2 * window + size


def convolution_of(
    image: Sequence[Any], weight: Sequence[Any], stride: Sequence[Any], dilation: Sequence[Any], groups: int
) -> Convolution | None:
    """Return the convolution of these shapes; None if it is not of images, or if a size other than the batch
    is a symbol."""
    sizes = (*image[1:], *weight, *stride, *dilation)
    if len(image) != 4 or not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    batch = image[0] if isinstance(image[0], int) else USUAL_BATCH
    side = max(1, isqrt(image[2] * image[3]))
    return Convolution(batch, image[1], weight[0], side, max(weight[2:]), max(stride), groups, max(dilation))


def microseconds(convolution: Convolution, which: str) -> tuple[float, float] | None:
    """Return the times of a pass with channels first and with channels last; None where nothing alike was
    measured."""
    row = _nearest(convolution)
    if row is None:
        return None
    scale = convolution.elements / row[0].elements
    first, last = (times[PASSES.index(which)] * scale for times in row[1:])
    return first, last


@functools.cache
def _nearest(convolution: Convolution) -> tuple[Convolution, Times, Times] | None:
    alike = [row for row in MEASURED if row[0].kind == convolution.kind]
    return min(alike, key=lambda row: convolution.distance(row[0]), default=None)


def faster_is_last(convolution: Convolution, which: str, last: bool) -> bool:
    """True if a pass is faster with channels last. last: the order of its operands and of what reads its
    result; for the other one both are copied."""
    times = microseconds(convolution, which)
    if times is None:
        return last
    here, there = (times[1], times[0]) if last else times
    return last != (there + convolution.copy_us < GAIN * here)


def shortest(convolution: Convolution, which: str, last: bool) -> float:
    """Return the microseconds of a pass between operands of an order, by the faster way; 0 if nothing alike
    was measured."""
    times = microseconds(convolution, which)
    if times is None:
        return 0
    here, there = (times[1], times[0]) if last else times
    return min(here, there + convolution.copy_us if there + convolution.copy_us < GAIN * here else inf)


Times = tuple[float, float, float]


def _row(sizes: str, first: str, last: str) -> tuple[Convolution, Times, Times]:
    """sizes: batch, inputs, outputs, side, kernel, stride, groups and, if it is not 1, dilation; first, last:
    microseconds of forward, gradient of the image and gradient of the weight."""
    a, b = (tuple(map(float, times.split())) for times in (first, last))
    return Convolution(*map(int, sizes.split())), (a[0], a[1], a[2]), (b[0], b[1], b[2])


MEASURED: tuple[tuple[Convolution, Times, Times], ...] = (
    _row("128 32 32 112 3 1 32", "481 857 1071", "90 164 114"),
    _row("128 96 96 112 3 2 96", "389 2415 598", "139 478 173"),
    _row("128 144 144 56 3 1 144", "540 957 799", "103 184 126"),
    _row("128 144 144 56 5 2 144", "258 1272 553", "109 404 100"),
    _row("128 240 240 28 5 1 240", "409 456 884", "101 166 93"),
    _row("128 240 240 28 3 2 240", "64 393 119", "27 79 43"),
    _row("128 480 480 14 3 1 480", "114 198 214", "27 41 41"),
    _row("128 480 480 14 5 1 480", "207 226 567", "55 85 67"),
    _row("128 672 672 14 5 2 672", "75 385 413", "40 123 773"),
    _row("128 1152 1152 7 5 1 1152", "126 132 694", "35 64 47"),
    _row("128 1152 1152 7 3 1 1152", "69 113 254", "18 32 27"),
    _row("64 128 128 56 3 1 32", "188 206 302", "93 112 806"),
    _row("64 256 256 56 3 2 64", "160 299 378", "55 178 217"),
    _row("64 256 256 28 3 1 32", "107 108 90", "53 57 44"),
    _row("64 512 512 14 3 1 32", "54 54 59", "23 25 27"),
    _row("64 1024 1024 14 3 2 32", "55 88 57", "17 48 17"),
    _row("64 1024 1024 7 3 1 32", "36 36 38", "16 16 17"),
    _row("64 72 72 112 3 2 3", "260 464 404", "282 1035 767"),
    _row("64 72 72 56 3 1 3", "159 176 214", "171 384 381"),
    _row("64 216 216 28 3 1 9", "133 121 147", "307 290 296"),
    _row("64 576 576 14 3 1 24", "88 87 95", "214 207 206"),
    _row("64 1512 1512 14 3 2 63", "146 203 142", "290 401 290"),
    _row("64 1512 1512 7 3 1 63", "80 73 79", "164 151 151"),
    _row("128 16 16 112 3 1 16", "243 431 958", "49 84 109"),
    _row("128 64 64 112 3 2 64", "261 1611 458", "91 320 121"),
    _row("128 72 72 56 5 2 72", "132 638 290", "59 211 60"),
    _row("128 184 184 14 3 1 184", "45 73 90", "13 17 20"),
    _row("128 960 960 7 5 1 960", "105 111 578", "29 54 39"),
    _row("64 96 96 56 7 1 96", "661 867 1309", "142 332 126"),
    _row("64 192 192 28 7 1 192", "341 436 691", "86 166 53"),
    _row("64 384 384 14 7 1 384", "172 220 454", "44 80 42"),
    _row("64 768 768 7 7 1 768", "93 112 478", "29 53 29"),
    _row("1 144 144 56 5 2 144", "5 15 9", "7 8 12"),
    _row("1 672 672 14 5 1 672", "5 5 14", "7 4 12"),
    _row("1 96 96 56 7 1 96", "17 22 30", "16 11 19"),
    _row("1 128 128 56 3 1 32", "12 15 20", "6 7 18"),
    _row("16 256 256 65 3 1 256 2", "165 291 235", "934 245 780"),
    _row("64 36 36 56 3 1 36", "69 115 133", "16 25 31"),
    _row("64 33 33 56 3 1 33", "63 106 133", "20 24 31"),
    _row("64 36 36 56 3 1 12", "280 119 137", "344 230 999"),
    _row("64 64 128 56 3 1 64", "286 292 388", "1445 871 2875"),
    _row("32 256 256 32 31 1 256", "2297 4623 10922", "19648 8210 10530"),
    _row("128 3 32 224 3 2 1", "208 730 543", "244 463 271"),
    _row("128 16 96 112 1 1 1", "114 91 94", "110 93 98"),
    _row("128 480 80 14 1 1 1", "21 28 37", "9 13 12"),
    _row("128 480 20 1 1 1 1", "6 4 7", "6 4 7"),
)
