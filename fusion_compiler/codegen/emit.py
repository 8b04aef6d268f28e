"""The programs of a cluster: its loop nests under the best of their schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusion_compiler.codegen import assemble
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.kernel import Buffer, Program
from fusion_compiler.ir.loops import Load, LoopNest
from fusion_compiler.schedule import tiles
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.schedule import Schedule
from fusion_compiler.schedule.space import refusal, schedules

MORE_EARLY = 3  # times as many programs that load constants early as others


def schedules_of(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[Schedule | Placement, ...]:
    """Schedules of one loop nest, best guess first. Raises LookupError if there are none."""
    found = schedules(loops, device)
    if not found:
        raise LookupError(f"no schedule runs {name}: {refusal(Analysis(loops), device)}")
    return found


def emit(
    nests: tuple[LoopNest, ...],
    name: str,
    doc: str,
    buffers: Mapping[str, Buffer],
    device: DeviceSpec,
    limit: int = 4,
    constants: frozenset[str] | None = None,
) -> tuple[Program, ...]:
    """Programs of one cluster, best guess first: `limit` of them, and where all read words that their inputs
    end within, one more, for inputs that begin anywhere. Raises LookupError if there is no schedule.

    constants: as for `assemble.build`. Of a kernel that loads some while others run there are more: how it
    gets on with them is seen in their midst alone.
    """
    choices = [schedules_of(loops, name, device) for loops in nests]
    itemsizes = {buffer.name: buffer.dtype.itemsize for buffer in buffers.values()}
    choices = [_exact(loops, found, itemsizes) for loops, found in zip(nests, choices, strict=True)]
    if not constants:
        choices = [tuple(s for s in found if not s.early) for found in choices]
    loaded = {node.buffer for loops in nests for node in loops.nodes if isinstance(node, Load)}
    if any(buffer.over in loaded for buffer in buffers.values()):
        choices = [_of_full_tiles(found, device) or found for found in choices]
    early = [s for s in choices[0] if s.early][: MORE_EARLY * limit]
    best = [*[s for s in choices[0] if not s.early][:limit], *early]
    found = [_program(nests, first, choices, name, doc, buffers, constants) for first in best]
    plain = [tuple(s for s in schedules if not s.misaligned) for schedules in choices]
    if all(plain) and all(program.word for program in found):
        found.append(_program(nests, plain[0][0], plain, name, doc, buffers, constants))
    return tuple(found)


def _exact(
    loops: LoopNest, schedules: tuple[Schedule | Placement, ...], itemsizes: Mapping[str, int]
) -> tuple[Schedule | Placement, ...]:
    """Keep the schedules that multiply on tensor cores nothing that has more bits than these take."""
    return tuple(
        s for s in schedules if isinstance(s, Schedule) or tiles.with_short_products(loops, (s,), itemsizes)
    )


def _of_full_tiles(
    found: tuple[Schedule | Placement, ...], device: DeviceSpec
) -> tuple[Schedule | Placement, ...]:
    """Keep the schedules that give every thread at least one element. With fewer, several threads load the
    same element, and one may overwrite it before another has read it."""
    return tuple(s for s in found if s.elements >= device.warp_size * s.num_warps)


def program_of(
    nests: tuple[LoopNest, ...],
    first: Schedule | Placement,
    name: str,
    doc: str,
    buffers: Mapping[str, Buffer],
    device: DeviceSpec,
) -> Program:
    """The program of one cluster with a schedule of its first loop nest."""
    choices = [schedules_of(loops, name, device) for loops in nests]
    return _program(nests, first, choices, name, doc, buffers)


def _program(
    nests: tuple[LoopNest, ...],
    first: Schedule | Placement,
    choices: Sequence[tuple[Schedule | Placement, ...]],
    name: str,
    doc: str,
    buffers: Mapping[str, Buffer],
    constants: frozenset[str] | None = None,
) -> Program:
    """Tile programs beside the first run under their best schedules with as many warps, where they have any:
    a launch has one number of them."""
    others = (
        min(c, key=lambda s: (s.num_warps != first.num_warps, s.early != first.early)) for c in choices[1:]
    )
    return assemble.build(nests, (first, *others), name, doc, buffers, constants)
