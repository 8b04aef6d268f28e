"""Programs that share rows tell each other what they reduced, by messages (`math.send`, `math.receive`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.monoids import is_logical, neutral
from fusion_compiler.codegen.names import own
from fusion_compiler.codegen.online_reductions import Running, complete_after, states_of
from fusion_compiler.codegen.tile import Assign, For, Range, Wait
from fusion_compiler.ir.loops import ROWS, Reduce
from fusion_compiler.ir.syntax import Expression, Operand, Var, Variable, fm, lift, plus, tl
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


def exchange(b: Builder, states: Sequence[Running], names: Sequence[Sequence[Variable]]) -> None:
    """Every program of a block of rows sends its values to the others, waits for theirs, and merges all."""
    splits = b.s.splits
    lanes = own("part"), b.define("parts", tl.arange(0, 1 << (splits - 1).bit_length())), splits
    held = zip(states, names, strict=True)
    sent = {n: name for state, given in held for n, name in zip(state.numbers, given, strict=True)}
    theirs: dict[int, Variable] = {number: Var(f"all_{b.base_of(number)}") for number in sent}
    received: list[tuple[tuple[Variable, ...], Expression]] = []
    for message in _messages(b.a, states):
        pair = len(message) == 2
        values: list[Expression] = [sent[n] for n in message]
        if is_logical(b.reduction(message[0])):
            values = [sent[message[0]].to(torch.int32)]
        first = own("row" if b.tile.flat else "first_row")
        mail, rows = plus(b.pointers[mailbox(message)], first * (splits * splits)), _rows_left(b)
        b.do((fm.send_pair if pair else fm.send)(mail, *values, *lanes, *rows))
        neutrals = [neutral(b.reduction(n)) for n in message]
        take = (fm.receive_pair if pair else fm.receive)(mail, values[0], *lanes, *neutrals, *rows)
        received.append((tuple(theirs[n] for n in message), take))
    if b.tile.flat:
        for found, take in received:
            b.add(Wait(found, take))
        for state, given in zip(states, names, strict=True):
            state.merge(b, given, [theirs[number] for number in state.numbers])
    else:
        _merge_rows(b, states, names, theirs, received)


def _rows_left(b: Builder) -> tuple[Operand, ...]:
    """The last arguments for several rows: how many there are from the first on, and how far apart."""
    if b.tile.flat:
        return ()
    apart = b.s.rows_apart
    rows = lift(b.a.size(ROWS)) - own("first_row") if b.tile.row_mask else b.s.block_rows * apart
    return (rows, apart) if apart > 1 else (rows,)


def _merge_rows(
    b: Builder,
    states: Sequence[Running],
    names: Sequence[Sequence[Variable]],
    theirs: Mapping[int, Variable],
    received: Sequence[tuple[tuple[Variable, ...], Expression]],
) -> None:
    """Row by row: tiles over the rows and the parts would be laid out anew, and waited for each time."""
    messages = [Var("messages") for _ in received]
    for message, (_, take) in zip(messages, received, strict=True):
        b.add(Wait((message,), take))
    r = own("r")
    with b.inside(For(r, Range(lift(0), lift(b.s.block_rows), static=True))), b.one_row():
        for message, (found, _) in zip(messages, received, strict=True):
            b.add(Assign(found, message[r]))
        for state, given in zip(states, names, strict=True):
            merged = [Var(f"one_{name.base}") for name in given]
            state.merge(b, merged, [theirs[number] for number in state.numbers])
            for name, one in zip(given, merged, strict=True):
                b.set(name, fm.with_row(name, r, one))


def reduction_of(a: Analysis, number: int) -> Reduce:
    reduce = a.loops.nodes[number]
    assert isinstance(reduce, Reduce)
    return reduce
