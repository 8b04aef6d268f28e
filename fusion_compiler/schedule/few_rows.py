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
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import sympy

from fusion_compiler.ir.dag import FEW_ROWS, LEAST_SHARING
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import Dim, hint, product
from fusion_compiler.ir.loops import (
    INNER,
    Load,
    LoopNest,
    Node,
    Reduce,
    axes_in,
    axes_of,
    operands_of,
    with_operands,
)
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
from fusion_compiler.schedule.schedule import WORD
from fusion_compiler.schedule.shapes import are_apart, padded, warps_of
from fusion_compiler.schedule.tile_products import SMALLEST, factors_of

# Matrices side by side in a loop. Each has tiles in shared memory, and sixteen need more than there is. Six
# of 8192 x 2048 took 27.6 us each, where a copy takes 7.8.
MOST_MATRICES = 3
MOST_BY_THREADS = 4  # rows that threads multiply as fast as tensor cores do


@dataclass(frozen=True)
class Tile:
    """The tile of a program: rows of the matrix, and terms.

    part: the terms of a program, where programs share them.
    """

    rows: int
    terms: int
    warps: int
    stages: int = 1
    part: int | None = None


# Tiles for tensor cores, best first: measured on an H200, for matrices with so many rows that programs have
# several waves, for others with few terms, and for all others.
TALL = Tile(64, 256, 4, 3), Tile(32, 256, 4, 4), Tile(128, 128, 8, 3), Tile(16, 512, 4, 3)
SHORT = Tile(16, 512, 4, 3), Tile(32, 256, 4, 4), Tile(16, 1024, 8, 3), Tile(16, 256, 4, 4)
LONG = Tile(16, 512, 4, 3), Tile(16, 1024, 8, 3), Tile(32, 256, 4, 4), Tile(16, 256, 4, 4)
FEW_TERMS = 4096
WAVES = 32  # rows of a matrix for each multiprocessor of which programs have several waves
# Tiles for threads: sums that one keeps, over its rows and vectors, and words that it loads at once, over its
# rows and matrices.
SUMS, WORDS = 64, 24
WORD_COLS = 256  # terms: a word for each thread of a warp, so that no warp waits for another
IN_FLIGHT = 24576  # elements of matrices that a multiprocessor must have in flight
# Turned matrices: (rows of a tile, which are whole sectors, programs for each multiprocessor).
TURNED = ((128, 2), (64, 2), (128, 1), (128, 4), (64, 4), (256, 2), (32, 4))
# Partial results that the last program of some rows adds up. A kernel costs 2 us, an atomic and the round
# trip to L2 one, but then one program reads what a grid would read, at 64 bytes per cycle: half a us.
MOST_PARTIALS = 16384
TURNED_WORDS, MOST_WARPS = 8, 16  # words of a thread's tile, all of which it loads at once; warps
# The same for threads, which go through the terms in a loop and have one word of each.
BY_THREADS = ((8, 256, 1, 4), (8, 512, 2, 2), (4, 256, 1, 8), (16, 256, 1, 2))


