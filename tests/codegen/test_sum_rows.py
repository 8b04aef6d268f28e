"""Rows that are added up by their numbers: sorted, and one kernel with what comes before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.codegen.emit import schedules_of
from fusion_compiler.ir.loops import RAGGED
from fusion_compiler.runtime.target import compile_for
from tests.exactness import Compiled, cramped, not_as_close

aten = torch.ops.aten


def add_rows(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return x.index_add(0, index, rows)


def with_more(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """A factor before, a residual and a norm after."""
    total = torch.zeros_like(x).index_add(0, index, rows * rows[:, :1].sigmoid())
    return F.layer_norm(x + total, x.shape[1:])


def put(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    places = index[: len(index) // 2 * 2].view(2, -1) - len(x)  # of two dimensions, counted from the end
    return x.index_put([places], rows[: places.numel()].view(2, -1, x.shape[1]), accumulate=True)


def lookup(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """Whose gradient is the sum."""
    return x[index] * rows


def of_blocks(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return x.view(len(x), 4, -1).index_add(0, index, rows.view(len(rows), 4, -1)).sum(1)


def means(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    """A sum of ones, which do not vary over the rows that are added up, divides the sum."""
    counts = torch.zeros_like(x).index_add(0, index, torch.ones_like(rows))
    return x.index_add(0, index, rows) / (1 + counts)


def results(function: Callable[..., Tensor], index: Tensor, *tensors: Tensor) -> list[Tensor]:
    x, rows = (t.detach().requires_grad_() for t in tensors)
    out = function(x, index, rows)
    torch.manual_seed(7)
    upstream = torch.randn(out.shape, dtype=torch.float64).to(out)
    return [out.detach(), *torch.autograd.grad(out, (x, rows), upstream)]


FUNCTIONS = [add_rows, with_more, put, lookup, of_blocks, means]


@pytest.mark.sample(15)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("count", "width"), [(1, 64), (7, 100), (40, 256)])
def test_values_and_gradients(
    function: Callable[..., Tensor], dtype: torch.dtype, count: int, width: int
) -> None:
    """Numbers that many rows have, and none; one row, and more than a tile has."""
    torch.manual_seed(count + width)
    x, rows = torch.randn(count, width, dtype=dtype), torch.randn(60, width, dtype=dtype)
    index = torch.randint(count, (60,)).clamp(min=count // 3)
    fast = fc.compile(function, backend="interpret", strict=True)
    exact = results(function, index, x.double(), rows.double())
    eager, ours = results(function, index, x, rows), results(fast, index, x, rows)
    for got, theirs, truth in zip(ours, eager, exact, strict=True):
        assert (reason := not_as_close(got, theirs, truth)) is None, reason
    axes = [axis for plan in fast.plan for c in plan.clusters for nest in c.nests for axis in nest.axes]
    assert any(axis.group == RAGGED and len(axis.bounds) == 2 for axis in axes)


@pytest.mark.parametrize("schedules", [schedules_of, cramped])
@pytest.mark.parametrize("function", [add_rows, with_more], ids=lambda f: f.__name__)
def test_every_schedule(function: Callable[..., Tensor], schedules: Any) -> None:
    torch.manual_seed(3)
    x, rows, index = torch.randn(30, 96), torch.randn(200, 96), torch.randint(30, (200,))
    for number in range(6):
        fast = Compiled(function, schedules=schedules, schedule=number)
        torch.testing.assert_close(fast(x, index, rows), function(x, index, rows), rtol=1e-4, atol=1e-4)


def test_tiles_whose_rows_add_up_the_same_numbers_compile() -> None:
    """The interpreter takes the maximum of one number, and Triton does not."""

    def function(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        return x.index_add(1, index, rows.permute(3, 2, 1, 0))

    x, rows, index = torch.randn(13, 5, 2, 3), torch.randn(3, 2, 5, 13), torch.randperm(5)
    fast = Compiled(function, schedules=cramped)
    torch.testing.assert_close(fast(x, index, rows), function(x, index, rows))
    for runner in fast.compiler.runners.values():
        for kernel in runner.candidates[0].kernels:
            compile_for(kernel, "sm_90")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [257, 17000])
def test_a_number_that_most_rows_have_is_summed_in_blocks(dtype: torch.dtype, rows: int) -> None:
    """No program adds up more than a few hundred rows, one after the other."""
    torch.manual_seed(5)
    x, added = torch.randn(9, 2, dtype=dtype), torch.randn(rows, 2, dtype=dtype)
    index = torch.randint(9, (rows,)).clamp(max=4) % 4
    fast = fc.compile(add_rows, backend="interpret", strict=True)
    exact = results(add_rows, index, x.double(), added.double())
    eager, ours = results(add_rows, index, x, added), results(fast, index, x, added)
    for got, theirs, truth in zip(ours, eager, exact, strict=True):
        assert (reason := not_as_close(got, theirs, truth)) is None, reason
    sums = [op for op in map(fast.plan[0].dag.op, fast.plan[0].dag.order) if "sum_rows" in str(op.target)]
    assert [op.outputs[0].shape[0] for op in sums] == ([9, 5, 9] if rows == 257 else [9, 67, 9])


@pytest.mark.parametrize(("count", "rows"), [(5, 0), (0, 0), (1, 1)])
def test_nothing_to_add(count: int, rows: int) -> None:
    x, index, added = torch.randn(count, 64), torch.zeros(rows, dtype=torch.int64), torch.randn(rows, 64)
    fast = fc.compile(with_more, backend="interpret", strict=True)
    torch.testing.assert_close(fast(x, index, added), with_more(x, index, added))


def test_one_kernel_with_what_comes_before_and_after() -> None:
    x, rows, index = torch.randn(30, 96), torch.randn(200, 96), torch.randint(30, (200,))
    fast = fc.compile(with_more, backend="interpret", strict=True)
    fast(x, index, rows)
    (plan,) = fast.plan
    (cluster,) = [c for c in plan.clusters if "sum_rows" in c.name]
    assert {"mul", "sigmoid", "add"} <= {plan.dag.op(n).target._opname for n in cluster.ops}
    assert [left.target for left in plan.leftovers] == ["aten.sort.stable", "aten.searchsorted.Tensor"]


def test_forward_and_backward_sort_once() -> None:
    def both(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        return x.index_add(0, index, x[index] * rows)

    x, rows, index = torch.randn(30, 96).requires_grad_(), torch.randn(200, 96), torch.randint(30, (200,))
    fast = fc.compile(both, backend="interpret", strict=True)
    fast(x, index, rows).sum().backward()
    sorts = [left.target for plan in fast.plan for left in plan.leftovers if "sort" in left.target]
    assert sorts == ["aten.sort.stable", "aten.searchsorted.Tensor"]


@pytest.mark.parametrize("include_self", [True, False])
def test_the_result_of_a_scatter_is_contiguous(include_self: bool) -> None:
    def largest(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
        return x.scatter_reduce(1, index.expand(x.shape), rows, "amax", include_self=include_self)

    x, rows, index = torch.randn(5, 4).T, torch.randn(4, 5), torch.randint(5, (1, 5))
    fast = fc.compile(largest, backend="interpret", strict=True)
    ours, eager = fast(x, index, rows), largest(x, index, rows)
    assert torch.equal(ours, eager) and ours.stride() == eager.stride() == (5, 1)


@pytest.mark.parametrize("columns", [2, 6])
def test_sums_of_neighbours_are_stored_together(columns: int) -> None:
    """One of them has a term that the other lacks."""

    def both(x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return x[:, ::2] * 1, x[index]

    x, index = torch.randn(30, columns, requires_grad=True), torch.randint(30, (50,))
    sent = torch.randn(30, columns // 2), torch.randn(50, columns)
    fast = fc.compile(both, backend="interpret", strict=True)
    (ours,) = torch.autograd.grad(fast(x, index), x, sent)
    (exact,) = torch.autograd.grad(both(x.double(), index), x, [s.double() for s in sent])
    torch.testing.assert_close(ours, exact)


def test_sums_of_sums_are_two_kernels() -> None:
    """The gradient of a lookup in a lookup: each of its terms would be a loop of its own."""
    x, first, second = torch.randn(30, 96), torch.randint(30, (200,)), torch.randint(200, (250,))
    x.requires_grad_()
    fast = fc.compile(lambda x, first, second: x[first][second] * 2, backend="interpret", strict=True)
    sent = torch.randn(250, 96)
    (ours,) = torch.autograd.grad(fast(x, first, second), x, sent)
    (exact,) = torch.autograd.grad(x.double()[first][second] * 2, x, sent.double())
    torch.testing.assert_close(ours, exact.float())
    backward = fast.plan[-1]
    assert len([c for c in backward.clusters if "sum_rows" in c.name]) == 2
    assert "in each iteration of another sum of rows" in str([r.reason for r in backward.refusals])


@pytest.mark.parametrize("number", [30, -31])
def test_a_number_that_no_row_has_is_an_error(number: int) -> None:
    x, rows, index = torch.randn(30, 96), torch.randn(9, 96), torch.full((9,), number)
    fast = fc.compile(add_rows, backend="interpret", strict=True)
    with pytest.raises(IndexError, match=str(number)):
        fast(x, index, rows)


def all_rows(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return x.long().index_add(0, index, rows.long())


def overwriting(x: Tensor, index: Tensor, rows: Tensor) -> Tensor:
    return x.index_put([index], rows)


@pytest.mark.parametrize("function", [all_rows, overwriting], ids=lambda f: f.__name__)
def test_others_stay_the_librarys(function: Callable[..., Tensor]) -> None:
    x, rows, index = torch.randn(30, 96), torch.randn(20, 96), torch.randperm(30)[:20]
    fast = fc.compile(function, backend="interpret")
    torch.testing.assert_close(fast(x, index, rows), function(x, index, rows))
    assert not any("sum_rows" in c.name for c in fast.plan[0].clusters)


def test_terms_that_depend_on_where_they_stand() -> None:
    """An element that is overwritten after the lookup sends no gradient back."""

    def overwritten(x: Tensor, index: Tensor, new: Tensor) -> Tensor:
        return torch.select_scatter(x[index], new, 1, -1)

    x, index, new = torch.randn(8, 4, 9), torch.randint(8, (8,)), torch.randn(8, 9)
    sent = torch.randn(8, 4, 9)
    fast = fc.compile(overwritten, backend="interpret", strict=True)
    x.requires_grad_()
    ours, eager = (torch.autograd.grad(f(x, index, new), x, sent)[0] for f in (fast, overwritten))
    torch.testing.assert_close(ours, eager)
    assert any("sum_rows" in cluster.name for plan in fast.plan for cluster in plan.clusters)
