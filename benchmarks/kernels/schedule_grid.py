"""Enumerate all reasonable schedules of a loop nest, for an exhaustive search.

The kinds of schedules choose a few of them; `python -m benchmarks schedules` measures how good these are. A
schedule is reasonable if each thread has a few elements of the tile and the registers for them, and if there
is a block for each program that shares the rows.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule import inner_reduction, looped, misaligned
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.row_tiles import Cols, RowTile, placement_of
from fusion_compiler.schedule.run import Run
from fusion_compiler.schedule.shapes import padded, powers

WARPS = (1, 2, 4, 8, 16, 32)
STAGES = (1, 3)  # pipeline stages of loops
SHARES = (1, 2, 4)  # programs per multiprocessor that loop over the rows
THREAD_ELEMENTS = (2, 64)
WIDEST_WHOLE, WIDEST_BLOCK, MOST_ROWS = 1 << 17, 1 << 14, 1 << 10
MOST_SPLITS, LEAST_PART = 64, 1024  # programs that share a row, and columns of each
MOST_SHARED_ROWS = 4  # rows that they process at once
REGISTERS = 255  # registers of a thread


def grid(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    """Return every combination of extents, warps, programs and stages that `a` allows, unordered; none if
    placements run the nest."""
    schedules: dict[RowTile, None] = {}
    if not a.in_rows:
        return ()
    width, count = padded(hint(a.size(COLS))), padded(hint(a.size(ROWS)))
    for cols, block_cols, splits in _coverings(a, width, device):
        for block_rows in powers(1, min(count, MOST_ROWS if splits == 1 else MOST_SHARED_ROWS)):
            for warps in WARPS:
                tile = RowTile(block_rows, block_cols, cols, num_warps=warps, splits=splits)
                if _fits_threads(tile, width * count, device) and _has_registers(a, tile):
                    schedules.update(dict.fromkeys(_loops(a, tile, device)))
    if misaligned.fits(a):
        forms = [(s, misaligned.form_of(a, s)) for s in schedules]
        schedules.update((form, None) for s, form in forms if form and form.block_rows == s.block_rows)
    return tuple(s for s in schedules if _has_registers(a, s))


def _has_registers(a: Analysis, tile: RowTile) -> bool:
    return Run(a, placement_of(a, tile)).registers <= REGISTERS


def neighbours(s: RowTile, schedules: tuple[RowTile, ...]) -> tuple[RowTile, ...]:
    """Return the schedules that differ from `s` in one field, by the next value of that field among them.
    Halving or doubling the tile and the warps together counts as one step: the work of a thread stays."""
    near: dict[RowTile, None] = {}
    for name in RowTile._fields:
        value = getattr(s, name)
        others = [o for o in schedules if o != s and o._replace(**{name: value}) == s]
        for side in (-1, 1):
            beyond = [o for o in others if (_order(getattr(o, name)) - _order(value)) * side > 0]
            nearest = min(beyond, key=lambda o: abs(_order(getattr(o, name)) - _order(value)), default=None)
            if nearest is not None:
                near[nearest] = None
    members = set(schedules)
    for factor in (0.5, 2):
        for name in ("block_rows", "block_cols"):
            scaled = {n: int(getattr(s, n) * factor) for n in (name, "num_warps")}
            if (scaled_schedule := s._replace(**scaled)) in members:
                near[scaled_schedule] = None
    return tuple(near)


def _order(value: object) -> float:
    """Return the rank of a field's value. None (no loop over the rows) means the most programs."""
    if value is None:
        return float(1 << 40)
    return float(list(Cols).index(value)) if isinstance(value, Cols) else float(value)  # type: ignore[arg-type]


def _coverings(a: Analysis, width: int, device: DeviceSpec) -> Iterator[tuple[Cols, int, int]]:
    """Yield (how the columns are covered, block of columns, programs that share a row)."""
    along = any(COLS in a.reduced_groups(i) for i in a.reductions)
    if isinstance(a.size(COLS), int) and width <= WIDEST_WHOLE and a.reductions:
        yield Cols.WHOLE, width, 1
    if not along:
        yield from ((Cols.GRID, block, 1) for block in powers(16, min(width, WIDEST_BLOCK)))
        return
    is_looped = looped.suits(a) and looped.refuses(a, device) is None
    if is_looped:
        yield from ((Cols.LOOP, block, 1) for block in powers(128, min(width, WIDEST_BLOCK)))
    if a.shareable:
        yield from (s for s in _shared(width) if is_looped or s[0] is Cols.WHOLE)


def _shared(width: int) -> Iterator[tuple[Cols, int, int]]:
    """Yield coverings by programs that share a row; each keeps its part or loops over it."""
    most = min(MOST_SPLITS, width // LEAST_PART)
    for splits in powers(2, most) if most > 1 else ():
        part = width // splits
        if part <= WIDEST_BLOCK:
            yield Cols.WHOLE, part, splits
        yield from ((Cols.LOOP, block, splits) for block in powers(LEAST_PART, min(part // 2, WIDEST_BLOCK)))


def _loops(a: Analysis, tile: RowTile, device: DeviceSpec) -> Iterator[RowTile]:
    """Yield the schedule with one block of rows per program, and with programs that loop over blocks."""
    blocks = -(-hint(a.size(ROWS)) // tile.block_rows)
    across = -(-hint(a.size(COLS)) // tile.block_cols) if tile.cols is Cols.GRID else 1
    if not a.across_rows or blocks == 1 or (blocks <= inner_reduction.MOST_PARTIALS and not a.ends_in_a_row):
        stages = STAGES if tile.cols is Cols.LOOP else STAGES[:1]
        yield from (tile._replace(num_stages=s) for s in stages)
    if not isinstance(a.size(ROWS), int) or (tile.splits > 1 and tile.cols is Cols.LOOP):
        return
    for share in SHARES:
        programs = max(1, share * device.sms // (across * tile.splits))
        if 1 <= programs < blocks or (a.across_rows and programs <= blocks):
            yield from (tile._replace(programs=programs, num_stages=s) for s in STAGES)


def _fits_threads(tile: RowTile, elements: int, device: DeviceSpec) -> bool:
    """True if each thread has a moderate number of elements, or the tensor is too small for that."""
    least, most = THREAD_ELEMENTS
    tile_elements = tile.block_rows * tile.block_cols
    per_thread = tile_elements / (device.warp_size * tile.num_warps)
    return (least <= per_thread or (tile_elements >= elements and tile.num_warps == 1)) and per_thread <= most
