"""Sums, means and variances are as exact as eager's at every size."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels import ranking
from fusion_compiler.codegen.emit import schedules_of
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.loops import Axis, Index, Load, LoopNest, Reduce, Store
from fusion_compiler.schedule.analysis import MOST_TURNS
from fusion_compiler.schedule.row_tiles import Cols, RowTile
from tests.exactness import Compiled, Schedules, cramped, misaligned_forms, not_as_close, wide


def norm_and_variance(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    off = x - x.mean(-1, keepdim=True)
    return F.layer_norm(x, x.shape[-1:]), x.var(-1), off / (x.std(-1, keepdim=True) + 1e-5)


@pytest.mark.parametrize("schedules", [schedules_of, cramped, misaligned_forms])
@pytest.mark.parametrize("width", [7, 100, 1000, 20003, 40000])
def test_rows_of_equal_elements_have_no_variance(width: int, schedules: Schedules) -> None:
    """Eager finds exactly their mean; a sum divided by its length is off by a few units in the last place,
    which a norm multiplies by 1 / sqrt(eps)."""
    x = torch.tensor([0.1, -3.3, 1000.7, -98765.4]).unsqueeze(1).expand(4, width).contiguous()
    normed, variance, standard = Compiled(norm_and_variance, schedules=schedules)(x)
    assert normed.abs().max() == 0
    assert (variance <= 1e-12 * x[:, 0] ** 2).all()
    assert (standard.abs() <= 1e-6 * x.abs()).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("width", [7, 768, 1000, 8192, 20003])
def test_rows_of_equal_16_bit_elements_have_no_variance(width: int, dtype: torch.dtype) -> None:
    x = torch.tensor([0.1, -3.3, 1000.7, -9876.5], dtype=dtype).unsqueeze(1).expand(4, width).contiguous()

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:])

    assert Compiled(norm)(x).abs().max() == 0


@pytest.mark.parametrize("width", [33, 1000, 20000, 40000])
def test_norms_far_from_zero_are_as_exact_as_eagers(width: int) -> None:
    x = torch.randn(16, width, generator=torch.Generator().manual_seed(0)) + 1000
    truth = F.layer_norm(x.double(), (width,))

    def norm(x: Tensor) -> Tensor:
        return F.layer_norm(x, (width,))

    assert (Compiled(norm)(x) - truth).abs().max() <= (norm(x) - truth).abs().max()


@pytest.mark.parametrize("width", [1000, 10002, 40000])
def test_variances_of_float64_are_made_in_float64(width: int) -> None:
    x = torch.randn(2, width, dtype=torch.float64)

    def variance(x: Tensor) -> Tensor:
        return x.var(-1)

    torch.testing.assert_close(Compiled(variance)(x), variance(x), rtol=1e-13, atol=0)


@pytest.mark.parametrize(("count", "width"), [(512, 64), (64, 1000)])
@pytest.mark.parametrize("behind", [lambda v: v.exp().sum(), lambda v: torch.softmax(v, 0)])
def test_what_follows_a_sum_over_rows_has_reductions_of_vectors_whole(
    behind: Callable[[Tensor], Tensor], count: int, width: int
) -> None:
    def columns(x: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(x, 1).sum(0) * behind(v)

    def total(x: Tensor, v: Tensor) -> Tensor:
        return (torch.softmax(x, 1) * v).sum() * behind(v).sum()

    inputs = torch.randn(count, width), torch.randn(width)
    for f in (columns, total):
        assert not_as_close(Compiled(f)(*inputs), f(*inputs), f(*wide(inputs))) is None


@pytest.mark.parametrize("schedules", [schedules_of, cramped])
def test_a_number_that_programs_share_is_stored_in_each_column(schedules: Any) -> None:
    """It varies over no axis, and what waits for it does."""

    def function(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        top = x.expand(300, 2).amax(0, keepdim=True)
        return top.expand(1, 2) + y, x.expand(300, 2).sum(0) * y

    inputs = torch.randn(()), torch.randn(1, 2)
    for number in range(6):
        fast = Compiled(function, number, schedules)
        for ours, eager in zip(fast(*inputs), function(*inputs), strict=True):
            torch.testing.assert_close(ours, eager)


def sums_over_rows(count: int, width: int, along: bool) -> LoopNest:
    """A sum over the rows of a matrix, with the sum along each row where asked for."""
    axes = (Axis("row", count, "rows"), Axis("col", width, "cols"))
    nodes: list[Any] = [Load("x", Index(0, ((0, width), (1, 1))), None, torch.float32)]
    nodes.append(Reduce("sum", 0, frozenset({0}), torch.float32))
    stores = [Store("over", Index(0, ((1, 1),)), 1)]
    if along:
        nodes.append(Reduce("sum", 0, frozenset({1}), torch.float32))
        stores.append(Store("along", Index(0, ((0, 1),)), 2))
    return LoopNest(axes, tuple(nodes), tuple(stores), ("x", "over", "along")[: len(nodes)])


@pytest.mark.parametrize("along", [False, True])
@pytest.mark.parametrize("width", [4, 64, 768, 4096, 8192])
@pytest.mark.parametrize("count", [1 << 10, 1 << 16, 1 << 22])
def test_no_program_adds_up_more_blocks_than_rounding_allows(count: int, width: int, along: bool) -> None:
    loops = sums_over_rows(count, width, along)
    for s in ranking.ranked(loops, device_spec("h200")):
        assert isinstance(s, RowTile)
        if s.programs is not None and s.splits == 1 and s.cols in (Cols.WHOLE, Cols.GRID):
            assert math.ceil(count / (s.block_rows * s.programs)) <= MOST_TURNS, s
