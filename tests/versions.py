"""Of which versions of Triton kernels are held to figures: those with which they were measured."""

from __future__ import annotations

import pytest
import triton

# Newer compilers keep more in registers across a wait, and spill: what they take is seen, not promised.
MEASURED = (3, 7)
of_measured_versions = pytest.mark.skipif(
    tuple(map(int, triton.__version__.split(".")[:2])) > MEASURED,
    reason="registers and spills are those of Triton 3.6 and 3.7, with which the kernels were measured",
)
