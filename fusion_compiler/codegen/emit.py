"""Emit the programs of a cluster: its loop nests under their best schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from fusion_compiler.codegen import assemble
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.kernel import Buffer, Program
from fusion_compiler.ir.loops import Load, LoopNest
from fusion_compiler.schedule import verifier
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.run import Run
from fusion_compiler.schedule.space import refusal, schedules
from fusion_compiler.schedule.tile_products import with_exact_products

MORE_EARLY = 3  # programs that load constants early, per other program


def schedules_of(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[Placement, ...]:
    """Return the placements of one loop nest, best guess first. Raises LookupError if there are none."""
    candidates = schedules(loops, device)
    if not candidates:
        raise LookupError(f"no schedule runs {name}: {refusal(Analysis(loops), device)}")
    return candidates


def emit(
    nests: tuple[LoopNest, ...],
    name: str,
    doc: str,
    buffers: Mapping[str, Buffer],
    device: DeviceSpec,
    limit: int = 4,
    constants: frozenset[str] | None = None,
) -> tuple[Program, ...]:
    """Return up to `limit` programs of one cluster, the best first. Raise LookupError without a schedule.

    If all of them move an input in whole words (`Program.word`), one more program is added for inputs that
    are not aligned.
    constants: see `assemble.build`. A kernel that loads constants early gets additional programs, because
        their benefit shows only among other kernels.
    """
    choices = [schedules_of(loops, name, device) for loops in nests]
    dtypes = {buffer.name: buffer.dtype for buffer in buffers.values()}
    choices = [with_exact_products(*nest, dtypes) for nest in zip(nests, choices, strict=True)]
    choices = [
        tuple(s for s in choice if not s.descriptors or verifier.refusal(loops, s, buffers, device) is None)
        for loops, choice in zip(nests, choices, strict=True)
    ]
    if not constants:
        choices = [tuple(s for s in choice if not s.early) for choice in choices]
    loaded = {node.buffer for loops in nests for node in loops.nodes if isinstance(node, Load)}
    overwritten = loaded & {buffer.reuses for buffer in buffers.values()}
    if overwritten:
        choices = [
            tuple(s for s in choice if fills_threads(loops, s, overwritten, device)) or choice
            for loops, choice in zip(nests, choices, strict=True)
        ]
    early = [s for s in choices[0] if s.early][: MORE_EARLY * limit]
    best = [*[s for s in choices[0] if not s.early][:limit], *early]
    prepared = assemble.Nests(nests, buffers)
    programs = [_program(prepared, first, choices, name, doc, constants) for first in best]
    aligned = [tuple(s for s in choice if not s.misaligned) for choice in choices]
    if all(aligned) and all(program.word for program in programs):
        programs.append(_program(prepared, aligned[0][0], aligned, name, doc, constants))
    return tuple(programs)


def fills_threads(
    loops: LoopNest, placement: Placement, overwritten: Set[str | None], device: DeviceSpec
) -> bool:
    """True if every thread has at least one element of a tile of the buffers that a program overwrites. With
    fewer, several threads load the same element, and one may overwrite it before another has read it."""
    run, threads = Run(Analysis(loops), placement), device.warp_size * placement.num_warps
    if run.in_rows:
        return run.elements() >= threads
    sizes = zip(loops.nodes, run.tile_sizes, strict=True)
    return all(
        size >= threads for node, size in sizes if isinstance(node, Load) and node.buffer in overwritten
    )


def program_of(
    nests: tuple[LoopNest, ...],
    first: Placement,
    name: str,
    doc: str,
    buffers: Mapping[str, Buffer],
    device: DeviceSpec,
) -> Program:
    """Return the program of one cluster with a given schedule of its first loop nest."""
    choices = [schedules_of(loops, name, device) for loops in nests]
    return _program(assemble.Nests(nests, buffers), first, choices, name, doc)


def _program(
    nests: assemble.Nests,
    first: Placement,
    choices: Sequence[tuple[Placement, ...]],
    name: str,
    doc: str,
    constants: frozenset[str] | None = None,
) -> Program:
    """Build a program. Nests after the first use their best schedule with the first one's number of warps, if
    any. A launch has one number of warps."""
    others = (
        min(c, key=lambda s: (s.num_warps != first.num_warps, s.early != first.early)) for c in choices[1:]
    )
    return assemble.build(nests, (first, *others), name, doc, constants)
