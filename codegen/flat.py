"""Element-wise work in one pass over the output, any layout: sixteen elements a thread."""

from __future__ import annotations

from fusion_compiler.codegen.printer import Analysis, Cols, Schedule
from fusion_compiler.device import DeviceSpec
from fusion_compiler.dims import hint
from fusion_compiler.loops import COLS


def fits(a: Analysis) -> bool:
    return not a.reductions


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    width = 1 << max(2, (hint(a.size(COLS)) - 1).bit_length())
    shapes = ((2048, 4), (1024, 2), (4096, 8), (1024, 4))
    fitting = [(min(block, width), max(1, warps * min(block, width) // block)) for block, warps in shapes]
    return tuple(Schedule(1, block, Cols.GRID, num_warps=w) for block, w in dict.fromkeys(fitting))
