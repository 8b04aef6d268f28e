"""The second stage of sums over rows that several programs share.

Each program leaves one partial result in scratch memory. The sum of these, and every op that depends on it,
is a loop nest of its own. If it is one element wide, the last program to arrive runs it, found by an atomic
counter. If it is a row, or there are so many programs that the counter would take longer, a second kernel
runs it. In a schedule with `Schedule.last_finishes`, the last program of each block of columns runs its part
of the row, with one counter per block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import cast

import torch

from fusion_compiler.ir.dims import Dim, strides_of
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Axis,
    Index,
    Load,
    LoopNest,
    Node,
    Reduce,
    axes_in,
    operands_of,
    renumber,
    renumber_index,
    renumber_store,
    row_major,
    store_operands,
    with_operands,
)
from fusion_compiler.schedule.analysis import Analysis, accumulator_dtype, ceil_div, waiting
from fusion_compiler.schedule.schedule import Cols, Schedule
from fusion_compiler.schedule.shapes import padded

# Most programs that increment a counter. Each waits until its results have arrived, and one program, with as
# many warps as the others, reads them all. With 16384, that takes 8 us on an H200, and a second kernel 2.
MOST_TICKETS = 4096
# With fewer columns of partial results, each program of a second kernel has one sector of 32 bytes.
NARROW, SECTOR = 2048, 8


@dataclass(frozen=True)
class SecondStage:
    """The second stage of a loop nest's sums over rows, after the programs that share them.

    partials: buffers with one partial result per program.
    loops, schedule: the nest that adds them up and computes everything that depends on it.
    programs: how many share the sum.
    counter: int32 [blocks of columns], counts finished programs if the last of them runs the nest; None for a
        second kernel.
    loads: see `early_loads`; empty unless every program loads them.
    """

    partials: tuple[Buffer, ...]
    loops: LoopNest
    schedule: Schedule
    programs: int
    counter: Buffer | None
    loads: Mapping[int, int] = field(default_factory=dict[int, int])

    @property
    def scratch(self) -> tuple[Buffer, ...]:
        return self.partials if self.counter is None else (*self.partials, self.counter)


def second_stage_of(
    analysis: Analysis, schedule: Schedule, numbers: Iterator[int], tickets: Iterator[int]
) -> SecondStage | None:
    """Return the second stage, or None if there are no sums over rows or one program computes them.

    numbers, tickets: yield the numbers in the names of a cluster's partial results and counters.
    """
    programs = row_programs(analysis, schedule)
    if not analysis.across_rows or programs == 1:
        return None
    assert isinstance(programs, int), "programs that share a reduction are counted at compile time"
    partials = tuple(_partial(analysis, next(numbers), number, programs) for number in analysis.across_rows)
    nest = second_stage_nest(analysis, programs, tuple(b.name for b in partials))
    last = schedule if schedule.last_finishes and analysis.ends_in_a_row else None
    counter: Buffer | None = None
    if last is not None or (not analysis.ends_in_a_row and programs <= MOST_TICKETS):
        ticket, blocks = next(tickets), 1 if last is None else col_blocks(analysis, last)
        name = f"ticket_{ticket}" if ticket else "ticket"
        counter = Buffer(name, (blocks,), (1,), torch.int32, zeroed=True)
    loads = {} if last is None or last.block_rows == 1 else early_loads(analysis, nest)
    stage_schedule = _second_stage_schedule(nest, programs, last)
    return SecondStage(partials, nest, stage_schedule, programs, counter, loads)


def early_loads(analysis: Analysis, late: LoopNest) -> dict[int, int]:
    """Return the second stage's loads that vary only along columns: number in the nest -> number in the
    stage.

    A program loads them (a bias, for example) while it waits for memory anyway, before it can know whether it
    is the last. Then everything left comes from L2, which takes half as long as device memory.
    """
    shift = 1 - len(analysis.axes[ROWS])
    axis_numbers = {i: i + shift for i, axis in enumerate(analysis.loops.axes) if axis.group == COLS}
    places = {node: i for i, node in enumerate(late.nodes) if isinstance(node, Load)}
    loads: dict[int, int] = {}
    for i, node in enumerate(analysis.loops.nodes):
        if isinstance(node, Load) and not operands_of(node) and analysis.groups[i] == frozenset({COLS}):
            place = places.get(replace(node, index=renumber_index(node.index, {}, axis_numbers)))
            loads |= {} if place is None else {i: place}
    return loads


def col_blocks(analysis: Analysis, schedule: Schedule) -> Dim:
    """Return the number of blocks into which a schedule divides the columns."""
    return ceil_div(analysis.size(COLS), schedule.block_cols) if schedule.cols is Cols.GRID else 1


def row_programs(analysis: Analysis, schedule: Schedule) -> Dim:
    """Return the number of programs that share the rows."""
    if schedule.programs is not None:
        return schedule.programs
    return ceil_div(analysis.size(ROWS), schedule.block_rows)


def _partial(analysis: Analysis, position: int, number: int, programs: int) -> Buffer:
    node = analysis.loops.nodes[number]
    assert isinstance(node, Reduce)
    width = analysis.size(COLS) if COLS in analysis.groups[number] else 1
    shape = (programs, width)
    return Buffer(f"partial_{position}", shape, strides_of(shape), accumulator_dtype(node))


def second_stage_nest(analysis: Analysis, programs: int, partials: tuple[str, ...]) -> LoopNest:
    """Return the loop nest that sums the partial results and computes the values that depend on the sums."""
    loops = analysis.loops
    cols = analysis.axes[COLS] if analysis.ends_in_a_row else ()
    group = ROWS if cols else COLS  # one element wide: the partial results are the row
    axes = (Axis("row" if cols else "col", programs, group), *cols)
    shift = 1 - len(analysis.axes[ROWS])
    axis_numbers = {i: i + shift for i in range(len(analysis.axes[ROWS]), len(loops.axes))}
    loads: dict[int, Load] = {}
    for number, buffer in zip(analysis.across_rows, partials, strict=True):
        node = loops.nodes[number]
        assert isinstance(node, Reduce)
        has_cols = COLS in analysis.groups[number]
        width = analysis.size(COLS) if has_cols else 1
        terms = ((0, width), *(row_major(cols, 1) if has_cols else ()))
        loads[number] = Load(buffer, Index(0, tuple(terms)), None, accumulator_dtype(node))
    return completed(loops, loads, axes, group, axis_numbers)


def completed(
    loops: LoopNest,
    partials: Mapping[int, Load],
    axes: tuple[Axis, ...],
    group: str,
    moved: Mapping[int, int],
) -> LoopNest:
    """Return the nest of some reductions over their partial results, and of the stores that depend on them.

    partials: loads of the partial results, by reduction.
    group: the group of `axes` over which they are reduced.
    moved: new numbers of the axes of `loops` that remain.
    """
    dependent = waiting(loops, partials)
    stores_left = [s for s in loops.stores if s.value in dependent]
    needed = with_operands(loops, (o for s in stores_left for o in store_operands(s)), partials)
    numbers: dict[int, int] = {}
    nodes: list[Node] = []
    names: list[str] = []
    for number in sorted(needed):
        node = loops.nodes[number]
        if number in partials:
            assert isinstance(node, Reduce)
            nodes.append(partials[number])
            names.append("partial")
            node = Reduce(node.combine, len(nodes) - 1, axes_in(axes, (group,)), node.dtype)
        else:
            node = renumber(node, numbers, moved)
        numbers[number] = len(nodes)
        nodes.append(node)
        names.append(loops.names[number])
    stores = tuple(renumber_store(s, numbers, moved) for s in stores_left)
    return LoopNest(axes, tuple(nodes), stores, tuple(names))


def _second_stage_schedule(nest: LoopNest, programs: int, last: Schedule | None) -> Schedule:
    """Return the schedule of the second stage. last: the schedule of the programs, if the last of a block
    runs it."""
    height = padded(programs)
    if last is not None:  # all partial results of the block at once
        return Schedule(height, last.block_cols, Cols.GRID, num_warps=last.num_warps)
    rows = [a for a in nest.axes if a.group == ROWS]
    if not rows:
        return Schedule(1, height, Cols.WHOLE, num_warps=min(32, max(4, height // 512)))
    sizes = [a.size for a in nest.axes if a.group == COLS]
    is_narrow = all(isinstance(n, int) for n in sizes) and prod(cast(list[int], sizes)) < NARROW
    most, cols = (256, SECTOR) if is_narrow else (64, 32)
    return Schedule(min(height, most), cols, Cols.GRID, programs=1, num_warps=4)
