"""The time that tensor cores take for matrix products in tiles, and the shared memory that the tiles need."""

from __future__ import annotations

from math import ceil, prod
from typing import NamedTuple

from fusion_compiler.ir.device import GEMM_SHARE, DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import Load, source_of, with_operands
from fusion_compiler.schedule.placement import Place
from fusion_compiler.schedule.run import Run
from fusion_compiler.schedule.work import Work

# Results of a tile for each element that is loaded in a turn of its loop, from which on tensor cores wait
# for no loads: those of 128 x 256. The rate falls with the root of them: not measured here. Kernels of 128 x
# 128 that others publish for an H100 reach 0.85 to 0.9 of those of 128 x 256.
FULL, FALL = 128 * 256 / (128 + 256), 0.5
REGISTERS = 48  # of a thread, beside its sums


class Multiplied(NamedTuple):
    """The products of a run. us: microseconds of tensor cores. waves: tiles of the multiprocessor that has
    most. filled: of all tiles, for each tile of a multiprocessor that has most. resident: programs of a
    multiprocessor."""

    us: float
    waves: int
    filled: float
    resident: int


def multiplied(work: Work, run: Run, device: DeviceSpec) -> Multiplied:
    """Return the time of tensor cores for a nest's matrix products."""
    matrices = run.a.matrices
    assert matrices is not None
    axes = run.placement.axes(work.loops.axes)
    sizes = [hint(axis.size, work.hints) for axis in axes]
    lanes = [leaf for leaf in run.leaves if leaf.place is Place.LANES]
    rows, cols, terms = (
        next(leaf for leaf in lanes if not leaf.members.isdisjoint(axes))  # some may be fused
        for axes in (matrices.rows, matrices.cols, matrices.terms)
    )
    parts = prod(
        hint(leaf.extent, work.hints)
        for leaf in run.leaves
        if leaf.place is Place.GRID and leaf.axis == terms.axis
    )
    tiles = parts * prod(max(1, sizes[k]) for k in matrices.batch)
    tiles *= prod(max(1, ceil(sizes[leaf.axis] / leaf.lanes)) for leaf in (rows, cols))
    turns = ceil(sizes[terms.axis] / (terms.lanes * parts))
    loaded, results = _loaded(work, run), len(matrices.factors) * rows.lanes * cols.lanes
    moved = sum(count for count, _ in loaded) / terms.lanes
    rate = GEMM_SHARE * device.tensor_flops / device.sms
    rate *= 2 if all(size == 1 for _, size in loaded) else 1  # eight bits
    rate *= min(1.0, results / max(1.0, moved) / FULL) ** FALL
    waves = ceil(tiles / device.sms)
    registers = run.threads * REGISTERS + results
    resident = min(device.registers_per_sm // registers, device.shared_bytes // shared_bytes(work, run))
    us = 1e6 * waves * 2 * results * terms.lanes * turns / rate
    return Multiplied(us, waves, tiles / (waves * device.sms), max(1, min(resident, waves)))


def shared_bytes(work: Work, run: Run) -> int:
    """Return the bytes of the tiles that a program has in shared memory: those that its loop loads ahead, and
    a factor that is computed of them."""
    nodes, each = run.a.loops.nodes, sum(count * size for count, size in _loaded(work, run))
    computed = (n for n in factors_of(run) if not isinstance(nodes[n], Load))
    return run.placement.num_stages * each + sum(2 * run.elements(run.a.node_axes[n]) for n in computed)


def factors_of(run: Run) -> frozenset[int]:
    """Return the nodes whose values tensor cores multiply, as they are before conversions."""
    matrices, nodes = run.a.matrices, run.a.loops.nodes
    assert matrices is not None
    return frozenset(source_of(nodes, factor) for pair in matrices.factors.values() for factor in pair)


def _loaded(work: Work, run: Run) -> list[tuple[int, int]]:
    """Return (elements, bytes of an element) of what a turn of the loop over the terms loads."""
    matrices, loops = run.a.matrices, run.a.loops
    assert matrices is not None
    terms, loads = frozenset(matrices.terms), dict[object, tuple[int, int]]()
    for n in with_operands(loops, factors_of(run)):
        node = loops.nodes[n]
        if isinstance(node, Load) and not run.a.node_axes[n].isdisjoint(terms):
            size = work.buffers[node.buffer].itemsize
            loads[node.buffer, node.index] = run.elements(run.a.node_axes[n]), size
    return list(loads.values())
