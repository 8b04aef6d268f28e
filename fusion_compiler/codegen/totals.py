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
from fusion_compiler.codegen.expression import TRITON_TYPES
from fusion_compiler.ir.loops import COLS, Compute, Counter, Total, operands_of

_NAN = "propagate_nan=tl.PropagateNan.ALL"
_STEPS = {
    "sum": ("0", "{total} + {term}"),
    "max": ("float('-inf')", f"tl.maximum({{total}}, {{term}}, {_NAN})"),
    "min": ("float('inf')", f"tl.minimum({{total}}, {{term}}, {_NAN})"),
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
    shape = b.shape(b.a.groups[number])
    total = b.let("total", f"tl.full({shape}, {neutral}, {TRITON_TYPES[node.dtype]})")
    if alone:
        turns = f"{first}, {last}, num_stages={AHEAD}"
    else:
        most = b.let("most", f"tl.max({last} - {first})")
        are_few = sum(isinstance(n, Total) for n in b.loops.nodes) <= FEW
        turns = f"0, {most}, num_stages=1" + (f", loop_unroll_factor={AT_ONCE}" if are_few else "")
    with b.inside(b.loop("turn", f"tl.range({turns})")):
        here = "turn" if alone else b.let("here", f"{first} + turn")
        b.env[node.counter] = here
        if alone:
            b.true |= _here(b, node.counter, counter)
        build(b, b.need((node.operand,)))
        term = b.variable(node.operand)
        term = term if alone else f"tl.where({here} < {last}, {term}, {neutral})"
        b.set(total, step.format(total=total, term=term))
    b.env[number] = total


def _here(b: Builder, number: int, counter: Counter) -> frozenset[int]:
    """The condition that a turn is one of the counter's."""
    nodes = b.loops.nodes
    own = (i for i, n in enumerate(nodes) if isinstance(n, Compute) and n.target is torch.ops.aten.lt.Tensor)
    return frozenset(i for i in own if operands_of(nodes[i]) == (number, counter.last))
