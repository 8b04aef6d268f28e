"""Gradients of lookups of every form, and scatters by rows: sorted sums, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from tests.exactness import not_as_close

# Fresh numbers in each run; a failure shows the seed.
SEED = int(torch.randint(1 << 30, ()))


def by_two(x: Tensor, i: Tensor) -> Tensor:
    return x[i % x.shape[0], i - x.shape[1]]  # negative ones count from the end


def by_outer_dimensions(x: Tensor, i: Tensor) -> Tensor:
    return x[i[:6] % x.shape[0], :, i[:6] % x.shape[2]]


def by_broadcast(x: Tensor, i: Tensor) -> Tensor:
    return x[i[:3, None] % x.shape[0], i[None, :5]]


def by_the_last(x: Tensor, i: Tensor) -> Tensor:
    return x[..., i % x.shape[2]]


def by_one_in_the_middle(x: Tensor, i: Tensor) -> Tensor:
    return x.index_select(1, i)


def by_all(x: Tensor, i: Tensor) -> Tensor:
    return x[i % x.shape[0], i, i % x.shape[2]]


def by_a_matrix(x: Tensor, i: Tensor) -> Tensor:
    return x[:, i.view(2, -1)]


def narrow_rows(x: Tensor, i: Tensor) -> Tensor:
    return x[0, :, :1][i] * x[0, :, 0][i].unsqueeze(-1)


LOOKUPS = [
    by_two, by_outer_dimensions, by_broadcast, by_the_last, by_one_in_the_middle, by_all, by_a_matrix,
    narrow_rows,
]  # fmt: skip


def is_eager(plan: Any) -> list[str]:
    scatters = ("index_put", "scatter_reduce", "scatter_add", "index_add", "embedding")
    return [str(op.target) for op in plan.leftovers if any(name in str(op.target) for name in scatters)]


def close(fast: Callable[..., Any], function: Callable[..., Any], floats: list[Tensor], *others: Any) -> None:
    """Compare results and gradients with float64, as exactly as eager."""

    def run(f: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in floats]
        out = f(*leaves, *others)
        torch.manual_seed(SEED)
        sent = torch.randn(out.shape, dtype=torch.float64).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, sent)]

    exact, eager = run(function, torch.float64), run(function, floats[0].dtype)
    for got, theirs, truth in zip(run(fast, floats[0].dtype), eager, exact, strict=True):
        assert got.shape == theirs.shape
        assert (reason := not_as_close(got, theirs, truth)) is None, f"{reason}, seed {SEED}"


@pytest.mark.parametrize("function", LOOKUPS, ids=lambda f: f.__name__)
def test_gradients_of_lookups_are_sorted_sums(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(SEED)
    x, i = torch.randn(3, 9, 5), torch.randint(9, (60,))
    fast = fc.compile(function, backend="interpret", strict=True)
    close(fast, function, [x], i)
    assert [name for plan in fast.plan for name in is_eager(plan)] == []


@pytest.mark.parametrize("function", LOOKUPS, ids=lambda f: f.__name__)
def test_sizes_that_differ(function: Callable[..., Tensor]) -> None:
    torch.manual_seed(SEED)
    fast = fc.compile(function, backend="interpret", strict=True, dynamic=True)
    for count in (40, 24):
        close(fast, function, [torch.randn(3, 9, 5)], torch.randint(9, (count,)))


@pytest.mark.parametrize("numbers", [[9], [-10]])
def test_an_index_that_lies_outside_is_an_error(numbers: list[int]) -> None:
    x, i = torch.randn(9, 3, requires_grad=True), torch.tensor(numbers)
    fast = fc.compile(lambda x, i: x[i] * 2, backend="interpret", strict=True)
    with pytest.raises(IndexError):
        fast(x, i).sum().backward()


def test_a_scatter_of_a_negative_row_is_an_error() -> None:
    x, i, rows = torch.zeros(9, 4), torch.full((30,), -1), torch.randn(30, 4)
    fast = fc.compile(lambda x, i, r: x.scatter_add(0, i[:, None].expand(-1, 4), r), backend="interpret")
    with pytest.raises((IndexError, RuntimeError)):
        fast(x, i, rows)


def test_no_lookups() -> None:
    x, none = torch.randn(9, 3, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    fast = fc.compile(lambda x, i: x[i] * 2, backend="interpret", strict=True)
    fast(x, none).sum().backward()
    assert x.grad is not None and not x.grad.any()


@pytest.mark.parametrize("reduce", ["sum", "amax", "amin"])
@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_scatters_by_rows(reduce: str, include_self: bool, dim: int) -> None:
    torch.manual_seed(SEED)

    def scatter(x: Tensor, rows: Tensor, i: Tensor) -> Tensor:
        index = i[:, None].expand(-1, 4) if dim == 0 else i.expand(4, -1)
        return x.scatter_reduce(dim, index, rows, reduce, include_self=include_self)

    x, rows = torch.randn(10, 4), torch.randn(50, 4)
    x, rows = (x, rows) if dim == 0 else (x.t().contiguous(), rows.t().contiguous())
    fast = fc.compile(scatter, backend="interpret", strict=True)
    close(fast, scatter, [x, rows], torch.randint(8, (50,)))
    assert [name for plan in fast.plan for name in is_eager(plan)] == []


def test_scatters_of_numbers_of_a_count_that_differs() -> None:
    fast = fc.compile(
        lambda x, i, y: x.scatter_reduce(0, i, y, "amax"), backend="interpret", strict=True, dynamic=True
    )
    for count in (16, 19):
        x, y, i = torch.randn(count), torch.randn(count), torch.randint(count, (count,))
        assert torch.equal(fast(x, i, y), x.scatter_reduce(0, i, y, "amax"))


def test_a_maximum_keeps_nan_and_the_smallest_number() -> None:
    rows = torch.tensor([[1.0, -torch.inf], [torch.nan, 3.0], [-5.0, -torch.inf]])
    index = torch.tensor([0, 0, 2])

    def largest(rows: Tensor, index: Tensor) -> Tensor:
        x = rows.new_full((4, 2), -7.0)
        return x.scatter_reduce(0, index[:, None].expand(-1, 2), rows, "amax", include_self=False)

    fast = fc.compile(largest, backend="interpret", strict=True)
    torch.testing.assert_close(fast(rows, index), largest(rows, index), equal_nan=True, rtol=0, atol=0)


def test_masks_are_left_alone() -> None:
    x, mask = torch.randn(9, 3), torch.tensor([True, False, True] * 3)
    fast = fc.compile(lambda x, m: x.index_put([m], torch.ones(()), accumulate=True), backend="interpret")
    torch.testing.assert_close(fast(x, mask), x.index_put([mask], torch.ones(()), accumulate=True))


def test_a_table_of_mostly_other_rows_is_the_librarys() -> None:
    """The bounds of a million numbers would take more time than two rows of one element."""
    x, i = torch.randn(1000, 1, requires_grad=True), torch.tensor([3, 900])
    fast = fc.compile(lambda x, i: x[i] * 2, backend="interpret", strict=True)
    fast(x, i).sum().backward()
    assert x.grad is not None and x.grad.sum() == 4
    assert [name for plan in fast.plan for name in is_eager(plan)] != []


def test_one_sort_for_each_index_of_a_step() -> None:
    """Sums, maxima and the gradients of lookups by one index share its order, forward and backward."""

    def attend(h: Tensor, e: Tensor, src: Tensor, dst: Tensor) -> Tensor:
        score = (e[src] + e[dst]).tanh()
        index = dst[:, None].expand(-1, e.shape[1])
        top = torch.full_like(e, -9.0).scatter_reduce(0, index, score.detach(), "amax")
        weight = (score - top[dst]).exp()
        weight = weight / torch.zeros_like(e).index_add(0, dst, weight)[dst]
        return torch.zeros_like(h).index_add(0, dst, h[src] * weight[..., None])

    torch.manual_seed(SEED)
    src, dst = torch.randint(20, (2, 90))
    fast = fc.compile(attend, backend="interpret", strict=True)
    close(fast, attend, [torch.randn(20, 4, 6), torch.randn(20, 4)], src, dst)
    calls = [op.target for plan in fast.plan for op in plan.leftovers]
    assert sorted(calls) == ["aten.searchsorted.Tensor"] * 2 + ["aten.sort.stable"] * 2
