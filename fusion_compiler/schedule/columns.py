"""Sums over the rows alone: tiles of columns, the rows split over programs, partial sums added at the end.

A shape is (rows, columns, warps, programs a multiprocessor); of no columns, whole rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule.analysis import Analysis, enough
from fusion_compiler.schedule.contractions import SMALLEST
from fusion_compiler.schedule.measured import Shape
from fusion_compiler.schedule.schedule import WORD, Cols, Schedule
from fusion_compiler.schedule.shapes import padded, powers, warps_of

WARPS = 16  # of a multiprocessor: with 32 elements a thread, three times, enough in flight
SQUARE = ((64, 64, 8, 2), (32, 128, 8, 2), (128, 32, 8, 2))  # both memory orders touch whole sectors
ALL = ((8192, 4, 8), (4096, 8, 4), (2048, 8, 4), (16384, 2, 16))  # of one column: elements, share, warps
# Products: a thread has a word of every row of the tile, and adds these up by itself.
PRODUCTS = ((8, 256, 1, 4), (8, 512, 2, 2), (4, 256, 1, 8), (16, 256, 1, 2))
# The same where the matrix's size is known: columns of a block, whole sectors, and programs a multiprocessor.
IN_FLIGHT = ((128, 2), (64, 2), (128, 1), (128, 4), (64, 4), (256, 2), (32, 4))
TYPICAL = 4  # of these
# The same of programs that share no rows: two words or four of each, which are whole sectors.
UNDIVIDED, UNDIVIDED_WARPS = (4 * WORD, 2 * WORD), 16
WORDS = 8  # of a thread's tile at most, all of which it loads at once
# Threads for each row of a tile at least: with fewer, Triton gives each thread rows of its own, as it loads a
# vector, and brings the matrix there through shared memory.
ROW_THREADS = 2
AHEAD = 32  # elements of whole vectors (`schedule.ahead`) that a thread has at most
# Of a program at most, twice as many where tensor units need few registers; of one that has a larger tile
# part by part.
MOST_WARPS, TURN_WARPS = 8, 4
MOST_PARTIALS = 16384  # see `_last_finishes`
WHOLE = (1, 0, 8, 2)  # what is stored besides goes row by row


def suits(a: Analysis) -> bool:
    return bool(a.reductions) and not a.reads_rows


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    return None


def measured(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    """Not a table: the best tiles depend on how many columns there are for each multiprocessor."""
    width, count = max(1, hint(a.size(COLS))), hint(a.size(ROWS))
    if a.size(COLS) == 1:
        return _one_column(device, count)
    if _is_known_product(a):
        return ()  # none was: the model ranks them
    if a.weighted_columns:
        return made(a, device, PRODUCTS)
    stored = any(s.value not in a.finish for s in a.loops.stores)
    by_row = stored and not a.mixed and isinstance(a.size(COLS), int) and 1024 <= padded(width) <= 8192
    tiles = SQUARE if a.mixed else tuple(_tiles(width, count, device))
    return made(a, device, ((WHOLE,) if by_row else ()) + tiles)


def typical(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    if not _is_known_product(a):
        return measured(a, device)[:3]
    found = tuple(s for s in _of_products(a, device) if not s.early)
    return tuple(s for s in found if s.last_finishes or replace(s, last_finishes=True) not in found)[:TYPICAL]


def others(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    if _is_known_product(a):
        return tuple(_of_products(a, device))
    if hint(a.size(COLS)) <= 1 or a.weighted_columns:
        return ()
    shapes = ((32 * w * 32 // cols, cols, w, 2) for cols in powers(32, 1024) for w in powers(1, 16))
    return made(a, device, tuple(s for s in shapes if s[0]))


def made(a: Analysis, device: DeviceSpec, shapes: tuple[Shape, ...]) -> tuple[Schedule, ...]:
    width, count = max(1, hint(a.size(COLS))), hint(a.size(ROWS))
    whole, tallest = padded(width), padded(count)
    found: dict[Schedule, None] = {}
    for rows, cols, warps, share in shapes:
        if not cols:
            programs = _programs(count, 1, share * device.sms)
            found[_staged(1, whole, Cols.WHOLE, programs, warps_of(warps, device))] = None
            continue
        block, rows = min(cols, whole), min(rows, tallest)
        warps = max(1, min(warps_of(warps, device), rows * block // (16 * device.warp_size)))
        programs = _programs(count, rows, share * device.sms // -(-width // block))
        if isinstance(a.size(ROWS), int) and rows >= count:  # all loads at once
            found[Schedule(rows, block, Cols.GRID, num_warps=warps)] = None
        else:
            found[_staged(rows, block, Cols.GRID, programs, warps)] = None
    return tuple(found)


def _is_known_product(a: Analysis) -> bool:
    """Whether all sums are products with a matrix of known size."""
    known = all(isinstance(a.size(group), int) for group in (ROWS, COLS))
    return known and a.size(COLS) != 1 and bool(a.products) and a.products == frozenset(a.across_rows)


def _of_products(a: Analysis, device: DeviceSpec) -> Iterator[Schedule]:
    """Tiles of all rows of a program's group where its threads hold them, else of a few rows in turn; each
    finished by the last program of a block, where that may be, and by a second kernel; or of all rows."""
    turns = made(a, device, PRODUCTS) if a.weighted_columns else ()
    for s in dict.fromkeys((*_in_flight(a, device), *_undivided(a, device), *turns)):
        programs = -(-hint(a.size(ROWS)) // s.block_rows) if s.programs is None else s.programs
        if _last_finishes(a, programs, s.block_cols):
            yield replace(s, last_finishes=True)
        yield s


def _in_flight(a: Analysis, device: DeviceSpec) -> list[Schedule]:
    """In turn only where no threads hold a whole tile: what a loop loads is not on its way before it, so that
    no weights come while the kernel before ends."""
    width, count = max(1, hint(a.size(COLS))), max(1, hint(a.size(ROWS)))
    most = MOST_WARPS * (2 if a.weighted_columns else 1)
    ahead = padded(count) // (AHEAD * device.warp_size) if a.ahead else 0
    whole: list[Schedule] = []
    turns: list[Schedule] = []
    for cols, share in IN_FLIGHT:
        block = min(cols, padded(width))
        groups = max(1, min(share * device.sms // -(-width // block), count // SMALLEST))
        rows, held = padded(-(-count // groups)), device.warp_size * min(WORD * WORDS, block // ROW_THREADS)
        if rows * block <= most * held:
            warps = max(1, rows * block // held, ahead)
            whole.append(Schedule(rows, block, Cols.GRID, num_warps=warps))
        else:
            rows = max(1, TURN_WARPS * held // block)
            turns.append(_staged(rows, block, Cols.GRID, enough(groups, count, rows), TURN_WARPS))
    return whole or ([] if a.weighted_columns else turns)


def _undivided(a: Analysis, device: DeviceSpec) -> Iterator[Schedule]:
    """Tiles of all rows, or of as many as threads hold in turn: nothing is left for a counter."""
    rows, held = padded(max(1, hint(a.size(ROWS)))), device.warp_size * WORD * WORDS
    for cols in () if a.weighted_columns else UNDIVIDED:
        warps = rows * cols // held
        if 1 <= warps <= UNDIVIDED_WARPS:
            yield Schedule(rows, cols, Cols.GRID, num_warps=warps)
        elif warps > UNDIVIDED_WARPS:
            turns = _staged(UNDIVIDED_WARPS * held // cols, cols, Cols.GRID, 1, UNDIVIDED_WARPS)
            yield from (turns, replace(turns, early=1))


def _last_finishes(a: Analysis, programs: int, block: int) -> bool:
    """Whether the last program of a block of columns, and no second kernel, adds up what so many left.

    A kernel costs 2 us, a ticket and the way to L2 one; but then one program of few warps reads what a grid
    would, at 64 bytes a cycle: MOST_PARTIALS of a block in half a microsecond. Products of few rows have so
    few. Other sums over rows keep their second kernel, with which they were measured: they are longer, and of
    hundreds of partial results a column.
    """
    return programs > 1 and len(a.across_rows) * padded(programs) * block <= MOST_PARTIALS


def _staged(rows: int, block: int, cols: Cols, programs: int, warps: int) -> Schedule:
    return Schedule(rows, block, cols, programs, num_warps=warps, num_stages=3)


def _tiles(width: int, count: int, device: DeviceSpec) -> Iterator[Shape]:
    """32 elements a thread, and as many warps as give a multiprocessor WARPS.

    A tile of the few rows that there are has half of that, and no loop. Where there are so many columns that
    one warp for 128 of them is more than that, it takes more columns; to add up what few warps hold is
    quicker, and a program of one warp does not wait for others.
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
    """Programs along the rows: one wave of them at most unless they would add too long, each with a block."""
    return enough(max(1, min(-(-count // rows), most)), count, rows)


def _one_column(device: DeviceSpec, count: int) -> tuple[Schedule, ...]:
    """A sum of everything."""
    found: dict[Schedule, None] = {}
    for elements, share, warps in ALL:
        rows = min(elements, padded(count))
        programs = _programs(count, rows, share * device.sms)
        found[Schedule(rows, 1, Cols.WHOLE, programs, warps_of(warps, device))] = None
    return tuple(found)
