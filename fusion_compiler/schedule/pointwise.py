"""Schedules of element-wise work in one pass, with sixteen elements per thread, or four for long functions.

There are rows if a value varies only over rows. Several short rows share a tile: a multiprocessor holds so
few programs that programs of one warp would leave half of it empty.

A shape is (rows, columns, warps). With zero rows, columns are elements.
"""

from __future__ import annotations

from collections.abc import Iterator

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS
from fusion_compiler.schedule import measured as table
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.measured import Shape
from fusion_compiler.schedule.row_tiles import Cols, RowTile
from fusion_compiler.schedule.shapes import padded, powers, warps_of

SHORT = 512  # columns; several shorter rows share a tile


def suits(a: Analysis) -> bool:
    return not a.reductions and not a.scans


def refuses(a: Analysis, device: DeviceSpec) -> str | None:
    return None


def measured(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    return from_shapes(a, device, table.shapes("pointwise", a, device.target))


def typical(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    return from_shapes(a, device, ((64, 64, 8),) if a.mixed else ((0, 2048, 4), (0, 1024, 2)))


def others(a: Analysis, device: DeviceSpec) -> tuple[RowTile, ...]:
    return from_shapes(a, device, _squares() if a.mixed else _blocks())


def _squares() -> Iterator[Shape]:
    for rows in powers(32, 128):
        yield from ((rows, cols, max(1, rows * cols // 512)) for cols in powers(32, 128))


def _blocks() -> Iterator[Shape]:
    for elements in powers(256, 8192):
        yield from ((0, elements, warps) for warps in powers(max(1, elements // 1024), elements // 128))


def from_shapes(
    a: Analysis, device: DeviceSpec, shapes: Iterator[Shape] | tuple[Shape, ...]
) -> tuple[RowTile, ...]:
    tallest, widest = (padded(hint(a.size(g))) for g in (ROWS, COLS))
    width = max(4, widest)
    squares: list[Shape] = []
    tiles: list[Shape] = []
    rows_each: list[Shape] = []
    for rows, cols, warps in shapes:
        if rows:
            squares.append((min(rows, tallest), min(cols, widest), warps))
            continue
        block = min(cols, width)
        rows_each.append((1, block, max(1, warps * block // cols)))
        if width <= SHORT:
            tiles.append((min(tallest, cols // block), block, warps))
    all_shapes = (*squares, *[t for t in tiles if t[0] > 1][:3], *rows_each)
    return tuple(
        RowTile(rows, cols, Cols.GRID, num_warps=warps_of(warps, device))
        for rows, cols, warps in dict.fromkeys(all_shapes)
    )
