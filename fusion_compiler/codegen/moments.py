"""The mean of a row and its sum of squares around it, where a tile holds the row.

    off = x - mean;  squares, rest = sum(off^2), sum(off);  mean += rest / n;  squares -= rest^2 / n

The corrected two-pass algorithm of Chan, Golub and LeVeque, "Algorithms for computing the sample variance",
1983: what rounding left in the first mean is seen in the sum of the differences, for which the threads wait
only once. A row of equal elements has exactly that mean. Where the elements have 16 bits it has so anyway.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fusion_compiler.codegen.expression import dim_text
from fusion_compiler.ir.loops import COLS, Compute, Dim, Load, Reduce, operands_of
from fusion_compiler.schedule.analysis import HALVES, rounding_of, waiting

if TYPE_CHECKING:
    from fusion_compiler.codegen.printer import Printer

_TO_COPY = torch.ops.aten._to_copy.default

LONGEST = 8192  # so many equal elements of 11 significant bits have a sum that float32 holds


def is_exact(p: Printer, total: int, width: Dim) -> bool:
    """Whether adding up `width` equal elements does not round: they have 16 bits, and are not too many.

    Differences from the mean do round, all alike between two powers of two: a correction would add that.
    """
    (source,) = operands_of(p.loops.nodes[total])
    node = p.loops.nodes[source]
    while isinstance(node, Compute) and node.target is _TO_COPY and rounding_of(node) is None:
        (source,) = operands_of(node)
        node = p.loops.nodes[source]
    dtype = str(p.dtypes[node.buffer]) if isinstance(node, Load) else rounding_of(node)
    return dtype in HALVES and isinstance(width, int) and width <= LONGEST


def print_squares(p: Printer, number: int) -> None:
    """Print a sum of squares around a mean, and correct both; what was made of that mean is made again."""
    _, mean = p.a.moments[number]
    reduce, middle = p.loops.nodes[number], p.loops.nodes[mean]
    assert isinstance(reduce, Reduce) and isinstance(middle, Compute)
    (off, *_) = operands_of(p.loops.nodes[reduce.operand])
    tiles = [p.tile_of(replace(reduce, operand=n), frozenset({COLS})) for n in (reduce.operand, off)]
    squares, rest, corrected = p.fresh(p.base_of(number)), p.fresh("rest"), p.fresh(p.base_name(middle))
    p.line(f"{squares}, {rest} = fm.sums({', '.join(tiles)}, {'0' if p.flat else '1'}, {not p.flat})")
    known = f"{p.env[mean]}, {squares}, {rest}, {dim_text(p.a.size(COLS))}"
    p.line(f"{corrected}, {squares} = fm.corrected({known})")
    for made in waiting(p.loops, (mean,)) & p.env.keys():
        del p.env[made]
    p.env[mean], p.env[number] = corrected, squares
