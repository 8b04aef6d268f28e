"""Masks computed from `arange` and sizes alone, as functions of their coordinates, for all sizes.

Each node becomes a function from an index to an integer expression or a predicate; the function
of the mask, at symbolic coordinates, is then simplified. Nothing is evaluated, so neither the
number of elements nor whether sizes are known matters. Operators that the functions below don't
cover raise UnprovedError.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import sympy
import torch
from torch import fx
from torch._ops import OpOverload

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
        packet = node.target._schema.name.removeprefix("aten::")
        rule = _RULES.get(packet)
        if rule is None:
            raise UnprovedError(f"{node.target} is outside of the algebra of masks")
        arguments = {a.name: a.default_value for a in node.target._schema.arguments}
        arguments |= dict(zip(arguments, node.args, strict=False)) | dict(node.kwargs)
        read = {name: self._argument(value) for name, value in arguments.items()}
        result = node.meta["val"]
        shape = tuple(expression(s) for s in result.shape)
        at = rule(self, shape, read)
        return Value(shape, lambda index: self._cast(at(index), result.dtype))

    def _argument(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            value = argument.meta.get("val")
            if isinstance(value, torch.Tensor):
                return self.value(argument)
            return expression(value)
        if isinstance(argument, list | tuple):
            return [self._argument(a) for a in argument]
        return argument

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


Rule = Callable[[_Reader, tuple[Expr, ...], dict[str, Any]], Callable[[Index], Scalar]]


def _element(operand: Any, index: Index) -> Scalar:
    """Return an operand's element at an index of the broadcast result."""
    if not isinstance(operand, Value):
        return _constant(operand)
    operand_index = index[len(index) - len(operand.shape) :]
    return operand.at(
        tuple(sympy.Integer(0) if s == 1 else i for i, s in zip(operand_index, operand.shape, strict=True))
    )


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


def _pointwise(function: Callable[[_Reader, Scalar, Scalar], Scalar]) -> Rule:
    def rule(reader: _Reader, shape: tuple[Expr, ...], a: dict[str, Any]) -> Callable[[Index], Scalar]:
        del shape
        scale = _integer(_constant(a.get("alpha", 1)))
        other = a.get("other")

        def at(index: Index) -> Scalar:
            right = _element(other, index)
            return function(
                reader, _element(a["self"], index), right if scale == 1 else scale * _integer(right)
            )

        return at

    return rule


def _ordered(sign: int, strict: int) -> Rule:
    """Return the rule of self <= other for sign +1, or self >= other for -1; strict=1 excludes equality."""
    return _pointwise(lambda reader, x, y: reader.bounds.le0(sign * (_integer(x) - _integer(y)) + strict))


def _identity(reader: _Reader, shape: tuple[Expr, ...], a: dict[str, Any]) -> Callable[[Index], Scalar]:
    del reader, shape
    return lambda index: _element(a["self"], index)


def _fill(value: Callable[[dict[str, Any]], Any]) -> Rule:
    return lambda reader, shape, a: lambda index: _constant(value(a))


def _arange(reader: _Reader, shape: tuple[Expr, ...], a: dict[str, Any]) -> Callable[[Index], Scalar]:
    del reader, shape
    start, step = _constant(a.get("start", 0)), _constant(a.get("step", 1))
    return lambda index: start + step * index[0]


def _where(reader: _Reader, shape: tuple[Expr, ...], a: dict[str, Any]) -> Callable[[Index], Scalar]:
    del shape

    def at(index: Index) -> Scalar:
        condition = reader.nonzero(_element(a["condition"], index))
        if isinstance(condition, bool):
            return _element(a["self"] if condition else a["other"], index)
        yes, no = (_truth(_element(a[name], index)) for name in ("self", "other"))
        return some(every(condition, yes), every(negation(condition), no))

    return at


