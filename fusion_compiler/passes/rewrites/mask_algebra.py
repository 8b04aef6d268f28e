"""Masks computed from `arange` and sizes alone, as functions of their coordinates, for all sizes.

Each node becomes a function from an index to an integer expression or a predicate; the function
of the mask, at symbolic coordinates, is then simplified. Nothing is evaluated, so neither the
number of elements nor whether sizes are known matters. Operators that neither are views
(`ops/views.py`) nor have a rule below raise UnprovedError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

from fusion_compiler.capture.graphs import arguments
from fusion_compiler.ir.layout import view_of_node
from fusion_compiler.ops.views import Diagonal, Expanded, Part, Permuted, Selected, View
from fusion_compiler.passes.rewrites.predicate import Bounds, Formula, every, negation, some

Expr = sympy.Expr
Scalar = Expr | Formula
Index = tuple[Expr, ...]


class UnprovedError(Exception):
    """A mask cannot be derived; the message is the reason: an op outside of the algebra, or data."""


@dataclass(frozen=True)
class Value:
    """A tensor: `at` gives its element at an index of `len(shape)` expressions."""

    shape: tuple[Expr, ...]
    at: Callable[[Index], Scalar]


def expression(size: object) -> Expr:
    """Return an int, SymInt or sympy expression as a sympy expression."""
    return cast(Expr, size.node.expr if isinstance(size, torch.SymInt) else sympy.sympify(size))


def predicate_of(mask: fx.Node) -> tuple[tuple[sympy.Symbol, ...], Formula]:
    """Return the bool tensor `mask` as its coordinates' symbols and a formula over them.

    Raises UnprovedError.
    """
    coordinates, element, _ = _element_of(mask)
    if isinstance(element, Expr):
        raise UnprovedError("it is not a bool mask")
    return coordinates, element


def integers_of(tensor: fx.Node) -> tuple[tuple[sympy.Symbol, ...], Expr, Bounds]:
    """Return a tensor of integers as its coordinates' symbols, an expression of them, and their bounds.

    Raises UnprovedError.
    """
    coordinates, element, bounds = _element_of(tensor)
    return coordinates, _integer(element), bounds


def _element_of(tensor: fx.Node) -> tuple[tuple[sympy.Symbol, ...], Scalar, Bounds]:
    shape = tuple(expression(s) for s in tensor.meta["val"].shape)
    coordinates = tuple(sympy.Symbol(f"i{d}", integer=True) for d in range(len(shape)))
    reader = _Reader(Bounds(dict(zip(coordinates, shape, strict=True))))
    return coordinates, reader.value(tensor).at(coordinates), reader.bounds


class _Reader:
    """A reader of nodes as Values. It reads each node once."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self._values: dict[fx.Node, Value] = {}

    def value(self, node: fx.Node) -> Value:
        if node not in self._values:
            self._values[node] = self._read(node)
        return self._values[node]

    def _read(self, node: fx.Node) -> Value:
        if node.op != "call_function" or not isinstance(node.target, OpOverload):
            raise UnprovedError(f"it depends on data ({node.name})")
        rule, view = _RULES.get(node.target._schema.name.removeprefix("aten::")), view_of_node(node)
        if rule is None and view is None:
            raise UnprovedError(f"{node.target} is outside of the algebra of masks")
        result = node.meta["val"]
        shape = tuple(expression(s) for s in result.shape)
        if rule is None:
            source = self.value(node.all_input_nodes[0])
            return Value(shape, lambda index: _viewed(view, source, shape, index))
        call = _Call(self, shape, {name: self._argument(value) for name, value in arguments(node).items()})
        return Value(shape, lambda index: self._cast(rule(call, index), result.dtype))

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = argument.meta.get("val")
            return self.value(argument) if isinstance(value, torch.Tensor) else expression(value)
        return [*map(self._argument, argument)] if isinstance(argument, list | tuple) else argument

    def _cast(self, element: Scalar, dtype: torch.dtype) -> Scalar:
        if dtype is torch.bool:
            return self.nonzero(element)
        if dtype.is_floating_point or dtype.is_complex:
            raise UnprovedError("it holds floating-point numbers")
        if dtype.itemsize < 4:
            raise UnprovedError(f"it counts in {dtype}, which may wrap")
        return sympy.Integer(element) if isinstance(element, bool) else _integer(element)

    def nonzero(self, element: Scalar) -> Formula:
        return negation(self.equal(element, sympy.Integer(0))) if isinstance(element, Expr) else element

    def equal(self, a: Scalar, b: Scalar) -> Formula:
        if isinstance(a, Expr) and isinstance(b, Expr):
            return every(self.bounds.le0(a - b), self.bounds.le0(b - a))
        a, b = _truth(a), _truth(b)
        return some(every(a, b), every(negation(a), negation(b)))

    def fresh(self, size: Expr) -> sympy.Symbol:
        """Return a new coordinate, which may be any of 0 ... size - 1."""
        symbol = sympy.Symbol(f"k{len(self.bounds.sizes)}", integer=True)
        self.bounds = Bounds({**self.bounds.sizes, symbol: size})
        return symbol


