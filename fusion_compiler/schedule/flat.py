"""Element-wise work in one pass, any layout: sixteen elements a thread, four of long functions.

Rows exist where a value belongs to one; tiles hold several of short rows, since a multiprocessor holds so few
programs that those of one warp leave half of it empty.
"""

from __future__ import annotations

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import COLS, ROWS, Compute
from fusion_compiler.ir.ops import spec_of
from fusion_compiler.schedule.analysis import Analysis, Cols, Schedule

LONG = 16  # instructions
SHORT = 512  # columns: shorter rows are several to a tile
TRANSPOSING = ((64, 64, 8), (32, 64, 4), (64, 32, 4), (128, 64, 8))


def fits(a: Analysis) -> bool:
    return not a.reductions


def schedules(a: Analysis, device: DeviceSpec) -> tuple[Schedule, ...]:
    most = [1 << max(0, (hint(a.size(g)) - 1).bit_length()) for g in (ROWS, COLS)]
    if a.mixed:  # two memory orders meet: square tiles, through shared memory
        tiles = dict.fromkeys((min(r, most[0]), min(c, most[1]), w) for r, c, w in TRANSPOSING)
        return tuple(Schedule(r, c, Cols.GRID, num_warps=w) for r, c, w in tiles)
    width = max(4, most[1])
    shapes = ((2048, 4), (1024, 2), (4096, 8), (1024, 4))
    if any(isinstance(n, Compute) and _is_long(n) for n in a.loops.nodes):
        shapes = ((512, 4), (1024, 8), (1024, 4), (256, 2))
    fitting = [(1, min(block, width), max(1, warps * min(block, width) // block)) for block, warps in shapes]
    if width <= SHORT:
        tiles = [(min(most[0], block // min(block, width)), min(block, width), w) for block, w in shapes]
        fitting = [t for t in tiles if t[0] > 1][:3] + fitting
    return tuple(Schedule(r, c, Cols.GRID, num_warps=w) for r, c, w in dict.fromkeys(fitting))


def _is_long(node: Compute) -> bool:
    """A function with no short form, the sine say: sixteen copies of libdevice's slow path spill."""
    spec = spec_of(node.target)
    return spec is not None and spec.flops >= LONG and spec.rough is None
