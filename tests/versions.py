"""Of which versions of Triton kernels are held to figures: those with which they were measured."""

from __future__ import annotations

import pytest
import triton

# Triton 3.9 keeps more in registers across a wait, and spills; it moves the masked ends of a skewed row one
# element at a time. What it makes is right, but how well it does is seen, not promised.
MEASURED = (3, 7)
of_measured_versions = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) > MEASURED,
    reason="registers, spills and widths of accesses are those of Triton 3.6 and 3.7, as they were measured",
)
