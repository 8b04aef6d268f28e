"""Grouped products of few rows as clusters: values against float64, what is read, and what stays a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fusion_compiler as fc
from fusion_compiler.ir.experts import expert_mm
from fusion_compiler.passes.fuse import candidates
from fusion_compiler.passes.fuse.cost import FEW_ROWS
from fusion_compiler.passes.rewrites.experts import MOST_ROWS
from tests.exactness import not_as_close

DTYPES = (torch.float32, torch.bfloat16)


@pytest.fixture(autouse=True)
def small_matrices(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Clusters of matrices that are too small to be worth one."""
    monkeypatch.setattr(candidates, "LIBRARY_MARGIN", float("inf"))
    monkeypatch.setenv("FUSION_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


def experts_of(offsets: Tensor, rows: int) -> Tensor:
    """int64 [rows]; of a row that no expert has, the last one."""
    return (offsets <= torch.arange(rows)[:, None]).sum(1).clamp(0, len(offsets) - 1)


def in_rows(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """x: [S, k], w: [E, n, k], as linear layers have it; offsets: int32 [E]."""
    return in_columns(x, w.mT, offsets)


def in_columns(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """w: [E, k, n]. Nothing but bfloat16 can be traced by PyTorch."""
    if x.dtype is torch.bfloat16:
        return F.grouped_mm(x, w, offs=offsets)
    return expert_mm(x, w, experts_of(offsets, len(x)))


def exact(f: Callable[..., Tensor], x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    chosen = w.double()[experts_of(offsets, len(x))]
    return (x.double()[:, None] @ (chosen.mT if f is in_rows else chosen))[:, 0]


def tensors(rows: int, experts: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x and w, whose rows begin at multiples of 16 bytes, as PyTorch's grouped product wants them."""
    width = -(-k // 8) * 8
    x = torch.randn(rows, width, dtype=dtype)[:, :k]
    return x, torch.randn(experts, n, width, dtype=dtype)[..., :k]


def offsets_of(experts: int, *chosen: int) -> Tensor:
    """int32 [experts], from which expert each row is of."""
    counts = torch.bincount(torch.tensor(chosen, dtype=torch.int64), minlength=experts)
    return counts.cumsum(0).int()


def planned(f: Callable[..., Tensor], *inputs: Tensor) -> tuple[Tensor, fc.FusionPlan]:
    torch._dynamo.reset()  # sizes of other cases are no symbols here
    fast = fc.compile(f, backend="interpret", strict=True)
    with torch.no_grad():
        ours = fast(*inputs)
    (plan,) = fast.plan
    return ours, plan


def checked(f: Callable[..., Tensor], x: Tensor, w: Tensor, offsets: Tensor) -> fc.FusionPlan:
    """The plan of `f`: no call is left, and it is as close to float64 as eager is."""
    ours, plan = planned(f, x, w, offsets)
    eager = f(x, w, offsets)
    assert ours.stride() == eager.stride()
    assert not_as_close(ours, eager, exact(f, x, w, offsets)) is None
    assert not plan.leftovers, str(plan)
    assert x.dtype is not torch.bfloat16 or "experts: done" in str(plan)
    return plan


def some(experts: int, rows: int) -> Tensor:
    return offsets_of(experts, *torch.randint(experts, (rows,)).tolist())


SIZES = [(1, 8, 64, 48), (2, 8, 160, 96), (3, 4, 72, 40), (8, 3, 32, 24), (16, 16, 32, 16), (5, 1, 64, 8)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, (2, 5, 33, 7), (3, 3, 257, 1), (2, 4, 3, 19)], ids=str)
def test_values(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    checked(in_rows, *tensors(*sizes, dtype), some(sizes[1], sizes[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matrices_in_the_other_order(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    rows, experts, k, n = sizes
    x, w = torch.randn(rows, k, dtype=dtype), torch.randn(experts, k, n, dtype=dtype)
    checked(in_columns, x, w, some(experts, rows))


@pytest.mark.parametrize("chosen", [(0, 0, 0), (4, 4, 4), (2, 2, 2), (0, 2, 4), (1, 1, 3)], ids=str)
def test_whose_rows_they_are(chosen: tuple[int, ...]) -> None:
    """All of one expert's, of the first and the last; some experts have none."""
    checked(in_rows, *tensors(3, 5, 40, 24, torch.bfloat16), offsets_of(5, *chosen))


@pytest.mark.parametrize("chosen", [(), (0,), (3, 3)], ids=str)
def test_offsets_that_end_before_the_rows(chosen: tuple[int, ...]) -> None:
    """Rows that no expert has get the last one's product: eager's are not initialised."""
    x, w = tensors(4, 5, 40, 24, torch.bfloat16)
    ours, plan = planned(in_rows, x, w, offsets_of(5, *chosen))
    assert "experts: done" in str(plan)
    expected = exact(in_rows, x, w, offsets_of(5, *chosen))
    torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_call_itself_is_the_same(dtype: torch.dtype) -> None:
    """What a cluster is not worth runs as PyTorch's grouped product."""
    x, w = tensors(6, 5, 40, 24, dtype)
    expert = torch.tensor([0, 0, 2, 3, 3, 4])
    expected = torch.stack([x[r] @ w[e].T for r, e in enumerate(expert)])
    torch.testing.assert_close(expert_mm(x, w.mT, expert), expected)


def test_limits_agree() -> None:
    assert MOST_ROWS == FEW_ROWS
