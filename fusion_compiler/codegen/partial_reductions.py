"""Sums over segments: of some of the rows, and of the inner columns in each of them.

A norm of channels in groups needs the sums of each channel over all samples, beside those along its rows,
which are the groups of each sample. What such a sum keeps is neither a row nor a column of a tile. So each
block of a row leaves one partial result for every piece of a segment in it, and a second kernel adds up the
pieces and rows that belong together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from fusion_compiler.codegen.finishing import completed
from fusion_compiler.codegen.printer import Printer, axes_strides
from fusion_compiler.ir.dims import Dim, product, strides_of
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import (
    COLS,
    ROWS,
    Axis,
    Compute,
    Index,
    Load,
    LoopNest,
    Reduce,
    Value,
    operands_of,
    segment_of,
)
from fusion_compiler.schedule.analysis import (
    Analysis,
    Cols,
    Pieces,
    Schedule,
    accumulator_dtype,
    operand_of,
    pieces_of,
)

aten = torch.ops.aten

TILE = (256, 16, 4)  # rows, columns and warps of what adds up the partial results: two sectors of each row


@dataclass(frozen=True)
class Segments:
    """The partial results of a tile program, by the name that its printer knows them under, and what adds
    them up and computes all that waits for them: a tile program for all that keep the same axes."""

    partials: Mapping[str, Buffer]
    finishings: tuple[tuple[LoopNest, Schedule], ...]


def segments_of(analysis: Analysis, schedule: Schedule, numbers: Iterator[int]) -> Segments:
    """numbers: what the names of a cluster's partial results are made of."""
    partials = {n: _partial(analysis, schedule, n, next(numbers)) for n in analysis.segmented}
    nests = [
        _finishing(analysis, schedule, kept, partials)
        for kept in dict.fromkeys(analysis.kept(n) for n in analysis.segmented)
    ]
    named = {partials_name(n): buffer for n, buffer in partials.items()}
    return Segments(named, tuple((nest, _schedule(nest)) for nest in nests))


def partial_results(p: Printer, numbers: Sequence[int]) -> None:
    """Store what the block at hand adds to reductions over segments: one value a piece of each row."""
    for alike in _two_by_two(p, numbers):
        tiles: list[str] = []
        for number in alike:
            p.print_nodes(p.need(operands_of(p.loops.nodes[number])))
            tiles.append(p.tile(number, frozenset({COLS})))
        pieces = pieces_of(p.a, p.s, alike[0])
        here = p.s.block_cols // pieces.columns
        axis, keep = "0" if p.flat else "1", not p.flat
        if here > 1:
            (operand,) = operands_of(p.loops.nodes[alike[0]])
            tall = not p.flat and ROWS in p.a.groups[operand]
            shape = [*([] if p.flat else [p.s.block_rows if tall else 1]), here, pieces.columns]
            tiles, axis, keep = [f"tl.reshape({t}, {shape})" for t in tiles], str(len(shape) - 1), False
        names = [p.fresh("segment_sum") for _ in alike]
        p.print_folds(alike, names, tiles, axis, keep)
        for number, name in zip(alike, names, strict=True):
            _store_pieces(p, number, name, pieces, here)


