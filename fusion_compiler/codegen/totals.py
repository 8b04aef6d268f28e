"""Sums, maxima and minima over a ragged axis, whose length is data, in a loop of their own.

    total = tl.full([1024], 0, tl.float32)
    for turn in tl.range(first, last, num_stages=3):
        place = tl.load(order_ptr + turn)
        total = total + tl.load(rows_ptr + place * 2048 + col).to(tl.float32)

A tile of several rows, each with its own bounds, has as many turns as the longest one. Prefetching would need
a barrier in each turn, so four turns load together instead:

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
AHEAD = 3  # turns in flight of a single row
AT_ONCE = 4  # turns of many rows that load together
FEW = 2  # most totals for which that pays: with 28 in four nests, ptxas took 28 s instead of four


def build_total(b: Builder, number: int, node: Total, build: Callable[[Builder, list[int]], None]) -> None:
    """Build a total. Its operands outside the loop must be built. build: builds the nodes of a turn."""
    counter = b.loops.nodes[node.counter]
    assert isinstance(counter, Counter)
    first, last = b.variable(counter.first), b.variable(counter.last)
    is_single_row = b.tile.flat and COLS not in b.a.groups[node.counter]
    neutral, step = _STEPS[node.combine]
    total = b.let("total", tl.full(b.shape(b.a.groups[number]), neutral, node.dtype))
    if is_single_row:
        turns = Range(first, last, stages=AHEAD)
    else:
        are_few = sum(isinstance(n, Total) for n in b.loops.nodes) <= FEW
        most = b.let("most", tl.max(last - first))
        turns = Range(lift(0), most, stages=1, unroll=AT_ONCE if are_few else None)
    turn = own("turn")
    with b.inside(For(turn, turns)):
        position = turn if is_single_row else b.let("here", first + turn)
        b.env[node.counter] = position
        if is_single_row:
            b.true |= _turn_conditions(b, node.counter, counter)
        build(b, b.need((node.operand,)))
        term = b.variable(node.operand)
        b.set(total, step(total, term if is_single_row else tl.where(position < last, term, neutral)))
    b.env[number] = total


def _turn_conditions(b: Builder, number: int, counter: Counter) -> frozenset[int]:
    """Return the nodes of the condition that a turn is before the counter's end."""
    nodes = b.loops.nodes
    comparisons = (
        i for i, n in enumerate(nodes) if isinstance(n, Compute) and n.target is torch.ops.aten.lt.Tensor
    )
    return frozenset(i for i in comparisons if operands_of(nodes[i]) == (number, counter.last))
