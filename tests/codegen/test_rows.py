"""Rows and columns under placements: what every form of a nest has in common, and what few forms have."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import prod
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

import fusion_compiler as fc
from fusion_compiler import explain
from fusion_compiler.codegen import assemble, emit
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import COLS, ROWS, Axis, Index, Load, LoopNest, Reduce, Store
from fusion_compiler.runtime.launch import interpret
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.row_tiles import Cols, RowTile, placement_of
from fusion_compiler.schedule.run import Run
from tests.exactness import Compiled, not_as_close, placements

FORMS = (
    RowTile(1, 64, Cols.GRID),
    RowTile(1, 64, Cols.GRID, programs=1),
    RowTile(1, 64, Cols.GRID, programs=3),
    RowTile(4, 32, Cols.GRID, programs=2),
    RowTile(2, 64, Cols.WHOLE, programs=3),
)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_random_numbers_do_not_depend_on_the_form(form: RowTile) -> None:
    """Gradients of a mask that is made again need the mask of the forward pass, however that ran."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        dropped = F.dropout(x, 0.5, training=True)
        return dropped, dropped.sum(0)

    x, results = torch.rand(37, 64) + 1, []
    for each in (FORMS[0], form):
        torch.manual_seed(7)
        results.append(Compiled(fn, schedules=lambda *_, each=each: (each,))(x))
    (first, _), (dropped, total) = results
    assert torch.equal(first, dropped) and 0.3 < (first == 0).float().mean() < 0.7
    torch.testing.assert_close(total, first.sum(0))


def products(x: Tensor) -> Tensor:
    return torch.softmax(x[..., ::2] * x[..., 1::2], -1)


def centred(x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:])


@pytest.mark.parametrize("programs", [None, 2])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("fn", [products, centred])
def test_the_last_block_of_a_loop_has_lanes_of_its_own(
    fn: Callable[[Tensor], Tensor], rows: int, programs: int | None
) -> None:
    """Also of neighbours that are moved together."""
    form = RowTile(rows, 64, Cols.LOOP, programs, num_warps=1)
    x = torch.randn(7, 600)
    ours = Compiled(fn, schedules=lambda *_: (form,))(x)
    assert (problem := not_as_close(ours, fn(x), fn(x.double()))) is None, problem


def sum_of_shared(width: int) -> LoopNest:
    """Rows minus their sum and that of a vector, which all rows share."""
    axes = (Axis("row_0", 3, ROWS), Axis("row_1", 5, ROWS), Axis("col", width, COLS))
    index = Index(0, ((0, 5 * width), (1, width), (2, 1)))
    nodes = (
        Load("x", index, None, torch.float32),
        Reduce("sum", 0, frozenset({2}), torch.float32),
        Load("w", Index(0, ((2, 1),)), None, torch.float32),
        Reduce("sum", 2, frozenset({2}), torch.float32),
    )
    stores = tuple(Store(f"out{n}", Index(0, ((0, 5), (1, 1))), n) for n in (1, 3))
    return LoopNest(axes, nodes, stores, ("x", "sum", "w", "total"))


@pytest.mark.parametrize(
    "form",
    [
        *FORMS[:3],
        RowTile(2, 512, Cols.WHOLE),
        RowTile(1, 128, Cols.LOOP, num_stages=3),
        RowTile(1, 256, Cols.WHOLE, splits=2),
        RowTile(2, 32, Cols.LOOP, splits=4),
        RowTile(1, 512, Cols.WHOLE, programs=8, word=8),
        RowTile(2, 128, Cols.WHOLE, programs=8, splits=3, word=8),
    ],
    ids=str,
)
def test_a_form_is_a_placement_that_is_read_back(form: RowTile) -> None:
    analysis = Analysis(sum_of_shared(317))
    placement = placement_of(analysis, form)
    assert Placement.parse(str(placement)) == placement
    axes = placement.axes(analysis.loops.axes)
    leaves = placement.leaves(analysis.loops.axes)
    for number, axis in enumerate(axes):
        extents = [hint(leaf.extent) for leaf in leaves if leaf.axis == number]
        assert bool(extents) is (axis.name != "row_0" and axis.name != "row_1")
        assert not extents or prod(extents) >= hint(axis.size)


def test_every_program_that_shares_a_row_has_columns() -> None:
    analysis = Analysis(sum_of_shared(317))
    for splits, with_columns in ((3, 3), (4, 3), (16, 3), (2, 2)):
        schedule = RowTile(1, 128, Cols.WHOLE, splits=splits)
        assert Run(analysis, placement_of(analysis, schedule)).parts == with_columns


def test_misaligned_rows_do_not_add_up_what_lies_behind_a_vector() -> None:
    """Whole words of it are shifted, of which the last may have other elements."""
    loops = sum_of_shared(317)
    form = RowTile(2, 128, Cols.WHOLE, programs=8, splits=3, word=8)
    x, w = torch.randn(3, 5, 317), torch.randn(317)
    around = torch.full((317 + 64,), 1e9)
    around[:317] = w
    truth = x.double().sum(-1), w.double().sum().expand(3, 5)
    for ours, true in zip(computed(loops, form, x, around[:317]), truth, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-4, atol=1e-3)