def _two_by_two(p: Printer, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Neighbours that are sums of tiles of the same shape together."""
    found: list[tuple[int, ...]] = []
    for number in numbers:
        last = found[-1] if found else ()
        if len(last) == 1 and _adds_alike(p, last[0], number):
            found[-1] = (*last, number)
        else:
            found.append((number,))
    return found


def _adds_alike(p: Printer, one: int, other: int) -> bool:
    """Whether two reductions are sums of float32 over the same pieces of the same axes."""
    (mine,), (theirs,) = (operands_of(p.loops.nodes[n]) for n in (one, other))
    shapes = [(pieces_of(p.a, p.s, n), p.a.groups[operand]) for n, operand in ((one, mine), (other, theirs))]
    return p.a.is_sum(one) and p.a.is_sum(other) and shapes[0] == shapes[1]


def _store_pieces(p: Printer, number: int, text: str, pieces: Pieces, here: int) -> None:
    """Store the values of the pieces in the block; of a single one other sums may be made."""
    piece = _pieces_here(p, pieces.columns, here)
    masks = [p.row_mask] if p.row_mask and p.a.axes[ROWS] else []
    only = here == 1 and p.col_start is None
    masks += [f"({piece} < {pieces.count})"] if p.col_mask and not only else []
    mask = f", mask={' & '.join(masks)}" if masks else ""
    if here == 1:
        p.index_env["sum", number] = text
    block = "" if p.flat else " + tl.zeros([1, 1], tl.int32)"  # a pointer to a block's only piece
    row = f" + row * {pieces.count}" if p.a.axes[ROWS] else block
    p.line(f"tl.store({p.pointers[partials_name(number)]}{row} + {piece}, {text}{mask})")


def scaled_sum(p: Printer, number: int) -> tuple[int, tuple[int, ...]] | None:
    """A sum along the row as one over segments times values that the block shares: sum(w * x) = w * sum(x).

    (the reduction over segments, the loads of those values), where the block lies in one segment.
    """
    if not p.a.segmented:
        return None
    nodes, factors = p.loops.nodes, _factors(p.loops)
    reduce = nodes[number]
    assert isinstance(reduce, Reduce)
    for segment in p.a.segmented:
        other = nodes[segment]
        assert isinstance(other, Reduce)
        alike = other.combine == reduce.combine == "sum" and p.a.level[segment] == p.a.level[number]
        mine, theirs = factors[reduce.operand], factors[other.operand]
        if alike and theirs <= mine and pieces_of(p.a, p.s, segment).columns == p.s.block_cols:
            shared = tuple((mine - theirs).elements())
            if all(isinstance(n := nodes[i], Load) and p.same_in_block(n) for i in shared):
                return segment, shared
    return None


def _factors(loops: LoopNest) -> list[Counter[int]]:
    """The values that each node is the product of, by how often; all others are their own only factor."""
    found: list[Counter[int]] = []
    for i, node in enumerate(loops.nodes):
        own = Counter((i,))
        if isinstance(node, Compute) and node.dtype is torch.float32:
            given = [found[a.node] for _, a in node.operands if isinstance(a, Value)]
            product = node.target is aten.mul.Tensor and len(given) == len(node.operands) == 2
            passed = node.target is aten._to_copy.default and "rounding" not in dict(node.operands)
            source = operand_of(node, "self")
            if product:
                own = given[0] + given[1]
            elif passed and source is not None and loops.nodes[source].dtype is torch.float32:
                own = given[0]
        found.append(own)
    return found


def _pieces_here(p: Printer, columns: int, here: int) -> str:
    """The variable of the numbers of the block's pieces in the row."""
    key = ("piece", columns)
    if key not in p.index_env:
        start = [] if p.col_start is None else [f"{p.col_start} // {columns}"]
        lanes = [f"tl.arange(0, {here})" + ("" if p.flat else "[None, :]")] if here > 1 else []
        p.index_env[key] = name = p.fresh("piece")
        p.line(f"{name} = {' + '.join(start + lanes) or '0'}")
    return p.index_env[key]


def partials_name(number: int) -> str:
    """What the printer knows the partial results of a reduction over segments as."""
    return f"pieces_{number}"


def _partial(analysis: Analysis, schedule: Schedule, number: int, position: int) -> Buffer:
    node, rows = analysis.loops.nodes[number], analysis.size(ROWS)
    assert isinstance(node, Reduce)
    shape = (rows, pieces_of(analysis, schedule, number).count)
    return Buffer(f"partial_{position}", shape, strides_of(shape), accumulator_dtype(node))


def _finishing(
    analysis: Analysis, schedule: Schedule, kept: frozenset[int], partials: Mapping[int, Buffer]
) -> LoopNest:
    """The tile program whose rows are what is left to reduce and whose columns are what is kept."""
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
    """How the partial results lie: (size, step) of all that is left to reduce, the step of each kept axis."""
    steps = {k: product((step, pieces.count)) for k, step in axes_strides(analysis.axes[ROWS], 0)}
    reduced = [(analysis.loops.axes[k].size, step) for k, step in steps.items() if k not in kept]
    segment = segment_of(analysis.loops, kept)
    reduced.append((pieces.count if segment is None else segment // pieces.columns, 1))
    for k, step in axes_strides(analysis.axes[COLS], analysis.first[COLS]):
        assert isinstance(step, int), "segments have a known size"
        steps[k] = step // pieces.columns
    return [pair for pair in reduced if pair[0] != 1] or [(1, 1)], steps


def _schedule(nest: LoopNest) -> Schedule:
    rows = product(a.size for a in nest.axes if a.group == ROWS)
    assert isinstance(rows, int), "segments have a known size"
    height, width, warps = TILE
    tall = 1 << max(0, rows - 1).bit_length()
    return Schedule(min(height, tall), width, Cols.GRID, programs=1, num_warps=warps)