def _triangle(sign: int) -> Rule:
    """Return the rule of tril, which keeps column - row <= diagonal, for sign +1, or of triu for -1."""

    def rule(reader: _Reader, shape: tuple[Expr, ...], a: dict[str, Any]) -> Callable[[Index], Scalar]:
        del shape

        def at(index: Index) -> Scalar:
            kept = reader.bounds.le0(sign * (index[-1] - index[-2] - _constant(a["diagonal"])))
            return every(kept, _truth(_element(a["self"], index)))

        return at

    return rule


def _reshape(reader: _Reader, shape: tuple[Expr, ...], a: dict[str, Any]) -> Callable[[Index], Scalar]:
    """Read a view that only adds or drops dimensions of size 1."""
    del reader
    source: Value = a["self"]
    kept = [d for d, s in enumerate(shape) if s != 1]
    if [shape[d] for d in kept] != [s for s in source.shape if s != 1]:
        raise UnprovedError("a view merges or splits dimensions")

    def at(index: Index) -> Scalar:
        rest = iter(kept)
        return source.at(tuple(sympy.Integer(0) if s == 1 else index[next(rest)] for s in source.shape))

    return at


def _reorder(order: Callable[[int, dict[str, Any]], list[int]]) -> Rule:
    def rule(reader: _Reader, shape: tuple[Expr, ...], a: dict[str, Any]) -> Callable[[Index], Scalar]:
        del reader
        dims = order(len(shape), a)
        return lambda index: a["self"].at(tuple(index[dims.index(d)] for d in range(len(shape))))

    return rule


def _swapped(rank: int, a: dict[str, Any]) -> list[int]:
    dims = list(range(rank))
    x, y = (a[k] % rank for k in ("dim0", "dim1"))
    dims[x], dims[y] = dims[y], dims[x]
    return dims


def _slice(reader: _Reader, shape: tuple[Expr, ...], a: dict[str, Any]) -> Callable[[Index], Scalar]:
    del reader
    dim = a["dim"] % len(shape)
    start = _integer(_constant(a["start"] or 0))
    if start.is_nonnegative is not True:
        raise UnprovedError("a slice starts at an index that may be negative")
    step = _constant(a["step"])
    return lambda index: a["self"].at((*index[:dim], start + step * index[dim], *index[dim + 1 :]))


def _repeat(reader: _Reader, shape: tuple[Expr, ...], a: dict[str, Any]) -> Callable[[Index], Scalar]:
    del reader
    source: Value = a["self"]
    times: list[Any] = a["repeats"][len(shape) - len(source.shape) :]
    if any(t != 1 and s != 1 for t, s in zip(times, source.shape, strict=True)):
        raise UnprovedError("it repeats a dimension")
    return lambda index: _element(source, index)


def _index(reader: _Reader, shape: tuple[Expr, ...], a: dict[str, Any]) -> Callable[[Index], Scalar]:
    """Read x[i, j, ...] with one index tensor per dimension."""
    source: Value = a["self"]
    indices: list[Any] = a["indices"]
    if len(indices) != len(source.shape) or any(i is None for i in indices):
        raise UnprovedError("an indexing leaves out dimensions")

    def at(index: Index) -> Scalar:
        chosen = tuple(_integer(_element(i, index)) for i in indices)
        if not all(reader.bounds.le0(-c) is True for c in chosen):
            raise UnprovedError("an index may be negative")
        return source.at(chosen)

    return at


def _difference(reader: _Reader, shape: tuple[Expr, ...], a: dict[str, Any]) -> Callable[[Index], Scalar]:
    """Read x[k] - x[k - 1], where x may have a `prepend` of length one before it."""
    del reader
    source, before = a["self"], a["prepend"]
    dim = a["dim"] % len(shape)
    if a["n"] != 1 or a["append"] is not None or (before is not None and before.shape[dim] != 1):
        raise UnprovedError("a difference other than of neighbours")

    def at(index: Index) -> Scalar:
        def element(x: Value, k: Expr) -> Expr:
            return _integer(x.at((*index[:dim], k, *index[dim + 1 :])))

        if before is None:
            return element(source, index[dim] + 1) - element(source, index[dim])
        zero = sympy.Integer(0)
        first = sympy.expand(element(source, zero) - element(before, zero))
        others = sympy.expand(element(source, index[dim]) - element(source, index[dim] - 1))
        if first != others:
            raise UnprovedError("a difference whose first element is another")
        return others

    return at


