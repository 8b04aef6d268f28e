"""python -m benchmarks library: calls that stay a library's, beside the times that the cost model predicts.

Convolutions of ResNet-50, of U-Nets and of ConvNeXt-T, forward and backward, with channels first and last;
products and attention of transformers. `share` is the predicted time over the measured one.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.harness.record import Record, environment
from benchmarks.harness.tables import table
from benchmarks.harness.timing import event_time, wall_time
from fusion_compiler.ir import dag
from fusion_compiler.ir.device import DeviceSpec, device_spec
from fusion_compiler.machines.estimate import spec_of
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.fuse.cost import contraction_cost

CALLS, PAUSE = 10, 3_000_000  # calls of a round, and clock ticks in which the host runs ahead
FORMATS = {"first": torch.contiguous_format, "last": torch.channels_last}
# images, channels, height and width, channels of the result, window, stride
CONVOLUTIONS = (
    (128, 3, 224, 64, 7, 2), (128, 64, 56, 64, 3, 1), (128, 64, 56, 256, 1, 1), (128, 256, 56, 64, 1, 1),
    (128, 256, 56, 128, 3, 2), (128, 128, 28, 128, 3, 1), (128, 512, 28, 128, 1, 1),
    (128, 256, 14, 256, 3, 1), (128, 1024, 14, 256, 1, 1), (128, 512, 7, 512, 3, 1),
    (1, 128, 512, 128, 3, 1), (8, 128, 256, 128, 3, 1), (8, 384, 128, 256, 3, 1), (8, 256, 64, 256, 3, 1),
    (8, 512, 32, 512, 3, 1), (4, 320, 64, 320, 3, 1), (4, 1280, 16, 1280, 3, 1), (64, 96, 56, 384, 1, 1),
    (64, 192, 28, 384, 2, 2),
)  # fmt: skip
PRODUCTS = ((16384, 1024, 4096), (8192, 1024, 1024), (4096, 4096, 4096), (2048, 320, 1280))  # m, k, n
ATTENTION = ((4, 32, 2048, 64), (4, 16, 1024, 64), (8, 16, 512, 64))  # batch, heads, length, width


@dataclass(frozen=True)
class Call:
    name: str
    function: Callable[..., object]
    args: tuple[Tensor, ...]


def convolutions(shape: tuple[int, int, int, int, int, int], dtype: torch.dtype) -> Iterator[Call]:
    n, channels, side, results, window, stride = shape
    padding = 0 if window == stride else window // 2
    for name, layout in FORMATS.items():
        x = torch.randn(n, channels, side, side, dtype=dtype).to(memory_format=layout)
        weight = torch.randn(results, channels, window, window, dtype=dtype).to(memory_format=layout)
        gradient = torch.randn_like(F.conv2d(x, weight, None, stride, padding))

        def forward(x: Tensor, weight: Tensor) -> Tensor:
            return F.conv2d(x, weight, None, stride, padding)

        def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> object:
            geometry = [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1
            mask = [True, True, False]
            return torch.ops.aten.convolution_backward(gradient, x, weight, None, *geometry, mask)

        label = f"{n} x {channels} x {side} x {side} to {results}, {window} x {window}, channels {name}"
        yield Call(f"{label}, forward", forward, (x, weight))
        yield Call(f"{label}, backward", backward, (gradient, x, weight))


def calls(dtype: torch.dtype, quick: bool) -> Iterator[Call]:
    """Yield the calls of a dtype on the default device; with small sizes if `quick`."""
    if quick:
        yield from convolutions((2, 8, 16, 8, 3, 1), dtype)
        return
    for shape in CONVOLUTIONS:
        yield from convolutions(shape, dtype)
    for m, k, n in PRODUCTS:
        a, b = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
        yield Call(f"product {m} x {k} x {n}", torch.mm, (a, b))
    for size in ATTENTION:
        q, k, v = (torch.randn(size, dtype=dtype) for _ in range(3))
        yield Call(f"causal attention {' x '.join(map(str, size))}", attend, (q, k, v))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def predicted_us(call: Call, device: DeviceSpec) -> float:
    built = dag.build(make_fx(call.function, tracing_mode="fake")(*call.args))
    ops = [op for op in map(built.op, built.order) if op.kind is Kind.CONTRACTION]
    return sum(contraction_cost(op, device).us for op in ops)


def measured_us(call: Call, device: torch.device, repetitions: int) -> float:
    def run() -> object:
        return call.function(*call.args)

    run()
    if device.type != "cuda":
        return 1e6 * wall_time(run, device, repetitions)
    return 1e6 * event_time(run, repetitions, CALLS, PAUSE)


def main(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    spec = spec_of("cpu" if device.type == "cpu" else device_spec(device))
    record = Record("library", environment(device), options.json)
    with device:
        for dtype in (torch.bfloat16, torch.float32):
            for call in calls(dtype, options.quick):
                name = f"{str(dtype).removeprefix('torch.')}, {call.name}"
                if re.search(options.filter, name):
                    us = measured_us(call, device, options.repetitions)
                    record.add({"name": name, "us": us, "predicted us": predicted_us(call, spec)})
    rows = [(row["name"], row["us"], row["predicted us"]) for row in record.rows]
    cells = [[name, f"{us:.0f}", f"{predicted:.0f}", f"{predicted / us:.2f}"] for name, us, predicted in rows]
    print(table(["call", "us", "predicted us", "share"], cells))
