"""Reductions over a ragged axis, whose length is data, in a loop of their own.

    total = tl.full([1024], 0.0, tl.float32)
    for turn in tl.range(first, last, num_stages=3):
        place = tl.load(order_ptr + turn)
        total += tl.load(rows_ptr + place * 2048 + col).to(tl.float32)

A tile of several rows, each with its own bounds, has as many turns as the longest one. Prefetching would need
a barrier in each turn, so four turns load together instead:

    for turn in tl.range(0, most, num_stages=1, loop_unroll_factor=4):
"""

from __future__ import annotations

from collections.abc import Callable

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.monoids import neutral, step
from fusion_compiler.codegen.names import own
from fusion_compiler.codegen.tile import For, Range
from fusion_compiler.ir.loops import COLS, Coordinate
from fusion_compiler.ir.syntax import lift, tl

AHEAD = 3  # turns in flight of a single row
AT_ONCE = 4  # turns of many rows that load together
FEW = 2  # most reductions for which that pays: with 28 in four nests, ptxas took 28 s instead of four


def build_ragged(b: Builder, number: int, build: Callable[[Builder, list[int]], None]) -> None:
    """Build a reduction over a ragged axis, whose invariants are built. build: builds the nodes of a turn."""
    node, nodes = b.reduction(number), b.loops.nodes
    assert node.within is not None
    (axis,) = node.axes
    first, last = map(b.variable, b.loops.axes[axis].bounds)
    (place,) = (i for i, n in enumerate(nodes) if isinstance(n, Coordinate) and axis in dict(n.index.terms))
    total = b.let("total", tl.full(b.shape(b.a.groups[number]), neutral(node), node.dtype))
    is_single_row = b.tile.flat and COLS not in b.a.groups[node.within]
    if is_single_row:
        turns = Range(first, last, stages=AHEAD)
    else:
        most = b.let("most", tl.max(last - first))
        turns = Range(lift(0), most, stages=1, unroll=AT_ONCE if len(b.a.invariants) <= FEW else None)
    turn = own("turn")
    with b.inside(For(turn, turns)):
        if is_single_row:
            b.true |= {node.within}
        b.env[place] = turn if is_single_row else b.let("here", first + turn)
        build(b, b.need((node.operand, node.within)))
        term = b.variable(node.operand)
        if not is_single_row:
            term = tl.where(b.variable(node.within), term, neutral(node))
        b.add(step(node, total, term))
    b.env[number] = total
