"""Programs that share rows tell each other what they reduced, by messages (`math.send`, `math.receive`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.expression import dim_text
from fusion_compiler.codegen.monoids import is_logical, neutral_text
from fusion_compiler.codegen.online_reductions import Running, complete_after, states_of
from fusion_compiler.codegen.tile import Assign, Wait
from fusion_compiler.ir.loops import ROWS, Reduce
from fusion_compiler.schedule.analysis import Analysis, accumulator_dtype


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


def exchange(b: Builder, states: Sequence[Running], names: Sequence[Sequence[str]]) -> None:
    """Every program of a block of rows sends its values to the others, waits for theirs, and merges all."""
    splits = b.s.splits
    b.define("parts", f"tl.arange(0, {1 << (splits - 1).bit_length()})")
    sent = {
        n: name for s, own in zip(states, names, strict=True) for n, name in zip(s.numbers, own, strict=True)
    }
    theirs = {number: b.variables.new(f"all_{b.base_of(number)}") for number in sent}
    received: list[tuple[tuple[str, ...], str]] = []
    for message in _messages(b.a, states):
        kind, values = "_pair" if len(message) == 2 else "", [sent[n] for n in message]
        if is_logical(b.reduction(message[0])):
            values = [f"{sent[message[0]]}.to(tl.int32)"]
        neutral = ", ".join(neutral_text(b.reduction(n)) for n in message)
        mail = f"{b.pointers[mailbox(message)]} + {'row' if b.tile.flat else 'first_row'} * {splits * splits}"
        lanes, rows = f"part, parts, {splits}", _rows_left(b)
        b.line(f"fm.send{kind}({mail}, {', '.join(values)}, {lanes}{rows})")
        take = f"fm.receive{kind}({mail}, {values[0]}, {lanes}, {neutral}{rows})"
        received.append((tuple(theirs[n] for n in message), take))
    if b.tile.flat:
        for found, take in received:
            b.add(Wait(found, take))
        for state, own in zip(states, names, strict=True):
            state.merge(b, own, [theirs[number] for number in state.numbers])
    else:
        _merge_rows(b, states, names, theirs, received)


def _rows_left(b: Builder) -> str:
    """The last arguments for several rows: how many there are from the first on, and how far apart."""
    if b.tile.flat:
        return ""
    apart = b.s.rows_apart
    rows = f"{dim_text(b.a.size(ROWS))} - first_row" if b.tile.row_mask else str(b.s.block_rows * apart)
    return f", {rows}{f', {apart}' if apart > 1 else ''}"


def _merge_rows(
    b: Builder,
    states: Sequence[Running],
    names: Sequence[Sequence[str]],
    theirs: Mapping[int, str],
    received: Sequence[tuple[tuple[str, ...], str]],
) -> None:
    """Row by row: tiles over the rows and the parts would be laid out anew, and waited for each time."""
    messages = [b.variables.new("messages") for _ in received]
    for message, (_, take) in zip(messages, received, strict=True):
        b.add(Wait((message,), take))
    with b.inside(b.loop("r", f"tl.static_range({b.s.block_rows})")), b.one_row():
        for message, (found, _) in zip(messages, received, strict=True):
            b.add(Assign(found, f"{message}[r]"))
        for state, own in zip(states, names, strict=True):
            merged = [b.variables.new(f"one_{b.variables.base(name)}") for name in own]
            state.merge(b, merged, [theirs[number] for number in state.numbers])
            for name, one in zip(own, merged, strict=True):
                b.set(name, f"fm.with_row({name}, r, {one})")


def reduction_of(a: Analysis, number: int) -> Reduce:
    reduce = a.loops.nodes[number]
    assert isinstance(reduce, Reduce)
    return reduce
