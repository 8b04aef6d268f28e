"""Segment sums: reductions over some of the rows and over inner columns.

A norm of channels in groups needs the sums of each channel over all samples in addition to those along its
rows, which are the groups of each sample. The kept axes of such a sum are neither rows nor columns of a tile.
So each block of a row leaves one partial result for every piece of a segment in it, and a second kernel adds
up the pieces and rows that belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from fusion_compiler.codegen.finishing import completed
from fusion_compiler.ir.dims import Dim, product, strides_of
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Axis,
    Index,
    Load,
    LoopNest,
    Reduce,
    row_major,
    segment_of,
)
from fusion_compiler.schedule.analysis import Analysis, Pieces, accumulator_dtype, pieces_of
from fusion_compiler.schedule.schedule import Cols, Schedule
from fusion_compiler.schedule.shapes import padded

TILE = (256, 16, 4)  # rows, columns and warps of the second stage: two sectors of each row


@dataclass(frozen=True)
class Partials:
    """The partial results of a loop nest, by their names in its emitter, and the second stages.

    finishings: one loop nest for all reductions that keep the same axes; it adds them up and computes what
        depends on them.
    """

    partials: Mapping[str, Buffer]
    finishings: tuple[tuple[LoopNest, Schedule], ...]


def partials_of(analysis: Analysis, schedule: Schedule, numbers: Iterator[int]) -> Partials:
    """Return the partial results of a nest. numbers: yields the numbers in their names."""
    columns = schedule.block_cols
    partials = {n: _partial(analysis, columns, n, next(numbers)) for n in analysis.segmented}
    nests = [
        _second_stage(analysis, columns, kept, partials)
        for kept in dict.fromkeys(analysis.kept(n) for n in analysis.segmented)
    ]
    named = {partials_name(n): buffer for n, buffer in partials.items()}
    return Partials(named, tuple((nest, schedule_of(nest)) for nest in nests))


def partials_name(number: int) -> str:
    """Return the name of the partial results of a segment reduction."""
    return f"pieces_{number}"


def _partial(analysis: Analysis, columns: int, number: int, position: int) -> Buffer:
    node, rows = analysis.loops.nodes[number], analysis.size(ROWS)
    assert isinstance(node, Reduce)
    shape = (rows, pieces_of(analysis, columns, number).count)
    return Buffer(f"partial_{position}", shape, strides_of(shape), accumulator_dtype(node))


def _second_stage(
    analysis: Analysis, columns: int, kept: frozenset[int], partials: Mapping[int, Buffer]
) -> LoopNest:
    """Return the loop nest whose rows are the remaining reduced axes and whose columns are the kept axes."""
    loops, sums = analysis.loops, [n for n in partials if analysis.kept(n) == kept]
    reduced, steps = _partial_axes(analysis, kept, pieces_of(analysis, columns, sums[0]))
    moved = {k: len(reduced) + i for i, k in enumerate(sorted(kept))}
    terms = {**{i: step for i, (_, step) in enumerate(reduced)}, **{moved[k]: steps[k] for k in kept}}
    axes = [Axis(f"row_{i}", size, ROWS) for i, (size, _) in enumerate(reduced)]
    axes += [Axis(f"col_{i}", loops.axes[k].size, COLS) for i, k in enumerate(sorted(kept))]
    index = Index(0, tuple(sorted(terms.items())))
    loads = {n: Load(partials[n].name, index, None, partials[n].dtype) for n in sums}
    return completed(loops, loads, tuple(axes), ROWS, moved)


def _partial_axes(
    analysis: Analysis, kept: frozenset[int], pieces: Pieces
) -> tuple[list[tuple[Dim, Dim]], dict[int, Dim]]:
    """Return the layout of the partial results: (size, step) of the axes left to reduce, and the step of
    each kept axis."""
    steps = {k: product((step, pieces.count)) for k, step in row_major(analysis.axes[ROWS], 0)}
    reduced = [(analysis.loops.axes[k].size, step) for k, step in steps.items() if k not in kept]
    segment = segment_of(analysis.loops, kept)
    reduced.append((pieces.count if segment is None else segment // pieces.columns, 1))
    for k, step in row_major(analysis.axes[COLS], analysis.first[COLS]):
        assert isinstance(step, int), "segments have a known size"
        steps[k] = step // pieces.columns
    return [pair for pair in reduced if pair[0] != 1] or [(1, 1)], steps


def schedule_of(nest: LoopNest) -> Schedule:
    """Return the schedule of a nest that reduces partial results along its rows."""
    rows = product(a.size for a in nest.axes if a.group == ROWS)
    assert isinstance(rows, int), "segments have a known size"
    height, width, warps = TILE
    return Schedule(min(height, padded(rows)), width, Cols.GRID, programs=1, num_warps=warps)
