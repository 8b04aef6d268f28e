"""The schedules of a loop nest, for the planner's costs and for code generation.

Each kind of schedules of rows and columns is a module. For a loop nest `a` it has

    suits(a)                 whether the kind supports the nest's reductions,
    refuses(a, device)       the reason why it has no schedule at these sizes, or None,
    measured(a, device)      tiles (`row_tiles.RowTile`) known to be fast on the measured device, best first,
    typical(a, device)       a few that show the kind's cost to the planner,
    others(a, device)        other reasonable ones.

At least one kind suits any nest of rows and columns. If all of those refuse, there is no kernel, and the
reason is the first one's. Nests of other axes have placements from `tiles`, `few_rows`, `matrix_products` and
`windowed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from operator import attrgetter
from types import ModuleType

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.loops import Load, LoopNest
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.schedule import (
    cooperative,
    inner_reduction,
    looped,
    matrix_products,
    misaligned,
    outer_reduction,
    persistent,
    pointwise,
    tiles,
    windowed,
)
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.cost import Roofline
from fusion_compiler.schedule.measured import TARGETS
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.row_tiles import RowTile, placement_of
from fusion_compiler.schedule.run import MOST
from fusion_compiler.schedule.work import BufferInfo

KINDS: tuple[ModuleType, ...] = (pointwise, outer_reduction, cooperative, persistent, inner_reduction, looped)
TYPICAL = 3  # placements whose cost the planner compares
FAR = 4.0  # a measured tile is for other sizes if the model expects it to take so many times the best time
MOST_THREADS = 1024  # threads of a program, on any device
LEADING = 4  # leading schedules of the ranking that get misaligned forms
# Share of the predicted time that is assumed for a schedule that was fast on another device, plus an
# increment per place behind the fastest.
ELSEWHERE, PLACE = 0.8, 0.01
NO_BUFFERS: Mapping[str, BufferInfo] = {}


def refusal(a: Analysis, device: DeviceSpec) -> str | None:
    """Return why no schedule runs a loop nest on a device, or None if some do."""
    if not a.in_rows:
        return (tiles if a.windows is None else windowed).refuses(a, device)
    reasons = [kind.refuses(a, device) for kind in _suited(a)]
    return None if None in reasons else reasons[0]


def schedules(
    loops: LoopNest,
    device: DeviceSpec,
    buffers: Mapping[str, BufferInfo] = NO_BUFFERS,
) -> tuple[Placement, ...]:
    """Return the legal placements of a loop nest, best first; none if `refusal` has a reason.

    buffers: the known ones.
    """
    a = Analysis(loops)
    if a.windows is not None:
        return windowed.placements(a, device)
    roofline = Roofline(a, device, buffers_of(loops) | dict(buffers))
    if a.in_rows:
        return tuple(placement_of(a, tile) for tile in row_tiles(a, roofline))
    return tiles.placements(a, roofline)


def row_tiles(a: Analysis, roofline: Roofline) -> tuple[RowTile, ...]:
    """Return the tiles of rows and columns that run a nest, best first.

    Tiles that were measured to be fast on this device come first, then the others by predicted cost. If sizes
    are known only at run time, the hints may show that a tile was measured for other sizes. Tiles with too
    many registers come last, in order of their registers.
    """
    device = roofline.device
    kinds = _kinds(a, device)
    measured = tuple(
        dict.fromkeys(s for kind in kinds for s in _runnable(a, kind.measured(a, device), device))
    )
    further = (s for kind in kinds for s in (*kind.typical(a, device), *kind.others(a, device)))
    others = tuple(s for s in dict.fromkeys(_runnable(a, further, device)) if s not in measured)
    runs = {s: roofline.run(placement_of(a, s)) for s in (*others, *measured)}
    us = {s: roofline.us(runs[s]) for s in others}
    us |= {s: (ELSEWHERE + i * PLACE) * roofline.us(runs[s]) for i, s in enumerate(measured)}
    crowded = {s: run.registers if run.registers > MOST else 0.0 for s, run in runs.items()}
    measured_here = device.target in TARGETS and not all(crowded[s] for s in measured)
    limit = FAR * min(us.values(), default=0.0)
    near = [s for s in measured if us[s] <= limit]
    leaders = sorted(near, key=crowded.__getitem__) if measured_here else []
    ranked = sorted(us, key=lambda s: (crowded[s], us[s]))
    leaders = leaders or ranked[:LEADING]
    if not leaders:
        return ()
    return tuple(dict.fromkeys((*misaligned.with_misaligned(a, tuple(leaders)), *ranked)))


def cheapest(roofline: Roofline) -> Cost:
    """Return the cost of a loop nest under the best of its typical placements. Raises LookupError if there
    are none."""
    if roofline.empty:
        return Cost(0.0, 0, 0, 0, "launch")
    a, device = roofline.a, roofline.device
    if a.in_rows:
        typical = [s for kind in _kinds(a, device) for s in kind.typical(a, device)]
        runs = [roofline.run(placement_of(a, s)) for s in _runnable(a, typical, device)]
    elif a.windows is not None:
        runs = list(islice(windowed.runs(a, device, roofline.work.hints), 1))
    else:
        runs = list(map(roofline.run, tiles.placements(a, roofline)[:TYPICAL]))
    if not runs:
        reason = refusal(a, device)
        if reason is None and a.matrices is not None:
            reason = matrix_products.refuses(a, a.matrices, matrix_products.itemsizes_of(roofline))
        raise LookupError(reason or "no schedule")
    return min(map(roofline.cost, runs), key=attrgetter("us"))


def _suited(a: Analysis) -> list[ModuleType]:
    return [kind for kind in KINDS if kind.suits(a)]


def _kinds(a: Analysis, device: DeviceSpec) -> list[ModuleType]:
    return [kind for kind in _suited(a) if not kind.refuses(a, device)]


def _runnable(a: Analysis, candidates: Iterable[RowTile], device: DeviceSpec) -> list[RowTile]:
    """Return the tiles for which a device has enough threads, without pipelining of gathers.

    Asynchronous copies of gathered elements, of four bytes each or past the cache, take longer than loads,
    and need room for as many whole tiles.
    """
    most = MOST_THREADS // device.warp_size
    return [
        s._replace(num_stages=1) if s.num_stages > 1 and a.gathers(s.block_rows, s.block_cols) else s
        for s in candidates
        if s.num_warps <= most
    ]


def buffers_of(loops: LoopNest) -> dict[str, BufferInfo]:
    """Return default infos of buffers: two bytes per element if they are computed in float32."""
    loads = {n.buffer: n.dtype.itemsize for n in loops.nodes if isinstance(n, Load)}
    stores = {s.buffer: loops.nodes[s.value].dtype.itemsize for s in loops.stores}
    return {name: BufferInfo(1 << 60, 2 if size == 4 else size) for name, size in (loads | stores).items()}
