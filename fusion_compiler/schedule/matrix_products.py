"""Placements of matrix products with many rows and many columns, which tensor cores make tile by tile.

    y[m, n] = gelu(sum(a[m, k] * b[k, n], {k}) + bias[n])
    split(m, 128); split(m.o, 8); split(n, 256); split(k, 64)
    place(m.o.o, GRID); place(n.o, GRID); place(m.o.i, GRID); place(k.o, LOOP)
    place(m.i, LANES); place(n.i, LANES); place(k.i, LANES); unit(y, TENSOR_CORE); 8 warps, 3 stages

A program goes through the terms of a tile of results in a loop, which loads the next blocks of both factors
while tensor cores multiply. What is computed of a factor is computed in its tile before the product, and what
is computed of the results behind the loop. Programs with neighbouring numbers make eight blocks of rows of
the same columns, so that they find both factors in L2. Where there are fewer tiles than multiprocessors,
programs share the terms as well, and a second kernel adds up what they have.

Products of few rows, which take as long as their matrix is read, are placed by `schedule.few_rows`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice

import sympy

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import Dim, hint, product, quotient
from fusion_compiler.ir.loops import Load, LoopNest, Reduce, rounding_of, source_of, symbols_of
from fusion_compiler.schedule.analysis import Analysis, ceil_div
from fusion_compiler.schedule.boxes import box_of
from fusion_compiler.schedule.cost import Roofline
from fusion_compiler.schedule.few_rows import Draft
from fusion_compiler.schedule.matrices import Matrices
from fusion_compiler.schedule.matrix_cost import shared_bytes
from fusion_compiler.schedule.placement import Access, At, On, Place, Placement, Split, Unit, Via
from fusion_compiler.schedule.run import Run
from fusion_compiler.schedule.shapes import WARP, padded, warps_of
from fusion_compiler.schedule.tile_products import SMALLEST
from fusion_compiler.schedule.verifier import has_descriptors, refusal_of

KEPT = 8  # placements of a nest, best first
GROUP = 8  # blocks of rows whose programs have neighbouring numbers
LEAST_PART = 256  # terms of a program, where programs share them
MOST_PARTS = 16  # programs that share the terms of one tile
MANY = 2048  # of a size that is known at run time only
NO_SIZES: Mapping[str, int] = {}
ACCUMULATORS = 128  # registers of a thread for sums: half of what it may have


@dataclass(frozen=True)
class Tile:
    """The tile of results of a program, in powers of two. warps: of 32 threads."""

    rows: int
    cols: int
    warps: int


# The sides of a tile, each with the warps that have 64 or 128 sums a thread. Tensor cores of Hopper take 64
# rows for each four warps.
SIDES = (
    (128, 256, 8), (256, 128, 8), (128, 128, 8), (128, 128, 4), (64, 256, 4), (64, 128, 4), (128, 64, 4),
    (64, 64, 4), (32, 64, 4), (64, 32, 4), (32, 32, 4),
)  # fmt: skip
# (terms of a turn, turns whose factors are in shared memory), best first: the first that fits.
BLOCKS = (64, 4), (64, 3), (32, 4), (32, 3), (32, 2)
SHALLOW = BLOCKS[2:]  # if both factors pass through registers, as deeper blocks need more of these
LEAST = min(tall for tall, _, _ in SIDES)  # rows or columns of a tile


def refuses(a: Analysis, matrices: Matrices, itemsizes: Mapping[str, int] = NO_SIZES) -> str | None:
    """Return why tensor cores do not multiply the matrices of a nest, or None if they do. itemsizes: the
    bytes of an element, by buffer, if they are known."""
    loops, terms = a.loops, _size(a.loops, matrices.terms)
    if isinstance(terms, int) and padded(terms) < SMALLEST:
        return f"tensor cores add up {SMALLEST} terms or more, and a product has {terms}"
    for n, node in enumerate(loops.nodes):
        if isinstance(node, Reduce) and n not in matrices.factors:
            kept = node.axes.difference(matrices.terms)
            if not isinstance(_size(loops, kept), int):
                return f"how many programs have a part of {loops.names[n]} is known at launch only"
    for factor in (factor for factors in matrices.factors.values() for factor in factors):
        node = loops.nodes[source_of(loops.nodes, factor)]
        size = itemsizes.get(node.buffer, 2) if isinstance(node, Load) else 4 - 2 * bool(rounding_of(node))
        if size > 2:
            return f"{loops.names[factor]} has more than 16 bits, and tensor cores would round it"
    return None


def placements(a: Analysis, matrices: Matrices, roofline: Roofline) -> tuple[Placement, ...]:
    """Return placements of a nest's products, best first by prediction; none where `refuses` has a reason."""
    if refuses(a, matrices, itemsizes_of(roofline)) is not None:
        return ()
    loops, device, hints = a.loops, roofline.device, roofline.work.hints
    if unknown := {*symbols_of((loops,), ())} - hints.keys():
        hints = dict.fromkeys(unknown, MANY) | dict(hints)
        roofline = Roofline(a, device, roofline.work.buffers, hints)
    runs, blocks = list[Run](), BLOCKS if has_descriptors(device) else SHALLOW
    for tile in _tiles(loops, matrices, hints):
        for part in _parts(loops, matrices, tile, device, hints):
            placed = (_placed(loops, matrices, tile, block, part, device) for block in blocks)
            room = device.shared_bytes_of_program
            fitting = (run for run in map(roofline.run, placed) if shared_bytes(roofline.work, run) <= room)
            runs += islice((run for run in fitting if refusal_of(run) is None), 1)
    best = [run.placement for run in sorted(runs, key=roofline.us)[:KEPT]]
    boxed = [_boxed(a, matrices, placement, roofline) for placement in best[: KEPT // 2]]
    first = (p for pair in zip(boxed, best, strict=False) for p in pair if p is not None)
    return tuple(dict.fromkeys((*first, *best)))[:KEPT]


def itemsizes_of(roofline: Roofline) -> dict[str, int]:
    return {name: buffer.itemsize for name, buffer in roofline.work.buffers.items()}


def _size(loops: LoopNest, axes: Iterable[int]) -> Dim:
    return product(loops.axes[k].size for k in axes)


def _tiles(loops: LoopNest, matrices: Matrices, hints: Mapping[sympy.Symbol, int]) -> Iterator[Tile]:
    """Yield the tiles that are no larger than the matrices."""
    sides = matrices.rows, matrices.cols
    rows, cols = (padded(max(1, hint(_size(loops, axes), hints))) for axes in sides)
    for tall, wide, warps in SIDES:
        sums = len(matrices.factors) * tall * wide
        if sums <= ACCUMULATORS * WARP * warps and tall <= max(LEAST, rows) and wide <= max(LEAST, cols):
            yield Tile(tall, wide, warps)


def _parts(
    loops: LoopNest, matrices: Matrices, tile: Tile, device: DeviceSpec, hints: Mapping[sympy.Symbol, int]
) -> Iterator[int]:
    """Yield how many programs share the terms of a tile: one, and more where there are few tiles."""
    yield 1
    rows, cols, batch, terms = (
        max(1, hint(_size(loops, axes), hints))
        for axes in (matrices.rows, matrices.cols, matrices.batch, matrices.terms)
    )
    programs = batch * -(-rows // tile.rows) * -(-cols // tile.cols)
    parts = min(device.sms // programs, terms // LEAST_PART, MOST_PARTS)
    if parts > 1 and isinstance(_size(loops, matrices.terms), int):
        yield parts


def _placed(
    loops: LoopNest,
    matrices: Matrices,
    tile: Tile,
    block: tuple[int, int],
    parts: int,
    device: DeviceSpec,
) -> Placement:
    """Return the placement of products in some tiles. block: the terms of a turn, and the turns that are
    loaded ahead. parts: how many programs share the terms."""
    draft, (deep, stages) = Draft(loops), block
    draft.grid += [At(loops.axes[k].name, Place.GRID) for k in matrices.batch]
    terms, depth = draft.one(matrices.terms, "terms")
    if parts > 1:
        part = deep * -(-hint(depth) // (deep * parts))
        terms, depth = draft.cut(terms, depth, part), part
    draft.lanes.append((2, At(draft.cut(terms, depth, deep, Place.LOOP), Place.LANES)))
    rows, height = draft.one(matrices.rows, "rows")
    group = _group(loops, matrices, ceil_div(height, tile.rows), tile)
    above = len(draft.grid)
    draft.lanes.append((0, At(draft.cut(rows, height, tile.rows), Place.LANES)))
    of_rows = draft.grid[above:]
    if group > 1:  # programs go through the columns for one group of blocks of rows after the other
        draft.cuts.append(Split(f"{rows}.o", group))
        draft.grid[above:] = [At(f"{rows}.o.o", Place.GRID)]
        of_rows = [At(f"{rows}.o.i", Place.GRID)]
    else:
        del draft.grid[above:]
    cols, width = draft.one(matrices.cols, "cols")
    draft.lanes.append((1, At(draft.cut(cols, width, tile.cols), Place.LANES)))
    draft.grid += of_rows
    units = (On(name, Unit.TENSOR_CORE) for name in dict.fromkeys(loops.names[n] for n in matrices.factors))
    return Placement((*draft.directives(), *units), warps_of(tile.warps, device), stages)


def _group(loops: LoopNest, matrices: Matrices, blocks: Dim, tile: Tile) -> int:
    """Return how many blocks of rows have programs with neighbouring numbers: 1 if they are not grouped.

    The last group may have fewer blocks, unless programs number their parts of a reduction over the rows.
    """
    width = _size(loops, matrices.cols)
    if (isinstance(blocks, int) and blocks <= GROUP) or (isinstance(width, int) and width <= tile.cols):
        return 1
    rows = frozenset(matrices.rows)
    if any(isinstance(node, Reduce) and not node.axes.isdisjoint(rows) for node in loops.nodes):
        return next((group for group in (8, 4, 2) if quotient(blocks, group) is not None), 1)
    return GROUP


def _boxed(a: Analysis, matrices: Matrices, placement: Placement, roofline: Roofline) -> Placement | None:
    """Return a placement in which descriptors load the factors that are boxes of memory; None without any."""
    if not has_descriptors(roofline.device):
        return None
    loops, leaves, boxed = a.loops, placement.leaves(a.loops.axes), dict[str, bool]()
    for factor in (factor for factors in matrices.factors.values() for factor in factors):
        if isinstance(load := loops.nodes[source_of(loops.nodes, factor)], Load):
            itemsize = roofline.work.buffers[load.buffer].itemsize
            is_box = not isinstance(box_of(loops, load, leaves, itemsize), str)
            boxed[load.buffer] = boxed.get(load.buffer, True) and is_box
    vias = tuple(Via(name, Access.DESCRIPTOR) for name, is_box in boxed.items() if is_box)
    return replace(placement, directives=(*placement.directives, *vias)) if vias else None
