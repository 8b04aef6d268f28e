"""Predict the costs of clusters and of the calls beside them, which the search compares.

A cluster takes what the best of its schedules takes (`schedule.cost` is the roofline of one); library calls
and eager's kernels have a roofline of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, prod

import sympy
import torch
from torch._ops import OpOverload

from fusion_compiler.ir.dag import FEW_ROWS, Op
from fusion_compiler.ir.device import GEMM_SHARE, DeviceSpec
from fusion_compiler.ir.dims import hint, numel
from fusion_compiler.ir.loops import LoopNest
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.ops.own import depthwise
from fusion_compiler.ops.products import factors_of
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.cost import NO_HINTS, Roofline
from fusion_compiler.schedule.space import cheapest
from fusion_compiler.schedule.work import BufferInfo

# As GEMM_SHARE, for attention: eight causal layers of 4 x 2048 x 32 x 64, measured 1.6 ms.
ATTENTION_SHARE = 0.35
# Products of few rows read a whole matrix each, and reach this share of bandwidth: a token of a Llama-1B
# shape takes 81 of them, 1.06 ms for the 0.58 ms of streaming them; a chain of long ones reaches 0.68.
FEW_ROWS_SHARE = 0.68
# Such a launch takes at least so long: GPT-2 medium's 96 products of a token, of 2 to 8 MB, take 4.3 to
# 5.2 us on an H200.
FEW_ROWS_US, FEW_ROWS_BYTES = 4.3, 2e6
# A library's depthwise convolutions reach these shares of bandwidth and of the float units' rate, the latter
# with channels first and last: measured in bfloat16 on an H200 at 20 shapes of three networks (2026-11-27).
DEPTHWISE_SHARE = 0.7
DEPTHWISE_RATES: dict[object, tuple[float, float]] = {
    depthwise.depthwise: (0.04, 0.15),
    depthwise.depthwise_input_gradient: (0.03, 0.09),
    depthwise.depthwise_weight_gradient: (0.02, 0.13),
}
DEPTHWISE_US = 4.0  # such a call takes at least so long, on a single image
# cuDNN's kernels for tensor units read channels last. If channels are first, they copy each tensor to that
# order, at this share of a copy's bandwidth. They need no copies for a window of one element if the bytes of
# a channel of an image are a multiple of 16. `python -m benchmarks channel-order` measures this; the share is
# that of an H200 on 2026-11-30.
TRANSPOSED_SHARE, ALIGNED_BYTES = 0.5, 16
TF32_CAPABILITY = 80  # PyTorch lets cuDNN round float32 to TF32, which NVIDIA's GPUs have from here on
EAGER_SHARE = 0.9  # the share of copy bandwidth that an ATen element-wise kernel reaches
EAGER_NORM_SHARE = 0.65  # the same for its reductions and normalizations


def cost_of(
    loops: LoopNest,
    device: DeviceSpec,
    buffers: Mapping[str, BufferInfo],
    hints: Mapping[sympy.Symbol, int] = NO_HINTS,
    analysis: Analysis | None = None,
) -> Cost:
    """Predict the cost of one cluster's kernel: the least of its schedules. Legality ensures that it has one.

    buffers: every buffer that the nest loads or stores. hints: the values of symbolic sizes to plan for.
    """
    return cheapest(Roofline(analysis or Analysis(loops), device, buffers, hints))


def side_by_side(costs: Sequence[Cost], device: DeviceSpec) -> Cost:
    """Return the cost of loop nests that share a launch. What bounds the longest nest bounds them, unless
    each takes no longer than its launch: then they have too few programs together as well."""
    if len(costs) == 1:
        return costs[0]
    us = sum(c.us for c in costs) - (sum(c.us > 0 for c in costs) - 1) * device.launch_us
    read, written = sum(c.bytes_read for c in costs), sum(c.bytes_written for c in costs)
    copied = 1e6 * (read + written) / device.copy_bandwidth
    bound = max(costs, key=lambda c: c.us).bound
    if us - device.launch_us <= device.floor_us:  # no longer than two launches
        bound = "launch"
    elif bound == "launch":
        bound = "memory" if copied > us / 2 else "latency"
    return Cost(us, read, written, sum(c.flops for c in costs), bound)


def one_after_the_other(costs: Sequence[Cost]) -> Cost:
    """Return the cost of calls that run one after the other; the longest says what bounds them."""
    read, written = sum(c.bytes_read for c in costs), sum(c.bytes_written for c in costs)
    longest = max(costs, key=lambda c: c.us)
    return Cost(sum(c.us for c in costs), read, written, sum(c.flops for c in costs), longest.bound)


def _roofline(device: DeviceSpec, seconds: float, bytes_moved: float, share: float) -> tuple[float, str]:
    memory = bytes_moved / (device.copy_bandwidth * share)
    us = device.launch_us - device.floor_us + max(device.floor_us, 1e6 * max(seconds, memory))
    if 1e6 * max(seconds, memory) <= device.floor_us:
        return us, "launch"
    return us, "arithmetic" if seconds > memory else "memory"


def _traffic(op: Op, hints: Mapping[sympy.Symbol, int]) -> tuple[int, int]:
    """Return (bytes read, bytes written) by an op that runs alone."""
    written = sum(prod(hint(size, hints) for size in meta.shape) * meta.dtype.itemsize for meta in op.outputs)
    written = min(written, op.bytes)
    return op.bytes - written, written


def contraction_cost(op: Op, device: DeviceSpec, hints: Mapping[sympy.Symbol, int] = NO_HINTS) -> Cost:
    """Predict a library call (matrix product, convolution, attention) by roofline, from its flops and bytes.

    16-bit types and float32 convolutions run on the tensor units, other float32 and depthwise convolutions on
    the float units (PyTorch's default), at the share of their rate that large calls reach. Causal attention
    computes half of what its shapes say.
    """
    read, written = _traffic(op, hints)
    is_causal = isinstance(op.target, OpOverload) and op.arguments.get("is_causal") is True
    flops = op.flops // 2 if is_causal else op.flops
    dtype = op.outputs[0].dtype if op.outputs else torch.float32
    attention, share = "attention" in str(op.target), 1.0
    if op.target in DEPTHWISE_RATES:
        last, share = op.outputs[0].stride[1] == 1, DEPTHWISE_SHARE
        rate = 2 * device.fp32_per_s * DEPTHWISE_RATES[op.target][last]
        if op.target is depthwise.depthwise_input_gradient:  # tries all taps for each element of the image
            rate /= prod(op.args[-3])  # type: ignore[arg-type]
    elif dtype.itemsize <= 2:
        rate = device.tensor_flops * (ATTENTION_SHARE if attention else GEMM_SHARE)
    elif dtype is torch.float32 and op.window and device.capability >= TF32_CAPABILITY:
        rate = device.tensor_flops / 2 * GEMM_SHARE
    else:
        lanes = device.fp64_per_s if dtype is torch.float64 else device.fp32_per_s
        rate = 2 * lanes * GEMM_SHARE
    us, bound = _roofline(device, flops / rate, op.bytes, share)
    us += transposing_us(op, device, hints)
    us = max(us, DEPTHWISE_US) if op.target in DEPTHWISE_RATES else us
    if tokens_of(op, hints) <= FEW_ROWS:
        streamed = device.launch_us + 1e6 * op.bytes / (device.copy_bandwidth * FEW_ROWS_SHARE)
        streamed = max(streamed, FEW_ROWS_US) if op.bytes >= FEW_ROWS_BYTES else streamed
        us, bound = max(us, streamed), bound if us > streamed else "memory"
    return Cost(us, read, written, flops, bound)


def transposing_us(op: Op, device: DeviceSpec, hints: Mapping[sympy.Symbol, int]) -> float:
    """Return the microseconds in which cuDNN copies the tensors of a convolution to channels last; 0 for any
    other op, and on other devices."""
    result = next((meta for meta in op.outputs if len(meta.shape) > 2), None)
    if not op.window or result is None or result.stride[1] == 1:
        return 0.0
    least = 1 if result.dtype.itemsize <= 2 else TF32_CAPABILITY
    if result.dtype is torch.float64 or device.capability < least:
        return 0.0
    image = numel(result.shape[2:], hints) * result.dtype.itemsize
    if op.window == 1 and image % ALIGNED_BYTES == 0:
        return 0.0
    return 1e6 * 2 * op.bytes / (device.copy_bandwidth * TRANSPOSED_SHARE)


def tokens_of(op: Op, hints: Mapping[sympy.Symbol, int] = NO_HINTS) -> float:
    """Return the tokens in flight of a matrix product: its rows, or its columns if these are fewer;
    infinitely many for any other op."""
    if factors_of(op.target) is None:
        return inf
    return min(hint(size, hints) for size in op.outputs[0].shape[-2:])


def eager_cost(
    *, bytes_read: int, bytes_near: int, bytes_written: int, flops: int, reduces: bool, device: DeviceSpec
) -> Cost:
    """Predict one kernel of ATen: element-wise, a reduction or a normalization. bytes_near: read from L2."""
    share = EAGER_NORM_SHARE if reduces else EAGER_SHARE
    memory = (bytes_read + bytes_written) / (device.copy_bandwidth * share) + bytes_near / device.l2_bandwidth
    arithmetic = flops / device.fp32_per_s
    body = 1e6 * max(memory, arithmetic) + device.dram_latency_us
    us = device.launch_us - device.floor_us + max(device.floor_us, body)
    bound = "arithmetic" if arithmetic > memory else "memory"
    bound = "launch" if body <= 2 * device.floor_us else bound
    return Cost(us, bytes_read, bytes_written, flops, bound)
