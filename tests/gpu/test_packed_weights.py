"""Weights of bits with scales of groups, on the device: the bits' values, and products of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from tests.codegen.test_packed_weights import BITS, GROUP, PACKED, grouped
from tests.exactness import not_as_close


@pytest.mark.parametrize("f", [f for f, _ in BITS])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_bits_of_bytes_become_floats_exactly(dtype: torch.dtype, f: Callable[[Tensor], Tensor]) -> None:
    bytes_ = torch.arange(256).to(torch.uint8).view(dtype).cuda()
    assert torch.equal(fc.compile(f, strict=True)(bytes_), f(bytes_))


@pytest.mark.parametrize("unpacked", PACKED, ids=lambda f: f.__name__)
@pytest.mark.parametrize("rows", [1, 2, 4])
def test_scales_of_groups(rows: int, unpacked: Callable[[Tensor], Tensor]) -> None:
    w = torch.randint(0, 256, (2048, 2048), dtype=torch.uint8, device="cuda")
    width = unpacked(w[:1]).shape[1]
    x, scale = (torch.randn(s, device="cuda").bfloat16() for s in ((rows, width), (2048, width // GROUP)))

    def f(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        return grouped(x, w, scale, unpacked)

    fast = fc.compile(f, strict=True)
    with torch.no_grad():
        ours, eager, exact = fast(x, w, scale), f(x, w, scale), f(x.double(), w, scale.double())
    assert not_as_close(ours, eager, exact) is None
    (plan,) = fast.plan
    assert len(plan.clusters) == 1 and not plan.leftovers, str(plan)
