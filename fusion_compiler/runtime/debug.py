"""Print what FUSION_DEBUG asks for, and write what FUSION_DUMP asks for.

FUSION_DEBUG=1   each graph's plan           FUSION_DUMP=dir  the same as files, everything:
FUSION_DEBUG=2   + every rejection           dir/<graph>/plan.txt, plan.json
FUSION_DEBUG=3   + kernel source             dir/<graph>/kernels/<name>.py
FUSION_DEBUG=4   + the graph after each pass dir/<graph>/graph-<pass>.py
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from torch import fx

from fusion_compiler.errors import WarnOnce
from fusion_compiler.ir.breaks import GraphBreak
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_text import breaks_text, format_plan, print_plan

PLAN, REJECTIONS, KERNELS, GRAPHS = 1, 2, 3, 4


@dataclass(frozen=True)
class DebugSettings:
    """The settings say what one compilation prints and writes. level: 0 (nothing) to 4. dump: the directory
    that everything is written to, or None.

    problem: what was wrong with the environment's values, for one warning.
    """

    level: int = 0
    dump: Path | None = None
    problem: str = ""

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> DebugSettings:
        """Read FUSION_DEBUG and FUSION_DUMP; call it once per compilation with os.environ."""
        text = environment.get("FUSION_DEBUG", "").strip() or "0"
        dump = environment.get("FUSION_DUMP", "").strip()
        folder = Path(dump).expanduser() if dump else None
        if text.isdecimal() and int(text) <= GRAPHS:
            return cls(int(text), folder)
        problem = f"FUSION_DEBUG={text!r} is ignored: set it to a level from 0 to {GRAPHS}"
        return cls(0, folder, problem)


class Debug:
    """Print and write what one compilation decides. With default settings this does nothing.

    warned: where problems go, once each. stream: None is the present sys.stderr.
    """

    def __init__(self, settings: DebugSettings, warned: WarnOnce, stream: TextIO | None = None) -> None:
        self.settings = settings
        self._warned = warned
        self._stream = stream
        self._dump = settings.dump
        self._folders: dict[str, Path] = {}
        if settings.problem:
            warned.warn("FUSION_DEBUG", settings.problem)

    def plan(self, plan: FusionPlan) -> None:
        """Print a plan from level 1, with every rejection from level 2; write plan.txt (every rejection) and
        plan.json."""
        level = self.settings.level
        if level >= PLAN:
            print_plan(plan, level, self._out())
        if self._dump:
            self._write(plan.name, "plan.txt", format_plan(plan, REJECTIONS) + "\n")
            self._write(plan.name, "plan.json", json.dumps(plan.json(), indent=1) + "\n")

    def breaks(self, breaks: Sequence[GraphBreak]) -> None:
        """Print graph breaks from level 1."""
        if breaks and self.settings.level >= PLAN:
            print(breaks_text(breaks), file=self._out())

    def kernel(self, graph: str, name: str, source: str) -> None:
        """Print a kernel from level 3; write kernels/<name>.py."""
        if self.settings.level >= KERNELS:
            print(f"# kernel {name} of {graph}\n{source.rstrip()}\n", file=self._out())
        self._write(graph, f"kernels/{_file_name(name)}.py", source)

    def stage(self, graph: str, stage: str, what: str | fx.GraphModule) -> None:
        """Print the graph after a pass, as text or as a module, from level 4; write graph-<stage>.py."""
        if self.settings.level < GRAPHS and not self._dump:
            return  # printing a graph is slow
        text = what if isinstance(what, str) else what.print_readable(print_output=False)
        if self.settings.level >= GRAPHS:
            print(f"# {graph} after {stage}\n{text.rstrip()}\n", file=self._out())
        self._write(graph, f"graph-{_file_name(stage)}.py", text)

    def _out(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stderr

    def _write(self, graph: str, name: str, text: str) -> None:
        if not self._dump:
            return
        try:
            file = self._folder(self._dump, graph) / name
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            self._warned.warn(
                "FUSION_DUMP",
                f"FUSION_DUMP={self._dump} cannot be written ({error.strerror or error}): nothing more is "
                "dumped. Set it to a writable directory.",
            )
            self._dump = None

    def _folder(self, dump: Path, graph: str) -> Path:
        """Return a folder that this compilation alone writes. Another one's folder of the same name is left
        as it is."""
        if graph not in self._folders:
            base, number = _file_name(graph), 1
            while True:
                folder = dump / (base if number == 1 else f"{base}-{number}")
                try:
                    folder.mkdir(parents=True)
                    break
                except FileExistsError:
                    if not folder.is_dir():
                        raise
                    number += 1
            self._folders[graph] = folder
        return self._folders[graph]


def _file_name(name: str) -> str:
    """Return a name with "_" for everything that a file system or a shell may misread."""
    return re.sub(r"[^\w.-]", "_", name).lstrip(".") or "_"
