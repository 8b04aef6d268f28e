"""Sums, maxima and minima of as many terms as data says, in a loop of their own.

    total = tl.full([1024], 0, tl.float32)
    for turn in tl.range(first, last, num_stages=3):
        place = tl.load(order_ptr + turn)
        total = total + tl.load(rows_ptr + place * 2048 + col).to(tl.float32)

A tile of several rows, each with ends of its own, has as many turns as its longest. To load ahead would take
a barrier in each turn, so that four turns load together:

    for turn in tl.range(0, most, num_stages=1, loop_unroll_factor=4):
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.names import own
from fusion_compiler.codegen.tile import For, Range
from fusion_compiler.ir.loops import COLS, Compute, Counter, Total, operands_of
from fusion_compiler.ir.syntax import INFINITY, MINUS_INFINITY, PROPAGATE_NAN, Expression, Literal, lift, tl

_STEPS: dict[str, tuple[Literal, Callable[[Expression, Expression], Expression]]] = {
    "sum": (Literal(0), lambda total, term: total + term),
    "max": (MINUS_INFINITY, lambda total, term: tl.maximum(total, term, PROPAGATE_NAN)),
    "min": (INFINITY, lambda total, term: tl.minimum(total, term, PROPAGATE_NAN)),
}
AHEAD = 3  # turns whose loads are under way, of one row
AT_ONCE = 4  # turns of many rows, whose loads are under way together
FEW = 2  # totals of which several turns at once pay: of 28 in four nests, ptxas took 28 s instead of four


def build_total(b: Builder, number: int, node: Total, build: Callable[[Builder, list[int]], None]) -> None:
    """A total, whose operands outside the loop are built. build: builds the nodes of a turn."""
    counter = b.loops.nodes[node.counter]
    assert isinstance(counter, Counter)
    first, last = b.variable(counter.first), b.variable(counter.last)
    alone = b.tile.flat and COLS not in b.a.groups[node.counter]
    neutral, step = _STEPS[node.combine]
    total = b.let("total", tl.full(b.shape(b.a.groups[number]), neutral, node.dtype))
    if alone:
        turns = Range(first, last, stages=AHEAD)
    else:
        are_few = sum(isinstance(n, Total) for n in b.loops.nodes) <= FEW
        most = b.let("most", tl.max(last - first))
        turns = Range(lift(0), most, stages=1, unroll=AT_ONCE if are_few else None)
    turn = own("turn")
    with b.inside(For(turn, turns)):
        here = turn if alone else b.let("here", first + turn)
        b.env[node.counter] = here
        if alone:
            b.true |= _here(b, node.counter, counter)
        build(b, b.need((node.operand,)))
        term = b.variable(node.operand)
        b.set(total, step(total, term if alone else tl.where(here < last, term, neutral)))
    b.env[number] = total


def _here(b: Builder, number: int, counter: Counter) -> frozenset[int]:
    """The condition that a turn is one of the counter's."""
    nodes = b.loops.nodes
    own = (i for i, n in enumerate(nodes) if isinstance(n, Compute) and n.target is torch.ops.aten.lt.Tensor)
    return frozenset(i for i in own if operands_of(nodes[i]) == (number, counter.last))
