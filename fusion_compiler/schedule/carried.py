"""The law of carried reductions: which reductions one loop makes although one of them reads another.

    m = max(s, {j});  l = sum(exp(s - m), {j});  o = sum(exp(s - m) * v, {j})

A loop over j knows m only when it ends. The sum l may still be made in the same loop if its terms F(x, d), a
function of what the loop reads and of earlier results, are separable: F = g1(x) h1(d) + g2(x) h2(d) + ... The
number of products is the rank of F. No algebra is needed for it: F is evaluated in float64 at 24 x 24
random points, and the singular values of that matrix are counted.

Rank 1 says F(x, d) = g(x) h(d). When d moves from a to b, what was added up before is multiplied by
h(b) / h(a). Neither g nor h is ever computed, since both may overflow where F does not: exp(s - m) is at most
1, exp(s) is not. So each factor of F that depends on d has to be an exponential, whose exponent is a sum
e(x, d) = a(x) + b(d). Then h(b) / h(a) is exp(e(x, b) - e(x, a)) at any x, and the difference is computed
before the exponential. An exponent must not be positive where d is the maximum of x, so that no term
exceeds 1. Factors of d alone stand behind the sum in a simplified nest (`passes.lower.algebra`). Other terms
are refused.

Rows whose elements all are -inf have d = -inf, and F is what -inf - -inf makes of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from fusion_compiler.ir.loops import (
    Compute,
    Constant,
    LoopNest,
    Reduce,
    Value,
    cast_of,
    is_applied,
    operands_of,
    pair_of,
    rounding_of,
    with_operands,
    with_readers,
)
from fusion_compiler.ir.walk import walk
from fusion_compiler.ops.arithmetic import ADD, DIV, EXP, MUL, SUB

POINTS = 24  # of the loop's data, and of earlier results
CANDIDATES = 96  # points that are drawn; those where F is not finite are left out
FAR = 1e3  # the size of numbers for which an exponent that is not bounded is out of range
EXACT = 1e-10  # a singular value below this part of the largest one is zero
MOST_RANK = 8  # sums in place of one: with more, a second pass takes less time
PEAKS = {"max": -math.inf, "min": math.inf}  # reductions that bound exponents, with their neutral elements
SIGNS = {ADD: "+", SUB: "-", MUL: "*", DIV: "/"}


T = TypeVar("T")  # of a value: an expression, or the number of a node


@dataclass(frozen=True)
class Carried:
    """A reduction that a loop makes together with those that it reads.

    rank: that of its terms. reads: the reductions over the same axes. powers: the exponentials among the
    factors of its terms. empty: a row whose elements are all -inf has NaN. text: the terms as a formula.
    shift: a factor a(x) + b(d), if there is one. plain: then, the sum of the terms without that factor.
    degree: the power of that factor. of_peak: the terms read one maximum and its operand x, nothing else
    along the axes, and they are zero where x is the maximum of nothing.
    """

    rank: int
    reads: tuple[int, ...]
    powers: tuple[int, ...]
    empty: bool
    text: str
    shift: int | None = None
    plain: int | None = None
    degree: int = 1
    of_peak: bool = False


def carried_of(loops: LoopNest, number: int) -> Carried | str:
    """Return how a loop makes a reduction together with those that it reads, or why it cannot."""
    node, name = loops.nodes[number], loops.names[number]
    if not isinstance(node, Reduce):
        return f"{name} is no reduction"
    terms = Terms(loops, node)
    if not terms.reads:
        return f"{name} reads no reduction over the same axes"
    if (reason := terms.refusal()) is not None:
        return reason
    text = terms.text(node.operand)
    if node.combine != "sum":
        return f"{name} is no sum, but the {node.combine} of {text}"
    rank = terms.rank()
    if rank is None:
        return f"{text} is not finite"
    if rank > MOST_RANK:
        return f"{text} is not separable: rank > {MOST_RANK}"
    factors = [n for n in terms.factors(node.operand) if n in terms.mixed or n in terms.reads]
    powers = [n for n in factors if is_applied(loops.nodes[n], EXP)]
    for power in powers:
        (exponent,) = operands_of(loops.nodes[power])
        if terms.is_sum(exponent) and not terms.is_bounded(exponent):
            return f"exp({terms.text(exponent)}) is not bounded by its maximum"
    shifts = [n for n in factors if n not in powers]
    exponents = [o for power in powers for o in operands_of(loops.nodes[power])]
    if not all(map(terms.is_sum, (*shifts, *exponents))) or len(shifts) > 1 or not powers:
        return f"{text} has rank {rank}, but factors that are not carried"
    plain = terms.without(shifts[0], number) if shifts else None
    if shifts and plain is None:
        return f"{text} has rank {rank}, and there is no sum without the factor {terms.text(shifts[0])}"
    shift, empty = shifts[0] if shifts else None, terms.is_nan_where_empty()
    return Carried(rank, terms.reads, tuple(powers), empty, text, shift, plain, of_peak=terms.are_of_peak())


def squares_of(loops: LoopNest, total: int, number: int) -> Carried:
    """Return the law of sum((x - mean)^2), of rank 3: `total`, the sum of x, is read as their mean."""
    (difference, *_) = operands_of(loops.nodes[loops.reduction(number).operand])
    return Carried(3, (total,), (), False, "(x - mean)^2", shift=difference, degree=2)


class Values(Protocol[T]):
    """Compute values of a nest: as expressions of a tile program, or as nodes of another nest."""

    def computed(self, node: Compute, operands: Mapping[int, T]) -> T:
        """Return the value of an operator, of the values of its operands."""
        ...

    def fixed(self, number: int) -> T:
        """Return a node that does not depend on d: its value, or zero where it varies as x does."""
        ...

    def finite(self, number: int, value: T) -> T:
        """Return the value of a maximum, or zero if it is one of nothing."""
        ...

    def combined(self, operator: OpOverload, left: T, right: T) -> T: ...


def rescaled(
    of: Carried, total: T, plain: T | None, step: Callable[[int], T | None], values: Values[T]
) -> T:
    """Return what was added up before d moved, as it is with the new d.

    total: the sum. plain: the sum of the terms without the factor `of.shift`, as it is with the new d.
    step: a function that returns `step_of` of a node. The sum of y grows by c for each term while y does, and
    that of y^2 by c^2 if the sum of y was zero, as that of differences from a mean is.
    """
    for power in of.powers:
        if (ratio := step(power)) is not None:
            total = values.combined(MUL, total, ratio)
    growth = None if of.shift is None else step(of.shift)
    if growth is not None and plain is not None:
        for _ in range(of.degree):
            plain = values.combined(MUL, plain, growth)
        total = values.combined(ADD, total, plain)
    return total


def step_of(
    loops: LoopNest, number: int, before: Mapping[int, T], now: Mapping[int, T], values: Values[T]
) -> T | None:
    """Return h(now) / h(before) of an exponential g(x) h(d), or b(now) - b(before) of a sum a(x) + b(d); None
    if it does not depend on d. A sum has no terms before its first maximum, which may then be any number."""
    node = loops.nodes[number]
    if not is_applied(node, EXP):
        finite = {n: values.finite(n, value) for n, value in before.items()}
        return growth_of(loops, number, finite, now, values)
    assert isinstance(node, Compute)
    (exponent,) = operands_of(node)
    growth = growth_of(loops, exponent, before, now, values)
    return None if growth is None else values.computed(node, {exponent: growth})


def growth_of(
    loops: LoopNest, number: int, before: Mapping[int, T], now: Mapping[int, T], values: Values[T]
) -> T | None:
    """Return by how much a sum a(x) + b(d) grows while d moves, or None if it does not depend on d.

    It is the difference of two values at x = 0. Terms without d are left out of it.
    """
    if number in now:
        return values.combined(SUB, now[number], before[number])
    node = loops.nodes[number]
    if with_operands(loops, (number,), now).isdisjoint(now):
        return None
    if (source := cast_of(node)) is not None:
        return growth_of(loops, source, before, now, values)
    for operator in (ADD, SUB):
        if pair := pair_of(node, operator):
            left = growth_of(loops, pair[0], before, now, values)
            right = growth_of(loops, pair[1], *((now, before) if operator is SUB else (before, now)), values)
            if left is None or right is None:
                return right if left is None else left
            return values.combined(ADD, left, right)
    return values.combined(SUB, value_at(loops, number, now, values), value_at(loops, number, before, values))


def value_at(loops: LoopNest, number: int, at: Mapping[int, T], values: Values[T]) -> T:
    """Return the value of a node where some nodes have given values."""
    node = loops.nodes[number]
    if number in at:
        return at[number]
    if with_operands(loops, (number,), at).isdisjoint(at):
        return values.fixed(number)
    assert isinstance(node, Compute)
    return values.computed(node, {o: value_at(loops, o, at, values) for o in operands_of(node)})


def plain_peaks(loops: LoopNest, carried: Mapping[int, Carried]) -> frozenset[int]:
    """Return the maxima and minima whose NaN need not be kept: each store that depends on one depends on a
    sum that reads it as well, which is NaN where an element is."""
    plain = set[int]()
    for peak in {n for of in carried.values() for n in of.reads}:
        late = with_readers(loops, (peak,))
        sums = with_readers(loops, [n for n, of in carried.items() if peak in of.reads])
        if all(store.value in sums for store in loops.stores if store.value in late):
            plain.add(peak)
    return frozenset(plain)


class Terms:
    """The terms F(x, d) of a reduction.

    reads: d, the reductions over the same axes. mixed: the nodes that depend on d, operands first. peaks: by
    maximum or minimum among d, the node whose largest or smallest element it is.
    """

    def __init__(self, loops: LoopNest, reduce: Reduce) -> None:
        self.loops, self.reduce = loops, reduce
        others = {n for n, node in enumerate(loops.nodes) if isinstance(node, Reduce)}
        same = {n for n in others if loops.reduction(n).axes == reduce.axes}
        within = with_operands(loops, (reduce.operand,), same)
        self.reads = tuple(sorted(within & same))
        late = with_readers(loops, self.reads)
        self.mixed = sorted(within & late - same)
        reads = {n: loops.reduction(n) for n in self.reads}
        self.peaks = {n: node.operand for n, node in reads.items() if node.combine in PEAKS}

    def refusal(self) -> str | None:
        """Return why F is no function of numbers, or None if it is one."""
        for n in self.mixed:
            if isinstance(self.loops.nodes[n], Reduce):
                return f"{self.loops.names[n]} reduces what waits for {self.loops.names[self.reads[0]]}"
            if not isinstance(self.loops.nodes[n], Compute):
                return f"{self.loops.names[n]} is found by what waits for {self.loops.names[self.reads[0]]}"
        return None

    # -- numbers -----------------------------------------------------------------------------------------

    @functools.cached_property
    def data(self) -> frozenset[int]:
        """Return x: the nodes that vary along the reduced axes and of which F is computed, without those that
        are computed of them. The operands of maxima are among them."""
        nodes, peaks = self.loops.nodes, frozenset(self.peaks.values())
        above = with_readers(self.loops, peaks) - peaks

        def is_computed(n: int) -> bool:
            return n in self.mixed or (n in above and isinstance(nodes[n], Compute))

        operands = walk(operands_of(self.reduce), lambda n: operands_of(nodes[n]) if is_computed(n) else ())
        left_out = {*self.reads, *(n for n, node in enumerate(nodes) if isinstance(node, Constant))}
        return frozenset(n for n in operands if not is_computed(n)) - left_out

    @functools.cached_property
    def points(self) -> dict[int, Tensor]:
        """Return random numbers for each of x, [POINTS, 1], and of d, [1, POINTS]. What does not vary along
        the reduced axes has one number."""
        random = torch.Generator().manual_seed(0)
        points: dict[int, Tensor] = {}
        for n in sorted(self.data):
            varies = not self.loops.node_axes[n].isdisjoint(self.reduce.axes)
            points[n] = _drawn(self.loops.nodes[n].dtype, (CANDIDATES if varies else 1, 1), random)
        for n in self.reads:
            points[n] = _drawn(self.loops.nodes[n].dtype, (1, CANDIDATES), random)
        return points

    def at(self, number: int, points: Mapping[int, Tensor]) -> Tensor:
        """Return a node's value in float64 where others have given values."""
        values = dict(points)
        with _disable_current_modes():
            for n in sorted(with_operands(self.loops, (number,), points)):
                if n not in values:
                    values[n] = _computed(self.loops, n, values)
        return values[number]

    def rank(self) -> int | None:
        """Return the rank of F, or None if it is finite at too few points."""
        with _disable_current_modes():
            matrix = self.at(self.reduce.operand, self.points).double().expand(CANDIDATES, CANDIDATES)
            columns = matrix[:, matrix.isfinite().sum(0) > POINTS][:, :POINTS]
            rows = columns[columns.isfinite().all(1)][:POINTS]
            if min(rows.shape) < POINTS or not rows.any():
                return None
            sizes = torch.linalg.svdvals(rows)
            return int((sizes > EXACT * sizes[0]).sum())

    def is_sum(self, number: int) -> bool:
        """True if a node is a sum a(x) + b(d), where d are maxima and minima."""
        reads = with_operands(self.loops, (number,), self.reads).intersection(self.reads)
        if not reads <= self.peaks.keys():
            return False
        with _disable_current_modes():
            e = self.at(number, self.points).double()
            apart = e - e[:1] - e[:, :1] + e[:1, :1]
            return bool(apart.abs().max() <= EXACT * (1 + e.abs().max()))

    def is_bounded(self, exponent: int) -> bool:
        """True if an exponent is a sum a(x) + b(d) that is not positive where d is the maximum of x, and no
        smaller where d is the maximum of nothing: no ratio of exponentials is then infinite."""
        within = with_operands(self.loops, (exponent,), self.reads)
        peaks = {n: x for n, x in self.peaks.items() if n in within}
        if not self.is_sum(exponent) or not self.data.issuperset(peaks.values()):
            return False
        with _disable_current_modes():
            points = dict(self.points)
            for n, x in peaks.items():
                least, d = PEAKS[self.loops.reduction(n).combine], FAR * points[n]
                below = FAR * points[x].abs() * math.copysign(1, least)
                points |= {n: d, x: torch.cat((d + below, d.expand(len(below), -1)))}
            others = {n: v for n, v in points.items() if n not in peaks.keys() | peaks.values()}
            points |= {n: torch.cat((v, v)) for n, v in others.items() if len(v) == CANDIDATES}
            nothing = {n: self._neutral(n) for n in peaks}
            start, later = (self.at(exponent, {**self.points, **d}) for d in (nothing, {}))
            return bool(self.at(exponent, points).max() <= EXACT * FAR and (start >= later).all())

    def are_of_peak(self) -> bool:
        """True if F is a function of one maximum and its operand alone, and zero where that is neutral."""
        if len(self.reads) > 1 or {*self.data} != {*self.peaks.values()}:
            return False
        ((peak, x),) = self.peaks.items()
        with _disable_current_modes():
            return not self.at(self.reduce.operand, {**self.points, x: self._neutral(peak)}).any()

    def is_nan_where_empty(self) -> bool:
        """True if a term is NaN where the maximum is -inf, and so are all elements."""
        with _disable_current_modes():
            points = dict(self.points)
            for n, operand in self.peaks.items():
                points |= {n: self._neutral(n), operand: self._neutral(n)}
            return bool(self.at(self.reduce.operand, points).isnan().all())

    def _neutral(self, peak: int) -> Tensor:
        with _disable_current_modes():
            return torch.full((1, 1), PEAKS[self.loops.reduction(peak).combine], dtype=torch.float64)

    # -- factors -----------------------------------------------------------------------------------------

    def factors(self, number: int) -> Iterator[int]:
        """Yield the factors of a node. What does not depend on d is one."""
        if number not in self.mixed:
            yield number
            return
        node = self.loops.nodes[number]
        source = cast_of(node)
        factors = pair_of(node, MUL) or (() if source is None else (source,))
        for factor in factors:
            yield from self.factors(factor)
        if not factors:
            yield number

    def without(self, factor: int, end: int) -> int | None:
        """Return the sum over the same axes of all other factors' product, or None if there is none before
        node `end`."""
        others = sorted(n for n in self.factors(self.reduce.operand) if n != factor)
        for n, node in enumerate(self.loops.nodes[:end]):
            is_alike = isinstance(node, Reduce) and (node.combine, node.axes) == ("sum", self.reduce.axes)
            if is_alike and others == sorted(self.factors(operands_of(node)[0])):
                return n
        return None

    def text(self, number: int) -> str:
        """Return a node as a formula of x and of the names of d."""
        if number in self.reads:
            return self.loops.names[number]
        if number not in self.mixed:
            node = self.loops.nodes[number]
            return f"{node.value:g}" if isinstance(node, Constant) else "x"
        node = self.loops.nodes[number]
        assert isinstance(node, Compute)
        if (source := cast_of(node)) is not None:
            return self.text(source)
        parts = [self.text(a.node) if isinstance(a, Value) else str(a) for _, a in node.operands[:2]]
        sign = next((sign for operator, sign in SIGNS.items() if is_applied(node, operator)), None)
        if sign is not None:
            return f" {sign} ".join(f"({p})" if sign in "*/" and _is_sum(p) else p for p in parts)
        parts = [self.text(o) for o in operands_of(node)]
        return f"{str(node.target._opname).lstrip('_')}({', '.join(parts)})"


