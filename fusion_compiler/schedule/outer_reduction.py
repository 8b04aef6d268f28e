"""Schedules of nests whose only reductions are sums over rows: tiles of columns, with the rows split over
programs and the partial sums added at the end.

A shape is (rows, columns, warps, programs per multiprocessor); zero columns mean whole rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule.analysis import Analysis, enough
from fusion_compiler.schedule.measured import Shape
from fusion_compiler.schedule.schedule import WORD, Cols, Schedule
from fusion_compiler.schedule.shapes import padded, powers, warps_of
from fusion_compiler.schedule.tile_products import SMALLEST

# warps per multiprocessor: enough in flight with 32 elements per thread in three stages
WARPS = 16
SQUARE = ((64, 64, 8, 2), (32, 128, 8, 2), (128, 32, 8, 2))  # both memory orders touch whole sectors
# sums of one column: (elements, programs per multiprocessor, warps)
ALL = ((8192, 4, 8), (4096, 8, 4), (2048, 8, 4), (16384, 2, 16))
# Products: a thread has one word of every row of the tile and adds up the rows by itself.
PRODUCTS = ((8, 256, 1, 4), (8, 512, 2, 2), (4, 256, 1, 8), (16, 256, 1, 2))
# Products with a matrix of known size: (columns of a block, which are whole sectors, programs per
# multiprocessor).
IN_FLIGHT = ((128, 2), (64, 2), (128, 1), (128, 4), (64, 4), (256, 2), (32, 4))
TYPICAL = 4  # typical schedules of products
# The same without a split of the rows: columns per block (two or four words, whole sectors), and most warps.
UNDIVIDED, UNDIVIDED_WARPS = (4 * WORD, 2 * WORD), 16
WORDS = 8  # words of a thread's tile, all of which it loads at once
# Least threads for each row of a tile: with fewer, Triton gives each thread rows of its own, as it loads a
# vector, and moves the matrix there through shared memory.
ROW_THREADS = 2
REPLICATED = 32  # most elements per thread of whole vectors (`schedule.replicated`)
# Most warps of a program (twice as many for more products than FEW_SUMS), and warps of a program that
# loops over the parts of a larger tile.
MOST_WARPS, TURN_WARPS = 8, 4
MOST_PARTIALS = 16384  # see `_last_finishes`
WHOLE = (1, 0, 8, 2)  # for nests that also store elements, row by row


def suits(a: Analysis) -> bool:
    return bool(a.reductions) and not a.reads_rows


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    return None


def measured(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    """Return the best tiles as a formula, because they depend on the number of columns per multiprocessor."""
    width, count = max(1, hint(a.size(COLS))), hint(a.size(ROWS))
    if a.size(COLS) == 1:
        return _one_column(device, count)
    if _is_known_product(a):
        return ()  # none was measured: the model ranks them
    if a.weighted_columns:
        return from_shapes(a, device, PRODUCTS)
    stored = any(s.value not in a.finish for s in a.loops.stores)
    by_row = stored and not a.mixed and isinstance(a.size(COLS), int) and 1024 <= padded(width) <= 8192
    tiles = SQUARE if a.mixed else tuple(_tiles(width, count, device))
    return from_shapes(a, device, ((WHOLE,) if by_row else ()) + tiles)


def typical(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    if not _is_known_product(a):
        return measured(a, device)[:3]
    products = tuple(s for s in _of_products(a, device) if not s.early)
    best = (s for s in products if s.last_finishes or replace(s, last_finishes=True) not in products)
    return tuple(itertools.islice(best, TYPICAL))


def others(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    if _is_known_product(a):
        return tuple(_of_products(a, device))
    if hint(a.size(COLS)) <= 1 or a.weighted_columns:
        return ()
    shapes = ((32 * w * 32 // cols, cols, w, 2) for cols in powers(32, 1024) for w in powers(1, 16))
    return from_shapes(a, device, tuple(s for s in shapes if s[0]))


def from_shapes(a: Analysis, device: DeviceSpec, shapes: tuple[Shape, ...]) -> tuple[Schedule, ...]:
    width, count = max(1, hint(a.size(COLS))), hint(a.size(ROWS))
    width_padded, tallest = padded(width), padded(count)
    schedules: dict[Schedule, None] = {}
    for rows, cols, warps, share in shapes:
        if not cols:
            programs = _programs(count, 1, share * device.sms)
            schedules[_staged(1, width_padded, Cols.WHOLE, programs, warps_of(warps, device))] = None
            continue
        block, rows = min(cols, width_padded), min(rows, tallest)
        warps = max(1, min(warps_of(warps, device), rows * block // (16 * device.warp_size)))
        programs = _programs(count, rows, share * device.sms // -(-width // block))
        if isinstance(a.size(ROWS), int) and rows >= count:  # all loads at once
            schedules[Schedule(rows, block, Cols.GRID, num_warps=warps)] = None
        else:
            schedules[_staged(rows, block, Cols.GRID, programs, warps)] = None
    return tuple(schedules)


def _is_known_product(a: Analysis) -> bool:
    """True if all sums are products with a matrix of known size."""
    is_static = all(isinstance(a.size(group), int) for group in (ROWS, COLS))
    return is_static and a.size(COLS) != 1 and bool(a.products) and a.products == frozenset(a.across_rows)


def _of_products(a: Analysis, device: DeviceSpec) -> Iterator[Schedule]:
    """Yield schedules of products: split over programs with whole or looped tiles, or not split.

    The last program of a block adds up the partial results if it may; each schedule also comes with a second
    kernel.
    """
    turns = from_shapes(a, device, PRODUCTS) if a.weighted_columns else ()
    for s in dict.fromkeys((*_in_flight(a, device), *_undivided(a, device), *turns)):
        programs = -(-hint(a.size(ROWS)) // s.block_rows) if s.programs is None else s.programs
        if _last_finishes(a, programs, s.block_cols):
            yield replace(s, last_finishes=True)
        yield s


def _in_flight(a: Analysis, device: DeviceSpec) -> list[Schedule]:
    """Return schedules with whole tiles if threads can hold them, else with loops over rows. A loop does not
    load before it starts, so the weights would not arrive while the previous kernel ends."""
    width, count = max(1, hint(a.size(COLS))), max(1, hint(a.size(ROWS)))
    most = MOST_WARPS * (2 if a.weighted_columns else 1)
    replicated = padded(count) // (REPLICATED * device.warp_size) if a.replicated else 0
    tiles: list[Schedule] = []
    loops: list[Schedule] = []
    for cols, share in IN_FLIGHT:
        block = min(cols, padded(width))
        groups = max(1, min(share * device.sms // -(-width // block), count // SMALLEST))
        rows = padded(-(-count // groups))
        elements_per_warp = device.warp_size * min(WORD * WORDS, block // ROW_THREADS)
        if rows * block <= most * elements_per_warp:
            warps = max(1, rows * block // elements_per_warp, replicated)
            tiles.append(Schedule(rows, block, Cols.GRID, num_warps=warps))
        else:
            rows = max(1, TURN_WARPS * elements_per_warp // block)
            loops.append(_staged(rows, block, Cols.GRID, enough(groups, count, rows), TURN_WARPS))
    return tiles or ([] if a.weighted_columns else loops)


def _undivided(a: Analysis, device: DeviceSpec) -> Iterator[Schedule]:
    """Yield schedules whose programs have all rows, at once or in a loop, and leave no partial results."""
    rows, elements_per_warp = padded(max(1, hint(a.size(ROWS)))), device.warp_size * WORD * WORDS
    for cols in () if a.weighted_columns else UNDIVIDED:
        warps = rows * cols // elements_per_warp
        if 1 <= warps <= UNDIVIDED_WARPS:
            yield Schedule(rows, cols, Cols.GRID, num_warps=warps)
        elif warps > UNDIVIDED_WARPS:
            loop = _staged(UNDIVIDED_WARPS * elements_per_warp // cols, cols, Cols.GRID, 1, UNDIVIDED_WARPS)
            yield from (loop, replace(loop, early=1))


def _last_finishes(a: Analysis, programs: int, block: int) -> bool:
    """True if the last program of a block of columns adds up the partial results, without a second kernel.

    A kernel costs 2 us, an atomic and the round trip to L2 one. But then one program with few warps reads
    what a grid would read, at 64 bytes per cycle: MOST_PARTIALS of a block take half a microsecond. Products
    of few rows have no more. Other sums over rows keep their second kernel, with which they were measured:
    they are longer, with hundreds of partial results per column.
    """
    return programs > 1 and len(a.across_rows) * padded(programs) * block <= MOST_PARTIALS


def _staged(rows: int, block: int, cols: Cols, programs: int, warps: int) -> Schedule:
    return Schedule(rows, block, cols, programs, num_warps=warps, num_stages=3)


def _tiles(width: int, count: int, device: DeviceSpec) -> Iterator[Shape]:
    """Yield tiles with 32 elements per thread and as many warps as give a multiprocessor WARPS.

    A tile of very few rows has half of the elements, and no loop. If there are more than WARPS * 128 columns
    per multiprocessor, tiles get wider: few warps add up their results faster, and a program of one warp does
    not wait for others.
    """
    if count <= 4:
        rows, share = padded(count), padded(width // device.sms)
        yield rows, max(128, min(2048 // rows, share)), 4, 2
    across = -(-width // 128)
    warps = 1 << max(0, min(8, WARPS * device.sms // max(across, 2 * device.sms)).bit_length() - 1)
    block = 128
    while block < 1024 and -(-width // block) > WARPS * device.sms:
        block *= 2
    for cols, w in ((block, warps), (block, max(1, warps // 2)), (block // 2, warps), (2 * block, 2 * warps)):
        yield max(1, 1024 * w // cols), cols, w, 2


def _programs(count: int, rows: int, most: int) -> int:
    """Return the number of programs along the rows: at most one wave, or more if one would add too many
    rows."""
    return enough(max(1, min(-(-count // rows), most)), count, rows)


def _one_column(device: DeviceSpec, count: int) -> tuple[Schedule, ...]:
    """Return schedules of a sum over everything."""
    schedules: dict[Schedule, None] = {}
    for elements, share, warps in ALL:
        rows = min(elements, padded(count))
        programs = _programs(count, rows, share * device.sms)
        schedules[Schedule(rows, 1, Cols.WHOLE, programs, warps_of(warps, device))] = None
    return tuple(schedules)
