"""Sums of squares around a mean in loop nests: sum((x - mean)^2), where the mean is sum(x) / n."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from fusion_compiler.ir.dims import Dim, product
from fusion_compiler.ir.loops import (
    Load,
    LoopNest,
    Reduce,
    is_applied,
    number_of,
    operands_of,
    pair_of,
    rounding_of,
    source_of,
)
from fusion_compiler.ops.arithmetic import DIV, MUL, POW, SUB

HALVES = (str(torch.float16), str(torch.bfloat16))
LONGEST = 8192  # float32 represents the sum of so many equal elements with 11 significant bits


def mean_of_squares(loops: LoopNest, number: int) -> tuple[int, int] | None:
    """Return (sum(x), mean) if a node is sum((x - mean)^2) over the same axes, whose sizes are known."""
    nodes, reduce = loops.nodes, loops.nodes[number]
    if not isinstance(reduce, Reduce):
        return None
    square, width = nodes[reduce.operand], product(loops.axes[k].size for k in reduce.axes)
    if reduce.combine != "sum" or not isinstance(width, int):
        return None
    squared = set(pair_of(square, MUL))
    if is_applied(square, POW) and number_of(nodes, square, "exponent") == 2:
        squared = set(operands_of(square))
    minus = pair_of(nodes[squared.pop()], SUB) if len(squared) == 1 else ()
    if not minus:
        return None
    value, middle = minus
    mean = nodes[middle]
    if is_applied(mean, DIV):
        is_mean = number_of(nodes, mean, "other") == width
    else:
        is_mean = is_applied(mean, MUL) and number_of(nodes, mean, "other") == 1 / width
    total = operands_of(mean)[0] if is_mean else None
    return (total, middle) if total is not None and nodes[total] == replace(reduce, operand=value) else None


def is_exact(loops: LoopNest, total: int, count: Dim, halves: Collection[str]) -> bool:
    """True if adding up `count` equal elements does not round: they have 16 bits, and are not too many.

    total: the sum. halves: the buffers with elements of 16 bits. Differences from the mean do round, all in
    the same way between two powers of two, which a correction would add.
    """
    node = loops.nodes[source_of(loops.nodes, operands_of(loops.nodes[total])[0])]
    is_half = isinstance(node, Load) and node.buffer in halves
    is_half = is_half or rounding_of(node) in HALVES
    return is_half and isinstance(count, int) and count <= LONGEST
