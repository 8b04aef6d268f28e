"""Algebra on loop nests: what a reduction over known positions comes to without a loop, and what in a sum
need not wait for another."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from fusion_compiler.ir.dims import Dim, product
from fusion_compiler.ir.loops import (
    COLS,
    INNER,
    ROWS,
    Compute,
    Constant,
    Coordinate,
    Index,
    Load,
    LoopNest,
    Node,
    Reduce,
    Value,
    groups_of,
    kept_of,
    operands_of,
    over_of,
    renumber,
    renumber_store,
)

aten = torch.ops.aten
ALONG = frozenset({COLS})
Parted = tuple[int | None, tuple[int, ...]]  # what is left of a product, and what was taken out of it


class _Rebuilt:
    """A loop nest that is made anew, node by node. numbers: of old nodes, the new ones with their values."""

    def __init__(self, loops: LoopNest) -> None:
        self.loops = loops
        self.nodes: list[Node] = []
        self.names: list[str] = []
        self.numbers: dict[int, int] = {}

    def add(self, node: Node, name: str) -> int:
        self.nodes.append(node)
        self.names.append(name)
        return len(self.nodes) - 1

    def keep(self, number: int) -> None:
        node = renumber(self.loops.nodes[number], self.numbers)
        self.numbers[number] = self.add(node, self.loops.names[number])

    def done(self) -> LoopNest:
        stores = tuple(renumber_store(s, self.numbers) for s in self.loops.stores)
        return LoopNest(self.loops.axes, tuple(self.nodes), stores, tuple(self.names))


def one_hot_sums(loops: LoopNest) -> LoopNest:
    """sum_j where(j == t, v, 0) -> where(0 <= t < n, v, 0), for t and v that do not vary over j.

    The backward pass of a cross-entropy sums such a row: it is one element of it.
    """
    groups = groups_of(loops)
    found = {i: hit for i, n in enumerate(loops.nodes) if (hit := _one_hot(loops, groups, n)) is not None}
    if not found:
        return loops
    new = _Rebuilt(loops)
    numbers, add = new.numbers, new.add
    for i, node in enumerate(loops.nodes):
        if i not in found:
            new.keep(i)
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
    return new.done()


def _one_hot(loops: LoopNest, groups: tuple[frozenset[str], ...], node: Node) -> tuple[int, int, int] | None:
    """(t, v, n) of a reduction that has the form; n is the row's length."""
    if not isinstance(node, Reduce) or node.combine != "sum" or kept_of(loops.axes, node):
        return None
    over = over_of(loops.axes, node)
    if INNER in over:  # which of the values vary over them is not known here
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
    if not isinstance(rest, Constant) or rest.value != 0 or groups[value.node] & over:
        return None
    if not isinstance(equal, Compute) or equal.target is not aten.eq.Tensor:
        return None
    sides = dict(equal.operands)
    a, b = sides.get("self"), sides.get("other")
    if not (isinstance(a, Value) and isinstance(b, Value)):
        return None
    for here, there in ((a.node, b.node), (b.node, a.node)):
        position = loops.nodes[here]
        if isinstance(position, Coordinate) and not groups[there] & over:
            size = _counts(loops, position.index, node.axes)
            if size is not None:
                return there, value.node, size
    return None


