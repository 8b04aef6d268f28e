"""The ordered templates: each answers `fits(analysis)` and `schedules(analysis, device)`; the first wins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

from fusion_compiler.codegen import assemble, columns, flat, persistent_rows, rows, wide_rows
from fusion_compiler.codegen.printer import Analysis, Schedule
from fusion_compiler.codegen.registers import MOST, tile_registers
from fusion_compiler.device import DeviceSpec
from fusion_compiler.kernel import Buffer, Program
from fusion_compiler.loops import LoopNest

TEMPLATES: tuple[ModuleType, ...] = (flat, columns, persistent_rows, rows, wide_rows)


def schedules_of(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[Schedule, ...]:
    """Schedules of the first template that fits, best guess first. Raises LookupError if none does.

    Those whose tiles would crowd a thread's registers come after all others.
    """
    analysis = Analysis(loops)
    for template in TEMPLATES:
        if template.fits(analysis):
            schedules = template.schedules(analysis, device)
            return tuple(sorted(schedules, key=lambda s: tile_registers(analysis, s) > MOST))
    raise LookupError(f"no template fits {name}")


def emit(
    nests: tuple[LoopNest, ...],
    name: str,
    doc: str,
    buffers: Mapping[str, Buffer],
    device: DeviceSpec,
    limit: int = 4,
) -> tuple[Program, ...]:
    """Programs of one cluster, best guess first, at most `limit`. Raises LookupError if no template fits."""
    choices = [schedules_of(loops, name, device) for loops in nests]
    if len(nests) == 1:
        return tuple(assemble.build(nests[0], s, name, doc, buffers) for s in choices[0][:limit])
    together: list[tuple[Schedule, ...]] = []
    for first in choices[0]:  # one launch has one number of warps
        others = [next((s for s in c if s.num_warps == first.num_warps), c[0]) for c in choices[1:]]
        together.append(tuple(replace(s, num_warps=first.num_warps) for s in (first, *others)))
    return tuple(assemble.build_beside(nests, t, name, doc, buffers) for t in together[:limit])
