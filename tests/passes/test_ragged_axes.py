"""A ragged axis follows the nodes of its bounds when nodes are removed, and goes with its reduction."""

from __future__ import annotations

from dataclasses import replace

import torch

from fusion_compiler.ir.loops import (
    COLS,
    RAGGED,
    Axis,
    Compute,
    Coordinate,
    Index,
    Load,
    LoopNest,
    Reduce,
    Store,
    Value,
    axes_of,
    groups_of,
)
from fusion_compiler.passes.lower.simplify import simplify
from fusion_compiler.schedule.analysis import Analysis

ROW = Index(0, ((0, 1),))
SUM = 6


def nest() -> LoopNest:
    """Return a sum of the numbers between two offsets of each row, and a load that nothing reads."""
    bounds = (("self", Value(3)), ("other", Value(2)))
    nodes = (
        Load("unused", ROW, None, torch.float32),
        Load("offsets", ROW, None, torch.int64),
        Load("offsets", Index(1, ROW.terms), None, torch.int64),
        Coordinate(Index(0, ((~1, 1), (1, 1))), torch.int64),
        Compute(torch.ops.aten.lt.Tensor, bounds, torch.bool),
        Load("numbers", Index(0, ((~3, 1),)), 4, torch.float32),
        Reduce("sum", 5, frozenset({1}), torch.float32, within=4),
    )
    axes = (Axis("col", 20, COLS), Axis("turn", 1, RAGGED, (1, 2)))
    return LoopNest(axes, nodes, (Store("out", ROW, SUM),), tuple(str(i) for i in range(len(nodes))))


def test_only_the_sum_does_not_vary_along_its_axis() -> None:
    loops = nest()
    assert [1 in axes for axes in axes_of(loops.nodes)] == [False, False, False, True, True, True, False]
    assert groups_of(loops)[SUM] == frozenset({COLS})
    analysis = Analysis(loops)
    assert analysis.reductions == ()
    assert {number: set(nodes) for number, nodes in analysis.invariants.items()} == {SUM: {1, 2}}


def test_bounds_are_renumbered() -> None:
    loops = simplify(nest())
    assert loops.axes == (Axis("col", 20, COLS), Axis("turn", 1, RAGGED, (0, 1)))
    assert [node for node in loops.nodes if isinstance(node, Reduce)] == [
        Reduce("sum", 4, frozenset({1}), torch.float32, within=3)
    ]


def test_without_its_reduction_the_axis_goes() -> None:
    without = replace(nest(), stores=(Store("out", ROW, 2),))
    assert simplify(without).axes == (Axis("col", 20, COLS),)