@dataclass(frozen=True)
class Products:
    """The products of a nest, which have the same axes.

    sums: their numbers. matrices: those of their matrices.
    few: the axes that only the factors with few rows have. wide: an axis that only the matrices have: the
    one along which neighbours in memory lie, or the longest one. terms: the axes that the products reduce.
    is_turned: neighbours in memory lie along `wide`, and not along `terms`.
    sizes: the sizes of all axes, of which some are estimates.
    """

    sums: tuple[int, ...]
    matrices: frozenset[int]
    few: tuple[int, ...]
    wide: int
    terms: tuple[int, ...]
    is_turned: bool
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, loops: LoopNest, hints: Mapping[sympy.Symbol, int]) -> Products | None:
        """Return the products of a nest, or None if it has none of several rows, or reduces what they come
        to over other axes than their rows, or multiplies a turned matrix by what waits for all of its terms:
        programs share these."""
        varies, sizes = axes_of(loops.nodes), [max(0, hint(axis.size, hints)) for axis in loops.axes]
        is_static = [isinstance(axis.size, int) for axis in loops.axes]

        def rank(axes: frozenset[int]) -> tuple[bool, bool, int]:
            """Return a number that is the less, the likelier these are the axes of few rows. A number of rows
            that is only known at run time has an upper bound, which the planner has checked."""
            size, are_static = prod(sizes[k] for k in axes), all(is_static[k] for k in axes)
            return not (are_static and size <= FEW_ROWS), are_static, size

        matrices: dict[int, int] = {}
        axes: set[tuple[frozenset[int], frozenset[int], frozenset[int]]] = set()
        for number, node in enumerate(loops.nodes):
            factors = factors_of(loops, number)
            if not isinstance(node, Reduce) or not factors:
                continue
            first, second = (varies[n] for n in factors)
            few, wide = sorted((first - second, second - first), key=rank)
            if node.axes <= first & second and wide:
                matrices[number] = factors[0] if wide <= first else factors[1]
                axes.add((few, wide, node.axes))
        if len(axes) != 1:
            return None
        ((few, wide, terms),) = axes
        if all(sizes[k] == 1 for k in few):
            return None
        for k in few:
            sizes[k] = sizes[k] if is_static[k] else FEW_ROWS
        if not axes_in(loops.axes, (INNER,)) <= few | terms:
            return None
        for node in loops.nodes:
            late = not with_operands(loops, operands_of(node)).isdisjoint(matrices)
            if isinstance(node, Reduce) and not node.axes <= (few if late else few | terms):
                return None
        loads = (loops.nodes[n] for n in with_operands(loops, matrices.values()))
        steps = {term for node in loads if isinstance(node, Load) for term in node.index.terms}
        adjacent = {k for k, step in steps if k >= 0 and step == 1 and sizes[k] != 1}
        longest = max(wide, key=lambda k: (k in adjacent, sizes[k]))
        is_turned = longest in adjacent and adjacent.isdisjoint(terms)
        read = with_operands(loops, (o for n in matrices for o in operands_of(loops.nodes[n])))
        if is_turned and any(_is_over(loops.nodes[n], terms) for n in read):
            return None
        return cls(
            tuple(matrices),
            frozenset(matrices.values()),
            tuple(k for k in sorted(few) if sizes[k] != 1),
            longest,
            tuple(k for k in sorted(terms) if sizes[k] != 1),
            is_turned,
            tuple(sizes),
        )

    def size(self, axes: Iterable[int]) -> int:
        return prod(self.sizes[k] for k in axes)

    @property
    def rows(self) -> int:
        """Return the rows of all matrices."""
        others = {*self.few, *self.terms}
        return self.size(k for k in range(len(self.sizes)) if k not in others)

    @property
    def width(self) -> int:
        """Return the terms of a product."""
        return self.size(self.terms)


def is_product(loops: LoopNest) -> bool:
    """True if a nest multiplies few rows by a matrix. A filter is multiplied by windows, which overlap."""
    products = Products.of(loops, {})
    if products is None:
        return False
    loads = (node for node in loops.nodes if isinstance(node, Load))
    return all(
        are_apart((abs(hint(step)), products.sizes[k]) for k, step in load.index.terms if k >= 0)
        for load in loads
    )


def placements(
    loops: LoopNest, products: Products, itemsizes: Mapping[str, int], device: DeviceSpec
) -> Iterator[Placement]:
    """Yield placements of a nest's products, best first, without a check that they can run it. itemsizes: the
    bytes of an element, by buffer."""
    few, on_cores = products.size(products.few), list[Placement]()
    if few >= LEAST_SHARING and len(products.matrices) <= MOST_MATRICES:
        tiles = _turned(products, device) if products.is_turned else _along(products, device)
        units = tuple(On(loops.names[n], Unit.TENSOR_CORE) for n in products.sums)
        on_cores = [_placement(loops, products, tile, Place.LANES, units, device) for tile in tiles]
        on_cores += [replace(p, early=1) for p in on_cores if p.num_stages > 1]
    if products.is_turned:
        tiles = _turned_by_threads(products, device)
    else:
        itemsize = min(itemsizes[node.buffer] for node in loops.nodes if isinstance(node, Load))
        sums, matrices = len(products.sums) * few, len(products.matrices)
        tiles = by_threads(products.rows, products.width, matrices, sums, itemsize, device)
    by_turn = tuple(In(loops.names[n], Stage.TURN) for n in products.sums)
    threads = [_placement(loops, products, tile, Place.UNROLL, by_turn, device) for tile in tiles]
    if few > MOST_BY_THREADS:
        yield from (*on_cores, *threads)
        return
    for pair in itertools.zip_longest(on_cores, threads):
        yield from (placement for placement in pair if placement is not None)


def _is_over(node: Node, axes: Iterable[int]) -> bool:
    return isinstance(node, Reduce) and not node.axes.isdisjoint(axes)


def _along(products: Products, device: DeviceSpec) -> Iterator[Tile]:
    """Yield tiles for tensor cores of a matrix whose neighbours are terms of one sum."""
    width = padded(products.width)
    tiles = TALL if products.rows >= WAVES * device.sms else SHORT if width <= FEW_TERMS else LONG
    for tile in tiles:
        if tile.terms <= width or tile is tiles[0]:
            yield replace(tile, terms=min(tile.terms, width))


