"""Segment sums: reductions over some of the rows and over inner columns.

A norm of channels in groups needs the sums of each channel over all samples in addition to those along its
rows, which are the groups of each sample. The kept axes of such a sum are neither rows nor columns of a tile.
So each block of a row leaves one partial result for every piece of a segment in it, and a second kernel adds
up the pieces and rows that belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from fusion_compiler.codegen.builder import ALONG, Builder
from fusion_compiler.codegen.finishing import completed
from fusion_compiler.codegen.names import own
from fusion_compiler.codegen.nodes import elements
from fusion_compiler.codegen.tile import Store as StoreStatement
from fusion_compiler.codegen.windows.block import is_same
from fusion_compiler.ir.dims import Dim, product, strides_of
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import COLS, ROWS, Axis, Index, Load, LoopNest, Reduce, row_major, segment_of
from fusion_compiler.ir.syntax import Variable, every, plus, tl
from fusion_compiler.schedule.analysis import Analysis, Pieces, accumulator_dtype, pieces_of
from fusion_compiler.schedule.schedule import Cols, Schedule
from fusion_compiler.schedule.shapes import padded

TILE = (256, 16, 4)  # rows, columns and warps of the second stage: two sectors of each row


@dataclass(frozen=True)
class Partials:
    """The partial results of a loop nest, by their names in its builder, and the second stages.

    finishings: one loop nest for all reductions that keep the same axes; it adds them up and computes what
        depends on them.
    """

    partials: Mapping[str, Buffer]
    finishings: tuple[tuple[LoopNest, Schedule], ...]


def partials_of(analysis: Analysis, schedule: Schedule, numbers: Iterator[int]) -> Partials:
    """Return the partial results of a nest. numbers: yields the numbers in their names."""
    partials = {n: _partial(analysis, schedule, n, next(numbers)) for n in analysis.segmented}
    nests = [
        _second_stage(analysis, schedule, kept, partials)
        for kept in dict.fromkeys(analysis.kept(n) for n in analysis.segmented)
    ]
    named = {partials_name(n): buffer for n, buffer in partials.items()}
    return Partials(named, tuple((nest, schedule_of(nest)) for nest in nests))


def partial_results(b: Builder, numbers: Sequence[int]) -> None:
    """Store the current block's part of segment reductions: one value per piece of each row."""
    for number in numbers:
        tile = elements(b, b.reduction(number), ALONG)
        pieces = _pieces(b, number)
        count = b.tile.lanes // pieces.columns
        axis, keep = b.col_axis, not b.tile.flat
        groups = b.a.groups[b.reduction(number).operand]
        if count > 1:
            tall = not b.tile.flat and ROWS in groups
            shape = [*([] if b.tile.flat else [b.s.block_rows if tall else 1]), count, pieces.columns]
            tile, axis, keep = tl.reshape(tile, shape), len(shape) - 1, False
        join_key = (pieces, groups) if b.a.is_sum(number) else None
        sums = b.let("segment_sum", b.folded(number, tile, axis, keep, join_key))
        _store_pieces(b, number, sums, pieces, count)


def _pieces(b: Builder, number: int) -> Pieces:
    return pieces_of(b.a, replace(b.s, block_cols=b.tile.lanes), number)


def _store_pieces(b: Builder, number: int, value: Variable, pieces: Pieces, count: int) -> None:
    """Store the values of the pieces in the block. Other sums may reuse the value of a single piece."""
    piece = _piece_numbers(b, pieces.columns, count)
    is_row = count == 1 and b.tile.start is None
    rows = b.tile.row_mask if b.a.axes[ROWS] else None
    mask = every(rows, piece < pieces.count if b.tile.col_mask and not is_row else None)
    if count == 1:
        b.named["sum", number] = value
    # A pointer to a block's only piece has the block's shape.
    block = None if b.tile.flat else tl.zeros([1, 1], torch.int32)
    row = own("row") * pieces.count if b.a.axes[ROWS] else block
    b.add(StoreStatement(plus(b.pointers[partials_name(number)], row, piece), value, mask))


def scaled_sum(b: Builder, number: int) -> tuple[int, tuple[int, ...]] | None:
    """Return a sum along the row as a segment sum times values that the block shares: sum(w * x) = w *
    sum(x).

    The result is (the segment reduction, the loads of those values) if the block is in one segment, else
    None.
    """
    if not b.a.segmented:
        return None
    nodes, factors = b.loops.nodes, b.a.factors
    reduce = nodes[number]
    assert isinstance(reduce, Reduce)
    for segment in b.a.segmented:
        other = nodes[segment]
        assert isinstance(other, Reduce)
        same_level = other.combine == reduce.combine == "sum" and b.a.level[segment] == b.a.level[number]
        of_sum, of_segment = factors[reduce.operand], factors[other.operand]
        if same_level and of_segment <= of_sum and _pieces(b, segment).columns == b.tile.lanes:
            shared = tuple((of_sum - of_segment).elements())
            if all(isinstance(n := nodes[i], Load) and is_same(b, n) for i in shared):
                return segment, shared
    return None


def _piece_numbers(b: Builder, columns: int, count: int) -> Variable:
    """Return the variable with the numbers of the block's pieces in the row."""
    start = None if b.tile.start is None else b.tile.start // columns
    return b.once(("piece", columns), "piece", plus(start, b.lanes(count) if count > 1 else None))


def partials_name(number: int) -> str:
    """Return the builder's name of the partial results of a segment reduction."""
    return f"pieces_{number}"


def _partial(analysis: Analysis, schedule: Schedule, number: int, position: int) -> Buffer:
    node, rows = analysis.loops.nodes[number], analysis.size(ROWS)
    assert isinstance(node, Reduce)
    shape = (rows, pieces_of(analysis, schedule, number).count)
    return Buffer(f"partial_{position}", shape, strides_of(shape), accumulator_dtype(node))


def _second_stage(
    analysis: Analysis, schedule: Schedule, kept: frozenset[int], partials: Mapping[int, Buffer]
) -> LoopNest:
    """Return the loop nest whose rows are the remaining reduced axes and whose columns are the kept axes."""
    loops, sums = analysis.loops, [n for n in partials if analysis.kept(n) == kept]
    reduced, steps = _partial_axes(analysis, kept, pieces_of(analysis, schedule, sums[0]))
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
