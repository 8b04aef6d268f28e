"""Placements: how they print and read back, what their leaves are, and what they refuse."""

from __future__ import annotations

import pytest
import torch

from fusion_compiler.ir.loops import COLS, Axis, Index, Load, LoopNest, Reduce, Store
from fusion_compiler.schedule.placement import At, Place, Placement, Split
from fusion_compiler.schedule.verifier import refusal

ROWS_IN_A_TILE = "split(r, 4); place(r.o, GRID); place(r.i, LANES); place(c, LANES); 4 warps"


def nest(rows: int, cols: int, *reduced: frozenset[int]) -> LoopNest:
    """Sums of a matrix over some axes, each of which reads the one before where there are several."""
    axes = (Axis("r", rows, COLS), Axis("c", cols, COLS))
    nodes = [Load("x", Index(0, ((0, cols), (1, 1))), None, torch.float32)]
    sums = [Reduce("sum", n, over, torch.float32) for n, over in enumerate(reduced)]
    stores = (Store("out", Index(0, ()), len(sums)),)
    return LoopNest(axes, (*nodes, *sums), stores, ("x",) * (1 + len(sums)))


@pytest.mark.parametrize(
    "text",
    [
        ROWS_IN_A_TILE,
        "place(r, GRID); split(c, 64); place(c.o, LOOP); place(c.i, LANES); 8 warps, 3 stages, 64 registers",
        "split(c, 4); split(c.o, 16); place(c.o.o, GRID); place(c.o.i, LANES); place(c.i, UNROLL); 2 warps",
    ],
)
def test_a_placement_reads_back_as_it_prints(text: str) -> None:
    assert str(Placement.parse(text)) == text


@pytest.mark.parametrize("text", ["place(r, NOWHERE); 4 warps", "place(r, GRID)", "4 warps; place(r, GRID)"])
def test_other_text_is_no_placement(text: str) -> None:
    with pytest.raises(ValueError):
        Placement.parse(text)


def test_leaves_count_elements_of_their_axis() -> None:
    placement = Placement.parse("split(c, 4); split(c.o, 8); place(c.o.o, GRID); place(r, GRID); "
                                "place(c.o.i, LANES); place(c.i, UNROLL); 2 warps")  # fmt: skip
    leaves = placement.leaves(nest(3, 70).axes)
    assert [(leaf.name, leaf.extent, leaf.step) for leaf in leaves] == [
        ("c.o.o", 3, 32), ("r", 3, 1), ("c.o.i", 8, 4), ("c.i", 4, 1),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("directives", "reason"),
    [
        ((At("r", Place.GRID),), "c has no place"),
        ((At("r", Place.GRID), At("r", Place.GRID)), "there is no axis r left to place"),
        ((Split("r", 2), At("r", Place.GRID)), "there is no axis r left to place"),
        ((At("r", Place.UNROLL), At("c", Place.UNROLL)), "repeat a statement 4096 times"),
    ],
)
def test_axes_are_placed_once(directives: tuple[Split | At, ...], reason: str) -> None:
    assert reason in str(refusal(nest(64, 64), Placement(directives)))


def test_what_programs_share_is_reduced_no_further() -> None:
    placement = Placement.parse("place(r, GRID); place(c, LANES); 4 warps")
    assert refusal(nest(64, 64, frozenset({1}), frozenset({0})), placement) is None
    assert "which programs share" in str(refusal(nest(64, 64, frozenset({0}), frozenset({1})), placement))
