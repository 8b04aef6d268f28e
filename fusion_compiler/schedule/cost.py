"""The roofline in time of one schedule of a loop nest on one device.

    time = gap + max(floor, latencies + max(memory, arithmetic) + exchange + finishing)

Memory time is device-memory bytes at copy bandwidth plus L2 bytes at L2 bandwidth, divided by the part
of the bandwidth that the schedule can draw (few programs, rows that fill a multiprocessor's registers).
Arithmetic time is the busiest of the issue slots, the special-function units and the integer units.
The constants below were read from fifteen kernels measured on an H200 (tests/schedule/test_cost.py compares
the model with them) and from the timings of benchmarks/results/schedules.json. The model foresees no spills.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import ceil, prod

import sympy

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import Load, LoopNest, operands_of
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.schedule.contractions import takes_tiles
from fusion_compiler.schedule.placement import Place, Placement, products_of, tile_sizes
from fusion_compiler.schedule.schedule import Cols, Schedule
from fusion_compiler.schedule.work import BufferInfo, Vectors, Work

SEGMENT_BLOCK = 16  # segments of which one program adds up the partial results,
ADDENDS = 256  # as many of each at a time
# Bandwidth drawn with P programs resident on a multiprocessor is P / (P + STALL): a program loads, reduces
# and stores in turn, and another covers its pauses. Softmax over 32768 columns in registers, P = 1: 0.76.
STALL = 0.316
LOOPED = 0.98  # of the bandwidth: looped rows, with much in flight each, so that few run at once
SHARED = 0.9  # rows shared by programs, which wait for each other,
WAITING, ENOUGH_WAITING = 0.5, 4  # as STALL; resident programs with which all of that is drawn
# From a program's last partial result to the last program's store: a barrier, a ticket's way to L2 and back,
# and that of what the others left. Not measured: an exchange has as many ways, and waits for the slowest.
LAST_US = 1.3
# Of each reduction in a tile of any axes, for each warp that waits for another one: attention over 512 keys, one
# tile of 16 warps for each query, takes 6.7 us on an H200 (2026-11-27), 5.5 by the rest of the model.
REDUCED_IN_TILE_US = 0.016
AHEAD_US = 0.25  # of what every program reduces by itself: threads wait for each other. Not measured either
EXCHANGE_US = 1.5  # from a program's message to the answer of the last
STAGED = 0.98  # of the bandwidth: persistent programs with staged loads (norm backward)
UNSTAGED = 0.84  # the same without: 1 x 4096, 264 programs of 8 warps 467 us, in three stages 394
STAGED_SHARED = 0.8  # with staged loads, where programs share rows, and wait for each other
REREAD = 0.3  # of the time that later passes take from L2 does not hide behind other programs' device memory
REREAD_SEVERAL = 2.4  # the same of several tensors, of which a multiprocessor's first level of cache
L1_SHARE = 0.5  # has more than this part in work: a norm's gradients over 8192 columns, 176 us for 132
L2_SHARE = 0.7  # of the L2 that rows in flight may fill before their second reading misses
SM_SHARE = 2.0  # times its fair part of the bandwidth that one multiprocessor can draw
OVERHEAD_REGISTERS = 24  # of each thread, beside the values of its row
START_US = (
    0.08  # from one program's start on a multiprocessor to the next: tiles of 128 elements, 0.6 ns each
)
FMA_SHARE = 0.75  # instructions left of each arithmetic operation once multiplies and adds have merged
NO_HINTS: Mapping[sympy.Symbol, int] = {}
# What a block costs its threads beside its elements (addresses, barriers, waiting for loads), in elements of
# a thread; where a program goes through blocks in turn nothing covers it but its staged loads.
BLOCK_ELEMENTS, TURN_ELEMENTS, SHARED_ELEMENTS = 0.8, 2.4, 1.5
ENOUGH, ENOUGH_REDUCED = 16, 32  # of a thread, without reductions and with: no measured kernel gains by more
# Elements that a multiprocessor works on, in turn: what draws all of the bandwidth, and what half of it.
STAGED_FULL, STAGED_HALF = 8192, 2100
SHARED_FULL, SHARED_HALF = 16384, 3500  # the same where programs wait for each other,
SHARED_STALL = 0.16  # during which another program of the multiprocessor goes on
RUN_ELEMENTS = 6  # that it costs to go from one row of a narrow tile to the next
MESSAGE_BYTES = 128  # of L2, for what one program that shares a row tells another
L1_BYTES = 64  # of a product's vectors that a multiprocessor's first level of cache delivers in a cycle
SHARP = 8  # how little the start of programs adds to the time while something else takes longer


@dataclass(frozen=True, slots=True)
class Run:
    """What a schedule does with the memory system.

    programs: of the grid. share: of the bandwidth, with programs enough. unused: bytes that come along in
    sectors. rereads: times that the loads in `work.early` are read after the first. flight: rows that are in
    work at once. slots: programs that run at once where each takes long enough for the last, incomplete round
    to count; else 0. after_us: of exchanges between programs and kernels that finish. messages: bytes of L2
    for the exchanges.
    """

    programs: int
    share: float
    rereads: int = 0
    flight: int = 0
    slots: int = 0
    after_us: float = 0.0
    messages: int = 0
    unused: float = 0.0


def _vectors(vectors: Vectors, blocks: int, device: DeviceSpec) -> tuple[float, float]:
    """Microseconds of (arithmetic, first level of cache) for the vectors that a matrix is multiplied by: each
    block of its rows finds them there, and makes of them what it needs."""
    issued = FMA_SHARE * vectors.fp32 + vectors.special
    arithmetic = max(issued / device.fp32_per_s, vectors.special / device.special_per_s)
    near = vectors.bytes / (L1_BYTES * device.sms * device.clock)
    return 1e6 * (blocks - 1) * arithmetic, 1e6 * (blocks - 1) * near


def _run(work: Work, s: Schedule | Placement, device: DeviceSpec) -> Run:
    _, rows, cols = work.shape
    if isinstance(s, Placement):
        leaves = s.leaves(work.loops.axes)
        programs = prod(hint(leaf.extent, work.hints) for leaf in leaves if leaf.place is Place.GRID)
        elements = max(tile_sizes(work.loops, s))
        resident = _resident(work, s, device, elements)
        share = resident / (resident + STALL) / _slowdown(s, device, BLOCK_ELEMENTS, elements=elements)
        innermost = max((leaf for leaf in leaves if leaf.place is Place.LANES), key=lambda leaf: leaf.order)
        if innermost.lanes < hint(work.loops.axes[innermost.axis].size, work.hints):
            share /= 1 + RUN_ELEMENTS / innermost.lanes
        again = _loaded_again(work, s, programs, device)
        waiting = REDUCED_IN_TILE_US * work.phases * (s.num_warps - 1)
        return Run(programs, share, slots=resident * device.sms, after_us=waiting, messages=again)
    blocks = ceil(rows / s.block_rows)
    groups = blocks if s.programs is None else min(blocks, s.programs)
    programs = groups * (ceil(cols / s.block_cols) if s.cols is Cols.GRID else s.splits)
    after = 0.0
    if work.reduced & 1 and groups > 1:  # partial results are written, and read by what finishes
        partial = 2 * work.row_bytes * groups * (cols if work.sums_of_columns else 1)
        after = 1e6 * partial / device.l2_bandwidth + (
            _last_us(work, s, groups, device) if s.last_finishes else device.floor_us
        )
    if work.ahead and work.sums_of_columns:
        after += work.ahead * AHEAD_US + 1e6 * programs * rows * work.of_rows / device.fp32_per_s
    exchanges = max(1, work.phases - 1)
    passes = exchanges + bool(work.early & work.late)
    messages = exchanges * MESSAGE_BYTES * s.splits**2 * rows if s.splits > 1 else 0
    if s.programs is not None and groups * s.block_rows < rows:
        narrow = s.cols is Cols.GRID and s.block_cols < cols
        share = _share_in_turn(s, programs, device) / (1 + narrow * RUN_ELEMENTS / s.block_cols)
        return Run(programs, share, after_us=after, messages=messages)
    if s.cols is Cols.GRID:
        share = 1.0 / _slowdown(s, device, BLOCK_ELEMENTS, ENOUGH)
        if work.reduced & 1 and groups > 1 and s.block_cols < cols:
            share /= 1 + RUN_ELEMENTS / s.block_cols
        return Run(programs, share, after_us=after)
    resident = _resident(work, s, device)
    slots = resident * device.sms
    if s.splits > 1:
        rereads, after = passes - 1 if s.cols is Cols.LOOP else 0, after + exchanges * EXCHANGE_US
        full = min(1.0, (1 + WAITING / ENOUGH_WAITING) * resident / (resident + WAITING))
        share = SHARED * full / _slowdown(s, device, SHARED_ELEMENTS)
        return Run(programs, share, rereads, max(1, slots // s.splits) * s.block_rows, slots, after, messages)
    if s.cols is Cols.WHOLE:
        share = resident / (resident + STALL) / _slowdown(s, device, BLOCK_ELEMENTS)
        return Run(programs, share, slots=slots, after_us=after)
    filled = cols / (ceil(cols / s.block_cols) * s.block_cols)  # of the blocks
    share = LOOPED * filled / _slowdown(s, device, BLOCK_ELEMENTS)
    return Run(programs, share, passes - 1, min(programs, slots) * s.block_rows, slots, after)


def _loaded_again(work: Work, s: Placement, programs: int, device: DeviceSpec) -> int:
    """Return the bytes that programs load of what others load too: from L2."""
    sizes, seen, moved = tile_sizes(work.loops, s), set[object](), 0.0
    for node, size in zip(work.loops.nodes, sizes, strict=True):
        if isinstance(node, Load) and (node.buffer, node.index) not in seen:
            seen.add((node.buffer, node.index))
            moved += programs * size * work.buffers[node.buffer].itemsize
    return max(0, int(moved - sum(work.bytes_of(work.reads, name, device) for name in work.reads)))


def _last_us(work: Work, s: Schedule, groups: int, device: DeviceSpec) -> float:
    """Of the last program of a block of columns, with the partial results of so many."""
    held = groups * s.block_cols * work.row_bytes * work.sums_of_columns
    return LAST_US + 1e6 * held / (L1_BYTES * device.clock)


def _share_in_turn(s: Schedule, programs: int, device: DeviceSpec) -> float:
    """Of the bandwidth, where programs go through blocks: as much as their loads in flight draw."""
    each = programs / device.sms
    held, most, half = each * s.block_rows * s.block_cols, STAGED_FULL, STAGED_HALF
    share = STAGED if s.num_stages > 1 else UNSTAGED
    if s.splits > 1:
        most, half = SHARED_FULL, SHARED_HALF
        share = STAGED_SHARED * min(1.0, (1 + SHARED_STALL / 2) * each / (each + SHARED_STALL))
    drawn = min(1.0, (1 + half / most) * held / (held + half))
    return share * drawn / _slowdown(s, device, TURN_ELEMENTS)


def _slowdown(
    s: Schedule | Placement,
    device: DeviceSpec,
    beside: float,
    enough: int = ENOUGH_REDUCED,
    elements: int | None = None,
) -> float:
    """Return how much longer threads with few elements take: `beside` as many go by before and after them.
    elements: of a tile."""
    each = (elements or s.elements) / (device.warp_size * s.num_warps)
    return 1 + max(0.0, beside / each - beside / enough)


def _resident(work: Work, s: Schedule | Placement, device: DeviceSpec, elements: int | None = None) -> int:
    """Programs that a multiprocessor holds at once. elements: of a tile."""
    threads = device.warp_size * s.num_warps
    holds_all = isinstance(s, Placement) or s.cols is Cols.WHOLE
    kept = max(1, (work.early & work.late).bit_count()) if holds_all else 1
    registers = (elements or s.elements) * kept * work.row_bytes // 4 + threads * OVERHEAD_REGISTERS
    if s.registers is not None:
        registers = min(registers, s.registers * threads)
    fit = min(device.registers_per_sm // registers, device.max_threads_per_sm // threads)
    return max(1, min(fit, device.max_blocks_per_sm))


class Roofline:
    """What schedules of one loop nest take on a device.

    buffers: every buffer that the nest loads or stores. hints: the sizes to plan for where they are symbolic.
    Reductions over rows are taken to end in stores: a sum over rows that is used on each row again would
    have to stop the whole grid, and no schedule here does that.
    """

    def __init__(
        self,
        loops: LoopNest,
        device: DeviceSpec,
        buffers: Mapping[str, BufferInfo],
        hints: Mapping[sympy.Symbol, int] = NO_HINTS,
    ) -> None:
        self.device, self.work = device, Work(loops, buffers, hints)
        work = self.work
        dram = near = 0.0
        for name in work.reads:
            moved = work.bytes_of(work.reads, name, device)
            if buffers[name].in_l2:
                near += moved
            else:
                dram += moved
        self.dram, self.near = dram, near + work.rewritten()
        self.written = sum(work.bytes_of(work.writes, name, device) for name in work.writes)
        early = {name for n, name in enumerate(work.tile_loads) if work.early >> n & 1}
        self.tensors_again = len(early)
        self.bytes_again = sum(work.bytes_of(work.reads, name, device) for name in early)
        self.arithmetic_us = _arithmetic_us(work, device)
        self.beside_units_us = _arithmetic_us(work, device, work.products())
        self.vectors = work.vectors()
        self.segments_us = _segments_us(work, device)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to launch."""
        return not self.work.count[3]

    def us(self, schedule: Schedule | Placement) -> float:
        """Of one kernel with what finishes it; nothing where there is nothing to launch."""
        if self.empty:
            return 0.0
        run = self._run(schedule)
        memory, arithmetic = self._demands(schedule, self._memory_us(run)[0])
        return self._us(self._body_us(run, memory, arithmetic))

    def cost(self, schedule: Schedule | Placement) -> Cost:
        """The same with its traffic and what bounds it."""
        if self.empty:
            return Cost(0.0, 0, 0, 0, "launch")
        device, work, run = self.device, self.work, self._run(schedule)
        memory, extra = self._memory_us(run)
        memory, arithmetic = self._demands(schedule, memory)
        body = self._body_us(run, memory, arithmetic)
        us, parallel = self._us(body), min(1.0, run.programs / device.sms)
        bound = "arithmetic" if arithmetic / parallel > memory else "memory"
        if body <= 2 * device.floor_us:
            bound = "launch"
        elif parallel < 1.0:
            bound = "latency"
        flops = work.fp32 + work.fp64 + work.special + work.integer
        return Cost(us, int(self.dram + extra), int(self.written), flops, bound)

    def _run(self, schedule: Schedule | Placement) -> Run:
        run = _run(self.work, schedule, self.device)
        unused = 0.0 if isinstance(schedule, Placement) else self.work.beside(schedule.block_rows)
        return replace(run, unused=unused) if unused else run

    def _us(self, body: float) -> float:
        return self.device.launch_us - self.device.floor_us + max(self.device.floor_us, body)

    def _demands(self, schedule: Schedule | Placement, memory: float) -> tuple[float, float]:
        """Microseconds of (memory, arithmetic): with what is read and made again for each block of the rows
        of a product's matrix, without the sums that tensor units make."""
        if isinstance(schedule, Placement):
            loops, work = self.work.loops, self.work
            terms = [work.axes[o] for n in products_of(loops, schedule) for o in operands_of(loops.nodes[n])]
            on_cores = 2 * sum(work.points(axes) for axes in terms)  # a multiplication and an addition
            return memory, _arithmetic_us(work, self.device, on_cores) if on_cores else self.arithmetic_us
        on_units = schedule.cols is Cols.LOOP and takes_tiles(schedule)
        own = self.beside_units_us if on_units else self.arithmetic_us
        if self.vectors is None:
            return memory, own
        blocks = ceil(self.work.count[1] / schedule.block_rows)
        arithmetic, near = _vectors(self.vectors, blocks, self.device)
        return max(memory, near), own + arithmetic

    def _body_us(self, run: Run, memory: float, arithmetic: float) -> float:
        device = self.device
        arithmetic /= min(1.0, run.programs / device.sms)
        busy, starts = max(memory, arithmetic), run.programs * START_US / device.sms
        if 2 * starts > busy:
            busy = (busy**SHARP + starts**SHARP) ** (1 / SHARP)
        return busy + (1 + self.work.phases) * device.dram_latency_us + run.after_us + self.segments_us

    def _memory_us(self, run: Run) -> tuple[float, float]:
        """(microseconds, extra device-memory bytes of later passes)."""
        work, device = self.work, self.device
        extra = again = 0.0
        moved = self.dram + self.written
        if run.rereads:
            once = self.bytes_again
            in_work = run.flight / work.count[1]
            if (moved + self.near) * in_work > L2_SHARE * device.l2_bytes:
                extra = run.rereads * once
            else:
                near = L1_SHARE * device.shared_bytes * device.sms
                crowd = self.tensors_again > 1 and once * in_work > near
                again = run.rereads * once * (REREAD_SEVERAL if crowd else REREAD)
        parallel = min(1.0, run.programs * SM_SHARE / device.sms)
        left = run.programs % run.slots if run.programs > run.slots > 0 else 0
        idle = max(0.0, device.sms / SM_SHARE - left) if left else 0.0  # in the last round, too few draw
        tail = idle / max(1, run.programs)
        seconds = (moved + extra + run.unused) * (1 + tail) / (device.copy_bandwidth * run.share * parallel)
        return 1e6 * (seconds + (self.near + again + run.messages) / (device.l2_bandwidth * parallel)), extra


def cost(
    loops: LoopNest,
    schedule: Schedule,
    device: DeviceSpec,
    buffers: Mapping[str, BufferInfo],
    hints: Mapping[sympy.Symbol, int] = NO_HINTS,
) -> Cost:
    """Predict one loop nest under one schedule; see `Roofline`."""
    return Roofline(loops, device, buffers, hints).cost(schedule)


def _arithmetic_us(work: Work, device: DeviceSpec, elsewhere: int = 0) -> float:
    """The busiest of issue slots, special units, integer units and float64 units. elsewhere: operations on
    float32 that tensor units do."""
    integer = work.integer / device.integer_per_s + work.random / device.random_per_s
    issued = FMA_SHARE * (work.fp32 - elsewhere + work.integer) + work.moves + work.special
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
