"""Every row of the matrix products, against the product of the arguments that it names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._ops import OpOverload

from fusion_compiler.ops.own.experts import expert_mm
from fusion_compiler.ops.products import factors_of
from fusion_compiler.ops.schema import bound

aten = torch.ops.aten


def randn(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


@pytest.mark.parametrize(
    ("target", "arguments", "rank"),
    [
        (aten.mm.default, (randn(3, 5), randn(5, 4)), 2),
        (aten.addmm.default, (randn(4), randn(3, 5), randn(5, 4)), 2),
        (aten.bmm.default, (randn(2, 3, 5), randn(2, 5, 4)), 3),
        (aten.baddbmm.default, (randn(3, 4), randn(2, 3, 5), randn(2, 5, 4)), 3),
        (aten.matmul.default, (randn(2, 3, 5), randn(5, 4)), None),
        (aten.linear.default, (randn(2, 3, 5), randn(4, 5), randn(4)), None),
    ],
    ids=lambda value: str(value) if isinstance(value, OpOverload) else "",
)
def test_a_product_is_that_of_its_factors_and_what_is_added(
    target: OpOverload, arguments: Any, rank: int | None
) -> None:
    row, named = factors_of(target), bound(target, arguments, {})
    assert row is not None and row.rank == rank
    left, right = named[row.left], named[row.right]
    added = 0 if row.added is None else named[row.added]
    truth = left @ (right.t() if target is aten.linear.default else right) + added
    torch.testing.assert_close(target(*arguments), truth)
    assert rank in (None, left.dim())


def test_each_row_of_experts_is_multiplied_by_the_matrix_that_it_chooses() -> None:
    rows, matrices, expert = randn(3, 5), randn(2, 5, 4), torch.tensor([1, 0, 1])
    factors, named = factors_of(expert_mm), bound(expert_mm, (rows, matrices, expert), {})
    assert factors is not None and factors.rank is None
    assert named[factors.left] is rows and named[factors.right] is matrices


@pytest.mark.parametrize("target", [aten.mul.Tensor, aten.convolution.default, torch.mm, "mm"])
def test_other_callables_are_no_products(target: object) -> None:
    assert factors_of(target) is None
