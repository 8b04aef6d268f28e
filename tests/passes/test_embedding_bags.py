"""Bags of embeddings of one size: values and gradients, and no library call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc
from tests.ops.test_rows_by_number import SEED, close

OPTIONS: list[dict[str, Any]] = [
    {"mode": "sum"},
    {"mode": "mean"},
    {"mode": "sum", "padding_idx": 3},
    {"mode": "mean", "padding_idx": 3},
    {"mode": "mean", "padding_idx": -2},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bags_are_lookups_and_sums(options: dict[str, Any], dtype: torch.dtype) -> None:
    torch.manual_seed(SEED)

    def bags(weight: Tensor, indices: Tensor) -> Tensor:
        return F.embedding_bag(indices, weight, **options)

    indices = torch.randint(6, (40, 4))
    indices[0] = 3  # nothing but padding
    fast = fc.compile(bags, backend="interpret", strict=True)
    close(fast, bags, [torch.randn(6, 5).to(dtype)], indices)
    library = "embedding_bag" if "padding_idx" in options else "embedding"  # a sum of some of the rows
    assert not [op for plan in fast.plan for op in plan.leftovers if library in op.target]


def test_bags_with_a_factor_for_each_row() -> None:
    torch.manual_seed(SEED)

    def bags(weight: Tensor, factors: Tensor, indices: Tensor) -> Tensor:
        return F.embedding_bag(indices, weight, mode="sum", per_sample_weights=factors)

    fast = fc.compile(bags, backend="interpret", strict=True)
    close(fast, bags, [torch.randn(6, 5), torch.randn(40, 4)], torch.randint(6, (40, 4)))
    assert not [op for plan in fast.plan for op in plan.leftovers if "embedding_bag" in op.target]


@pytest.mark.parametrize("mode", ["sum", "max"])
def test_others_stay_the_librarys(mode: str) -> None:
    """Bags whose sizes are data, and maxima."""

    def bags(weight: Tensor, indices: Tensor, offsets: Tensor) -> Tensor:
        if mode == "max":
            return F.embedding_bag(indices.view(2, -1), weight, mode=mode)
        return F.embedding_bag(indices, weight, offsets, mode=mode)

    weight, indices, offsets = torch.randn(6, 5), torch.randint(6, (10,)), torch.tensor([0, 3, 3])
    fast = fc.compile(bags, backend="interpret")
    torch.testing.assert_close(fast(weight, indices, offsets), bags(weight, indices, offsets))
    assert [op for op in fast.plan[0].leftovers if "embedding" in op.target]


def test_a_row_that_is_not_there_is_an_error() -> None:
    fast = fc.compile(lambda w, i: F.embedding_bag(i, w, mode="sum"), backend="interpret", strict=True)
    for wrong in (6, -1):
        with pytest.raises(IndexError):
            fast(torch.randn(6, 5), torch.full((3, 2), wrong))
