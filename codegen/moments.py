"""The mean of a row and its sum of squares around it, where a tile holds the row.

    off = x - mean;  squares, rest = sum(off^2), sum(off);  mean += rest / n;  squares -= rest^2 / n

The corrected two-pass algorithm of Chan, Golub and LeVeque, "Algorithms for computing the sample variance",
1983: what rounding left in the first mean is seen in the sum of the differences, for which the threads wait
only once. A row of equal elements has exactly that mean.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from fusion_compiler.codegen.analysis import waiting
from fusion_compiler.codegen.expression import dim_text
from fusion_compiler.loops import COLS, Compute, Reduce, operands_of

if TYPE_CHECKING:
    from fusion_compiler.codegen.printer import Printer


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
