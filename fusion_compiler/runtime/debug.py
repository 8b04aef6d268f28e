"""Print the reports of FUSION_DEBUG, write the files of FUSION_DUMP, and log both.

FUSION_DEBUG=1   each graph's plan           FUSION_DUMP=dir  the same as files, everything:
FUSION_DEBUG=2   + every rejection           dir/<graph>/plan.txt, plan.json
FUSION_DEBUG=3   + kernel source             dir/<graph>/kernels/<name>.py
FUSION_DEBUG=4   + the graph after each pass dir/<graph>/graph-<pass>.py

Each room has a logger. At level INFO, `fusion_compiler.compiler` logs plans, `fusion_compiler.capture` graph
breaks and `fusion_compiler.runtime` the schedules that were timed. At level DEBUG, `fusion_compiler.codegen`
logs kernels, `fusion_compiler.support` the cache on disk, and capture, passes and stitch log graphs.
TORCH_LOGS="+fusion_compiler" shows all of it. TORCH_TRACE=dir puts the same texts, tuning and cache aside,
among the artifacts that tlparse shows.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from torch import fx
from torch._logging import trace_structured
from torch._logging._internal import trace_log

from fusion_compiler.errors import WarnOnce
from fusion_compiler.ir.breaks import GraphBreak
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_text import breaks_text, format_plan, print_plan

PLAN, REJECTIONS, KERNELS, GRAPHS = 1, 2, 3, 4
WORDS = {"": 0, "false": 0, "no": 0, "off": 0, "true": PLAN, "yes": PLAN, "on": PLAN}


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
        text = environment.get("FUSION_DEBUG", "").strip().lower()
        dump = environment.get("FUSION_DUMP", "").strip()
        folder = Path(dump).expanduser() if dump else None
        if text.isdecimal() or text in WORDS:
            return cls(min(int(text), GRAPHS) if text.isdecimal() else WORDS[text], folder)
        problem = f"FUSION_DEBUG={text!r} is ignored: set it to a level from 0 to {GRAPHS}, or to true"
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
        text = functools.partial(format_plan, plan, REJECTIONS)
        self._keep(plan.name, "plan.txt", "compiler", logging.INFO, lambda: text() + "\n")
        if self._dump:
            self._write(plan.name, "plan.json", json.dumps(plan.json(), indent=1) + "\n")

    def breaks(self, breaks: Sequence[GraphBreak]) -> None:
        """Print graph breaks from level 1."""
        if breaks and self.settings.level >= PLAN:
            print(breaks_text(breaks), file=self._out())
        if breaks:
            logging.getLogger("fusion_compiler.capture").info("%s", breaks_text(breaks))

    @property
    def reads_kernels(self) -> bool:
        """True if kernels are printed, written, logged or traced, also where none of them runs."""
        return self.settings.level >= KERNELS or self._is_kept("codegen", logging.DEBUG)

    def kernel(self, graph: str, name: str, source: str) -> None:
        """Print a kernel from level 3; write kernels/<name>.py."""
        if self.settings.level >= KERNELS:
            print(f"# kernel {name} of {graph}\n{source.rstrip()}\n", file=self._out())
        self._keep(graph, f"kernels/{_file_name(name)}.py", "codegen", logging.DEBUG, lambda: source)

    def stage(self, graph: str, stage: str, what: str | fx.GraphModule) -> None:
        """Print the graph after a pass, as text or as a module, from level 4; write graph-<stage>.py."""
        room = stage if stage in ("capture", "stitch") else "passes"
        if self.settings.level < GRAPHS and not self._is_kept(room, logging.DEBUG):
            return  # printing a graph is slow
        text = what if isinstance(what, str) else what.print_readable(print_output=False)
        if self.settings.level >= GRAPHS:
            print(f"# {graph} after {stage}\n{text.rstrip()}\n", file=self._out())
        self._keep(graph, f"graph-{_file_name(stage)}.py", room, logging.DEBUG, lambda: text)

    def _out(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stderr

    def _is_kept(self, room: str, level: int) -> bool:
        """True if a text of a room is written, logged or traced."""
        return bool(self._dump) or _log_of(room).isEnabledFor(level) or _is_traced()

    def _keep(self, graph: str, name: str, room: str, level: int, text: Callable[[], str]) -> None:
        """Write a text as a file of a graph, log it, and make it an artifact of PyTorch's trace."""
        if not self._is_kept(room, level):
            return
        content = text()
        _log_of(room).log(level, "%s/%s\n%s", graph, name, content.rstrip())
        if _is_traced():
            about = {"name": f"fusion_compiler_{_file_name(graph)}_{_file_name(name)}", "encoding": "string"}
            trace_structured("artifact", lambda: about, payload_fn=lambda: content, expect_trace_id=False)
        self._write(graph, name, content)

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
                f"FUSION_DUMP={self._dump} cannot be written ({error.strerror or error}), so dumps "
                "stop here. Set it to a writable directory.",
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


def _log_of(room: str) -> logging.Logger:
    return logging.getLogger(f"fusion_compiler.{room}")


def _is_traced() -> bool:
    """True if TORCH_TRACE names a folder: TorchDynamo has removed the handler otherwise."""
    return bool(trace_log.handlers) and not trace_log.disabled
