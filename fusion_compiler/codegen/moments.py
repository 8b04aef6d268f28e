"""The mean of a row and its sum of squares around it, where a tile holds the row.

    off = x - mean;  squares, rest = sum(off^2), sum(off);  mean += rest / n;  squares -= rest^2 / n

The corrected two-pass algorithm of Chan, Golub and LeVeque, "Algorithms for computing the sample variance",
1983: what rounding left in the first mean is seen in the sum of the differences, for which the threads wait
only once. A row of equal elements has exactly that mean. Where the elements have 16 bits it has so anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion_compiler.codegen.builder import Builder
from fusion_compiler.codegen.tile import Assign
from fusion_compiler.ir.loops import COLS, Compute, Dim, Load, operands_of
from fusion_compiler.ir.syntax import Expression, Var, fm
from fusion_compiler.schedule.analysis import HALVES, rounding_of, waiting

_TO_COPY = torch.ops.aten._to_copy.default


def scale_of(count: int) -> float:
    """Return the power of two by which each of `count` terms is multiplied before they are added up.

    The sum of the largest numbers is finite then. No digit changes, and a product that is added is one
    instruction.
    """
    return 2.0 ** -(count - 1).bit_length()


LONGEST = 8192  # so many equal elements of 11 significant bits have a sum that float32 holds


def is_exact(b: Builder, total: int, width: Dim) -> bool:
    """Whether adding up `width` equal elements does not round: they have 16 bits, and are not too many.

    Differences from the mean do round, all alike between two powers of two: a correction would add that.
    """
    (source,) = operands_of(b.loops.nodes[total])
    node = b.loops.nodes[source]
    while isinstance(node, Compute) and node.target is _TO_COPY and rounding_of(node) is None:
        (source,) = operands_of(node)
        node = b.loops.nodes[source]
    dtype = str(b.dtypes[node.buffer]) if isinstance(node, Load) else rounding_of(node)
    return dtype in HALVES and isinstance(width, int) and width <= LONGEST


def operands(b: Builder, number: int) -> tuple[int, int]:
    """(x - mean, its square) of a sum of squares around a mean."""
    square = b.reduction(number).operand
    (off, *_) = operands_of(b.loops.nodes[square])
    return off, square


def build_squares(b: Builder, number: int, tiles: Sequence[Expression]) -> None:
    """A sum of squares around a mean, with its correction and the mean's; what was made of that mean is made
    again. tiles: of the squares, and of the differences."""
    _, mean = b.a.moments[number]
    middle = b.loops.nodes[mean]
    assert isinstance(middle, Compute)
    squares, rest = Var(b.base_of(number)), Var("rest")
    b.add(Assign((squares, rest), fm.sums(*tiles, b.col_axis, not b.tile.flat)))
    corrected = Var(str(middle.target._opname).lstrip("_"))
    value = fm.corrected(b.env[mean], squares, rest, b.a.size(COLS))
    b.add(Assign((corrected, squares), value))
    for made in waiting(b.loops, (mean,)) & b.env.keys():
        del b.env[made]
    b.env[mean], b.env[number] = corrected, squares
