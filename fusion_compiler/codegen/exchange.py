"""Programs tell each other what they computed.

Programs that share rows exchange what they reduced, by messages that hold the values (`math.send`,
`math.receive`), which are a `Signal` and a `Wait` of the tile program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.monoids import is_logical, neutral
from fusion_compiler.codegen.names import own
from fusion_compiler.codegen.online_reductions import Running, complete_after, states_of
from fusion_compiler.codegen.tile import (
    Assign,
    Boxes,
    For,
    Range,
    Signal,
    Wait,
)
from fusion_compiler.ir.loops import ROWS, Reduce
from fusion_compiler.ir.syntax import Expression, Var, Variable, fm, lift, plus, tl
from fusion_compiler.schedule.analysis import Analysis, accumulator_dtype
from fusion_compiler.schedule.shapes import padded


def mailbox(message: tuple[int, ...]) -> str:
    """The scratch through which the programs of a row exchange the values of these reductions."""
    return f"mail_{message[0]}"


def messages(a: Analysis) -> Iterator[tuple[int, ...]]:
    """The reductions whose values go into one message each, of all passes."""
    for level in range(1, max((a.level[i] for i in a.reductions), default=0) + 1):
        yield from _messages(a, states_of(a, complete_after(a, level)))


def _messages(a: Analysis, states: Sequence[Running]) -> list[tuple[int, ...]]:
    """Two float32 values in one, any other value alone."""
    numbers = [n for state in states for n in state.numbers]
    floats = [n for n in numbers if accumulator_dtype(reduction_of(a, n)) is torch.float32]
    pairs = [tuple(floats[i : i + 2]) for i in range(0, len(floats), 2)]
    return pairs + [(n,) for n in numbers if n not in floats]


def exchange(b: Builder, states: Sequence[Running], names: Sequence[Sequence[Variable]]) -> None:
    """Every program of a block of rows sends its values to the others, waits for theirs, and merges all."""
    splits = b.s.splits
    part, parts = own("part"), b.define("parts", tl.arange(0, padded(splits)))
    rows = _rows_left(b)
    held = zip(states, names, strict=True)
    sent = {n: name for state, given in held for n, name in zip(state.numbers, given, strict=True)}
    theirs: dict[int, Variable] = {number: Var(f"all_{b.base_of(number)}") for number in sent}
    received: list[Wait] = []
    for message in _messages(b.a, states):
        values: list[Expression] = [sent[n] for n in message]
        if is_logical(b.reduction(message[0])):
            values = [sent[message[0]].to(torch.int32)]
        first = own("row" if b.tile.flat else "first_row")
        mail = plus(b.pointers[mailbox(message)], first * (splits * splits))
        b.add(Signal(Boxes(plus(mail, parts * splits, part), parts < splits, rows), tuple(values)))
        neutrals = tuple(lift(neutral(b.reduction(n))) for n in message)
        boxes = Boxes(plus(mail, part * splits, parts), parts < splits, rows)
        received.append(Wait(tuple(theirs[n] for n in message), boxes, values[0], neutrals))
    if b.tile.flat:
        for wait in received:
            b.add(wait)
        for state, given in zip(states, names, strict=True):
            state.merge(b, given, [theirs[number] for number in state.numbers])
    else:
        _merge_rows(b, states, names, theirs, received)


def _rows_left(b: Builder) -> tuple[Expression, ...]:
    """Return `Boxes.rows` of a block of several rows."""
    if b.tile.flat:
        return ()
    apart = b.s.rows_apart
    rows = lift(b.a.size(ROWS)) - own("first_row") if b.tile.row_mask else lift(b.s.block_rows * apart)
    return (rows, lift(apart), lift(b.s.splits**2))


def _merge_rows(
    b: Builder,
    states: Sequence[Running],
    names: Sequence[Sequence[Variable]],
    theirs: Mapping[int, Variable],
    received: Sequence[Wait],
) -> None:
    """Row by row: tiles over the rows and the parts would be laid out anew, and waited for each time."""
    messages = [Var("messages") for _ in received]
    for message, wait in zip(messages, received, strict=True):
        b.add(replace(wait, targets=(message,)))
    r = own("r")
    with b.inside(For(r, Range(lift(0), lift(b.s.block_rows), static=True))), b.one_row():
        for message, wait in zip(messages, received, strict=True):
            b.add(Assign(wait.targets, message[r]))
        for state, given in zip(states, names, strict=True):
            merged = [Var(f"one_{name.base}") for name in given]
            state.merge(b, merged, [theirs[number] for number in state.numbers])
            for name, one in zip(given, merged, strict=True):
                b.set(name, fm.with_row(name, r, one))


def reduction_of(a: Analysis, number: int) -> Reduce:
    reduce = a.loops.nodes[number]
    assert isinstance(reduce, Reduce)
    return reduce