@dataclass(frozen=True)
class _Call:
    """A call of an operator with a result of `shape`. arguments: Values, expressions and literals by name."""

    reader: _Reader
    shape: tuple[Expr, ...]
    arguments: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def at(self, name: str, index: Index) -> Scalar:
        """Return an operand's element at an index of the broadcast result."""
        return _element(self.arguments[name], index)

    def along(self, dim: int, index: Index, place: Expr, name: str = "self") -> Scalar:
        """Return an operand's element at an index with another place along a dimension."""
        return self.at(name, (*index[:dim], place, *index[dim + 1 :]))

    @property
    def dim(self) -> int:
        return self["dim"] % len(self.shape)


Rule = Callable[[_Call, Index], Scalar]


def _element(operand: Any, index: Index) -> Scalar:
    if not isinstance(operand, Value):
        return _constant(operand)
    own_index = index[len(index) - len(operand.shape) :]
    return operand.at(tuple(_ZERO if s == 1 else i for i, s in zip(own_index, operand.shape, strict=True)))


_ZERO = sympy.Integer(0)


def _constant(number: Any) -> Scalar:
    if isinstance(number, bool):
        return number
    if isinstance(number, float) and not number.is_integer():
        raise UnprovedError(f"it holds the constant {number}")
    return sympy.Integer(int(number)) if isinstance(number, int | float) else number


def _integer(scalar: Scalar) -> Expr:
    if not isinstance(scalar, Expr):
        raise UnprovedError("it counts with a predicate")
    return scalar


def _truth(scalar: Scalar) -> Formula:
    if not isinstance(scalar, Expr):
        return scalar
    if scalar not in (0, 1):
        raise UnprovedError("it combines integers with predicates")
    return scalar == 1


def _viewed(view: View | None, source: Value, shape: tuple[Expr, ...], index: Index) -> Scalar:
    """Return the element of a view of `shape` at an index."""
    rank = len(source.shape)
    match view:
        case Permuted(order):
            return source.at(tuple(index[order.index(d)] for d in range(rank)))
        case Part(dim, start, step):
            start, step = _size(start), _size(step)
            if start.is_nonnegative is not True:
                raise UnprovedError("a slice starts at an index that may be negative")
            return source.at((*index[:dim], start + step * index[dim], *index[dim + 1 :]))
        case Selected(dim, place):
            place = _size(place)
            if place.is_nonnegative is not True:
                raise UnprovedError("an index may be negative")
            return source.at((*index[:dim], place, *index[dim:]))
        case Diagonal(first, second, offset):
            others = iter(index[:-1])
            along = {first: index[-1] - min(offset, 0), second: index[-1] + max(offset, 0)}
            return source.at(tuple(along[d] if d in along else next(others) for d in range(rank)))
        case Expanded():
            return _element(source, index)
        case _:  # which may only add or drop dimensions of size 1
            kept = [d for d, s in enumerate(shape) if s != 1]
            if [shape[d] for d in kept] != [s for s in source.shape if s != 1]:
                raise UnprovedError("a view merges or splits dimensions")
            rest = iter(kept)
            return source.at(tuple(_ZERO if s == 1 else index[next(rest)] for s in source.shape))


def _size(size: Any) -> Expr:
    return expression(size.meta["val"] if isinstance(size, fx.Node) else size)


def _pointwise(function: Callable[[_Reader, Scalar, Scalar], Scalar]) -> Rule:
    def at(call: _Call, index: Index) -> Scalar:
        scale, other = _integer(_constant(call.arguments.get("alpha", 1))), call.at("other", index)
        other = other if scale == 1 else scale * _integer(other)
        return function(call.reader, call.at("self", index), other)

    return at


def _ordered(sign: int, strict: int) -> Rule:
    """Return the rule of self <= other for sign +1, or self >= other for -1; strict=1 excludes equality."""
    return _pointwise(lambda reader, x, y: reader.bounds.le0(sign * (_integer(x) - _integer(y)) + strict))


def _arange(call: _Call, index: Index) -> Scalar:
    start, step = (_constant(call.arguments.get(name, n)) for name, n in (("start", 0), ("step", 1)))
    return start + step * index[0]


def _where(call: _Call, index: Index) -> Scalar:
    condition = call.reader.nonzero(call.at("condition", index))
    if isinstance(condition, bool):
        return call.at("self" if condition else "other", index)
    yes, no = (_truth(call.at(name, index)) for name in ("self", "other"))
    return some(every(condition, yes), every(negation(condition), no))


