"""Algebra on loop nests: what a reduction over known positions comes to without a loop."""

from __future__ import annotations

import torch

from fusion_compiler.ir.dims import Dim, product
from fusion_compiler.ir.loops import (
    Compute,
    Constant,
    Coordinate,
    Index,
    LoopNest,
    Node,
    Reduce,
    Value,
    groups_of,
    renumber,
    renumber_store,
)

aten = torch.ops.aten


def one_hot_sums(loops: LoopNest) -> LoopNest:
    """sum_j where(j == t, v, 0) -> where(0 <= t < n, v, 0), for t and v that do not vary over j.

    The backward pass of a cross-entropy sums such a row: it is one element of it.
    """
    groups = groups_of(loops)
    found = {i: hit for i, n in enumerate(loops.nodes) if (hit := _one_hot(loops, groups, n)) is not None}
    if not found:
        return loops
    nodes: list[Node] = []
    names: list[str] = []
    numbers: dict[int, int] = {}

    def add(node: Node, name: str) -> int:
        nodes.append(node)
        names.append(name)
        return len(nodes) - 1

    for i, node in enumerate(loops.nodes):
        if i not in found:
            numbers[i] = add(renumber(node, numbers), loops.names[i])
            continue
        target, value, size = found[i]
        position = Value(numbers[target])
        low = add(Compute(aten.ge.Scalar, (("self", position), ("other", 0)), torch.bool), "not_below")
        high = add(Compute(aten.lt.Scalar, (("self", position), ("other", size)), torch.bool), "below")
        both = (("self", Value(low)), ("other", Value(high)))
        inside = add(Compute(aten.logical_and.default, both, torch.bool), "inside")
        zero = add(Constant(0.0 if node.dtype.is_floating_point else 0, node.dtype), "zero")
        choice = (("condition", Value(inside)), ("self", Value(numbers[value])), ("other", Value(zero)))
        numbers[i] = add(Compute(aten.where.self, choice, node.dtype), loops.names[i])
    stores = tuple(renumber_store(s, numbers) for s in loops.stores)
    return LoopNest(loops.axes, tuple(nodes), stores, tuple(names))


def _one_hot(loops: LoopNest, groups: tuple[frozenset[str], ...], node: Node) -> tuple[int, int, int] | None:
    """(t, v, n) of a reduction that has the form; n is the row's length."""
    if not isinstance(node, Reduce) or node.combine != "sum" or node.kept:
        return None
    choice = loops.nodes[_origin(loops, node.operand)]
    if not isinstance(choice, Compute) or choice.target is not aten.where.self:
        return None
    arms = dict(choice.operands)
    condition, value, other = (arms.get(k) for k in ("condition", "self", "other"))
    if not (isinstance(condition, Value) and isinstance(value, Value) and isinstance(other, Value)):
        return None
    rest = loops.nodes[_origin(loops, other.node)]
    equal = loops.nodes[condition.node]
    if not isinstance(rest, Constant) or rest.value != 0 or groups[value.node] & node.over:
        return None
    if not isinstance(equal, Compute) or equal.target is not aten.eq.Tensor:
        return None
    sides = dict(equal.operands)
    a, b = sides.get("self"), sides.get("other")
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return None
    for here, there in ((a.node, b.node), (b.node, a.node)):
        position = loops.nodes[here]
        if isinstance(position, Coordinate) and not groups[there] & node.over:
            size = _counts(loops, position.index, node.over)
            if size is not None:
                return there, value.node, size
    return None


def _origin(loops: LoopNest, number: int) -> int:
    """The node whose value a cast within the dtype of the computation passes on."""
    node = loops.nodes[number]
    while isinstance(node, Compute) and node.target is aten._to_copy.default:
        operands = dict(node.operands)
        value = operands["self"]
        if "rounding" in operands or not isinstance(value, Value):
            break
        if loops.nodes[value.node].dtype != node.dtype:
            break
        number, node = value.node, loops.nodes[value.node]
    return number


def _counts(loops: LoopNest, index: Index, over: frozenset[str]) -> int | None:
    """The number of positions, where `index` counts the reduced axes 0, 1, 2, ... exactly once each."""
    axes = [i for i, a in enumerate(loops.axes) if a.group in over]
    terms = dict(index.terms)
    if index.const != 0 or set(terms) != set(axes):
        return None
    step: Dim = 1
    while axes:  # the innermost first: the one that the index follows in these steps
        i = next((k for k in axes if terms[k] == step), None)
        if i is None:
            return None
        step = product((step, loops.axes[i].size))
        axes.remove(i)
    return step if isinstance(step, int) else None
