"""The schedules of a loop nest: what the planner prices, and what codegen prints.

Each kind of schedules is a module that answers for a loop nest `a`

    suits(a)                 whether it has the kind's reductions,
    refuses(a, device)       why the kind has no schedule at these sizes, None where it has,
    measured(a, device)      those known to be fast on the device that was measured, best first,
    typical(a, device)       the few that tell what the kind takes, for the planner,
    others(a, device)        what else is within reason.

One kind at least suits any loop nest. Where all that suit refuse there is no kernel, and the reason is the
first one's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from operator import attrgetter
from types import ModuleType

import sympy

from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.loops import Load, LoopNest
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.schedule import (
    columns,
    flat,
    matrices,
    misaligned,
    persistent_rows,
    rows,
    shared_rows,
    wide_rows,
    windowed,
)
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.cost import NO_HINTS, Roofline
from fusion_compiler.schedule.measured import H200
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.registers import MOST, tile_registers
from fusion_compiler.schedule.schedule import Schedule
from fusion_compiler.schedule.work import BufferInfo

KINDS: tuple[ModuleType, ...] = (flat, columns, shared_rows, persistent_rows, rows, wide_rows)
OF_MATRICES: tuple[ModuleType, ...] = (matrices,)
MOST_THREADS = 1024  # of a program, on any device
LEADING = 4  # of the ranking, that have misaligned forms
# Of the time that the model predicts, what is taken to be true of a schedule that was fast on another device.
ELSEWHERE, PLACE = 0.8, 0.01  # the more, the further behind it was
NO_BUFFERS: Mapping[str, BufferInfo] = {}


def refusal(a: Analysis, device: DeviceSpec) -> str | None:
    """Why no schedule runs a loop nest on a device; None where some do."""
    if a.inner:
        return None if windowed.best(a.loops, device) else windowed.REFUSAL
    reasons = [kind.refuses(a, device) for kind in _suited(a)]
    return None if None in reasons else reasons[0]


def schedules(
    loops: LoopNest,
    device: DeviceSpec,
    buffers: Mapping[str, BufferInfo] = NO_BUFFERS,
    hints: Mapping[sympy.Symbol, int] = NO_HINTS,
) -> tuple[Schedule | Placement, ...]:
    """The legal schedules of a loop nest, best first: what was measured to be fast on this device, then by
    cost. Those whose tiles would crowd a thread's registers come after all others, the most crowded last.
    Empty where `refusal` has a reason. buffers: as far as they are known.
    """
    a = Analysis(loops)
    if a.inner:
        return windowed.placements(loops, device, hints)
    kinds = _kinds(a, device)
    known = tuple(dict.fromkeys(s for kind in kinds for s in _runnable(a, kind.measured(a, device), device)))
    more = (s for kind in kinds for s in (*kind.typical(a, device), *kind.others(a, device)))
    others = tuple(s for s in dict.fromkeys(_runnable(a, more, device)) if s not in known)
    roofline = Roofline(loops, device, buffers_of(loops) | dict(buffers), hints)
    us = {s: roofline.us(s) for s in others}
    us |= {s: (ELSEWHERE + i * PLACE) * roofline.us(s) for i, s in enumerate(known)}
    registers = {s: tile_registers(a, s) for s in us}
    crowded = {s: held if held > MOST else 0.0 for s, held in registers.items()}
    measured_here = device.target == H200.target and not all(crowded[s] for s in known)
    leaders = sorted(known, key=crowded.__getitem__) if measured_here else []
    ranked = sorted(us, key=lambda s: (crowded[s], us[s]))
    leaders = leaders or ranked[:LEADING]
    if not leaders:
        return ()
    return tuple(dict.fromkeys((*misaligned.with_misaligned(a, tuple(leaders)), *ranked)))


def cheapest(a: Analysis, roofline: Roofline) -> Cost:
    """What a loop nest takes under the best of its typical schedules. Raises LookupError without any."""
    if roofline.empty:
        return Cost(0.0, 0, 0, 0, "launch")
    found = (s for kind in _kinds(a, roofline.device) for s in kind.typical(a, roofline.device))
    costs = map(roofline.cost, _runnable(a, found, roofline.device))
    best = min(costs, key=attrgetter("us"), default=None)
    if best is None:
        raise LookupError(refusal(a, roofline.device) or "no schedule")
    return best


def fits(kind: ModuleType, a: Analysis, device: DeviceSpec) -> bool:
    """Whether a kind has schedules for a loop nest."""
    return kind in (OF_MATRICES if a.matrices else KINDS) and kind.suits(a) and not kind.refuses(a, device)


def _suited(a: Analysis) -> list[ModuleType]:
    return [kind for kind in (OF_MATRICES if a.matrices else KINDS) if kind.suits(a)]


def _kinds(a: Analysis, device: DeviceSpec) -> list[ModuleType]:
    return [kind for kind in _suited(a) if not kind.refuses(a, device)]


def _runnable(a: Analysis, found: Iterable[Schedule], device: DeviceSpec) -> Iterator[Schedule]:
    """Those schedules that a device has threads for. No loop copies ahead what lanes gather: such copies, of
    four bytes each or past the cache, take longer than the loads, and room for as many whole tiles."""
    for s in found:
        if s.num_warps * device.warp_size <= MOST_THREADS:
            gathers = s.num_stages > 1 and a.gathers(s.block_rows, s.block_cols)
            yield replace(s, num_stages=1) if gathers else s


def buffers_of(loops: LoopNest) -> dict[str, BufferInfo]:
    """Buffers that nobody described: of elements of two bytes where they are computed in float32."""
    loads = {n.buffer: n.dtype.itemsize for n in loops.nodes if isinstance(n, Load)}
    stores = {s.buffer: loops.nodes[s.value].dtype.itemsize for s in loops.stores}
    return {name: BufferInfo(1 << 60, 2 if size == 4 else size) for name, size in (loads | stores).items()}
