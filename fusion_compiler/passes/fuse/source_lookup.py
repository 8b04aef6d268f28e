"""Find the ops that a piece of the user's source stands for: those of the innermost call that holds it.

A line computes many things. Python's positions say where in it a call stands: our own trace of the model's
code knows both ends, TorchDynamo of torch 2.13 knows where the call begins, and older versions know nothing.
Names tell calls apart that places do not; otherwise the answer is marked as uncertain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.sources import Frame, frames_of
from fusion_compiler.ops.schema import short_name

_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class NameReference:
    """A reference holds the ops that a name may stand for.

    label: what to call them. sure: whether the name stands for all of them.
    """

    label: str
    ops: tuple[str, ...]
    sure: bool = True


Spot = tuple[str, int, tuple[int, int] | None]  # a file, a line, and the columns of a call in it


def references(dag: OpDag, piece: str) -> list[NameReference]:
    """Return what a piece of source stands for in a graph: a call, or several, on each line that has it."""
    inputs = set(dag.inputs)
    calls: dict[Spot, dict[str, Frame]] = {}
    for name, node in dag.nodes.items():
        for frame in frames_of(node) if name not in inputs else ():
            if piece in frame.code:
                calls.setdefault((frame.file, frame.line, _span(frame)), {})[name] = frame
    chosen: dict[Spot, dict[str, Frame]] = {}
    for file, line in dict.fromkeys(spot[:2] for spot in calls):
        spans = [spot[2] for spot in calls if spot[:2] == (file, line)]
        code = next(iter(next(f for s, f in calls.items() if s[:2] == (file, line)).values())).code
        for at in _places(code, piece):
            span = _innermost(spans, at)
            if (file, line, span) in calls:
                chosen[file, line, span] = calls[file, line, span]
    return [_reference(dag, piece, spot, list(ops), next(iter(ops.values())), len(chosen) > 1)
            for spot, ops in chosen.items()]  # fmt: skip


def _span(frame: Frame) -> tuple[int, int] | None:
    """Return the columns of a call; if only its beginning is known, up to what cannot belong to it."""
    if frame.span is None:
        return None
    start, end = frame.span
    depth = 0
    for column, char in enumerate(frame.code[start:end], start):
        depth += (char in _OPEN) - (char in _CLOSE)
        if depth < 0 or (depth == 0 and char == ","):
            return start, column
    return start, end


def _places(code: str, piece: str) -> Iterator[tuple[int, int]]:
    at = code.find(piece)
    while at >= 0:
        yield at, at + len(piece.rstrip("( "))
        at = code.find(piece, at + 1)


def _innermost(spans: Sequence[tuple[int, int] | None], at: tuple[int, int]) -> tuple[int, int] | None:
    """Return the shortest call that holds some columns; None if none does."""
    holding = [s for s in spans if s is not None and s[0] <= at[0] and at[1] <= s[1]]
    return min(holding, key=lambda s: s[1] - s[0], default=None)


def _reference(
    dag: OpDag, piece: str, spot: Spot, ops: list[str], frame: Frame, one_of_several: bool
) -> NameReference:
    """Return the ops at one spot; if several calls may be at it, the ops whose names are in the piece."""
    place = f"{Path(spot[0]).name}:{spot[1]}"
    text = frame.code if spot[2] is None else frame.code[slice(*spot[2])]
    if frame.exact or len({dag.op(n).call or n for n in ops}) == 1:
        return NameReference(f"{text} ({place})" if one_of_several else piece, tuple(ops))
    words = set(re.findall(r"\w+", piece))
    named = tuple(n for n in ops if words & _names(dag, n))
    if named:
        return NameReference(f"{piece} ({place})" if one_of_several else piece, named)
    return NameReference(f"what {text} ({place}) computes", tuple(ops), sure=False)


def _names(dag: OpDag, name: str) -> set[str]:
    """Return the names that source may use for the call to which an op belongs."""
    op = dag.op(name)
    names = {short_name(op.target)}
    if op.call is not None:
        names.add(op.call.target.removesuffix("_backward").removeprefix("native_"))
    if op.source is not None:
        names.add(op.source.module.rpartition(".")[2])
    return names
