"""Rewrite a loop nest to fewer instructions, as its results' dtypes allow, before it is printed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch

from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import (
    Compute,
    Constant,
    LoopNest,
    Node,
    Random,
    Value,
    operand_of,
    operands_of,
    store_operands,
)
from fusion_compiler.schedule.analysis import Analysis

aten = torch.ops.aten
# Comparison -> (the comparison of words, True if a number equal to the constant is on the lower side).
COMPARISONS = {
    overload: (target, above)
    for packet, target, above in (
        (aten.ge, aten.ge.Scalar, False),
        (aten.lt, aten.lt.Scalar, False),
        (aten.gt, aten.ge.Scalar, True),
        (aten.le, aten.lt.Scalar, True),
    )
    for overload in (packet.Scalar, packet.Tensor)
}


def shortened(loops: LoopNest, buffers: Mapping[str, Buffer]) -> LoopNest:
    """Return `loops` with shorter forms. buffers: by name, those of its loads and stores."""
    fp16 = Analysis(loops).fp16_values({name: buffer.dtype for name, buffer in buffers.items()})
    return thresholds(complements(loops, fp16))


def complements(loops: LoopNest, fp16: frozenset[int]) -> LoopNest:
    """Rewrite 1 + erf(u) -> erfc(-u) in 16-bit GELUs.

    erfc takes as many instructions (in float32 twice as many) and keeps digits that the sum loses.
    """
    nodes = list(loops.nodes)
    uses = Counter(o for n in nodes for o in operands_of(n))
    uses.update(o for s in loops.stores for o in store_operands(s))
    for i, node in enumerate(nodes):
        if i not in fp16 or not isinstance(node, Compute):
            continue
        erf = _one_more_than(loops, node)
        value = nodes[erf] if erf is not None else None
        if erf is None or uses[erf] != 1 or not isinstance(value, Compute):
            continue
        if value.target is aten.erf.default:
            nodes[erf] = Compute(aten.mul.Tensor, (*value.operands, ("other", -1)), value.dtype)
            nodes[i] = Compute(aten.erfc.default, (("self", Value(erf)),), node.dtype)
    return replace(loops, nodes=tuple(nodes))


def _one_more_than(loops: LoopNest, node: Compute) -> int | None:
    """Return n for the sum 1 + n, else None."""
    operands = dict(node.operands)
    if node.target not in (aten.add.Tensor, aten.add.Scalar) or operands.get("alpha", 1) != 1:
        return None
    for one, other in (("self", "other"), ("other", "self")):
        number = operand_of(node, one)
        constant = loops.nodes[number] if number is not None else None
        if (constant.value if isinstance(constant, Constant) else operands.get(one)) == 1:
            return operand_of(node, other)
    return None


def thresholds(loops: LoopNest) -> LoopNest:
    """Rewrite uniform >= p -> word >= P, an exactly equal decision, so that dropout needs no float.

    A uniform number is m / 2^24, where m is the upper 24 bits of the word. It is at least p if and only if
    the word is at least 2^8 times the smallest such m. All uses of the number must be such comparisons.
    """
    nodes = list(loops.nodes)
    readers: dict[int, list[int]] = {}
    for i, node in enumerate(nodes):
        for operand in operands_of(node):
            readers.setdefault(operand, []).append(i)
    stored = {o for s in loops.stores for o in store_operands(s)}
    for i, node in enumerate(nodes):
        if isinstance(node, Random) and i not in stored:
            rewritten = {n: _with_threshold(loops, nodes[n]) for n in readers.get(i, ())}
            if all(rewritten.values()):
                nodes[i] = replace(node, dtype=torch.uint32)
                nodes = [rewritten.get(n) or other for n, other in enumerate(nodes)]
    return replace(loops, nodes=tuple(nodes))


def _with_threshold(loops: LoopNest, node: Node) -> Compute | None:
    """Return a comparison of a uniform number with a constant as one of its word; None for any other node."""
    if not isinstance(node, Compute) or node.target not in COMPARISONS:
        return None
    operands = dict(node.operands)
    left, right = operands["self"], operands["other"]
    other = loops.nodes[right.node] if isinstance(right, Value) else None
    p = other.value if isinstance(other, Constant) else right
    if not isinstance(left, Value) or not isinstance(p, int | float) or not 0 < p < 1:
        return None
    target, above = COMPARISONS[node.target]
    steps = float(torch.tensor(p, dtype=torch.float32)) * 2.0**24  # exact, since p is float32 in the kernel
    least = int(steps) + 1 if above else math.ceil(steps)
    return Compute(target, (("self", left), ("other", least << 8)), torch.bool) if least < 2**24 else None
