"""The cost model: a roofline in time for one cluster on one device.

    time = gap + max(floor, latencies + max(memory, arithmetic) + finishing)

Memory time is device-memory bytes at copy bandwidth plus L2 bytes at L2 bandwidth, divided by the part
of the bandwidth that the schedule can draw (few programs, rows that fill a multiprocessor's registers).
Arithmetic time is the busiest of the issue slots, the special-function units and the integer units.
The schedule is the one that codegen would take: flat, rows in registers, or rows in several passes.
The constants below were read from fifteen measured kernels on an H200, which tests/test_cost.py holds the
model to: it is off by 2.6% on average and by 6.5% at most, for the best schedule known. It does not foresee
what a bad schedule costs, nor spills.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

import sympy
import torch
from torch._ops import OpOverload

from fusion_compiler.ir.dag import Op
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import LoopNest
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.ir.row_widths import MOST_PARTS
from fusion_compiler.passes.fuse.work import BufferInfo, Work

BLOCK = 1024  # elements that one program of a flat kernel holds
SEGMENT_BLOCK = 16  # segments of which one program adds up the partial results,
ADDENDS = 256  # as many of each at a time
COLUMN_BLOCK = 64  # columns of which one program can sum all rows
# Bandwidth drawn with P programs resident on a multiprocessor is P / (P + STALL): a program loads, reduces
# and stores in turn, and another covers its pauses. Softmax over 32768 columns in registers, P = 1: 0.76.
STALL = 0.316
LOOPED = 0.98  # of the bandwidth: looped rows, with much in flight each, so that few run at once
LOOPED_RESIDENT = 2
SHARED = 0.9  # rows shared by programs, which wait for each other
SHARED_RESIDENT = 4
PART = 16384  # columns of a long row: a block of a program that has it alone, the part of one that shares it
HELD = 8192  # columns that a program which shares a row keeps in registers
EXCHANGE_US = 1.5  # from a program's letter to the answer of the last
STAGED = 0.98  # of the bandwidth: persistent programs with staged loads (norm backward)
STAGED_SHARED = 0.8  # the same where they share rows, and wait for each other
REREAD = 0.3  # of the time that later passes take from L2 does not hide behind other programs' device memory
L2_SHARE = 0.7  # of the L2 that rows in flight may fill before their second reading misses
SM_SHARE = 2.0  # times its fair part of the bandwidth that one multiprocessor can draw
ROW_VALUES = 0.5  # of a multiprocessor's registers that one row may take
OVERHEAD_REGISTERS = 24  # of each thread, beside the values of its row
ELEMENTS_PER_THREAD = 16
FMA_SHARE = 0.75  # instructions left of each arithmetic operation once multiplies and adds have merged
GEMM_SHARE = 0.74  # of the tensor units' rate: 16384 x 1024 x 4096 in bf16, measured 0.188 ms
ATTENTION_SHARE = 0.35  # the same for attention: eight causal layers of 4 x 2048 x 32 x 64, measured 1.6 ms
EAGER_SHARE = 0.9  # of copy bandwidth that an ATen element-wise kernel reaches
EAGER_NORM_SHARE = 0.65  # the same for its reductions and normalizations
NO_HINTS: Mapping[sympy.Symbol, int] = {}


@dataclass(frozen=True, slots=True)
class _Schedule:
    """What a schedule does with the memory system.

    programs: of the grid. share: of the bandwidth, with programs enough. rereads: times that the loads
    in `work.early` are read after the first. flight: rows that are in work at once. slots: programs that
    run at once where each takes long enough for the last, incomplete round to count; else 0.
    """

    programs: int
    share: float
    rereads: int = 0
    flight: int = 0
    slots: int = 0
    finishing_us: float = 0.0


def _schedules(work: Work, device: DeviceSpec) -> tuple[_Schedule, ...]:
    """The ways in which codegen could run the nest; the cheapest is the cost."""
    _, rows, cols, tile = work.count
    blocks = ceil(tile / BLOCK)
    if work.reduced & 1:  # persistent programs; partial sums and a finishing one unless columns are many
        partial = work.reduced == 3 or cols < COLUMN_BLOCK * device.sms
        finishing = device.floor_us if partial and blocks > device.sms else 0.0
        share = STAGED_SHARED if work.phases and work.row_of_sums and cols > HELD else STAGED
        return (_Schedule(min(blocks, device.sms), share, finishing_us=finishing),)
    if not work.reduced and not work.partials:
        return (_Schedule(blocks, 1.0),)
    passes = max(1, work.phases - 1) + bool(work.early & work.late)
    found: list[_Schedule] = []
    width = 1 << max(0, cols - 1).bit_length()
    registers = width * max(1, (work.early & work.late).bit_count()) * work.row_bytes // 4
    if registers <= ROW_VALUES * device.registers_per_sm:
        threads = max(device.warp_size, width // ELEMENTS_PER_THREAD)
        fit = device.registers_per_sm // (registers + threads * OVERHEAD_REGISTERS)
        resident = max(1, min(fit, device.max_blocks_per_sm))
        programs = ceil(tile / BLOCK) if cols < BLOCK else rows
        found.append(_Schedule(programs, resident / (resident + STALL), slots=resident * device.sms))
    slots = LOOPED_RESIDENT * device.sms
    filled = cols / (ceil(cols / PART) * PART) if cols > PART else 1.0  # of the blocks
    found.append(_Schedule(rows, LOOPED * filled, passes - 1, min(rows, slots), slots))
    parts = min(ceil(cols / PART), MOST_PARTS)
    if parts > 1:  # programs that share a row and exchange what they reduced
        slots, waits = SHARED_RESIDENT * device.sms, passes * EXCHANGE_US
        found.append(_Schedule(rows * parts, SHARED, passes - 1, max(1, slots // parts), slots, waits))
        held = ceil(cols / HELD)
        if held <= MOST_PARTS:
            found.append(_Schedule(rows * held, SHARED, 0, max(1, slots // held), slots, waits))
    return tuple(found)


def _memory_us(
    work: Work, schedule: _Schedule, device: DeviceSpec, dram: float, near: float
) -> tuple[float, float]:
    """(microseconds, extra device-memory bytes of later passes)."""
    extra = again = 0.0
    if schedule.rereads:
        early = {name for n, name in enumerate(work.tile_loads) if work.early >> n & 1}
        bytes_again = schedule.rereads * sum(work.bytes_of(work.reads, name, device) for name in early)
        in_flight = (dram + near) * schedule.flight / work.count[1]
        if in_flight > L2_SHARE * device.l2_bytes:
            extra = bytes_again
        else:
            again = REREAD * bytes_again
    parallel = min(1.0, schedule.programs * SM_SHARE / device.sms)
    left = schedule.programs % schedule.slots if schedule.programs > schedule.slots > 0 else 0
    idle = max(0.0, device.sms / SM_SHARE - left) if left else 0.0  # in the last round, too few draw
    tail = idle / max(1, schedule.programs)
    seconds = (dram + extra) * (1 + tail) / (device.copy_bandwidth * schedule.share * parallel)
    return 1e6 * (seconds + (near + again) / (device.l2_bandwidth * parallel)), extra


def _arithmetic_us(work: Work, device: DeviceSpec) -> float:
    """The busiest of issue slots, special units, integer units and float64 units."""
    integer = work.integer / device.integer_per_s + work.random / device.random_per_s
    issued = FMA_SHARE * (work.fp32 + work.integer) + work.moves + work.special
    issued += work.random * device.integer_per_s / device.random_per_s
    return 1e6 * max(
        issued / device.fp32_per_s,
        work.special / device.special_per_s,
        integer,
        work.fp64 / device.fp64_per_s,
    )


def _segments_us(work: Work, device: DeviceSpec) -> float:
    """To store the partial results of sums over segments, and what a second kernel takes to add them up."""
    if not work.partials:
        return 0.0
    stored = 1e6 * work.partials * work.row_bytes / device.copy_bandwidth
    parallel = min(1.0, ceil(work.totals / SEGMENT_BLOCK) / device.sms)
    read = 1e6 * work.partials * work.row_bytes / (device.l2_bandwidth * parallel)
    return stored + max(device.floor_us, read + ceil(work.addends / ADDENDS) * device.dram_latency_us)


def cost_of(
    loops: LoopNest,
    device: DeviceSpec,
    buffers: Mapping[str, BufferInfo],
    hints: Mapping[sympy.Symbol, int] = NO_HINTS,
) -> Cost:
    """Predict one cluster's kernel.

    buffers: every buffer that the nest loads or stores. hints: the sizes to plan for where they are symbolic.
    Reductions over rows are taken to end in stores: a sum over rows that is used on each row again would
    have to stop the whole grid, and no schedule here does that.
    """
    work = Work(loops, buffers, hints)
    if not work.count[3]:
        return Cost(0.0, 0, 0, 0, "launch")  # nothing is launched for empty tensors
    dram = near = 0.0
    for name in work.reads:
        moved = work.bytes_of(work.reads, name, device)
        if buffers[name].in_l2:
            near += moved
        else:
            dram += moved
    near += work.rewritten()
    written = sum(work.bytes_of(work.writes, name, device) for name in work.writes)
    arithmetic = _arithmetic_us(work, device)
    best: Cost | None = None
    for schedule in _schedules(work, device):
        memory, extra = _memory_us(work, schedule, device, dram + written, near)
        parallel = min(1.0, schedule.programs / device.sms)
        body = max(memory, arithmetic / parallel) + (1 + work.phases) * device.dram_latency_us
        finishing = schedule.finishing_us + _segments_us(work, device)
        us = device.launch_us - device.floor_us + max(device.floor_us, body + finishing)
        if best is None or us < best.us:
            bound = "arithmetic" if arithmetic / parallel > memory else "memory"
            if body + finishing <= 2 * device.floor_us:
                bound = "launch"
            elif parallel < 1.0:
                bound = "latency"
            flops = work.fp32 + work.fp64 + work.special + work.integer
            best = Cost(us, int(dram + extra), int(written), flops, bound)
    assert best is not None  # _schedules always has one
    return best


def side_by_side(costs: Sequence[Cost], device: DeviceSpec) -> Cost:
    """Of tile programs that share a launch. What bounds the longest bounds them, where they are not over with
    their launch; several that would be are short of programs together as well."""
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


def _roofline(device: DeviceSpec, seconds: float, bytes_moved: float, share: float) -> tuple[float, str]:
    memory = bytes_moved / (device.copy_bandwidth * share)
    us = device.launch_us - device.floor_us + max(device.floor_us, 1e6 * max(seconds, memory))
    if 1e6 * max(seconds, memory) <= device.floor_us:
        return us, "launch"
    return us, "arithmetic" if seconds > memory else "memory"


def _traffic(op: Op, hints: Mapping[sympy.Symbol, int]) -> tuple[int, int]:
    """(bytes read, bytes written) by an op that runs alone."""
    written = sum(prod(hint(size, hints) for size in meta.shape) * meta.dtype.itemsize for meta in op.outputs)
    written = min(written, op.bytes)
    return op.bytes - written, written


def contraction_cost(op: Op, device: DeviceSpec, hints: Mapping[sympy.Symbol, int] = NO_HINTS) -> Cost:
    """A library call (matrix product, convolution, attention) by roofline, from the op's own flops and bytes.

    16-bit types run on the tensor units, float32 on the float units (PyTorch's default), both at the share of
    their rate that large ones reach. Causal attention computes half of what its shapes say.
    """
    read, written = _traffic(op, hints)
    flops = op.flops // 2 if _is_causal(op) else op.flops
    dtype = op.outputs[0].dtype if op.outputs else torch.float32
    attention = "attention" in str(op.target)
    if dtype.itemsize <= 2:
        rate = device.tensor_flops * (ATTENTION_SHARE if attention else GEMM_SHARE)
    else:
        lanes = device.fp64_per_s if dtype is torch.float64 else device.fp32_per_s
        rate = 2 * lanes * GEMM_SHARE
    us, bound = _roofline(device, flops / rate, op.bytes, 1.0)
    return Cost(us, read, written, flops, bound)


def _is_causal(op: Op) -> bool:
    if not isinstance(op.target, OpOverload):
        return False
    names = [argument.name for argument in op.target._schema.arguments]
    given = dict(zip(names, op.args, strict=False)) | dict(op.kwargs)
    return given.get("is_causal") is True


def eager_cost(
    *, bytes_read: int, bytes_near: int, bytes_written: int, flops: int, reduces: bool, device: DeviceSpec
) -> Cost:
    """One kernel of ATen, element-wise, or a reduction or normalization. bytes_near: read from L2."""
    share = EAGER_NORM_SHARE if reduces else EAGER_SHARE
    memory = (bytes_read + bytes_written) / (device.copy_bandwidth * share) + bytes_near / device.l2_bandwidth
    arithmetic = flops / device.fp32_per_s
    body = 1e6 * max(memory, arithmetic) + device.dram_latency_us
    us = device.launch_us - device.floor_us + max(device.floor_us, body)
    bound = "arithmetic" if arithmetic > memory else "memory"
    bound = "launch" if body <= 2 * device.floor_us else bound
    return Cost(us, bytes_read, bytes_written, flops, bound)
