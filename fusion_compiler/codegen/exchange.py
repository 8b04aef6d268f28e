"""Programs exchange values and tiles.

Programs that share rows exchange the results of their reductions in messages that hold the values
(`math.send`, `math.receive`). Programs on several devices exchange tiles in memory that all of them can read,
and signal that a tile is complete (`math.signal`, `math.arrived`). Both are a `Signal` and a `Wait` of the
tile program.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

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
    Scope,
    Signal,
    Statement,
    Store,
    Wait,
)
from fusion_compiler.ir.loops import ROWS, Reduce
from fusion_compiler.ir.syntax import Expression, Name, Operand, Var, Variable, fm, lift, plus, tl
from fusion_compiler.schedule.analysis import Analysis, accumulator_dtype
from fusion_compiler.schedule.shapes import padded


def mailbox(message: tuple[int, ...]) -> str:
    """Return the name of the scratch through which programs exchange the values of these reductions."""
    return f"mail_{message[0]}"


def messages(a: Analysis) -> Iterator[tuple[int, ...]]:
    """Yield, for each message of all passes, the reductions whose values it holds."""
    for level in range(1, max((a.level[i] for i in a.reductions), default=0) + 1):
        yield from _messages(a, states_of(a, complete_after(a, level)))


def _messages(a: Analysis, states: Sequence[Running]) -> list[tuple[int, ...]]:
    return messages_of(a, [n for state in states for n in state.numbers])


def messages_of(a: Analysis, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the reductions of each message: two of float32, or one of another dtype."""
    floats = [n for n in numbers if accumulator_dtype(reduction_of(a, n)) is torch.float32]
    pairs = [tuple(floats[i : i + 2]) for i in range(0, len(floats), 2)]
    return pairs + [(n,) for n in numbers if n not in floats]


def exchange(b: Builder, states: Sequence[Running], names: Sequence[Sequence[Variable]]) -> None:
    """Every program of a block of rows sends its values to the others, waits for theirs, and merges all."""
    splits = b.s.splits
    part, parts = own("part"), b.define("parts", tl.arange(0, padded(splits)))
    rows = _rows_left(b)
    pairs = list(zip(states, names, strict=True))
    sent = {n: v for state, variables in pairs for n, v in zip(state.numbers, variables, strict=True)}
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
        for state, variables in pairs:
            state.merge(b, variables, [theirs[number] for number in state.numbers])
    else:
        _merge_rows(b, states, names, theirs, received)


def _rows_left(b: Builder) -> tuple[Expression, ...]:
    """Return `Boxes.rows`, which is empty for a block of one row."""
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
    """Merge row by row: tiles [rows, parts] would need a change of layout, and a barrier for each."""
    messages = [Var("messages") for _ in received]
    for message, wait in zip(messages, received, strict=True):
        b.add(replace(wait, targets=(message,)))
    r = own("r")
    with b.inside(For(r, Range(lift(0), lift(b.s.block_rows), static=True))), b.one_row():
        for message, wait in zip(messages, received, strict=True):
            b.add(Assign(wait.targets, message[r]))
        for state, variables in zip(states, names, strict=True):
            merged = [Var(f"one_{name.base}") for name in variables]
            state.merge(b, merged, [theirs[number] for number in state.numbers])
            for name, one in zip(variables, merged, strict=True):
                b.set(name, fm.with_row(name, r, one))


def reduction_of(a: Analysis, number: int) -> Reduce:
    reduce = a.loops.nodes[number]
    assert isinstance(reduce, Reduce)
    return reduce


# -- tiles, through memory of several devices --------------------------------------------------------------


@dataclass(frozen=True)
class Peers:
    """Peers are the programs of one number on several devices; they exchange tiles.

    tiles, pads: pointers to tables of addresses, int64 [count] by rank, such as `buffer_ptrs_dev` of
        PyTorch's symmetric memory. An address in `tiles` points to [2, size] elements of dtype. An address in
        `pads` points to the boxes of all programs, int64 [programs, count] by program and sender. The boxes
        are zero before the first round. This memory belongs to one kernel with one grid, which every device
        launches equally often.
    rank: this device's number. program: the number of this program.
    scope: SYSTEM, or DEVICE if the peers are programs of one device.
    """

    tiles: Name
    pads: Name
    rank: Expression
    count: int
    program: Expression
    dtype: torch.dtype
    size: int
    scope: Scope = Scope.SYSTEM


def all_reduced(
    peers: Peers, value: Expression, lane: Expression, mask: Expression | None = None
) -> tuple[list[Statement], Var]:
    """Return the statements that add up one tile of each peer, and the variable of the sum.

    before  value
    after   store(own half, value); signal(peers); wait(peers); tiles = load(halves); total = sum(tiles)

    lane: where each element lies in [size]; mask: the lanes that exist. Every peer adds in the order of the
    ranks, in float32 (float64 for float64), so that all have the same bits.

    The number of a round is one more than what this rank left in its own box in the round before. So no box
    is reset to zero, and a CUDA graph continues the count when it is replayed. Rounds alternate between the
    two halves. A program that has passed the wait of a round knows that all peers have read the tiles of the
    round before, whose half the next round overwrites: one wait for each round is enough.
    """
    ranks, number, total = Var("ranks"), Var("number"), Var("total")
    own_pad, pads, own_tiles = Var("own_pad"), Var("pads"), Var("own_tiles")
    buffers = [Var("buffer") for _ in range(peers.count)]
    tiles = [Var("tile") for _ in buffers]
    exists = ranks < peers.count
    first = peers.program * peers.count
    masked: dict[str, Operand] = {} if mask is None else {"mask": mask, "other": 0.0}
    accumulator = torch.float64 if peers.dtype is torch.float64 else torch.float32

    def tiles_of(rank: Operand) -> Expression:
        return tl.multiple_of(tl.load(plus(peers.tiles, rank)).to(tl.pointer_type(peers.dtype)), 16)

    def half(buffer: Expression) -> Expression:
        return plus(buffer, number % 2 * peers.size, lane)

    boxes = tl.pointer_type(torch.int64)
    # The tables are read first, so that no load behind the wait waits for an address. The number is assigned
    # twice, so that no rewrite reads it before the kernel has waited for the one of the round before.
    return [
        Assign((ranks,), tl.arange(0, padded(peers.count))),
        Assign((own_pad,), plus(tl.load(plus(peers.pads, peers.rank)).to(boxes), first)),
        Assign((pads,), plus(tl.load(plus(peers.pads, ranks), mask=exists, other=0).to(boxes), first)),
        Assign((own_tiles,), tiles_of(peers.rank)),
        *(Assign((buffer,), tiles_of(rank)) for rank, buffer in enumerate(buffers)),
        Assign((number,), tl.load(plus(own_pad, peers.rank)) + 1),
        Store(half(own_tiles), value.to(peers.dtype), mask),
        Signal(Boxes(plus(pads, peers.rank), exists), (number,), peers.scope),
        Wait((number,), Boxes(plus(own_pad, ranks), exists), number, scope=peers.scope),
        *(
            Assign((tile,), tl.load(half(buffer), **masked).to(accumulator))
            for buffer, tile in zip(buffers, tiles, strict=True)
        ),
        Assign((total,), functools.reduce(Expression.__add__, tiles)),
    ], total
