"""Predict the time of a loop nest under a schedule, with a roofline in time.

    time = gap + max(floor, latencies + max(memory, arithmetic) + exchange + second stage)

Memory time is device-memory bytes at copy bandwidth plus L2 bytes at L2 bandwidth, divided by the share of
the bandwidth that the schedule can use (which is small for few programs, or for rows that fill a
multiprocessor's registers). Arithmetic time is that of the busiest of issue slots, special-function units and
integer units. Nests with windows take the sum of both, where arithmetic is what `windowed.issue_us` counts.
The constants were fitted to fifteen kernels measured on an H200 (tests/schedule/test_cost.py compares the
model with them) and to the timings in benchmarks/results/schedules.json. The model does not predict spills.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from math import ceil, prod
from typing import NamedTuple

import sympy

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS, Compute, Load, Reduce, with_operands
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.schedule import windowed
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.matrix_cost import factors_of, multiplied
from fusion_compiler.schedule.placement import Leaf, On, Place, Placement, Stage
from fusion_compiler.schedule.run import NO_HINTS, Run
from fusion_compiler.schedule.shared_reductions import SharedReductions
from fusion_compiler.schedule.windows import Windows
from fusion_compiler.schedule.work import BufferInfo, Work

# Results of one program of a second kernel, and partial results that it loads at once of each.
SECOND_BLOCK, ADDENDS = 16, 256

# Share of the bandwidth. With P resident programs on a multiprocessor it is P / (P + STALL): a program loads,
# reduces and stores in sequence, and others fill its pauses. Softmax over 32768 columns in registers, P = 1:
# 0.76.
STALL = 0.316
LOOPED = 0.98  # looped rows: few programs run at once, but each has many loads in flight
# Products whose terms programs share: 4 to 16 rows times 8192 x 2048 and 4096 x 4096 reach 0.24 to 0.54 on an
# H200.
TURNED = 0.45
# The same by threads: one row times 2048 x 8192, 8192 x 2048 and 4096 x 4096 takes 12.1 to 12.5 us, where a
# copy takes 7.9.
TURNED_BY_THREADS = 0.75
SHARED = 0.9  # rows shared by programs that wait for each other
WAITING, ENOUGH_WAITING = 0.5, 4  # STALL of these, and the resident programs that reach the full share
STAGED = 0.98  # persistent programs with pipelined loads (norm backward)
UNSTAGED = 0.84  # without pipelining: 1 x 4096, 264 programs of 8 warps take 467 us, with three stages 394
STAGED_SHARED = 0.8  # pipelined loads in programs that share rows and wait for each other
SM_SHARE = 2.0  # the most that one multiprocessor can use, in multiples of its fair share

# Time of a split reduction's second stage in the last block, from a program's last partial result to the
# store: a barrier, an atomic's round trip to L2, and a read of the other programs' results. Not measured; an
# exchange has as many round trips, and waits for the slowest program.
LAST_US = 1.3
# A reduction in a tile of any axes, for each warp that waits for another one: attention over 512 keys, one
# tile of 16 warps for each query, takes 6.7 us on an H200 (2026-11-27), 5.5 by the rest of the model.
REDUCED_IN_TILE_US = 0.016
REPLICATED_US = 0.25  # a replicated reduction: the barrier of a block's threads. Not measured
EXCHANGE_US = 1.5  # from a program's message to the last answer
START_US = 0.08  # between the starts of two programs on a multiprocessor (tiles of 128 elements, 0.6 ns each)

# Later passes over a row.
REREAD = 0.3  # share of their L2 time that other programs' device-memory traffic does not hide
REREAD_SEVERAL = 2.4  # the same for several tensors, when more than L1_SHARE of the L1 cache is in use
L1_SHARE = 0.5  # a norm's gradients over 8192 columns took 176 us for 132
L2_SHARE = 0.7  # share of L2 that rows in flight may fill before the second read misses

OVERHEAD_REGISTERS = 24  # registers of each thread beside the values of its row
FMA_SHARE = 0.75  # instructions per arithmetic operation after multiplies and adds are fused
# Overhead of a block (addresses, barriers, waiting for loads), in elements per thread. If a program processes
# several blocks in sequence, only its pipelined loads hide it.
BLOCK_ELEMENTS, TURN_ELEMENTS, SHARED_ELEMENTS = 0.8, 2.4, 1.5
# Elements per thread, without and with reductions, beyond which no measured kernel gains.
ENOUGH, ENOUGH_REDUCED = 16, 32
# Elements in flight per multiprocessor with which persistent programs reach their full bandwidth, and half.
STAGED_FULL, STAGED_HALF = 8192, 2100
SHARED_FULL, SHARED_HALF = 16384, 3500  # the same for programs that wait for each other
SHARED_STALL = 0.16  # STALL of these: another program of the multiprocessor continues meanwhile
RUN_ELEMENTS = 6  # overhead of the next row of a narrow tile, in elements
MESSAGE_BYTES = 128  # L2 bytes of a message between two programs that share a row
L1_BYTES = 64  # bytes per cycle of a product's vectors from a multiprocessor's L1 cache
SHARP = 8  # exponent of the norm that combines the time to start programs with the rest


class Use(NamedTuple):
    """The use of the memory system by the programs of a run.

    share: share of the bandwidth, given enough programs.
    rereads: how often the loads in `work.early` are read again.
    flight: rows in progress at the same time.
    slots: programs that run at the same time, if each takes long enough for an incomplete last wave to count;
        else 0.
    after_us: time of exchanges between programs and of second stages.
    messages: L2 bytes of exchanges.
    unused: bytes of sectors that are moved but not used.
    """

    share: float
    rereads: int = 0
    flight: float = 0
    slots: int = 0
    after_us: float = 0.0
    messages: int = 0
    unused: float = 0.0


def _use_of_tiles(work: Work, run: Run, device: DeviceSpec) -> Use:
    """Return the use of memory by tiles of any axes."""
    if run.sharing is not None:
        return _use_in_parts(work, run, run.sharing, device)
    tile = max(run.tile_sizes)
    resident = _resident(work, run, tile, device)
    slowdown = _slowdown(run, tile, device, BLOCK_ELEMENTS)
    if _is_turned_product(work, run):
        after = _finish_us(work, run, device) + _replicated_us(work, run, device)
        if any(leaf.place is Place.LOOP for leaf in run.leaves):
            share = _share_in_turn(run, tile, device)
        else:
            share = 1.0 / _slowdown(run, tile, device, BLOCK_ELEMENTS, ENOUGH)
        return Use(TURNED_BY_THREADS * share, after_us=after)
    if _streams(work, run.leaves):
        after = _finish_us(work, run, device)
        share = (TURNED if after else LOOPED) / slowdown
        return Use(share, slots=0 if after else resident * device.sms, after_us=after)
    share = resident / (resident + STALL) / slowdown
    innermost = max((leaf for leaf in run.leaves if leaf.place is Place.LANES), key=lambda leaf: leaf.order)
    if innermost.lanes < hint(run.placement.axes(work.loops.axes)[innermost.axis].size, work.hints):
        share /= 1 + RUN_ELEMENTS / innermost.lanes
    waiting = REDUCED_IN_TILE_US * work.phases * (run.placement.num_warps - 1)
    again = _loaded_again(work, run.leaves, device)
    return Use(share, slots=resident * device.sms, after_us=waiting, messages=again)


def _use_of_rows(work: Work, run: Run, device: DeviceSpec) -> Use:
    """Return the use of memory by tiles of rows and columns."""
    _, rows, cols = work.shape
    counts, parts = run.counts, run.parts
    block_rows, block_cols = counts.get((Place.LANES, ROWS), 1), counts.get((Place.LANES, COLS), 1)
    groups, in_loop = counts.get((Place.GRID, ROWS), 1), (Place.LOOP, COLS) in counts
    unused, after = work.unused_bytes(block_rows), 0.0
    if work.reduced & 1 and groups > 1:  # partial results are written, and read by the second stage
        partial = 2 * work.row_bytes * groups * (cols if work.sums_of_columns else 1)
        after = 1e6 * partial / device.l2_bandwidth + device.floor_us
    exchanges = max(1, work.phases - 1)
    passes = exchanges + bool(work.early & work.late)
    messages = exchanges * MESSAGE_BYTES * parts**2 * rows if parts > 1 else 0
    in_grid, tile = (Place.GRID, COLS) in counts, block_rows * block_cols
    if counts.get((Place.LOOP, ROWS), 1) > 1:
        narrow = in_grid and block_cols < cols and not run.a.only_tall
        share = _share_in_turn(run, tile, device) / (1 + narrow * RUN_ELEMENTS / block_cols)
        return Use(share, after_us=after, messages=messages, unused=unused)
    if in_grid:
        share = 1.0 / _slowdown(run, tile, device, BLOCK_ELEMENTS, ENOUGH)
        if work.reduced & 1 and groups > 1 and block_cols < cols and not run.a.only_tall:
            share /= 1 + RUN_ELEMENTS / block_cols
        return Use(share, after_us=after, unused=unused)
    resident = _resident(work, run, tile, device)
    slots = resident * device.sms
    if parts > 1:
        rereads, after = passes - 1 if in_loop else 0, after + exchanges * EXCHANGE_US
        full = min(1.0, (1 + WAITING / ENOUGH_WAITING) * resident / (resident + WAITING))
        share = SHARED * full / _slowdown(run, tile, device, SHARED_ELEMENTS)
        flight = max(1, slots // parts) * block_rows
        return Use(share, rereads, flight, slots, after, messages, unused)
    if not in_loop:
        share = resident / (resident + STALL) / _slowdown(run, tile, device, BLOCK_ELEMENTS)
        return Use(share, slots=slots, after_us=after, unused=unused)
    # share of the blocks' columns that are inside the row
    filled = cols / (ceil(cols / block_cols) * block_cols)
    share = LOOPED * filled / _slowdown(run, tile, device, BLOCK_ELEMENTS)
    return Use(share, passes - 1, min(run.programs, slots) * block_rows, slots, after, unused=unused)


def _use_in_parts(work: Work, run: Run, sharing: SharedReductions, device: DeviceSpec) -> Use:
    """Return the use of memory by programs that share reductions over different axes, or go through these in
    loops."""
    elements, in_loops = max(run.tile_sizes), run.extent(Place.LOOP)
    resident, after = _resident(work, run, elements, device), _finish_us(work, run, device)
    slots, exchanges = resident * device.sms, len(tuple(sharing.together()))
    has_loops = any(leaf.place is Place.LOOP for leaf in run.leaves)
    rereads = max(0, work.phases - 1) + bool(work.early & work.late) if has_loops else 0
    flight = min(1.0, slots / max(1, run.programs)) * work.count[1]
    share = resident / (resident + STALL) / _slowdown(run, elements, device, BLOCK_ELEMENTS)
    messages = 0
    if exchanges:
        after += exchanges * EXCHANGE_US
        messages = exchanges * MESSAGE_BYTES * run.parts * run.programs
        full = min(1.0, (1 + WAITING / ENOUGH_WAITING) * resident / (resident + WAITING))
        share = SHARED * full / _slowdown(run, elements, device, SHARED_ELEMENTS)
    elif has_loops:
        share = LOOPED / _slowdown(run, elements, device, BLOCK_ELEMENTS)
    covered = run.programs * elements * in_loops
    filled = min(1.0, prod(work.sizes) / max(1, covered))
    return Use(share * filled, rereads, flight, slots, after, messages)


def _streams(work: Work, leaves: Sequence[Leaf]) -> bool:
    """True if programs read their part of a matrix and little else: in a loop, or all of it at once where
    others have the rest of its terms."""
    reduced = frozenset[int]().union(*(n.axes for n in work.loops.nodes if isinstance(n, Reduce)))
    shared = (leaf for leaf in leaves if leaf.place is Place.GRID and leaf.members & reduced)
    return any(leaf.place is Place.LOOP for leaf in leaves) or any(shared)


def _is_turned_product(work: Work, run: Run) -> bool:
    """True if threads multiply one vector, or each of a few, by a matrix whose neighbours in memory belong to
    other results."""
    on_cores = any(isinstance(directive, On) for directive in run.placement.directives)
    if on_cores or any(leaf.place is Place.UNROLL for leaf in run.leaves):
        return False
    return work.products is not None and work.products.is_turned


def _replicated_us(work: Work, run: Run, device: DeviceSpec) -> float:
    """Return the time of reductions that each program makes by itself, and of what they reduce."""
    names, loops = run.placement.combined(Stage.EACH), work.loops
    copies = [n for n, name in enumerate(loops.names) if name in names and isinstance(loops.nodes[n], Reduce)]
    if not copies:
        return 0.0
    flops = 0
    for number in with_operands(loops, copies):
        if isinstance(node := loops.nodes[number], Compute):
            flops += work.points(work.axes[number]) * (node.spec.flops + node.spec.special)
    return len(copies) * REPLICATED_US + 1e6 * run.programs * flops / device.fp32_per_s


def _finish_us(work: Work, run: Run, device: DeviceSpec) -> float:
    """Return the time to store the partial results of the programs that share reductions, and to add them up
    in a second kernel or in the last programs."""
    grid, moved, of_block, last = [leaf for leaf in run.leaves if leaf.place is Place.GRID], 0, 0, True
    finished, of_each = run.placement.combined(Stage.LAST), run.placement.combined(Stage.EACH)
    addends, totals, sharing = 0, 0, run.sharing
    for number, node in enumerate(work.loops.nodes):
        shared = [leaf for leaf in grid if isinstance(node, Reduce) and leaf.members & node.axes]
        if sharing is not None:
            shared = list(sharing.leaves[number]) if number in sharing.partial else []
        if shared and work.loops.names[number] not in of_each:
            size = work.row_bytes * work.points(work.axes[number])
            parts = prod(hint(leaf.extent, work.hints) for leaf in shared)
            blocks = prod(hint(leaf.extent, work.hints) for leaf in grid if leaf not in shared)
            addends, totals = max(addends, parts), max(totals, work.points(work.axes[number]))
            moved, of_block = moved + 2 * size * parts, of_block + size * parts // max(1, blocks)
            last = last and work.loops.names[number] in finished
    if not moved:
        return 0.0
    after = LAST_US + 1e6 * of_block / (L1_BYTES * device.clock) if last else device.floor_us
    if sharing is not None:
        parallel = min(1.0, ceil(totals / SECOND_BLOCK) / device.sms)
        read = 1e6 * moved / 2 / (device.l2_bandwidth * parallel)
        chain = ceil(addends / ADDENDS) * device.dram_latency_us
        return 1e6 * moved / 2 / device.copy_bandwidth + max(device.floor_us, read + chain)
    waits = device.dram_latency_us if work.phases else 0.0  # nothing in a program waits for what it shares
    return 1e6 * moved / device.l2_bandwidth + after - waits


def _repetitions(work: Work, grid: Sequence[Leaf], axes: int) -> int:
    """Return how many programs have the same elements of a value that varies over some axes (bits)."""
    apart = (leaf for leaf in grid if not any(axes >> k & 1 for k in leaf.members))
    return prod(hint(leaf.extent, work.hints) for leaf in apart)


def _repeated_us(
    work: Work, leaves: Sequence[Leaf], device: DeviceSpec, copied: Collection[int] = ()
) -> tuple[float, float]:
    """Return microseconds of (arithmetic, L1 cache) for values that several programs load and compute.
    copied: nodes whose values do not pass through registers."""
    grid = [leaf for leaf in leaves if leaf.place is Place.GRID]
    flops = special = bytes_read = 0
    for number, (node, axes) in enumerate(zip(work.loops.nodes, work.axes, strict=True)):
        others = 0 if number in copied else _repetitions(work, grid, axes) - 1
        if others and isinstance(node, Compute):
            flops += others * work.points(axes) * node.spec.flops
            special += others * work.points(axes) * node.spec.special
        elif others and isinstance(node, Load):
            flops += others * work.points(axes)  # one operation converts it
            bytes_read += others * work.points(axes) * work.buffers[node.buffer].itemsize
    arithmetic = max((FMA_SHARE * flops + special) / device.fp32_per_s, special / device.special_per_s)
    return 1e6 * arithmetic, 1e6 * bytes_read / (L1_BYTES * device.sms * device.clock)


def _loaded_again(work: Work, leaves: Sequence[Leaf], device: DeviceSpec) -> int:
    """Return the bytes that programs load from L2 because others load them too. What all programs load stays
    in the L1 cache of a multiprocessor, if it is small."""
    seen, moved = set[object](), 0
    grid = [leaf for leaf in leaves if leaf.place is Place.GRID]
    for node, axes in zip(work.loops.nodes, work.axes, strict=True):
        if isinstance(node, Load) and (node.buffer, node.index) not in seen:
            seen.add((node.buffer, node.index))
            size = work.points(axes) * work.buffers[node.buffer].itemsize
            others = _repetitions(work, grid, axes)
            of_all = all(not axes >> k & 1 for leaf in grid for k in leaf.members)
            moved += size if of_all and size <= L1_SHARE * device.shared_bytes else size * others
    return max(0, moved - int(sum(work.bytes_of(work.reads, name, device) for name in work.reads)))


def _share_in_turn(run: Run, elements: int, device: DeviceSpec) -> float:
    """Return the share of the bandwidth of programs that process blocks in sequence. elements: of a block."""
    resident = run.programs / device.sms
    in_flight, most, half = resident * elements, STAGED_FULL, STAGED_HALF
    share = STAGED if run.placement.num_stages > 1 else UNSTAGED
    if run.parts > 1:
        most, half = SHARED_FULL, SHARED_HALF
        share = STAGED_SHARED * min(1.0, (1 + SHARED_STALL / 2) * resident / (resident + SHARED_STALL))
    reached = min(1.0, (1 + half / most) * in_flight / (in_flight + half))
    return share * reached / _slowdown(run, elements, device, TURN_ELEMENTS)


def _slowdown(
    run: Run, elements: int, device: DeviceSpec, overhead: float, enough: int = ENOUGH_REDUCED
) -> float:
    """Return how much slower threads with few elements are. elements: of a tile. overhead: what a block costs
    beside its elements, in elements per thread."""
    per_thread = elements / (device.warp_size * run.placement.num_warps)
    return 1 + max(0.0, overhead / per_thread - overhead / enough)


def _resident(work: Work, run: Run, elements: int, device: DeviceSpec) -> int:
    """Return how many programs a multiprocessor holds at the same time. elements: of a tile."""
    threads = device.warp_size * run.placement.num_warps
    in_loop = run.a.in_rows and (Place.LOOP, COLS) in run.counts
    tiles = 1 if in_loop else max(1, (work.early & work.late).bit_count())
    registers = elements * tiles * work.row_bytes // 4 + threads * OVERHEAD_REGISTERS
    if run.placement.registers is not None:
        registers = min(registers, run.placement.registers * threads)
    fit = min(device.registers_per_sm // registers, device.max_threads_per_sm // threads)
    return max(1, min(fit, device.max_blocks_per_sm))


class Roofline:
    """The predicted time of the schedules of one loop nest on a device.

    buffers: every buffer that the nest loads or stores.
    hints: sizes of symbolic dimensions to plan for.
    Reductions over rows are assumed to end in stores: to use a sum over rows on each row again would need a
    barrier of the whole grid, and no schedule has one.
    """

    def __init__(
        self,
        a: Analysis,
        device: DeviceSpec,
        buffers: Mapping[str, BufferInfo],
        hints: Mapping[sympy.Symbol, int] = NO_HINTS,
    ) -> None:
        self.a, self.device, self.work = a, device, Work(a, buffers, hints)
        work = self.work
        dram = l2 = 0.0
        for name in work.reads:
            bytes_moved = work.bytes_of(work.reads, name, device)
            if buffers[name].in_l2:
                l2 += bytes_moved
            else:
                dram += bytes_moved
        self.dram, self.l2 = dram, l2 + work.rewritten()
        self.written = sum(work.bytes_of(work.writes, name, device) for name in work.writes)
        early = {name for n, name in enumerate(work.tile_loads) if work.early >> n & 1}
        self.reread_tensors = len(early)
        self.reread_bytes = sum(work.bytes_of(work.reads, name, device) for name in early)
        self.arithmetic_us = _arithmetic_us(work, device)

    @property
    def empty(self) -> bool:
        """True if there is nothing to launch."""
        return not self.work.count[3]

    def run(self, placement: Placement) -> Run:
        """Return the run of the nest under a placement."""
        return Run(self.a, placement, self.work.hints)

    def us(self, run: Run) -> float:
        """Return microseconds of the kernel and its second stage, or 0 if there is nothing to launch."""
        return self.cost(run).us

    def cost(self, run: Run) -> Cost:
        """Return the time with its traffic and bound."""
        if self.empty:
            return Cost(0.0, 0, 0, 0, "launch")
        if self.a.windows is not None:
            return self._cost_of_windows(run, self.a.windows)
        if self.a.matrices is not None and run.terms:
            return self._cost_of_matrices(run)
        device = self.device
        use = (_use_of_rows if self.a.in_rows else _use_of_tiles)(self.work, run, device)
        memory, extra = self._memory_us(run, use)
        memory, arithmetic = self._demands(run, memory)
        body, parallel = self._body_us(run, use, memory, arithmetic), min(1.0, run.programs / device.sms)
        bound = "arithmetic" if arithmetic / parallel > memory else "memory"
        if body <= 2 * device.floor_us:
            bound = "launch"
        elif parallel < 1.0:
            bound = "latency"
        return Cost(self._us(body), int(self.dram + extra), int(self.written), self.work.flops, bound)

    def _cost_of_windows(self, run: Run, windows: Windows) -> Cost:
        """Return the cost of a nest with windows, whose programs seldom issue while they wait for memory."""
        device, work = self.device, self.work
        memory = 1e6 * (self.dram + self.l2 + self.written) / device.copy_bandwidth
        issue = windowed.issue_us(run, windows, device)
        reduced = (leaf for leaf in run.leaves if leaf.axis in self.a.inner)
        is_shared = any(leaf.place is Place.GRID and leaf.extent != 1 for leaf in reduced)
        body = windowed.LATENCY_US + memory + issue + (device.launch_us if is_shared else 0.0)
        body += 1e6 * windowed.work_in_windows(work) / device.fp32_per_s
        bound = "memory" if memory > issue else "arithmetic"
        return Cost(self._us(body), int(self.dram), int(self.written), work.flops, bound)

    def _cost_of_matrices(self, run: Run) -> Cost:
        """Return the cost of products in tiles. Where a multiprocessor holds one program, tensor cores wait
        for what threads compute, and for the first loads of the next tile."""
        device, work = self.device, self.work
        memory = 1e6 * ((self.dram + self.written) / device.copy_bandwidth + self.l2 / device.l2_bandwidth)
        products = multiplied(work, run, device)
        on_cores = 2 * sum(work.points(work.axes[n]) for n in run.terms)
        loads = {n for n in factors_of(run) if isinstance(work.loops.nodes[n], Load)}
        again, _ = _repeated_us(work, run.leaves, device, run.terms | loads)
        arithmetic = (_arithmetic_us(work, device, on_cores) + again) / products.filled
        if products.resident > 1:
            compute, waits = max(products.us, arithmetic), 1
        else:
            compute, waits = products.us + arithmetic, products.waves
        body = max(memory, compute) + waits * device.dram_latency_us + _finish_us(work, run, device)
        bound = "arithmetic" if compute > memory else "memory"
        return Cost(self._us(body), int(self.dram), int(self.written), work.flops, bound)

    def _us(self, body: float) -> float:
        return self.device.launch_us - self.device.floor_us + max(self.device.floor_us, body)

    def _demands(self, run: Run, memory: float) -> tuple[float, float]:
        """Return microseconds of (memory, arithmetic) in a run. They include what several programs read and
        compute again beside their part of a matrix, and exclude products on tensor units."""
        if self.a.in_rows:
            return memory, self.arithmetic_us
        work, arithmetic = self.work, self.arithmetic_us
        if run.terms:  # a multiplication and an addition each
            on_cores = 2 * sum(work.points(work.axes[n]) for n in run.terms)
            arithmetic = _arithmetic_us(work, self.device, on_cores)
        if _streams(work, run.leaves):
            again, l1 = _repeated_us(work, run.leaves, self.device)
            return max(memory, l1), arithmetic + again
        return memory, arithmetic

    def _body_us(self, run: Run, use: Use, memory: float, arithmetic: float) -> float:
        device = self.device
        arithmetic /= min(1.0, run.programs / device.sms)
        busy, starts = max(memory, arithmetic), run.programs * START_US / device.sms
        if 2 * starts > busy:
            busy = (busy**SHARP + starts**SHARP) ** (1 / SHARP)
        return busy + (1 + self.work.phases) * device.dram_latency_us + use.after_us

    def _memory_us(self, run: Run, use: Use) -> tuple[float, float]:
        """Return (microseconds, additional device-memory bytes of later passes)."""
        work, device = self.work, self.device
        extra = reread = 0.0
        total = self.dram + self.written
        if use.rereads:
            reread_bytes = self.reread_bytes
            fraction = use.flight / work.count[1]
            if (total + self.l2) * fraction > L2_SHARE * device.l2_bytes:
                extra = use.rereads * reread_bytes
            else:
                l1 = L1_SHARE * device.shared_bytes * device.sms
                exceeds_l1 = self.reread_tensors > 1 and reread_bytes * fraction > l1
                reread = use.rereads * reread_bytes * (REREAD_SEVERAL if exceeds_l1 else REREAD)
        parallel = min(1.0, run.programs * SM_SHARE / device.sms)
        last_wave = run.programs % use.slots if run.programs > use.slots > 0 else 0
        # too few programs use the bandwidth in the last wave
        idle = max(0.0, device.sms / SM_SHARE - last_wave) if last_wave else 0.0
        tail = idle / max(1, run.programs)
        seconds = (total + extra + use.unused) * (1 + tail) / (device.copy_bandwidth * use.share * parallel)
        return 1e6 * (seconds + (self.l2 + reread + use.messages) / (device.l2_bandwidth * parallel)), extra


def _arithmetic_us(work: Work, device: DeviceSpec, elsewhere: int = 0) -> float:
    """Return the time of the busiest of issue slots, special units, integer units and float64 units.
    elsewhere: float32 operations that tensor units execute."""
    integer = work.integer / device.integer_per_s + work.random / device.random_per_s
    issued = FMA_SHARE * (work.fp32 - elsewhere + work.integer) + work.moves + work.special
    issued += work.random * device.integer_per_s / device.random_per_s
    return 1e6 * max(
        issued / device.fp32_per_s,
        work.special / device.special_per_s,
        integer,
        work.fp64 / device.fp64_per_s,
    )
