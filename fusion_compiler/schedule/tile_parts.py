"""Placements of nests whose reductions are over different axes and of which a tile holds only a part.

    t = sum(x, {s});  db = sum(t, {n});  v = sum(w * t, {c});  y = x - v
    place(n, GRID); place(g, GRID); place(c, SHARED); split(s, 8192); place(s.o, SHARED); place(s.i, LANES)

Axes that nothing but stored results is reduced over (n) lie in GRID, because a second stage adds up what the
programs have. The other reduced axes are a group (c, s), of which a program has one part of neighbours in
memory. Programs that share a group exchange its sums; where there are too many parts, each program also goes
through its part in a loop. A group that fits in the registers of one program is in one tile.

A shape is (elements of a program, elements of a block, warps), optionally followed by the registers of a
thread. Zero elements of a program mean that it has a group alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product, takewhile
from math import ceil, prod

import sympy

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import LARGEST_TILE
from fusion_compiler.schedule import measured as table
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import At, Directive, Place, Placement, Split
from fusion_compiler.schedule.row_widths import ALONE, MOST_PARTS
from fusion_compiler.schedule.shapes import padded, warps_of

ORDER = (Place.SHARED, Place.LOOP, Place.LANES)  # of the directives of a group
LEAST_NEIGHBOURS = 16  # elements: a sector of 32 bytes
LEAST_TERMS = 16  # of a part of a sum: what is stored of each is little beside what was read
ENOUGH_FILLED = 18  # twentieths of a tile that axes should fill: fewer lanes behind their ends gain nothing
LEAST_RUN = 64  # neighbours in memory along the innermost axis of a tile


def group_of(a: Analysis, order: Sequence[int]) -> frozenset[int] | None:
    """Return the reduced axes that have to lie in the programs of one group; None if programs that have parts
    of these cannot make the reductions, would store almost as much as they load, or would load few
    neighbours in memory. order: the axes from the outermost one in memory to the innermost one."""
    loops, group = a.loops, a.inner - a.late_axes
    together = takewhile(lambda k: k in group, reversed(order))
    if prod(hint(loops.axes[k].size) for k in together) < LEAST_NEIGHBOURS:
        return None
    covered = dict[int, frozenset[int]]()  # by reduction, its axes and those of the inner sums that it reads
    for n, use in a.uses.items():
        axes = a.loops.reduction(n).axes | covered.get(n, frozenset())
        covered |= {reader: axes | covered.get(reader, frozenset()) for reader in use.readers}
        if use.needs_all is not None and not axes >= group:
            return None
        in_tile = prod(hint(loops.axes[k].size) for k in axes & group)
        if use.needs_all is None and use.stored and in_tile < LEAST_TERMS and axes - group:
            return None
    return group


def parts(
    a: Analysis, order: Sequence[int], device: DeviceSpec, hints: Mapping[sympy.Symbol, int]
) -> Iterator[Placement]:
    """Yield placements whose programs have a part of a group each, best first. order: the axes from the
    outermost one in memory to the innermost one."""
    loops, group = a.loops, group_of(a, order)
    if not group:
        return
    inside = [k for k in order if k in group]
    sizes = {k: hint(loops.axes[k].size, hints) for k in inside}
    count = prod(sizes.values())
    around: list[Directive] = [At(loops.axes[k].name, Place.GRID) for k in order if k not in group]
    all_fits = prod(padded(size) for size in sizes.values()) <= LARGEST_TILE
    if count <= ALONE or (all_fits and group == a.inner):
        return
    most_parts = min(MOST_PARTS, device.sms)
    for part, block, warps, *registers in table.shapes("tile_parts", a, device.target, count):
        tile = _tile(inside, sizes, block)
        blocks = {k: ceil(sizes[k] / tile[k]) for k in inside}
        least = ceil(prod(blocks.values()) / most_parts) if part else prod(blocks.values())
        turns = _turns(inside, blocks, max(part // block, least))
        shared = {k: ceil(blocks[k] / turns[k]) for k in inside}
        if prod(shared.values()) > most_parts:
            continue
        of_axes = [_directives(loops.axes[k].name, shared[k], turns[k], tile[k]) for k in inside]
        splits = (split for of_axis, _ in of_axes for split in of_axis)
        places = [at for _, of_axis in of_axes for at in of_axis]
        directives = (*splits, *around, *sorted(places, key=lambda at: ORDER.index(at.place)))
        warps = max(1, warps_of(warps, device) * prod(tile.values()) // block)
        is_filled = all(sizes[k] % (turns[k] * tile[k]) == 0 for k in inside)
        if is_filled or not registers:  # masks need registers as well
            yield Placement(directives, warps, registers=registers[0] if registers else None)


def _directives(name: str, shared: int, turns: int, lanes: int) -> tuple[list[Split], list[At]]:
    """Return the directives that split an axis and place its parts: one part for each of `shared` programs,
    which each take `turns` with `lanes` elements."""
    splits: list[Split] = []
    places: list[At] = []
    if shared > 1 and turns * lanes == 1:
        return splits, [At(name, Place.SHARED)]
    if shared > 1:
        splits.append(Split(name, turns * lanes))
        places.append(At(f"{name}.o", Place.SHARED))
        name = f"{name}.i"
    if turns > 1 and lanes == 1:
        return splits, [*places, At(name, Place.LOOP)]
    if turns > 1:
        splits.append(Split(name, lanes))
        places.append(At(f"{name}.o", Place.LOOP))
        name = f"{name}.i"
    return splits, [*places, At(name, Place.LANES)]


def _tile(inside: Sequence[int], sizes: Mapping[int, int], room: int) -> dict[int, int]:
    """Return the lanes of each axis in a tile of `room` elements, or of a half or a quarter of these where
    fewer lanes then lie behind the ends of axes. Neighbours in memory are in one tile."""
    powers = [[1 << i for i in range(padded(min(size, room)).bit_length())] for size in sizes.values()]
    tiles = (tile for tile in product(*powers) if room // 4 <= prod(tile) <= room)
    least = min(LEAST_RUN, sizes[inside[-1]])

    def rank(tile: Sequence[int]) -> tuple[bool, int, int, int]:
        pairs = zip(sizes.values(), tile, strict=True)
        filled = prod(size / (ceil(size / lanes) * lanes) for size, lanes in pairs)
        return tile[-1] >= least, min(ENOUGH_FILLED, int(filled * 20)), prod(tile), tile[-1]

    return dict(zip(sizes, max(tiles, key=rank), strict=True))


def _turns(inside: Sequence[int], blocks: Mapping[int, int], least: int) -> dict[int, int]:
    """Return the turns of a program's loop over each axis, which are `least` or more together."""
    turns = dict.fromkeys(inside, 1)
    for k in reversed(inside):
        turns[k] = ceil(blocks[k] / ceil(blocks[k] / min(blocks[k], least)))
        least = ceil(least / turns[k])
    return turns
