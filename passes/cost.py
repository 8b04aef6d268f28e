"""The cost model: a roofline in time for one cluster on one device.

    time = gap + max(floor, latencies + max(memory, arithmetic) + finishing)

Memory time is device-memory bytes at copy bandwidth plus L2 bytes at L2 bandwidth, divided by the part
of the bandwidth that the schedule can draw (few programs, rows that fill a multiprocessor's registers).
Arithmetic time is the busiest of the issue slots, the special-function units and the integer units.
The schedule is the one that codegen would take: flat, rows in registers, or rows in several passes.
The constants below were read from measured kernels on an H200; tests/test_cost.py compares the model
with every measured row and states its mean error.

It runs thousands of times per model, so shapes are plain integers in here (`hint`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil, prod

import sympy
import torch
from torch._ops import OpOverload

from fusion_compiler import ops
from fusion_compiler.dag import Op
from fusion_compiler.device import DeviceSpec
from fusion_compiler.dims import Dim, hint
from fusion_compiler.loops import (
    COLS,
    ROWS,
    Compute,
    Constant,
    Index,
    InRange,
    Load,
    LoopNest,
    Node,
    Random,
    Reduce,
    Ref,
)
from fusion_compiler.plan import Cost
from fusion_compiler.schema import is_view

LOGICAL_AND = torch.ops.aten.logical_and.default
SECTOR = 32  # bytes: the smallest piece of device memory that is moved
BLOCK = 1024  # elements that one program of a flat kernel holds
COLUMN_BLOCK = 64  # columns of which one program can sum all rows
# Bandwidth drawn with P programs resident on a multiprocessor is P / (P + STALL): a program loads, reduces
# and stores in turn, and another covers its pauses. Softmax over 32768 columns in registers, P = 1: 0.76.
STALL = 0.316
LOOPED_RESIDENT = 4  # programs a multiprocessor of looped rows: 16 warps each
STAGED = 0.98  # of the bandwidth: persistent programs with staged loads (norm backward)
L2_SHARE = 0.7  # of the L2 that rows in flight may fill before their second reading misses
SM_SHARE = 2.0  # times its fair part of the bandwidth that one multiprocessor can draw
ROW_VALUES = 0.5  # of a multiprocessor's registers that one row may take
OVERHEAD_REGISTERS = 24  # of each thread, beside the values of its row
ELEMENTS_PER_THREAD = 16
FMA_SHARE = 0.75  # instructions left of each arithmetic operation once multiplies and adds have merged
FP64_SPECIAL = 16  # arithmetic operations of a float64 function: no unit for them, a polynomial each
GEMM_SHARE = 0.74  # of the tensor units' rate: 16384 x 1024 x 4096 in bf16, measured 0.188 ms
ATTENTION_SHARE = 0.35  # the same for attention: eight causal layers of 4 x 2048 x 32 x 64, measured 1.6 ms
EAGER_SHARE = 0.9  # of copy bandwidth that an ATen element-wise kernel reaches
EAGER_NORM_SHARE = 0.65  # the same for its reductions and normalizations


@dataclass(frozen=True, slots=True)
class BufferInfo:
    """What the model needs to know of a tensor: elements, bytes an element, and whether the kernel that
    wrote it ran just before and left it in L2."""

    numel: Dim
    itemsize: int
    in_l2: bool = False


NO_HINTS: Mapping[sympy.Symbol, int] = {}


@cache
def _weights(target: OpOverload) -> tuple[int, int]:
    """(arithmetic, special) operations per element; 1 and 0 for what the table does not have."""
    spec = ops.spec_of(target)
    return (spec.flops, spec.special) if spec is not None else (1, 0)


class _Walk:
    """One pass over a nest: what each node varies over and needs, and what the whole nest does.

    Groups are bits: 1 rows, 2 cols; `count[groups]` is how many tile elements such a value has. Per node:
    `varies` (groups), `axes` (bits), `needs` (bits of the tile loads that it is computed from since the
    last reduction) and `phase` (reductions in a chain before it).
    """

    def __init__(self, loops: LoopNest, buffers: Mapping[str, BufferInfo], hints: Mapping[sympy.Symbol, int]):
        self.buffers = buffers
        self.hints = hints
        self.sizes = [axis.size if type(axis.size) is int else hint(axis.size, hints) for axis in loops.axes]
        self.group_of = [1 if axis.group == ROWS else 2 for axis in loops.axes]
        rows = prod(size for size, group in zip(self.sizes, self.group_of, strict=True) if group == 1)
        cols = prod(size for size, group in zip(self.sizes, self.group_of, strict=True) if group == 2)
        self.count = (1, rows, cols, rows * cols)
        self.varies: list[int] = []
        self.axes: list[int] = []
        self.needs: list[int] = []
        self.phase: list[int] = []
        self.fp32 = self.fp64 = self.special = self.integer = self.random = self.moves = 0
        self.reduced = 0  # groups that some node reduces
        self.phases = 0  # the longest chain of reductions
        self.row_bytes = 4  # of the widest value in a row
        self.early = self.late = 0  # tile loads that are reduced; that a stored value needs after that
        self.tile_loads: list[str] = []
        self.reads: dict[str, float] = {}  # elements moved from each buffer
        self.writes: dict[str, float] = {}
        self.gathered: set[str] = set()
        self.seen: set[object] = set()
        self.inside: dict[int, float] = {}  # part of the space in which a condition holds
        self.partial: dict[tuple[bool, str, object], tuple[float, float]] = {}
        for node in loops.nodes:
            if type(node) is Compute:
                self._compute(node)
            else:
                self._other(node)
        for store in loops.stores:
            varies, axes, _ = self._index(store.index)
            self.moves += self.count[varies]
            self._touch(True, store.buffer, store.index, axes, store.within)
            if self.phase[store.value]:
                self.late |= self.needs[store.value]
        for (written, buffer, terms), (moved, most) in self.partial.items():
            if (written, buffer, terms) not in self.seen:
                table = self.writes if written else self.reads
                table[buffer] = table.get(buffer, 0.0) + min(moved, most)

    def _compute(self, node: Compute) -> None:
        varies = axes = needs = phase = 0
        for _, operand in node.operands:
            if type(operand) is Ref:
                n = operand.node
                varies |= self.varies[n]
                axes |= self.axes[n]
                needs |= self.needs[n]
                if self.phase[n] > phase:
                    phase = self.phase[n]
                if n in self.inside and node.target is LOGICAL_AND:
                    number = len(self.varies)
                    self.inside[number] = self.inside.get(number, 1.0) * self.inside[n]
        self._add(varies, axes, needs, phase)
        flops, special = _weights(node.target)
        count = self.count[varies]
        dtype = node.dtype
        if dtype is torch.float64:
            self.fp64 += (flops + FP64_SPECIAL * special) * count
            return
        if dtype is torch.float32 or dtype is torch.bool:
            self.fp32 += flops * count
        else:
            self.integer += flops * count
        self.special += special * count

    def _other(self, node: Node) -> None:
        varies = axes = needs = phase = 0
        if isinstance(node, Load):
            varies, axes, phase = self._index(node.index)
            self.moves += self.count[varies]
            self._touch(False, node.buffer, node.index, axes, node.within)
            if self.count[varies] == self.count[3]:
                needs = 1 << len(self.tile_loads)
                self.tile_loads.append(node.buffer)
            if node.dtype is torch.float64:
                self.row_bytes = 8
        elif isinstance(node, Reduce):
            varies, axes, phase = self._reduce(node)
        elif isinstance(node, Random):
            varies, axes, phase = self._index(node.index)
            self.random += self.count[varies]
        elif not isinstance(node, Constant | Compute):
            varies, axes, phase = self._index(node.index)
            self.integer += self.count[varies]
            if isinstance(node, InRange):
                self.inside[len(self.varies)] = self._part(node)
        self._add(varies, axes, needs, phase)

    def _add(self, varies: int, axes: int, needs: int, phase: int) -> None:
        self.varies.append(varies)
        self.axes.append(axes)
        self.needs.append(needs)
        self.phase.append(phase)

    def _reduce(self, node: Reduce) -> tuple[int, int, int]:
        operand = node.operand
        over = (ROWS in node.over) | 2 * (COLS in node.over)
        self.reduced |= over
        self.fp32 += self.count[self.varies[operand]]
        axes = self.axes[operand]
        for axis, group in enumerate(self.group_of):
            if group & over:
                axes &= ~(1 << axis)
        phase = self.phase[operand]
        if over & 2:
            phase += 1
            self.early |= self.needs[operand]
            self.phases = max(self.phases, phase)
        return self.varies[operand] & ~over, axes, phase

    def _index(self, index: Index) -> tuple[int, int, int]:
        """(groups, axis bits, phase) of what an index varies over."""
        varies = axes = phase = 0
        for key, _ in index.terms:
            if key >= 0:
                axes |= 1 << key
                varies |= self.group_of[key]
            else:
                axes |= self.axes[~key]
                varies |= self.varies[~key]
                phase = max(phase, self.phase[~key])
        return varies, axes, phase

    def _part(self, node: InRange) -> float:
        """Of the values that an index takes, the part that lies in the range."""
        first = last = hint(node.index.const, self.hints)
        for key, coefficient in node.index.terms:
            if key < 0:
                return 1.0
            span = hint(coefficient, self.hints) * (self.sizes[key] - 1)
            first, last = first + min(span, 0), last + max(span, 0)
        low, high = max(first, hint(node.low, self.hints)), min(last + 1, hint(node.high, self.hints))
        return max(0, high - low) / (last + 1 - first)

    def _touch(self, written: bool, buffer: str, index: Index, axes: int, within: int | None) -> None:
        """Count the elements that an access moves, in whole sectors; the same access only once.

        Accesses under a condition count for the part of the space where it holds. Those that differ only by
        an offset (the halves of a rotation, the sides of a concatenation) share the space out among
        themselves, and lie in what an access without a condition moves anyway.
        """
        where, exact = (written, buffer, index.terms), (written, buffer, index.terms, index.const, within)
        if exact in self.seen:
            return
        self.seen.add(exact)
        moved, run = 1.0, 1
        for axis, size in enumerate(self.sizes):
            if axes >> axis & 1:
                moved *= size
        for key, coefficient in index.terms:
            if key < 0:
                self.gathered.add(buffer)
            elif coefficient == 1:
                run = self.sizes[key]
        itemsize = self.buffers[buffer].itemsize
        if run * itemsize < SECTOR:
            moved *= self._waste(index, itemsize)
        if within is not None:
            before, _ = self.partial.get(where, (0.0, 0.0))
            self.partial[where] = (before + moved * self.inside.get(within, 1.0), moved)
            return
        self.seen.add(where)
        table = self.writes if written else self.reads
        table[buffer] = table.get(buffer, 0.0) + moved

    def _waste(self, index: Index, itemsize: int) -> float:
        """Bytes moved per byte used: every contiguous run is rounded up to whole sectors."""
        gap = (
            SECTOR if any(key < 0 for key, _ in index.terms) else 0
        )  # between runs; gathered ones lie anywhere
        run = 1
        steps = [(abs(hint(c, self.hints)), self.sizes[key]) for key, c in index.terms if key >= 0]
        for stride, size in sorted(steps):
            if size > 1 and stride > run:
                gap = gap or stride
                break
            run = max(run, stride * size)
        return max(1.0, min(SECTOR / (run * itemsize), gap / run)) if gap else 1.0

    def bytes_of(self, table: dict[str, float], buffer: str, device: DeviceSpec) -> float:
        """Bytes that an entry of reads or writes moves: no more than the buffer has, unless it is gathered
        from a buffer too large for L2, where rows that come up again are read again."""
        info = self.buffers[buffer]
        whole = hint(info.numel, self.hints) * info.itemsize
        moved = table[buffer] * info.itemsize
        return moved if buffer in self.gathered and whole > device.l2_bytes else min(moved, whole)


@dataclass(frozen=True, slots=True)
class _Schedule:
    """What a schedule does with the memory system.

    programs: of the grid. share: of the bandwidth, with programs enough. rereads: times that the loads
    in `walk.early` are read after the first. flight: rows that are in work at once.
    """

    programs: int
    share: float
    rereads: int = 0
    flight: int = 0
    finishing_us: float = 0.0


def _schedules(walk: _Walk, device: DeviceSpec) -> tuple[_Schedule, ...]:
    """The ways in which codegen could run the nest; the cheapest is the cost."""
    _, rows, cols, tile = walk.count
    blocks = ceil(tile / BLOCK)
    if walk.reduced & 1:  # persistent programs; partial sums and a finishing one unless columns are many
        partial = walk.reduced == 3 or cols < COLUMN_BLOCK * device.sms
        finishing = device.floor_us if partial and blocks > device.sms else 0.0
        return (_Schedule(min(blocks, device.sms), STAGED, finishing_us=finishing),)
    if not walk.reduced:
        return (_Schedule(blocks, 1.0),)
    passes = max(1, walk.phases - 1) + bool(walk.early & walk.late)
    found: list[_Schedule] = []
    width = 1 << max(0, cols - 1).bit_length()
    registers = width * max(1, (walk.early & walk.late).bit_count()) * walk.row_bytes // 4
    if registers <= ROW_VALUES * device.registers_per_sm:
        threads = max(device.warp_size, width // ELEMENTS_PER_THREAD)
        fit = device.registers_per_sm // (registers + threads * OVERHEAD_REGISTERS)
        resident = max(1, min(fit, device.max_blocks_per_sm))
        programs = ceil(tile / BLOCK) if cols < BLOCK else rows
        found.append(_Schedule(programs, resident / (resident + STALL)))
    resident = LOOPED_RESIDENT
    share = resident / (resident + STALL)
    found.append(_Schedule(rows, share, passes - 1, min(rows, resident * device.sms)))
    if rows < device.sms * resident and blocks > rows:  # a row split over programs, one launch a pass
        pieces = min(blocks, device.sms * resident)
        found.append(_Schedule(pieces, share, passes - 1, rows, passes * device.floor_us))
    return tuple(found)


def _memory_us(
    walk: _Walk, schedule: _Schedule, device: DeviceSpec, dram: float, near: float
) -> tuple[float, float]:
    """(microseconds, extra device-memory bytes of later passes)."""
    extra = 0.0
    if schedule.rereads:
        again = {name for n, name in enumerate(walk.tile_loads) if walk.early >> n & 1}
        bytes_again = schedule.rereads * sum(walk.bytes_of(walk.reads, name, device) for name in again)
        in_flight = (dram + near) * schedule.flight / walk.count[1]
        if in_flight > L2_SHARE * device.l2_bytes:
            extra = bytes_again
        else:
            near += bytes_again
    parallel = min(1.0, schedule.programs * SM_SHARE / device.sms)
    waves = schedule.programs / (schedule.flight or schedule.programs or 1)
    tail = ceil(waves) / waves if waves > 1 else 1.0
    seconds = (dram + extra) / (device.copy_bandwidth * schedule.share * parallel) * tail
    return 1e6 * (seconds + near / (device.l2_bandwidth * parallel)), extra


def _arithmetic_us(walk: _Walk, device: DeviceSpec) -> float:
    """The busiest of issue slots, special units, integer units and float64 units."""
    integer = walk.integer / device.integer_per_s + walk.random / device.random_per_s
    issued = FMA_SHARE * (walk.fp32 + walk.integer) + walk.moves + walk.special
    issued += walk.random * device.integer_per_s / device.random_per_s
    return 1e6 * max(
        issued / device.fp32_per_s,
        walk.special / device.special_per_s,
        integer,
        walk.fp64 / device.fp64_per_s,
    )


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
    walk = _Walk(loops, buffers, hints)
    if not walk.count[3]:
        return Cost(0.0, 0, 0, 0, "launch")  # nothing is launched for empty tensors
    dram = near = 0.0
    for name in walk.reads:
        moved = walk.bytes_of(walk.reads, name, device)
        if buffers[name].in_l2:
            near += moved
        else:
            dram += moved
    written = sum(walk.bytes_of(walk.writes, name, device) for name in walk.writes)
    arithmetic = _arithmetic_us(walk, device)
    best: Cost | None = None
    for schedule in _schedules(walk, device):
        memory, extra = _memory_us(walk, schedule, device, dram + written, near)
        parallel = min(1.0, schedule.programs / device.sms)
        body = max(memory, arithmetic / parallel) + (1 + walk.phases) * device.dram_latency_us
        us = device.launch_us - device.floor_us + max(device.floor_us, body + schedule.finishing_us)
        if best is None or us < best.us:
            bound = "arithmetic" if arithmetic / parallel > memory else "memory"
            if body + schedule.finishing_us <= 2 * device.floor_us:
                bound = "launch"
            elif parallel < 1.0:
                bound = "latency"
            flops = walk.fp32 + walk.fp64 + walk.special + walk.integer
            best = Cost(us, int(dram + extra), int(written), flops, bound)
    assert best is not None  # _schedules always has one
    return best


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


def eager_cost(op: Op, device: DeviceSpec, hints: Mapping[sympy.Symbol, int] = NO_HINTS) -> Cost:
    """One op as the ATen call that eager would make: nothing for a view or an input, else its own kernel."""
    if op.kind is ops.Kind.CONTRACTION:
        return contraction_cost(op, device, hints)
    if not isinstance(op.target, OpOverload) or is_view(op.target):
        return Cost(0.0, 0, 0, 0, "launch")
    read, written = _traffic(op, hints)
    slow = op.kind in (ops.Kind.NORMALIZATION, ops.Kind.REDUCTION)
    us, bound = _roofline(
        device, op.flops / device.fp32_per_s, op.bytes, EAGER_NORM_SHARE if slow else EAGER_SHARE
    )
    return Cost(us, read, written, op.flops, bound)
