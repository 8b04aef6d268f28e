"""Placements of chains of products (`schedule.chains`).

Programs share the rows, and each goes through the axis of the last products in a loop. What lies between the
products is never stored. Tensor cores make the products. The loop makes all reductions that the law of
carried reductions allows it (`schedule.carried`); others take a second loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import MOST_FEATURES, Load, LoopNest
from fusion_compiler.schedule.chains import Chain
from fusion_compiler.schedule.placed_axes import PlacedAxes
from fusion_compiler.schedule.placement import At, Directive, In, On, Place, Placement, Split, Stage, Unit
from fusion_compiler.schedule.shapes import padded
from fusion_compiler.schedule.tile_products import SMALLEST, product_of

PROGRAMS = 2  # for each multiprocessor, if a loop is split over programs to occupy the device
LEAST_BLOCKS = 4  # of a program's part of a loop
MOST_PARTS = 64  # of a loop: merging them reads what programs store
# Rows, elements of a block of the loop, warps and stages, by the most features of a row: of 13 shapes on 20
# attentions, forward and backward, the few of which one is always near the best.
SHAPES: tuple[tuple[int, tuple[tuple[int, int, int, int], ...]], ...] = (
    (64, ((64, 64, 4, 3), (64, 32, 4, 3), (64, 64, 4, 2))),
    (128, ((64, 64, 4, 2), (64, 32, 4, 3), (64, 64, 4, 3), (128, 128, 8, 2))),
    (192, ((64, 32, 4, 3), (64, 64, 4, 2), (128, 64, 8, 2))),
    (256, ((128, 64, 8, 2), (64, 64, 8, 2), (128, 32, 8, 2))),
)
SMALLEST_SHAPE = (32, 32, 4, 2)  # for devices that have no room for another one


def placements(
    loops: LoopNest, chain: Chain, order: Sequence[int], device: DeviceSpec, itemsizes: Mapping[str, int]
) -> Iterator[Placement]:
    """Yield placements, best first. order: the axes from the outermost one in memory to the innermost.
    itemsizes: bytes of an element of the buffers, as far as they are known."""
    width = _width(loops, chain)
    shapes = next(shapes for most, shapes in SHAPES if width <= most)
    if chain.across:
        yield from _over_rows_and_columns(loops, chain, order, shapes)
        return
    fitting = [*_over_rows(loops, chain, order, shapes, device, itemsizes)]
    yield from fitting or _over_rows(loops, chain, order, (SMALLEST_SHAPE,), device, itemsizes)


def _over_rows(
    loops: LoopNest,
    chain: Chain,
    order: Sequence[int],
    shapes: Iterable[tuple[int, int, int, int]],
    device: DeviceSpec,
    itemsizes: Mapping[str, int],
) -> Iterator[Placement]:
    """Yield placements of programs that have rows, as far as their tiles fit into shared memory."""
    assert chain.loop is not None
    names = [axis.name for axis in loops.axes]
    most = [max(SMALLEST, padded(hint(loops.axes[k].size))) for k in (chain.rows, chain.loop)]
    rows, loop = names[chain.rows], names[chain.loop]
    inside = {chain.rows, chain.loop, *chain.features}
    around = [At(names[k], Place.GRID) for k in order if k not in inside]
    tile = [At(names[k], Place.LANES) for k in order if k in chain.features]
    combined = [In(loops.names[n], Stage.CARRIED) for n in chain.carried]
    count = prod(hint(loops.axes[k].size) for k in order if k not in inside)
    for height, block, warps, stages in shapes:
        height, block = min(height, most[0]), min(block, most[1])
        programs = count * -(-hint(loops.axes[chain.rows].size) // height)
        chunk = _chunk(hint(loops.axes[chain.loop].size), block, programs, device) if chain.has_parts else 0
        chunks: list[Directive] = [Split(loop, chunk), At(f"{loop}.o", Place.GRID)] if chunk else []
        part = f"{loop}.i" if chunk else loop
        directives: tuple[Directive, ...] = (
            Split(rows, height), *around, At(f"{rows}.o", Place.GRID), *chunks, Split(part, block),
            At(f"{part}.o", Place.LOOP), At(f"{rows}.i", Place.LANES), At(f"{part}.i", Place.LANES),
            *tile, *combined,
        )  # fmt: skip
        where = PlacedAxes.of(loops, Placement(directives))
        units = (On(loops.names[n], Unit.TENSOR_CORE) for n in chain.products if product_of(loops, n, where))
        if _shared_bytes(loops, chain, where, stages, itemsizes) <= device.shared_bytes_of_program:
            yield Placement((*directives, *units), warps, stages)


def _width(loops: LoopNest, chain: Chain) -> int:
    """Return the most features of a row that lie side by side; parts of an axis are axes of their own."""
    features: dict[str, frozenset[int]] = {}
    for node, axes in zip(loops.nodes, loops.node_axes, strict=True):
        if isinstance(node, Load):
            features[node.buffer] = features.get(node.buffer, frozenset()) | (axes & chain.features)
    widths = (sum(hint(loops.axes[k].size) for k in axes) for axes in features.values())
    return min(MOST_FEATURES, max(widths))  # keys that are values too have features of both


def _shared_bytes(
    loops: LoopNest, chain: Chain, where: PlacedAxes, stages: int, itemsizes: Mapping[str, int]
) -> int:
    """Return the bytes of shared memory for what tensor cores read: of each stage of a loop, and of rows."""
    total, features = 0, where.of_axes(chain.features)
    for node in loops.nodes:
        if isinstance(node, Load) and not features.isdisjoint(leaves := where.of_index(node.index)):
            lanes = prod(leaf.lanes for leaf in leaves if leaf.place is Place.LANES)
            is_in_loop = any(leaf.place is Place.LOOP for leaf in leaves)
            total += lanes * itemsizes.get(node.buffer, 2) * (stages if is_in_loop else 1)
    return total


def _over_rows_and_columns(
    loops: LoopNest, chain: Chain, order: Sequence[int], shapes: Sequence[tuple[int, int, int, int]],
) -> Iterator[Placement]:
    """Yield placements of programs that have rows and columns of the first products, and sum in a loop."""
    names = [axis.name for axis in loops.axes]
    split = (chain.rows, *chain.across)
    sizes = [max(SMALLEST, padded(hint(loops.axes[k].size))) for k in split]
    inside, looped = {*split, chain.loop, *chain.features}, () if chain.loop is None else (names[chain.loop],)
    for *block, warps, stages in shapes:
        directives: list[Directive] = []
        for k, most, length in zip(split, sizes, block, strict=True):
            directives += [Split(names[k], min(most, length)), At(f"{names[k]}.o", Place.GRID)]
        directives += [At(names[k], Place.GRID) for k in order if k not in inside]
        directives += [At(name, Place.LOOP) for name in looped]
        directives += [At(f"{names[k]}.i", Place.LANES) for k in split]
        directives += [At(names[k], Place.LANES) for k in order if k in chain.features]
        where = PlacedAxes.of(loops, Placement(tuple(directives)))
        units = (On(loops.names[n], Unit.TENSOR_CORE) for n in chain.products if product_of(loops, n, where))
        yield Placement((*directives, *units), warps, stages)


def _chunk(size: int, block: int, programs: int, device: DeviceSpec) -> int:
    """Return how many elements of a loop a program takes so that all multiprocessors have one; 0 for all."""
    parts = min(PROGRAMS * device.sms // max(1, programs), size // (LEAST_BLOCKS * block), MOST_PARTS)
    return 0 if parts < 2 else -(-size // (parts * block)) * block
