"""Time single convolutions with channels first and last: the facts behind `ops/convolution_times.py`.

    python -m benchmarks channel-order [--filter REGEX] [--within SECONDS] [--json FILE]

A row is one convolution; its columns are microseconds of GPU time of the forward, of the gradient of the
input and of the gradient of the weight, each with channels first (cf) and channels last (cl). The operands
lie in that order, so that a time includes only the copies that ATen and cuDNN make by themselves. PyTorch
picks the kernels: for depthwise convolutions in bfloat16, its own with channels first and cuDNN's with
channels last. `gain` is cf / cl over all three; `copy` is the time that converting the input and the result
between the two orders would take at 3 TB/s. `predicted` is what the cost model predicts for the three passes
over what they take, with channels first and last.
"""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.harness.record import Record, begin
from benchmarks.harness.tables import Column, Row, figure, lines_of, table
from benchmarks.harness.timing import event_time, wall_time
from fusion_compiler.ir import dag
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.fuse.cost import contraction_cost

_aten = torch.ops.aten
COPY = 3e12  # bytes per second, read and written, of a transposing copy
CALLS, ROUNDS = 10, 3
MASKS = {"forward": None, "dgrad": [True, False, False], "wgrad": [False, True, False]}
FORMATS = {3: torch.channels_last, 4: torch.channels_last, 5: torch.channels_last_3d}


@dataclass(frozen=True)
class Convolution:
    """A convolution of square images [batch, inputs, side, side] (of `rank` dimensions) with kernels of
    `kernel` elements along each side, padded by half of that."""

    net: str
    batch: int
    inputs: int
    outputs: int
    side: int
    kernel: int
    stride: int = 1
    groups: int = 1
    rank: int = 4
    dilation: int = 1
    rows: bool = False  # kernels of one row of `kernel` elements
    dtype: torch.dtype = torch.bfloat16

    @property
    def name(self) -> str:
        shape = f"{self.batch}x{self.inputs}x{self.side}^{self.rank - 2}"
        extra = (f" d{self.dilation}" if self.dilation > 1 else "") + (" row" if self.rows else "")
        to = "" if self.inputs == self.outputs else f" -> {self.outputs}"
        dtype = {torch.bfloat16: "bf16", torch.float16: "f16"}.get(self.dtype, "f32")
        return f"{self.net} {dtype} {shape}{to} k{self.kernel} s{self.stride} g{self.groups}{extra}"


def _depthwise(net: str, batch: int, *cases: tuple[int, ...]) -> list[Convolution]:
    """cases: channels, side, kernel, stride."""
    return [Convolution(net, batch, c, c, side, k, s, groups=c) for c, side, k, s in cases]


