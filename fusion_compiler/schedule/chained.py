"""Placements of chains of products (`schedule.chains`).

Programs share the rows, and each goes through the axis of the last products in a loop. What lies between the
products is never stored. Tensor cores make the products. The loop makes all reductions that the law of
carried reductions allows it (`schedule.carried`); others take a second loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import LoopNest
from fusion_compiler.schedule.chains import Chain
from fusion_compiler.schedule.placed_axes import PlacedAxes
from fusion_compiler.schedule.placement import At, Directive, In, On, Place, Placement, Split, Stage, Unit
from fusion_compiler.schedule.shapes import padded
from fusion_compiler.schedule.tile_products import SMALLEST, product_of

# Rows, elements of a block of the loop, warps and stages, best first, by the most features of a row.
SHAPES: tuple[tuple[int, tuple[tuple[int, int, int, int], ...]], ...] = (
    (64, ((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 4, 3), (128, 128, 8, 2), (64, 32, 4, 3))),
    (128, ((128, 64, 8, 3), (64, 64, 4, 3), (128, 64, 8, 2), (64, 32, 4, 3))),
    (256, ((64, 64, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2))),
)


def placements(loops: LoopNest, chain: Chain, order: Sequence[int]) -> Iterator[Placement]:
    """Yield placements, best first. order: the axes from the outermost one in memory to the innermost."""
    names = [axis.name for axis in loops.axes]
    width = max(hint(loops.axes[k].size) for k in chain.features)
    shapes = next(shapes for most, shapes in SHAPES if width <= most)
    most = [max(SMALLEST, padded(hint(loops.axes[k].size))) for k in (chain.rows, chain.loop)]
    rows, loop = names[chain.rows], names[chain.loop]
    for height, block, warps, stages in shapes:
        height, block = min(height, most[0]), min(block, most[1])
        inside = {chain.rows, chain.loop, *chain.features}
        around = [At(names[k], Place.GRID) for k in order if k not in inside]
        tile = [At(f"{rows}.i", Place.LANES), At(f"{loop}.i", Place.LANES)]
        tile += [At(names[k], Place.LANES) for k in order if k in chain.features]
        directives: tuple[Directive, ...] = (
            Split(rows, height), Split(loop, block), *around,
            At(f"{rows}.o", Place.GRID), At(f"{loop}.o", Place.LOOP), *tile,
            *(In(loops.names[n], Stage.CARRIED) for n in chain.carried),
        )  # fmt: skip
        where = PlacedAxes.of(loops, Placement(directives))
        units = (On(loops.names[n], Unit.TENSOR_CORE) for n in chain.products if product_of(loops, n, where))
        yield Placement((*directives, *units), warps, stages)
