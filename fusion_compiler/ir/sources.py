"""Find where a node of a captured graph comes from in the user's model."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import fx

from fusion_compiler.errors import GENERATED, is_generated
from fusion_compiler.ir.dag import Source

FRAME = re.compile(
    r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n'
    r"[ \t]*(?P<code>[^\n]*)(?:\n(?P<marks>[ ~^]*[~^]))?"
)
# Dynamo's name for the object that was compiled: L['self'], L['args'][0], ...
_ROOT = re.compile(r"^[A-Z]\[[^\]]*\](\[\d+\])?\.?")
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_INDENT = 4  # of the code in a traceback, and of the marks below it


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame is a line of the user's on the way to an op, and what of it was running.

    span: the first and the last column of the call in `code`, without the blanks before it; None if that is
    not known. exact: False if only its beginning is known, so that it may end anywhere behind that.
    """

    file: str
    line: int
    code: str
    span: tuple[int, int] | None
    exact: bool


def frames_of(node: fx.Node) -> tuple[Frame, ...]:
    """Return the lines outside of torch from which a node was traced, the outermost first; a backward node
    has its forward's."""
    return _frames(node.meta.get("stack_trace") or "")


@functools.lru_cache(maxsize=1024)  # traces repeat from layer to layer, forward and backward
def _frames(trace: str) -> tuple[Frame, ...]:
    return tuple(_frame(m) for m in FRAME.finditer(trace) if not is_library(m["file"]))


def _frame(match: re.Match[str]) -> Frame:
    code, marks = match["code"].strip(), match["marks"]
    if not marks:
        return Frame(match["file"], int(match["line"]), code, None, False)
    start = len(marks) - len(marks.lstrip()) - _INDENT
    return Frame(match["file"], int(match["line"]), code, (start, len(marks) - _INDENT), "~" in marks)


def marked(code: str, span: tuple[int, int] | None) -> str:
    """Return a line as a traceback shows it, with marks for a call that is known to its end."""
    if span is None:
        return f"    {code}\n"
    return f"    {code}\n{' ' * (_INDENT + span[0])}{'~' * (span[1] - span[0])}\n"


def source_of(node: fx.Node) -> Source | None:
    """Return the module to which `node` belongs and the user's line from which it was traced.

    The line is the innermost one outside of torch, and in a file if any is; a backward node has its
    forward's. module is
    the path below the compiled object, "" for that object itself. None where neither is known.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    module = _ROOT.sub("", paths[-1]) if paths else ""
    frames = frames_of(node)
    if frames:
        last = next((frame for frame in reversed(frames) if not is_generated(frame.file)), frames[-1])
        file = GENERATED if is_generated(last.file) else last.file
        return Source(module, file, last.line, last.code)
    return Source(module, "", 0, "") if module else None


def is_library(file: str) -> bool:
    """True if a file belongs to torch or to this package."""
    return file.startswith(_LIBRARIES)