def computed(loops: LoopNest, form: RowTile, x: Tensor, w: Tensor) -> list[Tensor]:
    """Return the results of a nest under one form, in the interpreter."""
    shapes = {"x": (3, 5, 317), "w": (317,), "out1": (3, 5), "out3": (3, 5)}
    buffers = {n: Buffer(n, s, torch.empty(s).stride(), torch.float32) for n, s in shapes.items()}
    program = assemble.build(assemble.Nests((loops,), buffers), placements(loops, form), "rows", "")
    tensors = {"x": x, "w": w}
    return list(interpret(program, [tensors[b.name] for b in program.inputs], []))


@pytest.mark.parametrize("is_product", [False, True])
@pytest.mark.usefixtures("small_matrices")
def test_the_time_of_emission_grows_with_the_nodes(is_product: bool) -> None:
    """Each node of this chain reads the one before twice: following both would take 2 ** 60 steps."""

    def squares(x: Tensor, matrix: Tensor) -> Tensor:
        for _ in range(60):
            matrix = matrix * matrix
        return F.linear(x, matrix) if is_product else matrix.sum(-1)

    x, matrix = torch.rand(1, 1000).bfloat16(), torch.rand(4096, 1000).bfloat16()
    before = time.perf_counter()
    with torch.no_grad():
        report = explain(squares, x, matrix, device="h200")
    assert report.json() and len(report.plans[0].clusters) == 1
    assert time.perf_counter() - before < 60


@pytest.mark.parametrize(
    "form",
    [
        RowTile(1, 256, Cols.WHOLE, 3, splits=2),
        RowTile(2, 256, Cols.WHOLE, 3, splits=2),
        RowTile(1, 64, Cols.LOOP, 3),
        RowTile(1, 64, Cols.LOOP, 3, splits=2),
    ],
    ids=str,
)
def test_values_without_rows_wait_for_a_reduction_that_programs_share(form: RowTile) -> None:
    def scaled(x: Tensor, v: Tensor) -> Tensor:
        return (x - v).abs().sum(-1) * (v * v).sum().rsqrt()

    x, v = torch.randn(7, 300), torch.randn(300)
    ours = Compiled(scaled, schedules=lambda *_: (form,))(x, v)
    assert (problem := not_as_close(ours, scaled(x, v), scaled(x.double(), v.double()))) is None, problem


def test_sums_join_along_one_axis_only() -> None:
    """The fold of a tile's columns, for the sum of the whole tile, has no part in a sum over rows."""

    def fn(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        tile = x.expand(3, 2)
        return tile.sum(), F.cross_entropy(F.selu(tile), target, reduction="sum")

    x, target = torch.randn(()), torch.tensor([1]).expand(3)
    ours = Compiled(fn)(x, target)
    for mine, eager, exact in zip(ours, fn(x, target), fn(x.double(), target), strict=True):
        assert (problem := not_as_close(mine, eager, exact)) is None, problem


@pytest.mark.parametrize(
    "form",
    [
        RowTile(1, 64, Cols.LOOP),
        RowTile(2, 64, Cols.LOOP),
        RowTile(1, 64, Cols.LOOP, splits=2),
        RowTile(1, 256, Cols.WHOLE, splits=2),
    ],
    ids=str,
)
def test_stores_at_places_that_are_loaded_are_made_for_every_column(form: RowTile) -> None:
    def put(kept: Tensor, places: Tensor, x: Tensor) -> Tensor:
        kept.index_copy_(1, places, x)
        return (x == x.amax(1, keepdim=True)).sum(1)

    places, x = torch.randperm(300), torch.randn(7, 300)
    with patch.object(emit, "schedules_of", lambda loops, *_: placements(loops, form)):
        compiled = fc.compile(put, backend="interpret")
        ours, eager = torch.zeros_like(x), torch.zeros_like(x)
        assert torch.equal(compiled(ours, places, x), put(eager, places, x))
    assert torch.equal(ours, eager) and len(compiled.plan[0].clusters) == 1


def of_nothing(x: Tensor, v: Tensor) -> Tensor:
    return torch.div(x, v.abs() + 1, rounding_mode="floor")


def of_one_element(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    padded = F.pad(x[:1, :1].byte(), (1, 3), value=1)
    return x[:1, :1].argmax(), ~padded, torch.roll(padded, 2, 0).float()


@pytest.mark.parametrize("fn", [of_nothing, of_one_element])
def test_what_is_known_in_advance_has_a_type_and_takes_no_loop(fn: Callable[..., Tensor]) -> None:
    """A gradient of zeros is a sum of nothing; an element that is checked may be a number."""
    x, v = torch.randn(128, 2), torch.randn(1, 2, requires_grad=True)
    compiled = fc.compile(fn, backend="interpret", strict=True)
    for ours, eager in zip(tree_leaves(compiled(x, v)), tree_leaves(fn(x, v)), strict=True):
        assert torch.equal(ours, eager)
        if eager.requires_grad:
            ones = torch.ones_like(eager)
            assert torch.equal(*(torch.autograd.grad(result, v, ones)[0] for result in (ours, eager)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16])
@pytest.mark.parametrize("form", [RowTile(1, 64, Cols.LOOP), RowTile(2, 512, Cols.WHOLE)], ids=str)
def test_a_maximum_of_small_integers_keeps_its_dtype(form: RowTile, dtype: torch.dtype) -> None:
    """Triton folds tiles of them as int32, which divides by no uint8."""

    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        largest = x.amax(-1)
        return torch.remainder(largest, largest // 2 + 1), x.amin(-1) - largest

    x = torch.randint(100, (3, 500)).to(dtype)
    compiled = Compiled(fn, schedules=lambda *_: (form,))
    for ours, eager in zip(compiled(x), fn(x), strict=True):
        assert torch.equal(ours, eager)
