"""The nodes that read the reductions of a nest: what is only stored, and what needs all of a reduction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fusion_compiler.ir.loops import Compute, LoopNest, Reduce, cast_of, operands_of, pair_of
from fusion_compiler.ops.arithmetic import MUL


@dataclass(frozen=True)
class Uses:
    """The nodes that read a reduction.

    readers: reductions of the same kind that may reduce its parts as they are.
    late: the reduction, and the nodes that depend on it without another reduction.
    stored: those of them that are stored.
    needs_all: the first node that needs the complete reduction, or None.
    """

    readers: frozenset[int]
    late: frozenset[int]
    stored: frozenset[int]
    needs_all: int | None


def uses_of(loops: LoopNest, varies: Sequence[frozenset[int]]) -> Mapping[int, Uses]:
    """Return, by reduction, what reads it. varies: the axes over which each node varies."""
    reductions = ((n, node) for n, node in enumerate(loops.nodes) if isinstance(node, Reduce))
    return {n: _uses(loops, n, node, varies) for n, node in reductions}


def _uses(loops: LoopNest, number: int, reduction: Reduce, varies: Sequence[frozenset[int]]) -> Uses:
    linear, late, readers, needs_all = {number}, {number}, set[int](), None
    for n, node in enumerate(loops.nodes):
        read = late.intersection(operands_of(node))
        if not read:
            continue
        if isinstance(node, Reduce) and node.combine == reduction.combine and read <= linear:
            if node.combine == "sum" or node.operand == number:
                readers.add(n)
                continue
        if not isinstance(node, Compute):
            needs_all = n if needs_all is None else needs_all
            continue
        late.add(n)
        factors = [o for o in operands_of(node) if o not in read]
        is_same = cast_of(node) is not None and node.dtype == reduction.dtype
        is_scaled = bool(pair_of(node, MUL)) and len(factors) == 1
        if read <= linear and len(read) == 1 and (is_same or is_scaled):
            if all(varies[o].isdisjoint(reduction.axes) for o in factors):
                linear.add(n)
    stores = [store for store in loops.stores if store.value in late]
    for store in stores:
        axes = varies[store.value] | {k for k, _ in store.index.terms}
        if not axes <= varies[number] or store.within is not None:
            needs_all = store.value if needs_all is None else needs_all
    return Uses(frozenset(readers), frozenset(late), frozenset(store.value for store in stores), needs_all)
