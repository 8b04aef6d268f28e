"""Element-wise work in one pass over the output, any layout."""

from __future__ import annotations

from fusion_compiler.codegen.printer import Analysis, Cols, Schedule
from fusion_compiler.device import DeviceSpec
from fusion_compiler.dims import hint
from fusion_compiler.loops import COLS


def fits(a: Analysis) -> bool:
    return not a.reductions


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    size = hint(a.size(COLS))
    if size <= 128:
        return (Schedule(1, 1 << max(2, (size - 1).bit_length()), Cols.GRID, num_warps=1),)
    shapes = ((1024, 4), (2048, 8), (512, 4), (2048, 4))
    return tuple(
        Schedule(1, min(block, 1 << (size - 1).bit_length()), Cols.GRID, num_warps=w) for block, w in shapes
    )
