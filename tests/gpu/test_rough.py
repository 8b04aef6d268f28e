"""Functions of 16-bit tensors on the device's own instructions: every number, within their bounds."""

from __future__ import annotations

import functools

import pytest
import torch

import fusion_compiler as fc
from tests.test_rough import DTYPES, FUNCTIONS, WITH_GRADIENTS, bounds, check, every_number


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_number(name: str, dtype: torch.dtype) -> None:
    for fn in FUNCTIONS[name]:
        compiler = functools.partial(fc.compile, strict=True)
        x = every_number(dtype).cuda()
        check(compiler, fn, x, bounds()[name][dtype], name in WITH_GRADIENTS)
