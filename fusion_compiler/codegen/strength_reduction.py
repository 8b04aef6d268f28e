"""Rewrite a loop nest to fewer instructions, as its results' dtypes allow, before it is printed."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch._ops import OpOverload

from fusion_compiler.ir.kernel import Buffer
from fusion_compiler.ir.loops import (
    Compute,
    LoopNest,
    Node,
    Random,
    applied,
    is_applied,
    number_of,
    operand_of,
    operands_of,
    store_operands,
)
from fusion_compiler.ops.arithmetic import ADD, ERF, ERFC, GE, LT, MUL
from fusion_compiler.schedule.analysis import Analysis

# Comparison -> (the comparison of words, True if a number equal to the constant is on the lower side).
COMPARISONS: Mapping[object, tuple[OpOverload, bool]] = {
    operator.ge: (GE, False), operator.lt: (LT, False), operator.gt: (GE, True), operator.le: (LT, True),
}  # fmt: skip


def shortened(loops: LoopNest, buffers: Mapping[str, Buffer]) -> LoopNest:
    """Return `loops` with shorter forms. buffers: the buffers of its loads and stores, by name."""
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
        if erf is None or uses[erf] != 1:
            continue
        value = nodes[erf]
        if is_applied(value, ERF):
            nodes[erf] = applied(nodes, MUL, *operands_of(value), other=-1, dtype=value.dtype)
            nodes[i] = applied(nodes, ERFC, erf, dtype=node.dtype)
    return replace(loops, nodes=tuple(nodes))


def _one_more_than(loops: LoopNest, node: Compute) -> int | None:
    """Return n for the sum 1 + n, else None."""
    if not is_applied(node, ADD) or dict(node.operands).get("alpha", 1) != 1:
        return None
    for one, other in (("self", "other"), ("other", "self")):
        if number_of(loops.nodes, node, one) == 1:
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
    if not isinstance(node, Compute) or node.spec.compare not in COMPARISONS:
        return None
    left, p = operand_of(node, "self"), number_of(loops.nodes, node, "other")
    if left is None or p is None or not 0 < p < 1:
        return None
    target, above = COMPARISONS[node.spec.compare]
    steps = float(torch.tensor(p, dtype=torch.float32)) * 2.0**24  # exact, since p is float32 in the kernel
    least = int(steps) + 1 if above else math.ceil(steps)
    return applied(loops.nodes, target, left, other=least << 8) if least < 2**24 else None
