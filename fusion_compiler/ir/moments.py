"""Sums of squares around a mean in loop nests: sum((x - mean)^2), where the mean is sum(x) / n."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from fusion_compiler.ir.dims import Dim, product
from fusion_compiler.ir.loops import (
    Compute,
    Constant,
    Load,
    LoopNest,
    Reduce,
    Value,
    operand_of,
    operands_of,
    rounding_of,
)

aten = torch.ops.aten
HALVES = (str(torch.float16), str(torch.bfloat16))
LONGEST = 8192  # float32 represents the sum of so many equal elements with 11 significant bits


def mean_of_squares(loops: LoopNest, number: int) -> tuple[int, int] | None:
    """Return (sum(x), mean) if a node is sum((x - mean)^2) over the same axes, whose sizes are known."""
    nodes, reduce = loops.nodes, loops.nodes[number]
    if not isinstance(reduce, Reduce):
        return None
    square, width = nodes[reduce.operand], product(loops.axes[k].size for k in reduce.axes)
    if reduce.combine != "sum" or not isinstance(square, Compute) or not isinstance(width, int):
        return None
    operands = dict(square.operands)
    times_itself = square.target is aten.mul.Tensor and operands["self"] == operands["other"]
    if not times_itself and (square.target is not aten.pow.Tensor_Scalar or operands["exponent"] != 2):
        return None
    off = operand_of(square, "self")
    minus = nodes[off] if off is not None else None
    if not isinstance(minus, Compute) or minus.target is not aten.sub.Tensor:
        return None
    value, middle = operand_of(minus, "self"), operand_of(minus, "other")
    mean = nodes[middle] if middle is not None else None
    if not isinstance(mean, Compute) or dict(minus.operands).get("alpha", 1) != 1:
        return None
    total = operand_of(mean, "self")
    if total is None or value is None or nodes[total] != replace(reduce, operand=value):
        return None
    assert middle is not None
    share = _number(loops, dict(mean.operands).get("other"))
    divided = mean.target is aten.div.Tensor and share == width
    scaled = mean.target is aten.mul.Tensor and share == 1 / width
    return (total, middle) if divided or scaled else None


def is_exact(loops: LoopNest, total: int, count: Dim, halves: Collection[str]) -> bool:
    """True if adding up `count` equal elements does not round: they have 16 bits, and are not too many.

    total: the sum. halves: the buffers with elements of 16 bits. Differences from the mean do round, all in
    the same way between two powers of two, which a correction would add.
    """
    node = loops.nodes[operands_of(loops.nodes[total])[0]]
    while isinstance(node, Compute) and node.target is aten._to_copy.default and rounding_of(node) is None:
        node = loops.nodes[operands_of(node)[0]]
    is_half = isinstance(node, Load) and node.buffer in halves
    is_half = is_half or rounding_of(node) in HALVES
    return is_half and isinstance(count, int) and count <= LONGEST


def _number(loops: LoopNest, operand: object) -> object:
    """Return the value of an operand that is a constant, and any other operand unchanged."""
    node = loops.nodes[operand.node] if isinstance(operand, Value) else None
    return node.value if isinstance(node, Constant) else operand
