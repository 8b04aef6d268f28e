"""Split features whose number is no power of two, which tiles have, into two powers of two.

    sum(q[i, d] * k[j, d], {d})    ->    sum(q[i, d] * k[j, d], {d}) + sum(q[i, 128 + e] * k[j, 128 + e], {e})
    d < 192                              d < 128, e < 64

A tile of 256 features would load and multiply a quarter of zeros.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from fusion_compiler.ir.loops import (
    Coordinate,
    Index,
    InRange,
    Load,
    LoopNest,
    Node,
    Random,
    Reduce,
    Store,
    applied,
    renumber,
    renumber_store,
)
from fusion_compiler.ops.arithmetic import ADD

LEAST = 16  # features of a part: tensor cores take no fewer


def in_powers_of_two(loops: LoopNest, axes: Iterable[int]) -> LoopNest:
    """Return a nest in which each of some axes is two where that makes powers of two of it."""
    for axis in axes:
        size = loops.axes[axis].size
        if not isinstance(size, int):
            continue
        rest = size - (first := 1 << (size.bit_length() - 1))
        others = (n for n in loops.nodes if isinstance(n, Reduce) and axis in n.axes and n.combine != "sum")
        if rest >= LEAST and rest & (rest - 1) == 0 and not any(others):
            loops = _split(loops, axis, first)
    return loops


def _split(loops: LoopNest, axis: int, first: int) -> LoopNest:
    """Return a nest in which an axis has its first elements, and another axis has the rest."""
    other, old = len(loops.axes), loops.axes[axis]
    assert isinstance(old.size, int)
    axes = list(loops.axes)
    axes[axis] = replace(old, size=first)
    axes.append(replace(old, name=f"{old.name}_rest", size=old.size - first))
    moved = {k: k for k in range(other)} | {axis: other}
    numbers, of_rest = dict[int, int](), dict[int, int]()
    nodes, names = list[Node](), list[str]()

    def push(node: Node, name: str) -> int:
        nodes.append(node)
        names.append(name)
        return len(nodes) - 1

    for n, (node, name) in enumerate(zip(loops.nodes, loops.names, strict=True)):
        is_sum = isinstance(node, Reduce) and axis in node.axes
        varies = axis in loops.node_axes[n]
        numbers[n] = of_rest[n] = push(renumber(node, numbers), f"{name}_first" if is_sum else name)
        if is_sum or varies:
            of_rest[n] = push(_behind(renumber(node, of_rest, moved), other, first), f"{name}_rest")
        if is_sum:
            total = applied(nodes, ADD, numbers[n], of_rest[n])
            numbers[n] = of_rest[n] = push(total, name)
    stores = list[Store]()
    for store in loops.stores:
        stores.append(renumber_store(store, numbers))
        if any(k == axis for k, _ in store.index.terms):
            rest = renumber_store(store, of_rest, moved)
            stores.append(replace(rest, index=_shifted(rest.index, other, first)))
    return LoopNest(tuple(axes), tuple(nodes), tuple(stores), tuple(names))


def _behind(node: Node, axis: int, first: int) -> Node:
    """Return a node whose places along an axis begin with another element."""
    if isinstance(node, Load | Coordinate | InRange | Random):
        return replace(node, index=_shifted(node.index, axis, first))
    return node


def _shifted(index: Index, axis: int, by: int) -> Index:
    return replace(index, const=index.const + by * dict(index.terms).get(axis, 0))
