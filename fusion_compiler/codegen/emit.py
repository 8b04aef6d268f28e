"""The ordered templates: each answers `fits(analysis)` and `schedules(analysis, device)`; the first wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType

from fusion_compiler.codegen import assemble
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.kernel import Buffer, Program
from fusion_compiler.ir.loops import LoopNest
from fusion_compiler.schedule import columns, flat, misaligned, persistent_rows, rows, shared_rows, wide_rows
from fusion_compiler.schedule.analysis import Analysis, Schedule
from fusion_compiler.schedule.registers import MOST, tile_registers

TEMPLATES: tuple[ModuleType, ...] = (flat, columns, persistent_rows, rows, shared_rows, wide_rows)


def schedules_of(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[Schedule, ...]:
    """Schedules of the first template that fits, best guess first. Raises LookupError if none does.

    Those whose tiles would crowd a thread's registers come after all others.
    """
    analysis = Analysis(loops)
    for template in TEMPLATES:
        if template.fits(analysis):
            schedules = template.schedules(analysis, device)
            by_room = sorted(schedules, key=lambda s: tile_registers(analysis, s) > MOST)
            return misaligned.with_skewed(analysis, tuple(by_room))
    raise LookupError(f"no template fits {name}")


def emit(
    nests: tuple[LoopNest, ...],
    name: str,
    doc: str,
    buffers: Mapping[str, Buffer],
    device: DeviceSpec,
    limit: int = 4,
) -> tuple[Program, ...]:
    """Programs of one cluster, best guess first: `limit` of them, and where all read words that their inputs
    end within, one more, for inputs that begin anywhere. Raises LookupError if no template fits.
    """
    choices = [schedules_of(loops, name, device) for loops in nests]
    found = [_program(nests, first, choices, name, doc, buffers) for first in choices[0][:limit]]
    plain = [tuple(s for s in schedules if not s.skewed) for schedules in choices]
    if all(plain) and all(program.word for program in found):
        found.append(_program(nests, plain[0][0], plain, name, doc, buffers))
    return tuple(found)


def program_of(
    nests: tuple[LoopNest, ...],
    first: Schedule,
    name: str,
    doc: str,
    buffers: Mapping[str, Buffer],
    device: DeviceSpec,
) -> Program:
    """The program of one cluster with a schedule of its first tile program."""
    choices = [schedules_of(loops, name, device) for loops in nests]
    return _program(nests, first, choices, name, doc, buffers)


def _program(
    nests: tuple[LoopNest, ...],
    first: Schedule,
    choices: Sequence[tuple[Schedule, ...]],
    name: str,
    doc: str,
    buffers: Mapping[str, Buffer],
) -> Program:
    """Tile programs beside the first run under their best schedules with as many warps, where they have any:
    a launch has one number of them."""
    others = (next((s for s in c if s.num_warps == first.num_warps), c[0]) for c in choices[1:])
    return assemble.build(nests, (first, *others), name, doc, buffers)
