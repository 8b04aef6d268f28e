"""Placements of products of few rows, which take as long as their matrix is read.

    y[m, n] = sum(x[m, k] * w[n, k], {k})
    split(n, 16); split(k, 512); place(n.o, GRID); place(k.o, LOOP)
    place(m, LANES); place(n.i, LANES); place(k.i, LANES); unit(y, TENSOR_CORE); 4 warps, 3 stages

Programs share the rows of the matrix, and each goes through its terms in a loop, so that the matrix is
loaded ahead. The few rows of the other factor are lanes of the tile if tensor cores multiply it, or a matrix
element is multiplied by one after the other of them.

If neighbours in memory are terms of different sums, a program has whole sectors of them, for which a matrix
has too few rows to keep a device busy. Then programs share the terms as well:

    split(n, 64); split(k, 128); place(n.o, GRID); place(k.o, GRID); ...; combine(y, LAST)

Threads multiply one row or two. A thread adds up the terms of each word that it loads: `combine(y, TURN)`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_compiler.ir.dag import FEW_ROWS, LEAST_SHARING
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import Dim, hint, product
from fusion_compiler.ir.loops import LoopNest
from fusion_compiler.schedule.placement import (
    At,
    Directive,
    Fuse,
    In,
    On,
    Place,
    Placement,
    Split,
    Stage,
    Unit,
)
from fusion_compiler.schedule.products import Products, is_over
from fusion_compiler.schedule.shapes import WARP, WORD, padded, warps_of
from fusion_compiler.schedule.tile_products import SMALLEST

# Matrices side by side in a loop. Each has tiles in shared memory, and sixteen need more than there is. Six
# of 8192 x 2048 took 27.6 us each, where a copy takes 7.8.
MOST_MATRICES = 3
MOST_BY_THREADS = 4  # rows; with more, tensor cores are faster than threads


@dataclass(frozen=True)
class Tile:
    """The tile of a program: rows of the matrix, and terms.

    warps: of 32 threads. part: the terms of a program, where programs share them.
    early: turns of the loop whose part of the matrix is loaded before the kernel waits for its predecessors.
    in_turn: each turn of the loop adds up what a thread loads in it.
    """

    rows: int
    terms: int
    warps: int
    stages: int = 1
    part: int | None = None
    early: int = 0
    in_turn: bool = False


# Tiles for tensor cores, best first: measured on an H200, for matrices with so many rows that programs have
# several waves, for others with few terms, and for all others.
TALL = Tile(64, 256, 4, 3), Tile(32, 256, 4, 4), Tile(128, 128, 8, 3), Tile(16, 512, 4, 3)
SHORT = Tile(16, 512, 4, 3), Tile(32, 256, 4, 4), Tile(16, 1024, 8, 3), Tile(16, 256, 4, 4)
LONG = Tile(16, 512, 4, 3), Tile(16, 1024, 8, 3), Tile(32, 256, 4, 4), Tile(16, 256, 4, 4)
FEW_TERMS = 4096
WAVES = 32  # rows of a matrix for each multiprocessor, from which on programs run in several waves
# Tiles for threads: sums that one keeps, over its rows and vectors, and words that it loads at once, over its
# rows and matrices.
SUMS, WORDS = 64, 24
WORD_COLS = 256  # terms: a word for each thread of a warp, so that no warp waits for another
IN_FLIGHT = 24576  # elements of matrices that a multiprocessor must have in flight
# (rows, terms, warps, elements): a thread loads so many elements of matrices before the kernel waits. The
# registers for these, plus as many again for the rest, are about what multiprocessors have. The best within
# recorded CUDA graphs, of eighteen that were tried.
EARLY = (
    (4, 2048, 8, 32),
    (2, 2048, 4, 32),
    (4, 2048, 4, 128),
    (4, 512, 2, 128),
    (2, 512, 1, 128),
    (2, 1024, 2, 64),
    (2, 256, 1, 64),
    (8, 512, 2, 128),
)
# A row that is loaded whole before the kernel waits: elements of the row and of a warp.
MOST_AT_ONCE, AT_ONCE = 16384, 1024
FEW_SUMS = 2  # that threads hold beside a whole row
# Turned matrices: (rows of a tile, which are whole sectors, programs for each multiprocessor).
TURNED = ((128, 2), (64, 2), (128, 1), (128, 4), (64, 4), (256, 2), (32, 4))
# Partial results that the last program of some rows adds up. A kernel costs 2 us, an atomic and the round
# trip to L2 one, but then one program reads what a grid would read, at 64 bytes per cycle: half a us.
MOST_PARTIALS = 16384
UNDIVIDED = 4 * WORD, 2 * WORD  # rows of programs that have all terms: two or four words, whole sectors
TURNED_WORDS = 8  # words of a thread's tile, which it loads at once
MOST_WARPS = 16
FEW_WARPS, TURN_WARPS = 8, 4  # of threads that multiply: warps with all terms, and warps that loop over them
# (terms, rows, warps, programs for each multiprocessor) of threads that go through the terms of many sums in
# a loop, and have one word of each term.
BY_THREADS = ((8, 256, 1, 4), (8, 512, 2, 2), (4, 256, 1, 8), (16, 256, 1, 2))


def placements(
    loops: LoopNest, products: Products, itemsizes: Mapping[str, int], device: DeviceSpec
) -> Iterator[Placement]:
    """Yield placements of a nest's products, best first, without a check that they can run it. itemsizes: the
    bytes of an element, by buffer."""
    few, on_cores = products.size(products.few), list[Placement]()
    if few >= LEAST_SHARING and len(products.matrices) <= MOST_MATRICES:
        of_all = _at_once(products, device, MOST_WARPS)
        tiles = of_all if products.is_turned else _along(products, device)
        units = tuple(On(loops.names[n], Unit.TENSOR_CORE) for n in products.sums)
        on_cores = [placed_tile(loops, products, tile, Place.LANES, units, device) for tile in tiles]
        on_cores += [replace(p, early=1) for p in on_cores if p.num_stages > 1]
    if products.is_turned:
        tiles = _turned_by_threads(products, device)
    else:
        itemsize = min(itemsizes[name] for name in products.buffers)
        tiles = _along_by_threads(loops, products, itemsize, device)
    by_turn = tuple(In(name, Stage.TURN) for name in _shared_reductions(loops, products))
    threads = [
        placed_tile(loops, products, tile, Place.UNROLL, by_turn if tile.in_turn else (), device)
        for tile in tiles
    ]
    if few > MOST_BY_THREADS:
        yield from (*on_cores, *threads)
        return
    for pair in itertools.zip_longest(on_cores, threads):
        yield from (placement for placement in pair if placement is not None)


def _shared_reductions(loops: LoopNest, products: Products) -> tuple[str, ...]:
    """Return the names of the reductions over terms, but those that each program makes by itself."""
    over = (n for n, node in zip(loops.names, loops.nodes, strict=True) if is_over(node, products.terms))
    return tuple(name for name in dict.fromkeys(over) if name not in products.replicated)


def _along(products: Products, device: DeviceSpec) -> Iterator[Tile]:
    """Yield tiles for tensor cores of a matrix whose neighbours are terms of one sum."""
    width = padded(products.width)
    tiles = TALL if products.rows >= WAVES * device.sms else SHORT if width <= FEW_TERMS else LONG
    for tile in tiles:
        if tile.terms <= width or tile is tiles[0]:
            yield replace(tile, terms=min(tile.terms, width))


def _at_once(products: Products, device: DeviceSpec, most_warps: int = FEW_WARPS) -> list[Tile]:
    """Return tiles of a turned matrix whose programs load all of their terms at once."""
    tiles = list[Tile]()
    for tall, groups in _shares(products, device):
        terms, warp = padded(-(-products.width // groups)), _elements_of_warp(tall)
        if terms * tall <= most_warps * warp:
            tiles.append(Tile(tall, terms, max(1, terms * tall // warp), part=terms))
    return tiles


def _staged(products: Products, device: DeviceSpec) -> list[Tile]:
    """Return tiles of a turned matrix whose programs go through their terms in a loop, which does not load
    before it starts: the matrix does not arrive while the previous kernel ends."""
    tiles = list[Tile]()
    for tall, groups in _shares(products, device):
        terms = max(1, TURN_WARPS * _elements_of_warp(tall) // tall)
        part = terms * -(-products.width // (groups * terms))
        tiles.append(Tile(tall, terms, TURN_WARPS, stages=3, part=part))
    return tiles


def _shares(products: Products, device: DeviceSpec) -> Iterator[tuple[int, int]]:
    """Yield the rows of a tile, which are whole sectors, and the programs that share their terms."""
    for tall, share in TURNED:
        tall = min(tall, padded(max(1, products.rows)))
        blocks = -(-max(1, products.rows) // tall)
        yield tall, max(1, min(share * device.sms // blocks, products.width // SMALLEST))


def _elements_of_warp(tall: int) -> int:
    """Return the elements of a tile for each warp of 32 threads.

    A row of the tile has two threads or more: with fewer, Triton gives each thread rows of its own, as it
    loads a vector, and moves the matrix there through shared memory.
    """
    return WARP * min(WORD * TURNED_WORDS, max(1, tall // 2))


def _turned_by_threads(products: Products, device: DeviceSpec) -> Iterator[Tile]:
    """Yield tiles for threads of a turned matrix."""
    rows, width, few = max(1, products.rows), max(1, products.width), products.size(products.few)
    if few * len(products.sums) <= FEW_SUMS:
        yield from _at_once(products, device) or _staged(products, device)
        for tall in UNDIVIDED:
            terms, warps = padded(width), padded(width) * tall // (WARP * WORD * TURNED_WORDS)
            if 1 <= warps <= MOST_WARPS:
                yield Tile(tall, terms, warps)
            elif warps > MOST_WARPS:
                looped = Tile(tall, terms * MOST_WARPS // warps, MOST_WARPS, stages=3)
                yield from (looped, replace(looped, early=1))
        return
    for terms, tall, warps, share in BY_THREADS:
        tall = min(tall, padded(rows))
        groups = max(1, min(share * device.sms // -(-rows // tall), -(-width // terms)))
        part = terms * -(-width // (groups * terms))
        yield Tile(tall, terms, warps, stages=3, part=part, in_turn=True)


def _along_by_threads(
    loops: LoopNest, products: Products, itemsize: int, device: DeviceSpec
) -> Iterator[Tile]:
    """Yield tiles for threads of a matrix whose neighbours are terms of one sum: the fewer rows it has, the
    more of it is in flight. itemsize: the bytes of its elements."""
    few, matrices = products.size(products.few), len(products.matrices)
    rows, width, sums = max(1, products.rows), padded(products.width), len(products.sums) * few
    most = min(8, SUMS // sums, WORDS // matrices)
    tallest = next(n for n in (8, 4, 2, 1) if n <= max(1, most))
    warp = WORD_COLS * (2 if itemsize == 1 else 1)  # a word has twice as many elements of one byte
    needed = padded(-(-IN_FLIGHT * device.sms // (rows * matrices)))
    terms = max(warp, min(needed, width, 8 * warp))
    tall = max(1, min(tallest, 4, padded(rows // device.sms)))
    other = terms // 4 if terms > 2 * warp else 2 * terms
    shapes = ((tall, terms), (max(1, tall // 2), terms), (tall, other))
    shapes = (*shapes, (tallest, min(terms, other)), (1, terms))
    tiles = [Tile(r, c, c // warp, in_turn=True) for r, c in dict.fromkeys(shapes) if c <= max(width, warp)]
    if few >= LEAST_SHARING:
        yield from tiles
        return
    rest = (node for n, node in enumerate(loops.nodes) if n not in products.sums)
    if any(is_over(node, products.terms) for node in rest):
        if width <= 8 * warp:  # of what the vectors are made
            with_all = Tile(max(1, tall // 2), width, max(1, width // warp), in_turn=True)
            tiles.insert(int(terms < width), with_all)
    elif terms < width <= MOST_AT_ONCE and sums <= FEW_SUMS:
        tiles.insert(1, Tile(1, width, max(1, width // AT_ONCE), in_turn=True))
    if 2 * rows <= device.sms and 2 * terms < width:  # programs share the few rows of a matrix
        groups = min(device.sms // rows, width // terms)
        part = terms * -(-width // (groups * terms))
        tiles.insert(0, Tile(1, terms, max(1, terms // warp), part=part, in_turn=True))
    yield from dict.fromkeys(tiles)
    for height, wide, warps, elements in EARLY:
        block = min(wide, width)
        height, warps = min(height, 2 * tall, tallest), max(1, warps * block // wide)
        in_turn = max(1, height * block * matrices // (WARP * warps))
        tile = Tile(height, block, warps, in_turn=True)
        if block < width or tile not in tiles:
            yield replace(tile, early=max(1, elements // in_turn))


class Draft:
    """The directives of a placement that is not finished.

    lanes: directives with numbers; the dimensions of a tile lie in the order of these numbers.
    """

    def __init__(self, loops: LoopNest) -> None:
        self.loops = loops
        self.fuses, self.cuts = list[Directive](), list[Directive]()
        self.grid, self.loop = list[Directive](), list[Directive]()
        self.lanes = list[tuple[int, Directive]]()

    def one(self, axes: Sequence[int], name: str) -> tuple[str, Dim]:
        """Fuse several axes into one, and return its name and size."""
        size = product(self.loops.axes[k].size for k in axes)
        if len(axes) == 1:
            return self.loops.axes[axes[0]].name, size
        self.fuses.append(Fuse(tuple(self.loops.axes[k].name for k in axes), name))
        return name, size

    def cut(self, name: str, size: Dim, inner: int, place: Place = Place.GRID) -> str:
        """Split an axis into parts of `inner` elements, and return the inner axis. place: the outer one's."""
        if isinstance(size, int) and size <= inner:
            return name
        self.cuts.append(Split(name, inner))
        (self.loop if place is Place.LOOP else self.grid).append(At(f"{name}.o", place))
        return f"{name}.i"

    def directives(self) -> tuple[Directive, ...]:
        lanes = (directive for _, directive in sorted(self.lanes, key=lambda lane: lane[0]))
        return (*self.fuses, *self.cuts, *self.grid, *self.loop, *lanes)


