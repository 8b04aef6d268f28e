"""Programs exchange values and tiles.

Programs that share rows exchange the results of their reductions in messages that hold the values
(`math.send`, `math.receive`). Programs on several devices exchange tiles in memory that all of them can read,
and signal that a tile is complete (`math.signal`, `math.arrived`). Both are a `Signal` and a `Wait` of the
tile program.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from fusion_compiler.codegen.carried import states_of
from fusion_compiler.codegen.tile import (
    Assign,
    Boxes,
    Scope,
    Signal,
    Statement,
    Store,
    Wait,
)
from fusion_compiler.ops.syntax import Expression, Name, Operand, Var, plus, tl
from fusion_compiler.schedule.analysis import Analysis, accumulator_dtype
from fusion_compiler.schedule.shapes import padded


def mailbox(message: tuple[int, ...]) -> str:
    """Return the name of the scratch through which programs exchange the values of these reductions."""
    return f"mail_{message[0]}"


def messages(a: Analysis) -> Iterator[tuple[int, ...]]:
    """Yield, for each message of all passes, the reductions whose values it holds."""
    for level in range(1, max((a.level[i] for i in a.reductions), default=0) + 1):
        complete = [n for n in a.reductions if n not in a.after_rows and a.level[n] == level]
        yield from messages_of(a, [n for state in states_of(a, complete) for n in state.numbers])


def messages_of(a: Analysis, numbers: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the reductions of each message: two of float32, or one of another dtype."""
    floats = [n for n in numbers if accumulator_dtype(a.loops.reduction(n)) is torch.float32]
    pairs = [tuple(floats[i : i + 2]) for i in range(0, len(floats), 2)]
    return pairs + [(n,) for n in numbers if n not in floats]


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
