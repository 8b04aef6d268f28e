"""Algebraic simplification of loop nests: closed forms of sums over known positions, common factors of sums,
and sums that several sums are computed from."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from fusion_compiler.ir.dims import Dim, hint, product
from fusion_compiler.ir.loops import (
    INNER,
    TILE,
    Constant,
    Coordinate,
    Index,
    Load,
    LoopNest,
    Node,
    Reduce,
    cast_of,
    groups_of,
    is_applied,
    kept_axes,
    operands_of,
    pair_of,
    reduced_groups,
    with_operands,
    with_readers,
)
from fusion_compiler.ir.moments import is_exact, mean_of_squares
from fusion_compiler.ir.rebuilt import Rebuilt
from fusion_compiler.ops.arithmetic import ABS, ADD, AND, AT_LEAST, DIV, EQ, GE, LT, MUL, SUB, WHERE

# the product of the remaining factors (None if there are none), and the removed factors
Factored = tuple[int | None, tuple[int, ...]]


def one_hot_sums(loops: LoopNest) -> LoopNest:
    """Rewrite sum_j where(j == t, v, 0) -> where(0 <= t < n, v, 0), for t and v that do not vary over j.

    The backward pass of a cross-entropy contains such a sum, whose result is a single element of the row.
    """
    groups = groups_of(loops)
    matches = {i: m for i, n in enumerate(loops.nodes) if (m := _one_hot(loops, groups, n)) is not None}
    if not matches:
        return loops
    new = Rebuilt(loops)
    numbers = new.numbers
    for i, node in enumerate(loops.nodes):
        if i not in matches:
            new.keep(i)
            continue
        target, value, size = matches[i]
        low = new.apply("not_below", GE, numbers[target], other=0)
        high = new.apply("below", LT, numbers[target], other=size)
        inside = new.apply("inside", AND, low, high)
        zero = new.add(Constant(0.0 if node.dtype.is_floating_point else 0, node.dtype), "zero")
        numbers[i] = new.apply(loops.names[i], WHERE, inside, numbers[value], zero)
    return new.done()


def _one_hot(loops: LoopNest, groups: tuple[frozenset[str], ...], node: Node) -> tuple[int, int, int] | None:
    """Return (t, v, n) if the reduction has the form of `one_hot_sums`, where n is the length of the row,
    else None."""
    if not isinstance(node, Reduce) or node.combine != "sum" or kept_axes(loops.axes, node):
        return None
    over = reduced_groups(loops.axes, node)
    if not over <= TILE:  # groups do not tell which values vary along other axes
        return None
    choice = loops.nodes[_origin(loops, node.operand)]
    if not is_applied(choice, WHERE) or len(operands_of(choice)) != 3:
        return None
    condition, value, other = operands_of(choice)
    rest, sides = loops.nodes[_origin(loops, other)], pair_of(loops.nodes[condition], EQ)
    if not isinstance(rest, Constant) or rest.value != 0 or groups[value] & over or not sides:
        return None
    for coordinate, target in (sides, sides[::-1]):
        position = loops.nodes[coordinate]
        if isinstance(position, Coordinate) and not groups[target] & over:
            size = _count_of_enumeration(loops, position.index, node.axes)
            if size is not None:
                return target, value, size
    return None


def factored_sums(loops: LoopNest) -> LoopNest:
    """Rewrite sum_j w_ij * (x_j * s) -> (sum_j w_ij * x_j) * s, for an s that depends on a sum over j.

    One pass then reads both operands of a norm and the matrix product after it, as the product no longer
    waits.
    """
    reduced = {n: _reduced(loops, node) for n, node in enumerate(loops.nodes) if isinstance(node, Reduce)}
    if len(set(reduced.values())) == len(reduced):
        return loops
    varies, new = loops.node_axes, Rebuilt(loops)
    over = {axes: [n for n, of in reduced.items() if of == axes] for axes in reduced.values()}
    late = {axes: with_readers(loops, numbers) for axes, numbers in over.items()}
    changed = False

    @functools.cache
    def factored(number: int, axes: frozenset[int]) -> Factored:
        """Split a product into the factors that vary over the terms and the invariant factors that depend on
        a reduction over the same axes."""
        number = _origin(loops, number)
        if varies[number].isdisjoint(axes) and number in late[axes]:
            return None, (new.numbers[number],)
        factors = _factors(loops, number)
        if not factors:
            return new.numbers[number], ()
        (a, removed), (b, removed_right) = (factored(n, axes) for n in factors)
        if not removed + removed_right:
            return new.numbers[number], ()
        if a is not None and b is not None:
            return new.apply(loops.names[number], MUL, a, b), removed + removed_right
        return a if b is None else b, removed + removed_right

    for i, node in enumerate(loops.nodes):
        if isinstance(node, Reduce) and _is_matrix_product(loops, varies, node):
            operand, removed = factored(node.operand, _reduced(loops, node))
            if operand is not None and removed:
                number, changed = new.add(replace(node, operand=operand), loops.names[i]), True
                for factor in removed:
                    number = new.apply(loops.names[i], MUL, number, factor)
                new.numbers[i] = number
                continue
        new.keep(i)
    return new.done() if changed else loops


@dataclass(frozen=True)
class _Nested:
    """A sum as a sum over `rest` of an inner sum times some factors.

    operand, axes: those of the inner sum. rest: the axes over which the outer sum goes; none if it is the
    inner one. factors: nodes that do not vary over the axes of the inner sum.
    """

    operand: int
    axes: frozenset[int]
    rest: frozenset[int]
    factors: tuple[int, ...]


def nested_sums(loops: LoopNest) -> LoopNest:
    """Rewrite sum_cs w_c x_cs, sum_ns x_ns -> t = sum_s x_s; sum_c w_c t_c, sum_n t_n if axes are inner ones.

    A tile is then reduced once for both sums. A factor such as w leaves the sum, because it does not vary
    over s.
    """
    nested = _nested(loops) if any(axis.group == INNER for axis in loops.axes) else {}
    if not nested:
        return loops
    new, inner = Rebuilt(loops), dict[tuple[int, frozenset[int]], int]()

    def add(number: int) -> None:
        """Add a node behind the nodes that it reads, which may come later in the old nest."""
        if number in new.numbers:
            return
        node, of = loops.nodes[number], nested.get(number)
        for operand in operands_of(node) if of is None else (of.operand, *of.factors):
            add(operand)
        if of is None or not isinstance(node, Reduce):
            new.keep(number)
            return
        key, name = (of.operand, of.axes), loops.names[number]
        if key not in inner:
            inner[key] = new.add(replace(node, operand=new.numbers[of.operand], axes=of.axes), name)
        value = inner[key]
        for factor in of.factors:
            value = new.apply(name, MUL, value, new.numbers[factor])
        if of.rest:
            value = new.add(replace(node, operand=value, axes=of.rest), name)
        new.numbers[number] = value

    for number in range(len(loops.nodes)):
        add(number)
    return new.done()


def _nested(loops: LoopNest) -> dict[int, _Nested]:
    """Return the sums that share an inner sum with a sum over other axes."""
    sums = [n for n, node in enumerate(loops.nodes) if isinstance(node, Reduce) and node.combine == "sum"]
    varies, nested = loops.node_axes, dict[int, _Nested]()
    factors = {n: _all_factors(loops, operands_of(loops.nodes[n])[0]) for n in sums}
    for n in sums:
        for other in sums:
            one, two = loops.reduction(n), loops.reduction(other)
            shared, left = _reduced(loops, one) & _reduced(loops, two), factors[n] - factors[other]
            if not shared or _reduced(loops, one) == _reduced(loops, two) or one.dtype != two.dtype:
                continue
            constant = all(varies[f].isdisjoint(shared) for f in left)
            if not constant or factors[other] - factors[n] or not one.dtype.is_floating_point:
                continue
            if n in with_operands(loops, (two.operand,)) or any(
                m in nested and nested[m].axes != shared for m in (n, other)
            ):
                continue
            nested[other] = _Nested(two.operand, shared, two.axes - shared, ())
            nested[n] = _Nested(two.operand, shared, one.axes - shared, tuple(left.elements()))
            break
    return nested


def corrected_means(loops: LoopNest, halves: Collection[str]) -> LoopNest:
    """Rewrite off = x - m; s = sum(off^2) -> d = sum(off) / n; m + d, off - d, s - n d^2 for a mean m.

    This is the corrected two-pass algorithm that tiles of rows have (`codegen.moments`), for nests of other
    axes: a row of equal elements gets exactly that mean. halves: the buffers with elements of 16 bits, of
    which a sum is exact if all are equal and there are not too many.
    """
    means = dict[int, int]()  # by sum of squares; each mean is corrected once
    for number, node in enumerate(loops.nodes):
        pair = mean_of_squares(loops, number)
        if pair is not None and isinstance(node, Reduce) and pair[1] not in means.values():
            if not is_exact(loops, pair[0], _count(loops, node), halves):
                means[number] = pair[1]
    if not means:
        return loops
    new = Rebuilt(loops)
    for number in range(len(loops.nodes)):
        new.keep(number)
        if number in means:
            _correct(new, number, loops.reduction(number), means[number])
    return new.done()


def _correct(new: Rebuilt, number: int, node: Reduce, mean: int) -> None:
    """Correct a sum of squares, its mean and the differences from it, for all nodes that follow."""
    loops, count = new.loops, float(hint(_count(new.loops, node)))
    off = operands_of(loops.nodes[node.operand])[0]
    computed = functools.partial(new.apply, loops.names[number])

    def finite(value: int) -> int:
        """Return a value, or zero in the place of infinity: infinity - infinity would be NaN."""
        is_finite = computed(LT, computed(ABS, value), other=math.inf)
        return computed(WHERE, is_finite, value, zero)

    zero = new.add(Constant(0.0, node.dtype), loops.names[number])
    rest = new.add(replace(node, operand=new.numbers[off]), loops.names[number])
    shift = finite(computed(DIV, rest, other=count))
    excess = finite(computed(MUL, computed(MUL, shift, shift), other=count))
    new.numbers[number] = computed(AT_LEAST, computed(SUB, new.numbers[number], excess), min=0.0)
    new.numbers[mean] = computed(ADD, new.numbers[mean], shift)
    new.numbers[off] = computed(SUB, new.numbers[off], shift)


def _count(loops: LoopNest, node: Reduce) -> Dim:
    """Return how many elements a reduction combines to one."""
    return product(loops.axes[k].size for k in node.axes)


def _all_factors(loops: LoopNest, number: int) -> Counter[int]:
    """Return {factor: power} of a product. Any other node is its own only factor."""
    number = _origin(loops, number)
    factors = _factors(loops, number)
    return sum((_all_factors(loops, n) for n in factors), Counter[int]()) if factors else Counter((number,))


def _reduced(loops: LoopNest, node: Reduce) -> frozenset[int]:
    """Return the axes that a reduction reduces, but for those of one element."""
    return frozenset(k for k in node.axes if loops.axes[k].size != 1)


def _factors(loops: LoopNest, number: int) -> tuple[int, ...]:
    """Return the two factors of a floating-point product, or () for any other node."""
    node = loops.nodes[number]
    factors = pair_of(node, MUL) if node.dtype.is_floating_point else ()
    return factors if all(loops.nodes[n].dtype == node.dtype for n in factors) else ()


def _is_matrix_product(loops: LoopNest, varies: tuple[frozenset[int], ...], node: Reduce) -> bool:
    """True if a reduction sums the elements of a matrix times values that all rows of the matrix share. The
    matrix may come with scales. Its neighbours in memory are terms of one sum, unless a tile has axes of all
    sorts."""
    if node.combine != "sum":
        return False
    stack, leaves = [node.operand], list[int]()
    while stack:
        number = _origin(loops, stack.pop())
        factors = _factors(loops, number)
        stack.extend(factors)
        leaves += () if factors else (number,)
    size = {n: product(loops.axes[k].size for k in varies[n]) for n in leaves}
    reduced = _reduced(loops, node)
    rows = varies[max(leaves, key=lambda n: hint(size[n]))] - reduced
    matrices = [n for n in leaves if rows & varies[n] and reduced & varies[n]]
    if not rows or any(rows & varies[n] for n in leaves if n not in matrices):
        return False
    if any(axis.group == INNER for axis in loops.axes):  # programs that share terms share the norm's as well
        return True
    return not any(_is_contiguous(loops, n, rows) for each in matrices for n in with_operands(loops, (each,)))


def _is_contiguous(loops: LoopNest, number: int, axes: frozenset[int]) -> bool:
    """True if a node loads neighbours in memory along some axes."""
    node = loops.nodes[number]
    terms = node.index.terms if isinstance(node, Load) else ()
    return any(key in axes and step == 1 and loops.axes[key].size != 1 for key, step in terms)


def _origin(loops: LoopNest, number: int) -> int:
    """Follow casts that do not change the dtype or round, and return the node whose value they pass on."""
    nodes, source = loops.nodes, cast_of(loops.nodes[number])
    while source is not None and nodes[source].dtype == nodes[number].dtype:
        number, source = source, cast_of(nodes[source])
    return number


def _count_of_enumeration(loops: LoopNest, index: Index, reduced: frozenset[int]) -> int | None:
    """Return n if `index` enumerates the reduced axes as 0, 1, ..., n - 1, else None."""
    axes = sorted(reduced)
    terms = dict(index.terms)
    if index.const != 0 or terms.keys() != reduced:
        return None
    step: Dim = 1
    while axes:  # find the innermost axis first: the one along which the index moves by `step`
        i = next((k for k in axes if terms[k] == step), None)
        if i is None:
            return None
        step = product((step, loops.axes[i].size))
        axes.remove(i)
    return step if isinstance(step, int) else None