def _triangle(sign: int) -> Rule:
    """Return the rule of tril, which keeps column - row <= diagonal, for sign +1, or of triu for -1."""

    def at(call: _Call, index: Index) -> Scalar:
        kept = call.reader.bounds.le0(sign * (index[-1] - index[-2] - _constant(call["diagonal"])))
        return every(kept, _truth(call.at("self", index)))

    return at


def _repeat(call: _Call, index: Index) -> Scalar:
    shape: tuple[Expr, ...] = call["self"].shape
    times: list[Any] = call["repeats"][len(index) - len(shape) :]
    if any(t != 1 and s != 1 for t, s in zip(times, shape, strict=True)):
        raise UnprovedError("it repeats a dimension")
    return call.at("self", index)


def _index(call: _Call, index: Index) -> Scalar:
    """Read x[i, j, ...] with one index tensor per dimension."""
    indices: list[Any] = call["indices"]
    if len(indices) != len(call["self"].shape) or any(i is None for i in indices):
        raise UnprovedError("an indexing leaves out dimensions")
    chosen = tuple(_integer(_element(i, index)) for i in indices)
    if not all(call.reader.bounds.le0(-c) is True for c in chosen):
        raise UnprovedError("an index may be negative")
    return call["self"].at(chosen)


def _difference(call: _Call, index: Index) -> Scalar:
    """Read x[k] - x[k - 1], where x may have a `prepend` of length one before it."""
    before, dim = call["prepend"], call.dim
    if call["n"] != 1 or call["append"] is not None or (before is not None and before.shape[dim] != 1):
        raise UnprovedError("a difference other than of neighbours")

    def element(place: Expr, name: str = "self") -> Expr:
        return _integer(call.along(dim, index, place, name))

    if before is None:
        return element(index[dim] + 1) - element(index[dim])
    others = sympy.expand(element(index[dim]) - element(index[dim] - 1))
    if sympy.expand(element(_ZERO) - element(_ZERO, "prepend")) != others:
        raise UnprovedError("a difference whose first element is another")
    return others


def _flipped(call: _Call, index: Index) -> Scalar:
    dims = [d % len(index) for d in call["dims"]]
    return call.at("self", tuple(call.shape[d] - 1 - i if d in dims else i for d, i in enumerate(index)))


def _running_sum(call: _Call, index: Index) -> Scalar:
    reader = call.reader
    if reader.nonzero(call.along(call.dim, index, reader.fresh(call.shape[call.dim]))) is not False:
        raise UnprovedError("a running sum of other than zeros")
    return _ZERO


def _rules() -> dict[str, Rule]:
    def filled(name: str) -> Rule:
        return lambda call, index: _constant(call[name])

    rules: dict[str, Rule] = {
        "arange": _arange,
        "add": _pointwise(lambda r, x, y: _integer(x) + _integer(y)),
        "sub": _pointwise(lambda r, x, y: _integer(x) - _integer(y)),
        "rsub": _pointwise(lambda r, x, y: _integer(y) - _integer(x)),
        "mul": _pointwise(lambda r, x, y: _integer(x) * _integer(y)),
        "neg": lambda call, index: -_integer(call.at("self", index)),
        "le": _ordered(1, 0),
        "lt": _ordered(1, 1),
        "ge": _ordered(-1, 0),
        "gt": _ordered(-1, 1),
        "eq": _pointwise(lambda r, x, y: r.equal(x, y)),
        "ne": _pointwise(lambda r, x, y: negation(r.equal(x, y))),
        "where": _where,
        "tril": _triangle(1),
        "triu": _triangle(-1),
        "index": _index,
        "diff": _difference,
        "flip": _flipped,
        "cumsum": _running_sum,
        "repeat": _repeat,
        "scalar_tensor": filled("s"),
    }
    of_names: dict[tuple[str, ...], Rule] = {
        # These take predicates only (_truth), for which bitwise and logical operators agree.
        ("__and__", "bitwise_and", "logical_and"): _pointwise(lambda r, x, y: every(_truth(x), _truth(y))),
        ("__or__", "bitwise_or", "logical_or"): _pointwise(lambda r, x, y: some(_truth(x), _truth(y))),
        ("bitwise_not", "logical_not"): lambda call, index: negation(_truth(call.at("self", index))),
        ("full", "full_like", "new_full"): filled("fill_value"),
        ("ones", "ones_like", "new_ones"): lambda call, index: sympy.Integer(1),
        ("zeros", "zeros_like", "new_zeros"): lambda call, index: _ZERO,
        ("to", "_to_copy", "contiguous", "clone"): lambda call, index: call.at("self", index),
    }
    return rules | {name: rule for names, rule in of_names.items() for name in names}


_RULES = _rules()
