"""Which ops a piece of the user's source stands for: those of the innermost call that holds it.

A line computes many things. Where in it a call stands is known from Python's positions: both ends where the
model's code ran in our own trace, where it begins from TorchDynamo of torch 2.13, nothing from older ones.
What places do not tell apart is told apart by names, or else said to be uncertain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fusion_compiler.ir.dag import OpDag
from fusion_compiler.ir.schema import short_name
from fusion_compiler.ir.sources import Frame, frames_of

_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class Meant:
    """Ops that a name may stand for. label: how to speak of them. sure: whether it stands for all of them."""

    label: str
    ops: tuple[str, ...]
    sure: bool = True


Spot = tuple[str, int, tuple[int, int] | None]  # a file, a line, and the columns of a call in it


def meant(dag: OpDag, piece: str) -> list[Meant]:
    """What a piece of source stands for in a graph: a call on each line that has it, or several on one."""
    inputs = set(dag.inputs)
    found: dict[Spot, dict[str, Frame]] = {}
    for name, node in dag.nodes.items():
        for frame in frames_of(node) if name not in inputs else ():
            if piece in frame.code:
                found.setdefault((frame.file, frame.line, _span(frame)), {})[name] = frame
    chosen: dict[Spot, dict[str, Frame]] = {}
    for file, line in dict.fromkeys(spot[:2] for spot in found):
        spans = [spot[2] for spot in found if spot[:2] == (file, line)]
        code = next(iter(next(f for s, f in found.items() if s[:2] == (file, line)).values())).code
        for at in _places(code, piece):
            span = _innermost(spans, at)
            if (file, line, span) in found:
                chosen[file, line, span] = found[file, line, span]
    return [_meant(dag, piece, spot, list(ops), next(iter(ops.values())), len(chosen) > 1)
            for spot, ops in chosen.items()]  # fmt: skip


def _span(frame: Frame) -> tuple[int, int] | None:
    """The columns of a call; where only its beginning is known, up to what cannot belong to it."""
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
    """The shortest call that holds some columns; None where none does."""
    known = [s for s in spans if s is not None and s[0] <= at[0] and at[1] <= s[1]]
    return min(known, key=lambda s: s[1] - s[0], default=None)


def _meant(dag: OpDag, piece: str, spot: Spot, ops: list[str], frame: Frame, one_of_several: bool) -> Meant:
    """The ops at one spot; where several calls may be at it, those that are called as the piece says."""
    place = f"{Path(spot[0]).name}:{spot[1]}"
    text = frame.code if spot[2] is None else frame.code[slice(*spot[2])]
    if frame.exact or len({dag.op(n).call or n for n in ops}) == 1:
        return Meant(f"{text} ({place})" if one_of_several else piece, tuple(ops))
    words = set(re.findall(r"\w+", piece))
    named = tuple(n for n in ops if words & _names(dag, n))
    if named:
        return Meant(f"{piece} ({place})" if one_of_several else piece, named)
    return Meant(f"what {text} ({place}) computes", tuple(ops), sure=False)


def _names(dag: OpDag, name: str) -> set[str]:
    """What the call that an op is a piece of may be called in source."""
    op = dag.op(name)
    found = {short_name(op.target)}
    if op.call is not None:
        found.add(op.call.target.removesuffix("_backward").removeprefix("native_"))
    if op.source is not None:
        found.add(op.source.module.rpartition(".")[2])
    return found