def factored_sums(loops: LoopNest) -> LoopNest:
    """sum_j w_ij * (x_j * s) -> (sum_j w_ij * x_j) * s, for an s that waits for a sum over j.

    A norm in front of a matrix: both are read in one pass, and nothing of it waits for the row's mean square.
    """
    if sum(isinstance(n, Reduce) and over_of(loops.axes, n) == ALONG for n in loops.nodes) < 2:
        return loops
    groups, waiting, new = groups_of(loops), _waiting(loops), _Rebuilt(loops)
    changed = False

    def times(a: int, b: int, name: str) -> int:
        operands = (("self", Value(a)), ("other", Value(b)))
        return new.add(Compute(aten.mul.Tensor, operands, new.nodes[a].dtype), name)

    @functools.cache
    def parted(number: int) -> Parted:
        """A product without the factors that are the same for all terms and wait; and those."""
        number = _origin(loops, number)
        if not groups[number] & ALONG and number in waiting:
            return None, (new.numbers[number],)
        factors = _factors(loops, number)
        if not factors:
            return new.numbers[number], ()
        (a, out), (b, more) = map(parted, factors)
        if not out + more:
            return new.numbers[number], ()
        left = times(a, b, loops.names[number]) if a is not None and b is not None else a if b is None else b
        return left, out + more

    for i, node in enumerate(loops.nodes):
        if isinstance(node, Reduce) and _weighs(loops, groups, node):
            operand, out = parted(node.operand)
            if operand is not None and out:
                number, changed = new.add(replace(node, operand=operand), loops.names[i]), True
                for factor in out:
                    number = times(number, factor, loops.names[i])
                new.numbers[i] = number
                continue
        new.keep(i)
    return new.done() if changed else loops


def _waiting(loops: LoopNest) -> set[int]:
    """The nodes that wait for a reduction along the columns."""
    found: set[int] = set()
    for number, node in enumerate(loops.nodes):
        reduces = isinstance(node, Reduce) and over_of(loops.axes, node) == ALONG
        if reduces or not found.isdisjoint(operands_of(node)):
            found.add(number)
    return found


def _factors(loops: LoopNest, number: int) -> tuple[int, ...]:
    """The two of a product of floats; none of what is none."""
    node = loops.nodes[number]
    if not isinstance(node, Compute) or node.target is not aten.mul.Tensor:
        return ()
    values = tuple(value.node for _, value in node.operands if isinstance(value, Value))
    alike = node.dtype.is_floating_point and all(loops.nodes[n].dtype == node.dtype for n in values)
    return values if len(values) == 2 and alike else ()


def _weighs(loops: LoopNest, groups: tuple[frozenset[str], ...], node: Reduce) -> bool:
    """Whether a reduction is a sum along rows of a matrix, or of one and its scales, which lie in memory so,
    each element times what is the same in all of them."""
    if node.combine != "sum" or over_of(loops.axes, node) != ALONG:
        return False
    stack, leaves = [node.operand], list[int]()
    while stack:
        number = _origin(loops, stack.pop())
        factors = _factors(loops, number)
        stack.extend(factors)
        leaves += () if factors else (number,)
    wide = [n for n in leaves if groups[n] == frozenset({ROWS, COLS})]
    if not wide or not all(groups[n] <= ALONG for n in leaves if n not in wide):
        return False
    return not any(_runs_along_rows(loops, n) for matrix in wide for n in _behind(loops, matrix))


def _behind(loops: LoopNest, number: int) -> set[int]:
    """A node and all that it is made of."""
    found, stack = set[int](), [number]
    while stack:
        if (number := stack.pop()) not in found:
            found.add(number)
            stack.extend(operands_of(loops.nodes[number]))
    return found


def _runs_along_rows(loops: LoopNest, number: int) -> bool:
    node = loops.nodes[number]
    terms = node.index.terms if isinstance(node, Load) else ()
    return any(key >= 0 and step == 1 and loops.axes[key].group == ROWS for key, step in terms)


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


def _counts(loops: LoopNest, index: Index, reduced: frozenset[int]) -> int | None:
    """The number of positions, where `index` counts the reduced axes 0, 1, 2, ... exactly once each."""
    axes = sorted(reduced)
    terms = dict(index.terms)
    if index.const != 0 or terms.keys() != reduced:
        return None
    step: Dim = 1
    while axes:  # the innermost first: the one that the index follows in these steps
        i = next((k for k in axes if terms[k] == step), None)
        if i is None:
            return None
        step = product((step, loops.axes[i].size))
        axes.remove(i)
    return step if isinstance(step, int) else None
