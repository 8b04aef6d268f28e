"""Predict times of convolutions of images in 16 bits from measurements, with channels first and last.

The rows are what `python -m benchmarks channel-order` printed on one H200 with PyTorch 2.11.0, CUDA 13.0 and
cuDNN 9.19, bfloat16, on 2026-11-27. A convolution that was not measured takes as long as the most similar one
that was, times the ratio of their elements. Depthwise convolutions with channels first are PyTorch's own
kernels; everything else is cuDNN's, which copies operands and result if its kernel wants channels last.
float16 was measured for eight rows: the faster order was the same in each of their passes.

Convolutions of several groups have fast kernels, with channels last, if a group has 8, 16, 32 or 64 channels.
Groups of another width are slow in both orders, so that padding them with zeros can pay.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isqrt, log2
from typing import Any

PASSES = ("forward", "dgrad", "wgrad")
COPY = 3e12  # bytes per second, read and written, of a copy in the same order
# Bytes per second of a copy to the other order inside a net: the kernels around it read or write with large
# strides. A step of RegNetY-3.2GF with grouped convolutions channels first, amid channels last, took
# 26.0 ms, with all channels last 21.1 ms, though the convolutions alone were 5 ms faster (H200, 2026-11-27).
TURN = 0.4e12
WIDTHS = (8, 16, 32, 64)  # channels of a group for which cuDNN has fast kernels
LAUNCH = 5.0  # microseconds of a kernel that has hardly anything to do
GAIN = 0.9  # an order is given up for one that takes this share of its time, copies included
USUAL_BATCH = 64  # assumed where the batch is a symbol


@dataclass(frozen=True)
class Convolution:
    """A convolution multiplies images [batch, inputs, side, side] by kernels [outputs, inputs / groups,
    kernel, kernel].

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
        """Return what the most similar measured convolution must share: dense, depthwise, multiplied,
        dilated, and of widths that have fast kernels."""
        one = self.inputs == self.groups
        fast = self.groups > 1 and all(width in WIDTHS for width in self.widths)
        return self.groups == 1, one and self.outputs == self.groups, one, self.dilation > 1, fast

    @property
    def widths(self) -> tuple[int, int]:
        """Return the input channels and output channels of a group."""
        return self.inputs // self.groups, self.outputs // self.groups

    @property
    def elements(self) -> int:
        """Return the elements of the image and of the result."""
        return self.batch * (self.inputs * self.side**2 + self.outputs * (self.side // self.stride) ** 2)

    @property
    def copy_us(self) -> float:
        """Return the microseconds in which the image and the result are copied to the other order."""
        return 1e6 * 2 * 2 * self.elements / TURN

    @property
    def padded(self) -> Convolution | None:
        """Return the convolution with groups padded to the next fast widths; None for one group, for groups
        of one channel or of more than the widest, and if both widths are fast."""
        wider = [next((fast for fast in WIDTHS if fast >= width), None) for width in self.widths]
        if self.groups in (1, self.inputs) or None in wider or tuple(wider) == self.widths:
            return None
        inner, outer = (self.groups * (width or 0) for width in wider)
        return replace(self, inputs=inner, outputs=outer)

    def distance(self, other: Convolution) -> float:
        """Return how unlike two convolutions of a kind are: what selects a kernel counts more than sizes."""

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
    here, other = (times[1], times[0]) if last else times
    return last != (other + convolution.copy_us < GAIN * here)


def shortest(convolution: Convolution, which: str, last: bool) -> float:
    """Return the microseconds of a pass between operands of an order, by the faster way; 0 if nothing alike
    was measured."""
    times = microseconds(convolution, which)
    if times is None:
        return 0
    here, other = (times[1], times[0]) if last else times
    return min(here, other + convolution.copy_us if other + convolution.copy_us < GAIN * here else inf)


def padding_refusal(convolution: Convolution, passes: Sequence[str]) -> str:
    """Return why the padded convolution is not faster with channels last than the convolution is with
    channels last around it; empty if it is faster.

    The padding is charged as copies of the image and of the result and a launch, although the kernels around
    a convolution carry out most of it.
    """
    padded = convolution.padded
    if padded is None:
        return "no wider groups are faster"
    row = _nearest(padded)
    if row is None or row[0].kernel != padded.kernel:
        return "nothing alike was measured"
    before = sum(shortest(convolution, name, True) for name in passes)
    after = sum(padded_us(convolution, name) for name in passes)
    if after < GAIN * before:
        return ""
    return f"padding takes them from {before:.0f} to {after:.0f} us"


def padded_us(convolution: Convolution, which: str) -> float:
    """Return the microseconds of a pass of the padded convolution with channels last, padding included."""
    padded = convolution.padded
    assert padded is not None
    copies = 1e6 * 2 * (convolution.elements + padded.elements) / COPY
    return shortest(padded, which, True) + copies + LAUNCH


Times = tuple[float, float, float]


def _row(sizes: str, first: str, last: str) -> tuple[Convolution, Times, Times]:
    """Return a row of the table. sizes: batch, inputs, outputs, side, kernel, stride, groups and, if it
    is not 1, dilation; first, last: microseconds of forward, gradient of the image and gradient of the
    weight."""
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
    _row("64 36 36 56 3 1 36", "69 115 133", "16 25 31"),
    _row("64 33 33 56 3 1 33", "63 106 133", "20 24 31"),
    _row("64 36 36 56 3 1 12", "280 119 137", "344 230 999"),
    _row("64 64 128 56 3 1 64", "286 292 388", "1445 871 2875"),
    _row("32 256 256 32 31 1 256", "2297 4623 10922", "19648 8210 10530"),
    _row("128 3 32 224 3 2 1", "208 730 543", "244 463 271"),
    _row("128 16 96 112 1 1 1", "114 91 94", "110 93 98"),
    _row("128 480 80 14 1 1 1", "21 28 37", "9 13 12"),
    _row("128 480 20 1 1 1 1", "6 4 7", "6 4 7"),
    _row("16 256 256 65 3 1 256 2", "165 290 235", "934 245 779"),
    _row("64 576 576 14 3 1 144", "62 67 118", "29 35 56"),
    _row("64 576 576 14 3 1 72", "64 69 62", "31 37 27"),
    _row("64 576 576 14 3 1 48", "95 98 94", "215 217 200"),
    _row("64 576 576 14 3 1 36", "58 59 62", "25 26 27"),
    _row("64 576 576 14 3 1 24", "89 85 94", "212 205 203"),
    _row("64 576 576 14 3 1 18", "63 65 61", "30 31 27"),
    _row("64 576 576 14 3 1 16", "112 134 106", "255 273 216"),
    _row("64 576 576 14 3 1 12", "107 91 476", "226 211 380"),
    _row("64 576 576 14 3 1 9", "64 64 72", "30 28 36"),
    _row("64 576 576 14 3 1 8", "153 161 269", "142 131 228"),
    _row("64 576 576 14 3 1 6", "103 99 188", "219 215 166"),
    _row("64 576 576 14 3 1 4", "165 150 185", "291 277 194"),
    _row("64 576 576 14 3 1 3", "122 126 195", "120 241 203"),
    _row("64 576 576 14 3 1 2", "116 114 161", "112 112 161"),
    _row("64 576 576 14 3 1 1", "209 194 238", "194 145 189"),
    _row("64 192 192 56 3 1 96", "704 560 253", "2873 1287 1029"),
    _row("64 192 192 56 3 1 64", "1565 441 387", "2728 975 1511"),
    _row("64 192 192 56 3 1 48", "273 301 453", "137 166 814"),
    _row("64 192 192 56 3 1 32", "429 433 431", "950 966 834"),
    _row("64 192 192 56 3 1 24", "281 286 227", "151 150 105"),
    _row("64 192 192 56 3 1 16", "425 451 432", "959 984 832"),
    _row("64 192 192 56 3 1 12", "245 243 226", "109 107 104"),
    _row("64 192 192 56 3 1 8", "396 361 421", "939 906 843"),
    _row("64 192 192 56 3 1 6", "247 237 254", "110 101 133"),
    _row("64 192 192 56 3 1 4", "347 330 527", "928 914 1030"),
    _row("64 192 192 56 3 1 3", "235 287 227", "97 315 104"),
    _row("64 192 192 56 3 1 2", "358 351 374", "924 920 872"),
    _row("64 192 192 56 3 1 1", "344 338 380", "206 200 256"),
    _row("64 128 128 56 3 1 16", "196 199 161", "105 104 75"),
    _row("64 216 216 28 3 1 27", "109 104 115", "70 58 73"),
    _row("64 216 216 28 3 1 3", "139 140 166", "139 141 308"),
    _row("64 216 216 56 3 2 3", "208 362 287", "217 390 596"),
    _row("64 288 288 28 3 1 9", "111 107 117", "52 47 65"),
    _row("64 768 768 14 3 1 24", "77 75 71", "33 31 29"),
    _row("128 576 576 14 3 2 576", "36 227 135", "17 49 26"),
    _row("128 672 672 14 3 2 672", "43 270 155", "20 56 31"),
    _row("128 672 672 14 5 2 672", "75 385 413", "40 123 773"),
    _row("128 240 240 28 5 2 240", "109 552 295", "50 174 62"),
    _row("128 672 672 14 5 1 672", "288 318 791", "73 117 90"),
    _row("128 960 960 14 7 2 960", "236 1373 1135", "108 460 1999"),
    _row("128 256 256 32 9 1 256", "2084 2121 3721", "10127 3270 4285"),
    _row("128 256 256 32 11 1 256", "2447 2987 5516", "14370 4600 6026"),
    _row("128 256 256 32 13 1 256", "2796 3872 7679", "19228 6466 8116"),
    _row("16 672 672 14 5 2 672", "12 52 76", "11 22 10"),
    _row("16 480 480 28 5 2 480", "29 140 89", "17 49 19"),
    _row("16 256 256 64 3 1 1 2", "174 171 183", "104 103 119"),
    _row("16 256 256 64 3 1 8 2", "119 115 113", "53 48 53"),
    _row("16 728 728 33 3 1 728 4", "121 215 176", "431 175 506"),
    _row("64 3 64 224 7 2 1", "635 1087 476", "452 921 301"),
    _row("64 64 64 56 3 1 1", "93 99 93", "39 45 44"),
    _row("64 64 256 56 1 1 1", "40 35 41", "39 36 41"),
    _row("64 256 256 28 3 2 1", "67 75 72", "29 36 36"),
    _row("64 256 256 14 3 1 1", "47 48 54", "29 29 35"),
    _row("64 2048 512 7 1 1 1", "35 37 32", "12 13 12"),
    _row("64 128 32 28 3 1 1", "40 39 47", "22 20 26"),
)
