"""Make terms of sums separable: what waits for another sum over the same axis stands behind its own.

    sum over j of (e[i, j] / l[i]) * v[j]            ->  (sum over j of e[i, j] * v[j]) / l[i]
    sum over j of (e[i, j] / l[i] - c * f[i, j] / n[i]) * v[j]
                                                     ->  (sum of e v) / l - (sum of f v) * c / n

Here l and n are sums over j. A loop then adds up all sums at once, where a reduction that it cannot make
together with those that it reads would take a second loop (`schedule/carried.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch._ops import OpOverload

from fusion_compiler.ir.loops import LoopNest, Reduce, is_applied, operands_of, pair_of, source_of
from fusion_compiler.ops.arithmetic import ADD, DIV, MUL, SUB
from fusion_compiler.passes.lower.algebra import Rebuilt

MOST_TERMS = 4  # sums in place of one
LINEAR = (MUL, DIV, ADD, SUB)


@dataclass(frozen=True)
class Term:
    """A product of factors that vary along the sum's axes, and what is done with their sum: operators of it
    and of a value that does not vary. minus: True if the term is subtracted."""

    factors: tuple[int, ...]
    behind: tuple[tuple[OpOverload, int], ...] = ()
    minus: bool = False


def separated(loops: LoopNest) -> LoopNest:
    """Return a nest in which sums wait for no other sum over the same axes unless they have to."""
    new, changed = Rebuilt(loops), False
    for number, node in enumerate(loops.nodes):
        terms = _terms(loops, number, node) if isinstance(node, Reduce) and node.combine == "sum" else ()
        if len(terms) < 2 and not any(term.behind for term in terms):
            new.keep(number)
            continue
        assert isinstance(node, Reduce)
        total: int | None = None
        for position, term in enumerate(terms):
            value = _summed(loops, new, number, node, term, position)
            if total is not None:
                value = new.apply(loops.names[number], SUB if term.minus else ADD, total, value)
            total = value
        assert total is not None
        new.numbers[number], changed = total, True
    return new.done() if changed else loops


def _summed(loops: LoopNest, new: Rebuilt, number: int, node: Reduce, term: Term, position: int) -> int:
    """Emit the sum of a term, and return its node. Directives know the sum by a name of its own."""
    name = loops.names[number]
    first, *others = (new.numbers[f] for f in term.factors)
    for factor in others:
        first = new.apply(name, MUL, first, factor)
    value = new.add(replace(node, operand=first), f"{name}_sum{position or ''}")
    for operator, operand in term.behind:
        value = new.apply(name, operator, value, new.numbers[operand])
    return value


def _terms(loops: LoopNest, number: int, node: Reduce) -> Sequence[Term]:
    """Return the terms of a sum; none if it waits for no other sum, or cannot be taken apart."""
    same = {
        n
        for n, other in enumerate(loops.nodes[:number])
        if isinstance(other, Reduce) and other.axes == node.axes
    }
    waiting = set(same)
    for n, other in enumerate(loops.nodes[:number]):
        if not waiting.isdisjoint(operands_of(other)):
            waiting.add(n)
    if node.operand not in waiting:
        return ()
    terms = _expanded(loops, node.operand, node.axes, waiting)
    usable = len(terms) <= MOST_TERMS and not terms[0].minus and all(term.factors for term in terms)
    return terms if usable else ()


def _expanded(loops: LoopNest, number: int, axes: frozenset[int], waiting: set[int]) -> tuple[Term, ...]:
    """Return a value as a sum of terms."""
    number = source_of(loops.nodes, number)
    node = loops.nodes[number]
    if number not in waiting or not node.dtype.is_floating_point:
        return (Term((number,)),)
    if loops.node_axes[number].isdisjoint(axes):
        return (Term((), ((MUL, number),)),)
    operator = next((o for o in LINEAR if is_applied(node, o) and len(pair_of(node, o)) == 2), None)
    if operator is None:
        return (Term((number,)),)
    left, right = pair_of(node, operator)
    if operator is DIV:
        if not loops.node_axes[right].isdisjoint(axes) or right not in waiting:
            return (Term((number,)),)
        terms = _expanded(loops, left, axes, waiting)
        return tuple(replace(t, behind=(*t.behind, (DIV, right))) for t in terms)
    ones, others = (_expanded(loops, n, axes, waiting) for n in (left, right))
    if operator is MUL:
        return tuple(
            Term((*a.factors, *b.factors), (*a.behind, *b.behind), a.minus != b.minus)
            for a in ones
            for b in others
        )
    if not all(any(t.behind for t in terms) for terms in (ones, others)):
        return (Term((number,)),)  # a difference of what is final, such as an exponent
    return (*ones, *(replace(t, minus=t.minus != (operator is SUB)) for t in others))