def _is_sum(text: str) -> bool:
    """True if a formula is a sum or a quotient, which parentheses keep together as a factor."""
    depth = 0
    for position, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if depth == 0 and text[position : position + 3] in (" + ", " - ", " / "):
            return True
    return False


def _drawn(dtype: torch.dtype, shape: tuple[int, int], random: torch.Generator) -> Tensor:
    with _disable_current_modes():
        numbers = torch.randn(shape, dtype=torch.float64, generator=random)
        return numbers if dtype.is_floating_point else (3 * numbers).to(dtype)


def _computed(loops: LoopNest, number: int, values: Mapping[int, Tensor]) -> Tensor:
    """Return a node's value for the values of its operands, with floats in float64."""
    node = loops.nodes[number]
    if isinstance(node, Constant):
        dtype = torch.float64 if node.dtype.is_floating_point else node.dtype
        return torch.full((1, 1), node.value, dtype=dtype)
    assert isinstance(node, Compute)
    operands = {name: values[a.node] if isinstance(a, Value) else a for name, a in node.operands}
    dtype = torch.float64 if node.dtype.is_floating_point else node.dtype
    if node.target is torch.ops.aten._to_copy.default:
        rounding = rounding_of(node)
        value = operands["self"]
        assert isinstance(value, Tensor)
        value = value if rounding is None else value.to(getattr(torch, str(rounding).removeprefix("torch.")))
        return value.to(dtype)
    names = {argument.name for argument in node.target._schema.arguments}
    return node.target.overloadpacket(**{n: v for n, v in operands.items() if n in names}).to(dtype)
