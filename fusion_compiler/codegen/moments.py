"""The mean of a row and the sum of squares around it, for a tile that holds the row.

    off = x - mean;  squares, rest = sum(off^2), sum(off);  mean += rest / n;  squares -= rest^2 / n

This is the corrected two-pass algorithm of Chan, Golub and LeVeque, "Algorithms for computing the sample
variance", 1983: the sum of the differences shows the rounding error of the first mean, at the cost of one
barrier for both sums. A row of equal elements gets exactly that mean. 16-bit elements do not need the
correction for that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fusion_compiler.ir.loops import Compute, Dim, Load, LoopNest, operands_of
from fusion_compiler.schedule.analysis import HALVES, rounding_of

_TO_COPY = torch.ops.aten._to_copy.default


def scale_of(count: int) -> float:
    """Return the power of two by which each of `count` terms is multiplied before they are added up.

    Then the sum of the largest numbers is finite. No digit changes, and a product and its addition are one
    instruction.
    """
    return 2.0 ** -(count - 1).bit_length()


LONGEST = 8192  # float32 represents the sum of so many equal elements with 11 significant bits


def is_exact(loops: LoopNest, dtypes: Mapping[str, torch.dtype], total: int, width: Dim) -> bool:
    """True if adding up `width` equal elements does not round: they have 16 bits, and are not too many.
    dtypes: those of the buffers.

    Differences from the mean do round, all in the same way between two powers of two, which a correction
    would add.
    """
    (source,) = operands_of(loops.nodes[total])
    node = loops.nodes[source]
    while isinstance(node, Compute) and node.target is _TO_COPY and rounding_of(node) is None:
        (source,) = operands_of(node)
        node = loops.nodes[source]
    dtype = str(dtypes[node.buffer]) if isinstance(node, Load) else rounding_of(node)
    return dtype in HALVES and isinstance(width, int) and width <= LONGEST


def operands(loops: LoopNest, number: int) -> tuple[int, int]:
    """Return (x - mean, its square) of a sum of squares around a mean."""
    (square,) = operands_of(loops.nodes[number])
    (difference, *_) = operands_of(loops.nodes[square])
    return difference, square
