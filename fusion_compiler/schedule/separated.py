"""Sums that are taken apart so that the law of carried reductions holds for each part (`schedule.carried`).

    sum((e1 / l1 - w * e2 / l2) * v)       ->   sum(e1 * v) / l1 - w * sum(e2 * v) / l2
    sum(exp(y - log(l)) * (y - log(l)))    ->   (sum(exp(y) * y) - sum(exp(y)) * log(l)) / exp(log(l))

Terms of rank 2 or more are sums of products. What depends on earlier sums alone is taken out of each product.
What is left are exponentials that a maximum bounds, and at most one factor y = x - max. No maximum is taken
out of y: x and its maximum may be large, and their difference is not.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from torch._ops import OpOverload

from fusion_compiler.ir.loops import (
    LoopNest,
    Node,
    Reduce,
    applied,
    cast_of,
    is_applied,
    operands_of,
    pair_of,
)
from fusion_compiler.ir.rebuilt import Rebuilt
from fusion_compiler.ops.arithmetic import ADD, DIV, EXP, MUL, SUB
from fusion_compiler.schedule.carried import Carried, Terms, carried_of

MOST_SUMS = 6  # in place of one


@dataclass(frozen=True)
class Part:
    """A product: of `kept`, which vary along the reduced axes, and of `out` and 1 / `under`, which do not.

    shifts: those of `kept` that are x - max. is_bounded: one of `kept` is an exponential or a shift.
    sign: 1 or -1.
    """

    kept: tuple[int, ...] = ()
    out: tuple[int, ...] = ()
    under: tuple[int, ...] = ()
    shifts: tuple[int, ...] = ()
    is_bounded: bool = False
    sign: int = 1

    def times(self, other: Part) -> Part:
        return Part(
            self.kept + other.kept,
            self.out + other.out,
            self.under + other.under,
            self.shifts + other.shifts,
            self.is_bounded or other.is_bounded,
            self.sign * other.sign,
        )


def separated(loops: LoopNest) -> LoopNest:
    """Return a nest whose sums are taken apart where only their parts can be carried."""
    new = _Separated(loops)
    for number in range(len(loops.nodes)):
        if not new.takes_apart(number):
            new.keep(number)
    return new.done()


class _NoPart(Exception):
    """A factor depends on other reductions and is none of those that parts have."""


class _Separated(Rebuilt):
    """sums: by axes and factors, the sums of the new nest."""

    def __init__(self, loops: LoopNest) -> None:
        super().__init__(loops)
        self.sums: dict[tuple[frozenset[int], tuple[int, ...]], int] = {}

    def keep(self, number: int) -> None:
        super().keep(number)
        node = self.loops.nodes[number]
        if isinstance(node, Reduce) and node.combine == "sum":
            terms = Terms(self.loops, node)
            factors = sorted(self.numbers[n] for n in terms.factors(node.operand))
            self.sums.setdefault((node.axes, tuple(factors)), self.numbers[number])

    def once(self, node: Node, name: str) -> int:
        """Return the number of a node, which is added unless the nest has it."""
        return self.nodes.index(node) if node in self.nodes else self.add(node, name)

    def operator(self, operator: OpOverload, *operands: int) -> int:
        return self.once(applied(self.nodes, operator, *operands), str(operator._opname))

    def takes_apart(self, number: int) -> bool:
        """Add the parts of a sum in its place; False where it has none, or needs none."""
        node = self.loops.nodes[number]
        if not isinstance(node, Reduce) or node.combine != "sum":
            return False
        if isinstance(carried_of(self.loops, number), Carried):
            return False
        terms = Terms(self.loops, node)
        if not terms.reads or terms.refusal() is not None:
            return False
        try:
            parts = self.parts(terms, node.operand)
        except _NoPart:
            return False
        if len(parts) > MOST_SUMS or not all(part.kept for part in parts):
            return False
        total: int | None = None
        for part in parts:
            value = self.value(part, node, self.loops.names[number])
            if total is None:
                negative = applied(self.nodes, MUL, value, other=-1.0, dtype=self.nodes[value].dtype)
                total = value if part.sign > 0 else self.once(negative, "negative")
            else:
                total = self.operator(ADD if part.sign > 0 else SUB, total, value)
        assert total is not None
        self.numbers[number] = total
        return True

    def value(self, part: Part, reduce: Reduce, name: str) -> int:
        """Return a part: its sum, times what was taken out of it."""
        for shift in part.shifts:  # a loop rescales this sum by the one without the factor
            self.sum(tuple(n for n in part.kept if n != shift), reduce, f"{name}_plain")
        value = self.sum(part.kept, reduce, name)
        for factor in part.out:
            value = self.operator(MUL, value, factor)
        for factor in part.under:
            value = self.operator(DIV, value, factor)
        return value

    def sum(self, factors: tuple[int, ...], reduce: Reduce, name: str) -> int:
        key = reduce.axes, tuple(sorted(factors))
        if key not in self.sums:
            product = functools.reduce(functools.partial(self.operator, MUL), factors)
            self.sums[key] = self.add(replace(reduce, operand=product), f"{name}_{len(self.sums)}")
        return self.sums[key]

    def parts(self, terms: Terms, number: int) -> list[Part]:
        """Return the products whose sum a node is. Raises _NoPart."""
        node, new = self.loops.nodes[number], self.numbers.get(number, -1)
        if self.loops.node_axes[number].isdisjoint(terms.reduce.axes):
            return [Part(out=(new,))]
        if number not in terms.mixed:
            return [Part(kept=(new,))]
        if (source := cast_of(node)) is not None:
            return self.parts(terms, source)
        if factors := pair_of(node, MUL):
            left, right = (self.parts(terms, factor) for factor in factors)
            return [one.times(other) for one in left for other in right]
        divided = pair_of(node, DIV)
        if divided and self.loops.node_axes[divided[1]].isdisjoint(terms.reduce.axes):
            under = Part(under=(self.numbers[divided[1]],))
            return [part.times(under) for part in self.parts(terms, divided[0])]
        if is_applied(node, EXP):
            return [self.power(terms, operands_of(node)[0])]
        if terms.is_sum(number):
            return [Part(kept=(new,), shifts=(new,), is_bounded=True)]
        for operator, sign in ((ADD, 1), (SUB, -1)):
            if pair := pair_of(node, operator):
                left, right = (self.parts(terms, operand) for operand in pair)
                if not all(part.is_bounded or not part.kept for part in (*left, *right)):
                    raise _NoPart  # x - mean: their difference is small, and they are not
                return [*left, *(replace(part, sign=sign * part.sign) for part in right)]
        raise _NoPart

    def power(self, terms: Terms, exponent: int) -> Part:
        """Return an exponential that a maximum bounds, divided by what else stands in its exponent."""
        if terms.is_bounded(exponent):
            return Part(kept=(self.operator(EXP, self.numbers[exponent]),), is_bounded=True)
        pair = pair_of(self.loops.nodes[exponent], SUB)
        if not pair or not self.loops.node_axes[pair[1]].isdisjoint(terms.reduce.axes):
            raise _NoPart
        return self.power(terms, pair[0]).times(Part(under=(self.operator(EXP, self.numbers[pair[1]]),)))
