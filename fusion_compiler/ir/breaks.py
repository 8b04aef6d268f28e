"""Read, from TorchDynamo's own records, where it ended a graph early, and which code it left alone.

`torch._dynamo.utils` keeps both, in torch 2.11 as in 2.13: `graph_break_reasons`, which
`torch._dynamo.explain` shows, with each place at which a graph ended; and the metrics of each compilation,
with the reason for which a function was given up. Neither says which thread it was.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from traceback import FrameSummary

from torch._dynamo.utils import get_compilation_metrics, graph_break_reasons

from fusion_compiler.errors import GENERATED, GraphBreakError, is_generated
from fusion_compiler.ir.dag import Source
from fusion_compiler.ir.sources import is_library

GIVEN_UP = ("Unsupported", "UserError")  # what Dynamo raises and then goes on without
_EXPLANATION = re.compile(r"^\s*Explanation: (.+)$", re.MULTILINE)
_FIRST = re.compile(r":\n\s*- (.+)$", re.MULTILINE)  # of reasons in a list
_HINT = re.compile(r"^\s*Hint: (.+)$", re.MULTILINE)
_NEXT = "\n*** While handling this graph break"  # what became of the first one
_RECOMPILED = "Dynamo recompile limit exceeded"


@dataclass(frozen=True)
class GraphBreak:
    """A graph break is code that no graph holds: it runs as plain Python, its tensor operations eager.

    source: the line, None if TorchDynamo does not say it. reason, todo: in its words. function: the name of a
    function all of which runs so, "" if the graphs before and after the line are compiled.
    """

    source: Source | None
    reason: str
    todo: str = ""
    function: str = ""

    @property
    def text(self) -> str:
        return f"all of {self.function}() runs eager: {self.reason}" if self.function else self.reason

    @property
    def deliberate(self) -> bool:
        """True if PyTorch's own code asked for the break, as its optimizers do between two pieces of
        Python."""
        return self.source is None and "torch._dynamo.graph_break()" in self.reason

    @property
    def error(self) -> GraphBreakError:
        return GraphBreakError(self.source, reason=self.text, todo=self.todo or "rewrite that line")


def breaks_since(reasons_before: int, began: int, called: str) -> tuple[GraphBreak, ...]:
    """Return the graph breaks that were recorded since a moment.

    reasons_before: how many of `graph_break_reasons` there were. began: nanoseconds of the clock then.
    called: the name of the function that was called, for breaks whose place TorchDynamo does not record.
    """
    breaks = [_of(r.reason, r.user_stack) for r in graph_break_reasons[reasons_before:]]
    for m in get_compilation_metrics():
        if m.fail_type in GIVEN_UP and (m.start_time_us or 0) >= began // 1000:
            place = [FrameSummary(m.fail_user_frame_filename or "", m.fail_user_frame_lineno or 0, "")]
            breaks.append(_of(m.fail_reason or "", place, _function(m.co_name, m.fail_reason)))
    return distinct(
        b if b.source or b.function or b.deliberate else replace(b, reason=f"in {called}: {b.reason}")
        for b in breaks
    )


def distinct(breaks: Iterable[GraphBreak]) -> tuple[GraphBreak, ...]:
    """Return each break once. A line that ends a graph may be why the function around it is given up
    afterwards."""
    unique = dict.fromkeys(breaks)
    given_up = {replace(b, function="") for b in unique if b.function}
    return tuple(b for b in unique if b not in given_up)


def of_error(error: Exception) -> GraphBreak:
    """Return the break for which Dynamo gave up because a graph must not break."""
    cause = error.__cause__ or error  # a limit on recompilations has the reason behind it
    return _of(str(cause), getattr(cause, "real_stack", ()))


def _of(text: str, frames: Iterable[FrameSummary], function: str = "") -> GraphBreak:
    first = text.partition(_NEXT)[0].strip()
    headline = first.partition("\n")[0]
    explanation, hint = _EXPLANATION.search(first), _HINT.search(first)
    if explanation:
        listed = _FIRST.match(first, explanation.end() - 1)
        headline = f"{headline}: {listed[1] if listed else explanation[1]}"
    reason = headline.removesuffix(" Message: None")
    todo = hint[1] if hint else ""
    if headline.startswith(("generic_jump", "Data-dependent branching")):
        reason, todo = "a branch depends on the values of a tensor", "Use torch.where or torch.cond."
    return GraphBreak(_place(frames), re.sub(r" at 0x[0-9a-f]+", "", reason), todo, function)


def _place(frames: Iterable[FrameSummary]) -> Source | None:
    """Return the innermost line outside of torch that is in a file, or else one of an fx graph's code."""
    outside = [f for f in reversed(list(frames)) if f.filename and not is_library(f.filename)]
    for frame in sorted(outside, key=lambda f: is_generated(f.filename)):
        line = frame.lineno or 0
        file = GENERATED if is_generated(frame.filename) else frame.filename
        return Source("", file, line, linecache.getline(frame.filename, line).strip())
    return None


def _function(name: str | None, reason: str | None) -> str:
    """Return the name of the function that TorchDynamo gave up; "" if earlier graphs of the function are
    still used."""
    return "" if not name or _RECOMPILED in (reason or "") else name
