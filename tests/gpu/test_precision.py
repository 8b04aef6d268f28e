"""Functions on the device's own instructions: every number of 16 bits within bounds, many of 32; bytes."""

from __future__ import annotations

import functools

import pytest
import torch

import fusion_compiler as fc
from tests.codegen.test_full_precision import DIVISORS, check_division, check_tanh, numbers
from tests.codegen.test_precision import DTYPES, FUNCTIONS, WITH_GRADIENTS, bounds, check, every_number


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_number(name: str, dtype: torch.dtype) -> None:
    for fn in FUNCTIONS[name]:
        compiler = functools.partial(fc.compile, strict=True)
        x = every_number(dtype).cuda()
        check(compiler, fn, x, bounds()[name][dtype], name in WITH_GRADIENTS)


def test_tanh_in_full_precision() -> None:
    check_tanh("auto", numbers(2**26).cuda())


@pytest.mark.parametrize("divisor", DIVISORS, ids=str)
def test_division_by_a_number(divisor: float) -> None:
    check_division("auto", numbers(2**24).cuda(), divisor)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_every_byte_becomes_its_number(dtype: torch.dtype) -> None:
    """In rows of whole words, of one byte more, and that begin anywhere; alone and multiplied."""
    numbers = torch.arange(256, device="cuda").to(torch.uint8).view(dtype)
    bytes_ = numbers[torch.randint(256, (64, 4099), device="cuda")]
    bytes_[0, :256] = numbers
    fast = fc.compile(lambda x: (x.float() * 2 + 1, x.to(torch.bfloat16), x.float().sum(-1)), strict=True)
    for x in (bytes_[:, :4096].contiguous(), bytes_, bytes_[:, 3:], bytes_[:, :3].contiguous(), numbers[:1]):
        twice, narrow, total = fast(x)
        exact = x.double()
        assert torch.equal(twice.double(), exact * 2 + 1) and torch.equal(narrow.double(), exact)
        assert torch.equal(total.double(), exact.sum(-1))  # whole numbers below 2^24


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8], ids=str)
def test_products_with_bytes_are_exact(dtype: torch.dtype) -> None:
    weight = torch.randint(0, 256, (2048, 4096), device="cuda").to(torch.uint8).view(dtype)
    x = torch.randint(-8, 9, (1, 4096), device="cuda").float()
    with torch.no_grad():
        got = fc.compile(lambda x, w: torch.nn.functional.linear(x, w.float()), strict=True)(x, weight)
    assert torch.equal(got.double(), x.double() @ weight.double().T)
