"""Runs: the programs, tiles and registers of a nest under a placement."""

from __future__ import annotations

import pytest
import torch

from fusion_compiler.ir.loops import COLS, INNER, ROWS, LoopNest, Reduce
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Place, Placement
from fusion_compiler.schedule.row_tiles import Cols, RowTile, placement_of
from fusion_compiler.schedule.run import Run
from tests.nests import Nest

ROWS_COUNT, WIDTH = 1000, 3000


def norm() -> Analysis:
    """x less its row's mean, times a weight, and the sum of x over the rows."""
    n = Nest({"r": (ROWS_COUNT, ROWS), "c": (WIDTH, COLS)})
    x = n.load("x", "r", "c")
    n.store("y", n.mul(n.sub(x, n.mean(x)), n.load("w", "c")), "r", "c")
    return Analysis(n.nest())


def run_of(a: Analysis, tile: RowTile) -> Run:
    return Run(a, placement_of(a, tile))


@pytest.mark.parametrize(
    ("tile", "programs", "parts", "elements"),
    [
        (RowTile(1, 4096, Cols.WHOLE), 1000, 1, 4096),
        (RowTile(4, 4096, Cols.WHOLE), 250, 1, 4 * 4096),
        (RowTile(4, 4096, Cols.WHOLE, programs=132), 132, 1, 4 * 4096),
        (RowTile(1, 512, Cols.LOOP), 1000, 1, 512),
        (RowTile(1, 1024, Cols.WHOLE, splits=3), 3000, 3, 1024),
        (RowTile(1, 512, Cols.WHOLE, splits=8), 6000, 6, 512),  # two of eight would have no column
        (RowTile(2, 256, Cols.GRID), 500 * 12, 1, 512),
    ],
    ids=str,
)
def test_tiles_of_rows_become_programs(tile: RowTile, programs: int, parts: int, elements: int) -> None:
    run = run_of(norm(), tile)
    assert (run.programs, run.parts, run.elements()) == (programs, parts, elements)
    assert run.together == parts and run.in_rows
    assert run.in_passes == (tile.cols is Cols.LOOP or parts > 1)


def test_a_value_has_the_lanes_of_its_axes() -> None:
    a = norm()
    run = run_of(a, RowTile(4, 4096, Cols.WHOLE))
    assert run.elements(a.rows) == 4 and run.elements(a.cols) == 4096 and run.elements(frozenset()) == 1
    assert run.counts == {(Place.GRID, ROWS): 250, (Place.LANES, ROWS): 4, (Place.LANES, COLS): 4096}
    for size, axes in zip(run.tile_sizes, a.node_axes, strict=True):
        assert size == run.elements(axes)


def test_a_whole_row_keeps_what_is_live_and_a_loop_its_accumulators() -> None:
    """The row and its weight, 32 elements a thread: x, x - mean and w are live at once at most. In a loop of
    512 columns a thread has four: the accumulator, and two tiles."""
    a = norm()
    needed = run_of(a, RowTile(1, 4096, Cols.WHOLE)).registers
    assert 2 * 32 <= needed < 4 * 32
    assert run_of(a, RowTile(1, 4096, Cols.WHOLE, num_warps=8)).registers == pytest.approx(needed / 2, abs=2)
    assert run_of(a, RowTile(1, 512, Cols.LOOP)).registers == (1 + 2) * 4


def test_sums_over_rows_are_kept_beside_the_tile() -> None:
    n = Nest({"r": (ROWS_COUNT, ROWS), "c": (WIDTH, COLS)})
    n.store("s", n.reduce("sum", n.load("x", "r", "c"), ROWS), "c")
    a = Analysis(n.nest())
    loop = run_of(a, RowTile(4, 1024, Cols.GRID, programs=2, num_warps=8))
    assert loop.registers == 4 * 1024 / 256 + 1024 / 256  # a tile, and a sum for each column


def test_statements_that_are_repeated_keep_a_sum_each() -> None:
    """Four results a thread, side by side in the text: each has an accumulator for its lanes."""
    n = Nest({"m": (4, COLS), "n": (64, COLS), "k": (256, INNER)})
    product = n.mul(n.load("x", "m", "k"), n.load("w", "n", "k"))
    total = n.push(Reduce("sum", product.node, frozenset({2}), torch.float32))
    n.store("y", total, "m", "n")
    loops: LoopNest = n.nest()
    text = "split(k, 64); place(k.o, LOOP); place(m, UNROLL); place(n, LANES); place(k.i, LANES); 4 warps"
    run = Run(Analysis(loops), Placement.parse(text))
    lanes = 64 * 64 / 128
    assert run.copies(frozenset({0})) == 4 and run.registers == 4 * lanes + 2 * lanes
