"""PyTorch's own samples of an operator's arguments."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch


def opinfo_samples(info: Any, dtype: torch.dtype, most: int, requires_grad: bool = False) -> Iterator[Any]:
    """The first of an OpInfo's SampleInputs, on the CPU.

    `info.sample_inputs` looks through the stack's source for the test that asks: a tenth of all tests' time.
    """
    return itertools.islice(info.sample_inputs_func(info, "cpu", dtype, requires_grad), most)
