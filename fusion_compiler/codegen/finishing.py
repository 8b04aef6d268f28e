"""What follows the reductions over rows that several programs share.

Each program leaves one partial result in scratch memory. The sum of these, and every op that waits for
it, is a loop nest of its own: where it is one element wide the last program to arrive runs it (a
ticket counter tells); where it is a row, or of so many programs that the counter would take longer, a
second kernel does. A schedule may have the last program of each block of columns run its part of a row
(`Schedule.last_finishes`): there is a counter for each block then.
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
)
from fusion_compiler.schedule.analysis import Analysis, accumulator_dtype, ceil_div, waiting
from fusion_compiler.schedule.schedule import Cols, Schedule

# Programs that draw a ticket: each waits until its results have arrived, and one, of as few warps as all,
# reads what they left. Sixteen thousand take 8 us of an H200 at that, and a second kernel two.
MOST_TICKETS = 4096
# Columns of partial results, below which each program of a second kernel has one sector of 32 bytes.
NARROW, SECTOR = 2048, 8


@dataclass(frozen=True)
class Finishing:
    """What follows the sums over rows of a loop nest, once the programs that share them are done.

    partials: one partial result a program. loops, schedule: what adds them up, and all that waits for
    it. counter: of the programs that are done, int32 [blocks of columns], where the last of them runs that;
    else a second kernel. programs: that share it. loads: of `early_loads`, where every program has them.
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


def finishing_of(
    analysis: Analysis, schedule: Schedule, numbers: Iterator[int], tickets: Iterator[int]
) -> Finishing | None:
    """None where nothing is summed over rows, or one program does it all.

    numbers, tickets: what the names of a cluster's partial results and counters are made of.
    """
    programs = row_programs(analysis, schedule)
    if not analysis.across_rows or programs == 1:
        return None
    assert isinstance(programs, int), "programs that share a reduction are counted at compile time"
    partials = tuple(_partial(analysis, next(numbers), number, programs) for number in analysis.across_rows)
    late = finishing(analysis, programs, tuple(b.name for b in partials))
    last = schedule if schedule.last_finishes and analysis.ends_in_a_row else None
    counter: Buffer | None = None
    if last is not None or (not analysis.ends_in_a_row and programs <= MOST_TICKETS):
        ticket, blocks = next(tickets), 1 if last is None else col_blocks(analysis, last)
        name = f"ticket_{ticket}" if ticket else "ticket"
        counter = Buffer(name, (blocks,), (1,), torch.int32, zeroed=True)
    loads = {} if last is None or last.block_rows == 1 else early_loads(analysis, late)
    return Finishing(partials, late, _finish_schedule(late, programs, last), programs, counter, loads)


def early_loads(analysis: Analysis, late: LoopNest) -> dict[int, int]:
    """What the finishing part loads of the columns alone, a bias say, by its number in both nests.

    A program has it while it waits for memory anyway, before it can know whether it is the last: then nothing
    is left to come from memory, which takes twice as long as from L2.
    """
    shift = 1 - len(analysis.axes[ROWS])
    moved = {i: i + shift for i, axis in enumerate(analysis.loops.axes) if axis.group == COLS}
    places = {node: i for i, node in enumerate(late.nodes) if isinstance(node, Load)}
    found: dict[int, int] = {}
    for i, node in enumerate(analysis.loops.nodes):
        if isinstance(node, Load) and not operands_of(node) and analysis.groups[i] == frozenset({COLS}):
            place = places.get(replace(node, index=renumber_index(node.index, {}, moved)))
            found |= {} if place is None else {i: place}
    return found


def col_blocks(analysis: Analysis, schedule: Schedule) -> Dim:
    """Into how many blocks a schedule cuts the columns."""
    return ceil_div(analysis.size(COLS), schedule.block_cols) if schedule.cols is Cols.GRID else 1


def row_programs(analysis: Analysis, schedule: Schedule) -> Dim:
    """How many programs share the rows."""
    if schedule.programs is not None:
        return schedule.programs
    return ceil_div(analysis.size(ROWS), schedule.block_rows)


def _partial(analysis: Analysis, position: int, number: int, programs: int) -> Buffer:
    node = analysis.loops.nodes[number]
    assert isinstance(node, Reduce)
    width = analysis.size(COLS) if COLS in analysis.groups[number] else 1
    shape = (programs, width)
    return Buffer(f"partial_{position}", shape, strides_of(shape), accumulator_dtype(node))


def finishing(analysis: Analysis, programs: int, partials: tuple[str, ...]) -> LoopNest:
    """The loop nest that sums the partial results and computes what waits for them."""
    loops = analysis.loops
    cols = analysis.axes[COLS] if analysis.ends_in_a_row else ()
    group = ROWS if cols else COLS  # one element wide: the partials are the row
    axes = (Axis("row" if cols else "col", programs, group), *cols)
    shift = 1 - len(analysis.axes[ROWS])
    moved = {i: i + shift for i in range(len(analysis.axes[ROWS]), len(loops.axes))}
    loads: dict[int, Load] = {}
    for number, buffer in zip(analysis.across_rows, partials, strict=True):
        node = loops.nodes[number]
        assert isinstance(node, Reduce)
        wide = COLS in analysis.groups[number]
        width = analysis.size(COLS) if wide else 1
        terms = ((0, width), *(row_major(cols, 1) if wide else ()))
        loads[number] = Load(buffer, Index(0, tuple(terms)), None, accumulator_dtype(node))
    return completed(loops, loads, axes, group, moved)


def completed(
    loops: LoopNest,
    partials: Mapping[int, Load],
    axes: tuple[Axis, ...],
    group: str,
    moved: Mapping[int, int],
) -> LoopNest:
    """Some reductions over their partial results, in `group` of `axes`, and the stores that wait for them.

    partials: by the reduction. moved: the axes that are left, by those of `loops`.
    """
    late = waiting(loops, partials)
    left = [s for s in loops.stores if s.value in late]
    needed: set[int] = set()
    stack = [o for s in left for o in store_operands(s)]
    while stack:
        number = stack.pop()
        if number not in needed:
            needed.add(number)
            stack.extend(() if number in partials else operands_of(loops.nodes[number]))
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
    stores = tuple(renumber_store(s, numbers, moved) for s in left)
    return LoopNest(axes, tuple(nodes), stores, tuple(names))


def _finish_schedule(late: LoopNest, programs: int, last: Schedule | None) -> Schedule:
    """last: that of the programs, where the last of a block's runs it."""
    if last is not None:  # all partial results of its block at once, by its own threads
        return Schedule(_power(programs), last.block_cols, Cols.GRID, num_warps=last.num_warps)
    rows = [a for a in late.axes if a.group == ROWS]
    if not rows:
        return Schedule(1, _power(programs), Cols.WHOLE, num_warps=min(32, max(4, _power(programs) // 512)))
    sizes = [a.size for a in late.axes if a.group == COLS]
    is_narrow = all(isinstance(n, int) for n in sizes) and prod(cast(list[int], sizes)) < NARROW
    height, cols = (256, SECTOR) if is_narrow else (64, 32)
    return Schedule(min(_power(programs), height), cols, Cols.GRID, programs=1, num_warps=4)


def _power(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
