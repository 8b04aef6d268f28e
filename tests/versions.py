"""Behaviour that not every supported version of PyTorch has, with the reasons."""

from __future__ import annotations

import pytest
import torch
import triton

# Triton 3.9 keeps more in registers across a wait, and spills; it moves the masked ends of a misaligned row
# one element at a time. What it makes is right, but how well it does is seen, not promised.
MEASURED = (3, 7)
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
of_measured_versions = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) > MEASURED,
    reason="registers, spills and widths of accesses are those of Triton 3.6 and 3.7, as they were measured",
)


def not_before(version: tuple[int, int], reason: str) -> pytest.MarkDecorator:
    """Skip a test, or a parameter of one, before a version of PyTorch that got it wrong itself."""
    name = ".".join(map(str, version))
    return pytest.mark.skipif(version > TORCH, reason=f"PyTorch before {name}: {reason}")
