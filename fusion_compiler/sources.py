"""Where a node of a captured graph comes from in the user's model."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import fx

from fusion_compiler.dag import Source

FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]*\n\s*(?P<code>[^\n]*)')
# Dynamo's name for the object that was compiled: L['self'], L['args'][0], ...
_ROOT = re.compile(r"^[A-Z]\[[^\]]*\](\[\d+\])?\.?")
_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def source_of(node: fx.Node) -> Source | None:
    """The module that `node` belongs to and the user's line that it was traced from.

    The line is the innermost one outside of torch; a backward node has its forward's. module is
    the path below the compiled object, "" for that object itself. None where neither is known.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    module = _ROOT.sub("", paths[-1]) if paths else ""
    frames = list(FRAME.finditer(node.meta.get("stack_trace") or ""))
    for frame in reversed(frames):
        if not is_library(frame["file"]):
            return Source(module, frame["file"], int(frame["line"]), frame["code"].strip())
    return Source(module, "", 0, "") if module else None


def is_library(file: str) -> bool:
    """Whether a file belongs to torch or to this package."""
    return file.startswith(_LIBRARIES)