def _grouped(net: str, batch: int, width: int, *cases: tuple[int, ...]) -> list[Convolution]:
    """width: channels of a group; cases: channels, side, stride. All kernels are 3 x 3."""
    return [Convolution(net, batch, c, c, side, 3, s, groups=c // width) for c, side, s in cases]


CASES: tuple[Convolution, ...] = (
    *_depthwise("efficientnet", 128, (32, 112, 3, 1), (96, 112, 3, 2), (144, 56, 3, 1), (144, 56, 5, 2),
                (240, 28, 5, 1), (240, 28, 3, 2), (480, 14, 3, 1), (480, 14, 5, 1), (672, 14, 5, 2),
                (1152, 7, 5, 1), (1152, 7, 3, 1)),
    *_grouped("resnext", 64, 4, (128, 56, 1), (256, 56, 2)),
    *_grouped("resnext", 64, 8, (256, 28, 1)),
    *_grouped("resnext", 64, 16, (512, 14, 1)),
    *_grouped("resnext", 64, 32, (1024, 14, 2), (1024, 7, 1)),
    *_grouped("regnet", 64, 24, (72, 112, 2), (72, 56, 1), (216, 28, 1), (576, 14, 1), (1512, 14, 2),
              (1512, 7, 1)),
    *_depthwise("mobilenetv3", 128, (16, 112, 3, 1), (64, 112, 3, 2), (72, 56, 5, 2), (184, 14, 3, 1),
                (960, 7, 5, 1)),
    *_depthwise("convnext", 64, (96, 56, 7, 1), (192, 28, 7, 1), (384, 14, 7, 1), (768, 7, 7, 1)),
    *_depthwise("efficientnet", 1, (144, 56, 5, 2), (672, 14, 5, 1)),
    *_depthwise("convnext", 1, (96, 56, 7, 1)),
    *_grouped("resnext", 1, 4, (128, 56, 1)),
    Convolution("deeplab", 16, 256, 256, 65, 3, groups=256, dilation=2),
    Convolution("odd", 64, 36, 36, 56, 3, groups=36),
    Convolution("odd", 64, 33, 33, 56, 3, groups=33),
    Convolution("odd", 64, 36, 36, 56, 3, groups=12),
    Convolution("multiplied", 64, 64, 128, 56, 3, groups=64),
    Convolution("large", 32, 256, 256, 32, 31, groups=256),
    *(Convolution("width", 64, 576, 576, 14, 3, groups=576 // w)
      for w in (4, 8, 12, 16, 24, 32, 36, 48, 64, 72, 96, 144, 192, 288, 576)),
    *(Convolution("width", 64, 192, 192, 56, 3, groups=192 // w)
      for w in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 192)),
    *_grouped("width", 64, 8, (128, 56, 1), (216, 28, 1)),
    *_grouped("width", 64, 72, (216, 28, 1), (216, 56, 2)),
    *_grouped("width", 64, 32, (288, 28, 1), (768, 14, 1)),
    *_grouped("padded", 64, 32, (96, 112, 2), (96, 56, 1), (288, 56, 2), (768, 28, 2), (2016, 14, 2),
              (2016, 7, 1)),
    *_grouped("padded", 64, 8, (256, 56, 1), (512, 56, 2)),
    Convolution("padded", 64, 384, 768, 14, 3, groups=24),
    *(Convolution("padded", 64, 32 * g, 32 * g, 14, k, groups=g) for g in (18, 24) for k in (1, 5, 7)),
    *(Convolution("padded", 64, 576, 576, 14, k, groups=24) for k in (1, 5, 7)),
    *_depthwise("depthwise", 128, (576, 14, 3, 2), (672, 14, 3, 2), (672, 14, 5, 2), (240, 28, 5, 2),
                (672, 14, 5, 1), (960, 14, 7, 2), (256, 32, 9, 1), (256, 32, 11, 1), (256, 32, 13, 1)),
    *_depthwise("depthwise", 16, (672, 14, 5, 2), (480, 28, 5, 2)),
    Convolution("rows", 64, 96, 96, 56, 11, groups=96, rows=True),
    Convolution("rows", 8, 2048, 2048, 1024, 3, groups=2048, rank=3),
    Convolution("rows", 8, 512, 512, 1024, 7, groups=512, rank=3),
    Convolution("dilated", 16, 256, 256, 64, 3, dilation=2),
    Convolution("dilated", 16, 256, 256, 64, 3, groups=8, dilation=2),
    Convolution("deeplab", 16, 728, 728, 33, 3, groups=728, dilation=4),
    Convolution("stem", 128, 3, 32, 224, 3, 2),
    Convolution("dense", 64, 3, 64, 224, 7, 2),
    Convolution("dense", 64, 64, 64, 56, 3),
    Convolution("dense", 64, 64, 256, 56, 1),
    Convolution("dense", 64, 256, 256, 28, 3, 2),
    Convolution("dense", 64, 256, 256, 14, 3),
    Convolution("dense", 64, 2048, 512, 7, 1),
    Convolution("dense", 64, 128, 32, 28, 3),
    Convolution("dense", 128, 128, 128, 28, 3),
    Convolution("dense", 128, 1024, 256, 14, 1),
    Convolution("u-net", 8, 128, 128, 256, 3),
    Convolution("u-net", 8, 384, 256, 128, 3),
    Convolution("u-net", 8, 512, 512, 32, 3),
    Convolution("u-net", 4, 1280, 1280, 16, 3),
    Convolution("product", 128, 16, 96, 112, 1),
    Convolution("product", 128, 480, 80, 14, 1),
    Convolution("squeeze", 128, 480, 20, 1, 1),
    Convolution("mamba", 8, 2048, 2048, 1024, 4, groups=2048, rank=3),
    Convolution("conformer", 16, 512, 512, 1000, 31, groups=512, rank=3),
    Convolution("wav2vec", 8, 768, 768, 499, 128, groups=16, rank=3),
    Convolution("x3d", 8, 54, 54, 28, 3, groups=54, rank=5),
    Convolution("resnext3d", 8, 128, 128, 28, 3, groups=32, rank=5),
)  # fmt: skip
HALF = ("efficientnet bf16 128x32x", "efficientnet bf16 128x144x56^2 k5", "efficientnet bf16 128x672x",
        "efficientnet bf16 128x1152x7^2 k5", "resnext bf16 64x128x", "regnet bf16 64x216x",
        "convnext bf16 64x96x", "mobilenetv3 bf16 128x184x")  # fmt: skip


def cases() -> list[Convolution]:
    """All convolutions in bfloat16, then some of them in float16 and in float32."""
    half = [c for c in CASES if c.name.startswith(HALF)]
    single = [c for c in CASES if c.net == "dense"]
    return [
        *CASES,
        *(replace(c, dtype=torch.float16) for c in half),
        *(replace(c, dtype=torch.float32) for c in single),
    ]


def passes(case: Convolution, last: bool, device: torch.device) -> Iterator[tuple[str, partial[object]]]:
    """The forward, the gradient of the input and that of the weight, as calls; sequences are images of one
    row where channels are to be last."""
    spread, rank = case.rank - 2, case.rank
    x = torch.randn(case.batch, case.inputs, *[case.side] * spread, device=device, dtype=case.dtype)
    kernel = [1, case.kernel] if case.rows else [case.kernel] * spread
    w = torch.randn(case.outputs, case.inputs // case.groups, *kernel, device=device)
    padding = [k // 2 * case.dilation for k in kernel]
    sizes = [[case.stride] * spread, padding, [case.dilation] * spread]
    if last and rank == 3:
        x, w, rank = x.unsqueeze(2), w.unsqueeze(2), 4
        sizes = [[fill, *size] for fill, size in zip((1, 0, 1), sizes, strict=True)]
    order = FORMATS[rank] if last else torch.contiguous_format
    x, w = (t.to(case.dtype).contiguous(memory_format=order) for t in (x, w))
    geometry = [*sizes, False, [0] * (rank - 2), case.groups]

    forward = partial(_forward, x, w, geometry)
    gradient = torch.randn_like(forward()).contiguous(memory_format=order)
    for name, mask in MASKS.items():
        yield name, forward if mask is None else partial(_backward, gradient, x, w, geometry, mask)


def _forward(x: Tensor, w: Tensor, geometry: Sequence[Any]) -> Tensor:
    return _aten.convolution.default(x, w, None, *geometry)


def _backward(gradient: Tensor, x: Tensor, w: Tensor, geometry: Sequence[Any], mask: list[bool]) -> object:
    return _aten.convolution_backward.default(gradient, x, w, None, *geometry, mask)


def predicted_us(call: partial[object], device: torch.device) -> float:
    """Return the time that the cost model predicts for a pass."""
    tensors = [arg for arg in call.args if isinstance(arg, Tensor)]
    others = call.args[len(tensors) :]
    built = dag.build(make_fx(lambda *args: call.func(*args, *others), tracing_mode="fake")(*tensors))
    (op,) = (op for op in map(built.op, built.order) if op.kind is Kind.CONTRACTION)
    return contraction_cost(op, device_spec(device)).us


def microseconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of a call; nan where PyTorch has no kernel."""
    try:
        for _ in range(2):
            call()
    except RuntimeError:
        return math.nan
    cuda = device.type == "cuda"
    return 1e6 * (event_time(call, ROUNDS, CALLS, 2_000_000) if cuda else wall_time(call, device, 1))


def measure(case: Convolution, device: torch.device) -> dict[str, Any]:
    """Return the microseconds of each pass in both orders, nan where PyTorch has no kernel."""
    calls = [dict(passes(case, last, device)) for last in (False, True)]
    first, last = ({name: microseconds(call, device) for name, call in order.items()} for order in calls)
    predicted = [sum(predicted_us(call, device) for call in order.values()) for order in calls]
    spread = case.rank - 2
    elements = case.inputs * case.side**spread + case.outputs * (case.side // case.stride) ** spread
    copy = 2 * 2 * case.batch * elements / COPY * 1e6
    gain = sum(first.values()) / sum(last.values())
    shares = [us / sum(times.values()) for us, times in zip(predicted, (first, last), strict=True)]
    return {"first": first, "last": last, "copy": copy, "gain": gain, "predicted": shares}


def as_data(case: Convolution, row: Row) -> str:
    """Return a measurement as a row of `MEASURED` in `ops/convolution_times.py`."""
    shape = [case.batch, case.inputs, case.outputs, case.side, case.kernel, case.stride, case.groups]
    sizes = " ".join(map(str, [*shape, case.dilation][: 7 + (case.dilation > 1)]))
    first, last = (" ".join(f"{row[order][name]:.0f}" for name in MASKS) for order in ("first", "last"))
    return f'    _row("{sizes}", "{first}", "{last}"),'


COLUMNS: tuple[Column, ...] = (
    ("us with channels first/last", lambda row: row["name"]),
    *((n, lambda row, n=n: f"{row['first'][n]:.0f}/{row['last'][n]:.0f}") for n in MASKS),
    ("gain", lambda row: figure(row["gain"])),
    ("copy", lambda row: figure(row["copy"], ".0f")),
    ("predicted", lambda row: "/".join(figure(share) for share in row["predicted"])),
)


def main(options: argparse.Namespace) -> Record:
    begun, device, record = time.monotonic(), torch.device(options.device), begin("channel-order", options)
    chosen = [case for case in cases() if re.search(options.filter, case.name)]
    done = {row["name"]: row for row in record.rows}
    for case in chosen:
        if case.name in done or time.monotonic() - begun > min(options.within, 80):
            continue
        quick: dict[str, int] = {"batch": 1, "side": min(case.side, 8), "kernel": min(case.kernel, 5)}
        figures = measure(replace(case, **quick) if options.quick else case, device)
        done[case.name] = {"name": case.name, **figures}
        record.add(done[case.name])
    measured = [case for case in chosen if case.name in done]
    images = [c for c in measured if c.rank == 4 and c.dtype is torch.bfloat16 and not c.rows]
    data = [as_data(case, done[case.name]) for case in images]
    count = f"{len(measured)} of {len(chosen)}, cuDNN {torch.backends.cudnn.version()}"
    return record.finish({}, "\n".join([table(*lines_of(COLUMNS, record.rows)), count, *data]))