def _turned(products: Products, device: DeviceSpec) -> Iterator[Tile]:
    """Yield tiles for tensor cores of a turned matrix. Programs load all of their terms at once."""
    rows, width = max(1, products.rows), max(1, products.width)
    for tall, share in TURNED:
        tall = min(tall, padded(rows))
        groups = max(1, min(share * device.sms // -(-rows // tall), width // SMALLEST))
        terms, warp = padded(-(-width // groups)), device.warp_size * min(WORD * TURNED_WORDS, tall // 2)
        if terms * tall <= MOST_WARPS * warp:
            yield Tile(tall, terms, max(1, terms * tall // warp), part=terms)


def _turned_by_threads(products: Products, device: DeviceSpec) -> Iterator[Tile]:
    """Yield tiles for threads of a turned matrix."""
    rows, width = max(1, products.rows), max(1, products.width)
    for terms, tall, warps, share in BY_THREADS:
        tall = min(tall, padded(rows))
        groups = max(1, min(share * device.sms // -(-rows // tall), -(-width // terms)))
        yield Tile(tall, terms, warps, stages=3, part=terms * -(-width // (groups * terms)))


def by_threads(
    rows: int, width: int, matrices: int, sums: int, itemsize: int, device: DeviceSpec
) -> list[Tile]:
    """Return tiles for threads: the fewer rows matrices have, the more of each is in flight.

    rows: of all matrices together. width: the terms of a sum. sums: of a row. itemsize: the bytes of a
    matrix' elements.
    """
    rows, width = max(1, rows), padded(width)
    most = min(8, SUMS // sums, WORDS // matrices)
    tallest = next(n for n in (8, 4, 2, 1) if n <= max(1, most))
    warp = WORD_COLS * (2 if itemsize == 1 else 1)  # a word has twice as many elements of one byte
    needed = padded(-(-IN_FLIGHT * device.sms // (rows * matrices)))
    terms = max(warp, min(needed, width, 8 * warp))
    tall = max(1, min(tallest, 4, padded(rows // device.sms)))
    other = terms // 4 if terms > 2 * warp else 2 * terms
    least = min(terms, other)
    tiles = ((tall, terms), (max(1, tall // 2), terms), (tall, other), (tallest, least), (1, terms))
    return [Tile(r, c, c // warp) for r, c in dict.fromkeys(tiles) if c <= max(width, warp)]


def _placement(
    loops: LoopNest,
    products: Products,
    tile: Tile,
    few: Place,
    units: tuple[Directive, ...],
    device: DeviceSpec,
) -> Placement:
    """Return a placement of products. few: the place of the few rows. units: what makes the products."""
    fuses, grid, loop = list[Directive](), list[Directive](), list[Directive]()
    cuts, lanes = list[Directive](), list[tuple[int, Directive]]()

    def one(axes: Sequence[int], name: str) -> tuple[str, Dim]:
        """Make one axis of several, and return its name and size."""
        size = product(loops.axes[k].size for k in axes)
        if len(axes) == 1:
            return loops.axes[axes[0]].name, size
        fuses.append(Fuse(tuple(loops.axes[k].name for k in axes), name))
        return name, size

    def cut(name: str, size: Dim, inner: int, outside: list[Directive], place: Place) -> str:
        """Return the part of an axis of which a tile has `inner` elements."""
        if isinstance(size, int) and size <= inner:
            return name
        cuts.append(Split(name, inner))
        outside.append(At(f"{name}.o", place))
        return f"{name}.i"

    used = {products.wide, *products.few, *products.terms}
    grid += [At(axis.name, Place.GRID) for k, axis in enumerate(loops.axes) if k not in used]
    name, size = one(products.few, "few")
    most = min(FEW_ROWS, padded(size)) if isinstance(size, int) else FEW_ROWS
    lanes.append((0, At(cut(name, size, most, grid, Place.GRID), few)))
    wide = loops.axes[products.wide]
    if tile.rows == 1:
        grid.append(At(wide.name, Place.GRID))
    else:
        lanes.append((2, At(cut(wide.name, wide.size, tile.rows, grid, Place.GRID), Place.LANES)))
    last: tuple[Directive, ...] = ()
    if products.terms:
        name, size = one(products.terms, "terms")
        if tile.part is not None and tile.part < hint(size):
            name, size = cut(name, size, tile.part, grid, Place.GRID), tile.part
            parts = -(-products.width // tile.part) * len(products.sums) * products.size(products.few)
            if padded(parts) * tile.rows <= MOST_PARTIALS:
                shared = (n for n, node in enumerate(loops.nodes) if _is_over(node, products.terms))
                last = tuple(In(loops.names[n], Stage.LAST) for n in shared)
        inner = cut(name, size, tile.terms, loop, Place.LOOP)
        if few is Place.UNROLL and loop and not products.is_turned:  # a thread has a word of neighbours
            words = list[Directive]()
            inner = cut(inner, tile.terms, WORD, words, Place.LANES)
            lanes += [(3, word) for word in words]
        lanes.append((1 if products.is_turned else 3, At(inner, Place.LANES)))
    placed = (directive for _, directive in sorted(lanes, key=lambda lane: lane[0]))
    return Placement(
        (*fuses, *cuts, *grid, *loop, *placed, *last, *units), warps_of(tile.warps, device), tile.stages
    )