def placed_tile(
    loops: LoopNest,
    products: Products,
    tile: Tile,
    few: Place,
    units: tuple[Directive, ...],
    device: DeviceSpec,
) -> Placement:
    """Return a placement of products. few: the place of the few rows. units: what makes the products."""
    draft, used = Draft(loops), {products.wide, *products.few, *products.terms}
    draft.grid += [At(axis.name, Place.GRID) for k, axis in enumerate(loops.axes) if k not in used]
    if products.few:
        name, size = draft.one(products.few, "few")
        most = min(FEW_ROWS, padded(size)) if isinstance(size, int) else FEW_ROWS
        draft.lanes.append((0, At(draft.cut(name, size, most), few)))
    wide = loops.axes[products.wide]
    if tile.rows == 1:
        draft.grid.append(At(wide.name, Place.GRID))
    else:
        draft.lanes.append((2, At(draft.cut(wide.name, wide.size, tile.rows), Place.LANES)))
    each = tuple(In(name, Stage.EACH) for name in sorted(products.replicated))
    last: tuple[Directive, ...] = ()
    if products.terms:
        name, size = draft.one(products.terms, "terms")
        if tile.part is not None and tile.part < hint(size):
            name, size = draft.cut(name, size, tile.part), tile.part
            parts = -(-products.width // tile.part) * len(products.sums) * products.size(products.few)
            if padded(parts) * tile.rows <= MOST_PARTIALS:
                last = tuple(In(name, Stage.LAST) for name in _shared_reductions(loops, products))
        inner = draft.cut(name, size, tile.terms, Place.LOOP)
        draft.lanes.append((1 if products.is_turned else 3, At(inner, Place.LANES)))
    return Placement(
        (*draft.directives(), *each, *last, *units),
        warps_of(max(tile.warps, products.least_warps), device),
        tile.stages,
        early=tile.early,
    )
