"""Prove that a cluster may write a result over an input that nobody reads any more.

Programs of a kernel run in any order, and a schedule may read a row in several passes. So it may where each
element of the input is read by the one program that stores a result in its very place, and by no pass behind
the one that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusion_compiler.ir.loops import (
    INNER,
    RAGGED,
    ROWS,
    Load,
    LoopNest,
    Reduce,
    Scan,
    axes_in,
    kept_axes,
    operands_of,
    reduced_groups,
    store_operands,
)


def may_lie_over(nests: Iterable[LoopNest], result: str, source: str) -> bool:
    """True if the buffer `result` may have the memory of `source`, of one dtype and size, under any schedule
    of the loop nests, which a kernel runs beside each other."""
    using = [n for n in nests if _loads(n, source) or any(s.buffer == result for s in n.stores)]
    return len(using) == 1 and all(law(using[0], result, source) for law in (_in_place, _read_first))


def _loads(loops: LoopNest, buffer: str) -> tuple[int, ...]:
    return tuple(i for i, n in enumerate(loops.nodes) if isinstance(n, Load) and n.buffer == buffer)


def _in_place(loops: LoopNest, result: str, source: str) -> bool:
    """True if one program reads and writes each element, and no other does either."""
    places = {s.index for s in loops.stores if s.buffer == result}
    loads = [n for n in loops.nodes if isinstance(n, Load) and n.buffer == source]
    wide = {k for k, axis in enumerate(loops.axes) if axis.size != 1}
    everywhere = all(s.within is None for s in loops.stores if s.buffer == result)
    return (
        bool(loads)
        and everywhere
        and all(n.within is None and n.index in places for n in loads)
        and all({key for key, _ in place.terms} >= wide for place in places)
        and not any(key < 0 for place in places for key, _ in place.terms)
        and not any(axes_in(loops.axes, (INNER,)) & {key for key, _ in place.terms} for place in places)
    )


def _read_first(loops: LoopNest, result: str, source: str) -> bool:
    """True if all that is made of the loaded elements themselves waits for no reduction that a store of the
    result does not wait for."""
    reductions = {i: n for i, n in enumerate(loops.nodes) if isinstance(n, Reduce)}
    if axes_in(loops.axes, (RAGGED,)) or any(isinstance(n, Scan) for n in loops.nodes):
        return False
    if any(kept_axes(loops.axes, n) for n in reductions.values()):
        return False
    behind = _reductions_behind(loops)
    stores = [behind[s.value] for s in loops.stores if s.buffer == result]
    first = frozenset.intersection(*stores)
    if any(ROWS in reduced_groups(loops.axes, reductions[i]) for i in first):
        return False  # what waits for a sum over rows may be another kernel's
    reached = {*_loads(loops, source)}
    for number, node in enumerate(loops.nodes):
        if reached.isdisjoint(operands_of(node)):
            continue
        if isinstance(node, Reduce):
            if not behind[node.operand] <= first:
                return False
        else:
            reached.add(number)
    ends = [operand for store in loops.stores for operand in store_operands(store)]
    return all(behind[end] <= first for end in ends if end in reached)


def _reductions_behind(loops: LoopNest) -> Sequence[frozenset[int]]:
    """Return the reductions that each node waits for."""
    behind: list[frozenset[int]] = []
    for number, node in enumerate(loops.nodes):
        first = {number} if isinstance(node, Reduce) else ()
        behind.append(frozenset(first).union(*(behind[o] for o in operands_of(node))))
    return behind