def _flipped(reader: _Reader, shape: tuple[Expr, ...], a: dict[str, Any]) -> Callable[[Index], Scalar]:
    del reader
    dims = [d % len(shape) for d in a["dims"]]
    last = [size - 1 for size in shape]
    return lambda index: a["self"].at(tuple(last[d] - i if d in dims else i for d, i in enumerate(index)))


def _running_sum(reader: _Reader, shape: tuple[Expr, ...], a: dict[str, Any]) -> Callable[[Index], Scalar]:
    dim = a["dim"] % len(shape)

    def at(index: Index) -> Scalar:
        earlier = reader.fresh(shape[dim])
        if reader.nonzero(a["self"].at((*index[:dim], earlier, *index[dim + 1 :]))) is not False:
            raise UnprovedError("a running sum of other than zeros")
        return sympy.Integer(0)

    return at


def _rules() -> dict[str, Rule]:
    both = _pointwise(lambda r, x, y: every(_truth(x), _truth(y)))
    either = _pointwise(lambda r, x, y: some(_truth(x), _truth(y)))
    inverse: Rule = lambda r, shape, a: lambda i: negation(_truth(_element(a["self"], i)))  # noqa: E731
    one, zero, filled = _fill(lambda a: 1), _fill(lambda a: 0), _fill(lambda a: a["fill_value"])
    rules: dict[str, Rule] = {
        "arange": _arange,
        "add": _pointwise(lambda r, x, y: _integer(x) + _integer(y)),
        "sub": _pointwise(lambda r, x, y: _integer(x) - _integer(y)),
        "mul": _pointwise(lambda r, x, y: _integer(x) * _integer(y)),
        "le": _ordered(1, 0),
        "lt": _ordered(1, 1),
        "ge": _ordered(-1, 0),
        "gt": _ordered(-1, 1),
        "eq": _pointwise(lambda r, x, y: r.equal(x, y)),
        "ne": _pointwise(lambda r, x, y: negation(r.equal(x, y))),
        "where": _where,
        "tril": _triangle(1),
        "triu": _triangle(-1),
        "permute": _reorder(lambda rank, a: [d % rank for d in a["dims"]]),
        "transpose": _reorder(_swapped),
        "slice": _slice,
        "index": _index,
        "diff": _difference,
        "flip": _flipped,
        "neg": lambda r, shape, a: lambda i: -_integer(_element(a["self"], i)),
        "rsub": _pointwise(lambda r, x, y: _integer(y) - _integer(x)),
        "cumsum": _running_sum,
        "repeat": _repeat,
        "scalar_tensor": _fill(lambda a: a["s"]),
    }
    # These take predicates only (_truth), for which bitwise and logical operators agree.
    rules |= dict.fromkeys(("__and__", "bitwise_and", "logical_and"), both)
    rules |= dict.fromkeys(("__or__", "bitwise_or", "logical_or"), either)
    rules |= dict.fromkeys(("bitwise_not", "logical_not"), inverse)
    rules |= dict.fromkeys(("full", "full_like", "new_full"), filled)
    rules |= dict.fromkeys(("ones", "ones_like", "new_ones"), one)
    rules |= dict.fromkeys(("zeros", "zeros_like", "new_zeros"), zero)
    rules |= dict.fromkeys(("to", "_to_copy", "contiguous", "clone", "alias", "detach", "expand"), _identity)
    return rules | dict.fromkeys(("view", "reshape", "unsqueeze", "squeeze", "_unsafe_view"), _reshape)


_RULES = _rules()
