"""The device's memory is given back after each test: several processes may test on one device."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest
import torch


@pytest.fixture(autouse=True)
def memory_is_given_back() -> Generator[None]:
    yield
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
