"""The ordered templates. Each answers `fits(analysis)` and `schedules(analysis, device)`; the first that fits is used."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from fusion_compiler.codegen import assemble, columns, flat, persistent_rows, rows, wide_rows
from fusion_compiler.codegen.printer import Analysis
from fusion_compiler.device import DeviceSpec
from fusion_compiler.kernel import Buffer, Program
from fusion_compiler.loops import LoopNest

TEMPLATES: tuple[ModuleType, ...] = (flat, columns, persistent_rows, rows, wide_rows)


def template_of(loops: LoopNest) -> ModuleType | None:
    analysis = Analysis(loops)
    return next((t for t in TEMPLATES if t.fits(analysis)), None)


def emit(
    loops: LoopNest, name: str, doc: str, buffers: Mapping[str, Buffer], device: DeviceSpec, limit: int = 4
) -> tuple[Program, ...]:
    """Programs of one cluster, best guess first, at most `limit`. Raises LookupError if no template fits."""
    analysis = Analysis(loops)
    for template in TEMPLATES:
        if template.fits(analysis):
            schedules = template.schedules(analysis, device)[:limit]
            loops = template.arrange(loops) if hasattr(template, "arrange") else loops
            return tuple(assemble.build(loops, s, name, doc, buffers) for s in schedules)
    raise LookupError(f"no template fits {name}")
