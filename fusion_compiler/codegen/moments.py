"""The mean of a row and the sum of squares around it, for a tile that holds the row.

    off = x - mean;  squares, rest = sum(off^2), sum(off);  mean += rest / n;  squares -= rest^2 / n

This is the corrected two-pass algorithm of Chan, Golub and LeVeque, "Algorithms for computing the sample
variance", 1983: the sum of the differences shows the rounding error of the first mean, at the cost of one
barrier for both sums. A row of equal elements gets exactly that mean. 16-bit elements do not need the
correction for that.
"""

from __future__ import annotations

from fusion_compiler.ir.loops import LoopNest, operands_of


def scale_of(count: int) -> float:
    """Return the power of two by which each of `count` terms is multiplied before they are added up.

    Then the sum of the largest numbers is finite. No digit changes, and a product and its addition are one
    instruction.
    """
    return 2.0 ** -(count - 1).bit_length()


def operands(loops: LoopNest, number: int) -> tuple[int, int]:
    """Return (x - mean, its square) of a sum of squares around a mean."""
    (square,) = operands_of(loops.nodes[number])
    (difference, *_) = operands_of(loops.nodes[square])
    return difference, square
