"""Rows that are added up by their numbers, on the device: values, gradients, the same bits each time."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from tests.codegen.test_sum_rows import FUNCTIONS, results
from tests.exactness import not_as_close


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("count", "rows", "width"), [(1000, 8000, 512), (3, 5000, 64), (70, 300, 1000)])
def test_values_and_gradients(
    function: Callable[..., Tensor], dtype: torch.dtype, count: int, rows: int, width: int
) -> None:
    torch.manual_seed(count)
    x, added = (torch.randn(n, width, device="cuda", dtype=dtype) for n in (count, rows))
    index = torch.randint(count, (rows,), device="cuda")
    index[: rows // 2] = count // 2  # of one number as many as of all others
    fast = fc.compile(function, strict=True)
    exact = results(function, index, x.double(), added.double())
    eager, ours = results(function, index, x, added), results(fast, index, x, added)
    for got, theirs, truth in zip(ours, eager, exact, strict=True):
        assert (reason := not_as_close(got, theirs, truth)) is None, reason
    for got, again in zip(ours, results(fast, index, x, added), strict=True):
        assert torch.equal(got, again)
