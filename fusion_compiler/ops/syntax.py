"""Define the expressions of a kernel: immutable trees that emission code builds and that passes rewrite.

Python's operators build trees, and `tl` and `fm` stand for the modules that kernels import. Code that emits
an expression therefore reads like the kernel:

    pointer + row * 2048 + col
    tl.where(mask, x, 0.0).to(torch.float32)[None, :]

Numbers, dtypes, symbolic sizes and lists are turned into trees wherever an expression is expected (`lift`).
`==` compares trees, as it does for every dataclass; `eq` and `ne` build the comparisons.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy
import torch

DTYPES = {
    torch.float8_e4m3fn: "float8e4nv",
    torch.float8_e5m2: "float8e5",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.int64: "int64",
    torch.uint8: "uint8",
    torch.bool: "int1",
}


class Expression:
    """All expressions have this base class, with the operators that build larger ones."""

    def __add__(self, other: Operand) -> Expression:
        return Binary("+", self, lift(other))

    def __radd__(self, other: Operand) -> Expression:
        return Binary("+", lift(other), self)

    def __sub__(self, other: Operand) -> Expression:
        return Binary("-", self, lift(other))

    def __rsub__(self, other: Operand) -> Expression:
        return Binary("-", lift(other), self)

    def __mul__(self, other: Operand) -> Expression:
        return Binary("*", self, lift(other))

    def __truediv__(self, other: Operand) -> Expression:
        return Binary("/", self, lift(other))

    def __rtruediv__(self, other: Operand) -> Expression:
        return Binary("/", lift(other), self)

    def __floordiv__(self, other: Operand) -> Expression:
        return Binary("//", self, lift(other))

    def __mod__(self, other: Operand) -> Expression:
        return Binary("%", self, lift(other))

    def __and__(self, other: Operand) -> Expression:
        return Binary("&", self, lift(other))

    def __or__(self, other: Operand) -> Expression:
        return Binary("|", self, lift(other))

    def __xor__(self, other: Operand) -> Expression:
        return Binary("^", self, lift(other))

    def __lt__(self, other: Operand) -> Expression:
        return Binary("<", self, lift(other))

    def __le__(self, other: Operand) -> Expression:
        return Binary("<=", self, lift(other))

    def __gt__(self, other: Operand) -> Expression:
        return Binary(">", self, lift(other))

    def __ge__(self, other: Operand) -> Expression:
        return Binary(">=", self, lift(other))

    def eq(self, other: Operand) -> Expression:
        return Binary("==", self, lift(other))

    def ne(self, other: Operand) -> Expression:
        return Binary("!=", self, lift(other))

    def __getitem__(self, items: Operand) -> Expression:
        return Subscript(self, tuple(map(lift, items if isinstance(items, tuple) else (items,))))

    def to(self, dtype: Operand) -> Expression:
        return Call(Member(self, "to"), (lift(dtype),))

    def reshape(self, *shape: Operand) -> Expression:
        return Call(Member(self, "reshape"), tuple(map(lift, shape)))

    def __str__(self) -> str:
        return printed(self)

    def parts(self) -> tuple[Expression, ...]:
        """Return the direct subexpressions."""
        return ()

    @functools.cached_property
    def names(self) -> frozenset[Variable | Global]:
        """Return the variables, parameters and names of modules in the expression."""
        names = set[Variable | Global]()
        stack: list[Expression] = [self]
        while stack:
            part = stack.pop()
            if isinstance(part, Var | Name | Global):
                names.add(part)
            else:
                stack += part.parts()
        return frozenset(names)


Operand: TypeAlias = (
    "Expression | float | torch.dtype | sympy.Expr | slice | list[int] | tuple[Operand, ...] | None"
)


@dataclass(frozen=True, eq=False)
class Var(Expression):
    """A Var is a variable that differs from every other; the printer makes its name from `base`."""

    base: str


@dataclass(frozen=True)
class Name(Expression):
    """A Name is a parameter, or a variable whose name is chosen where it is made, such as a loop's."""

    base: str


@dataclass(frozen=True)
class Global(Expression):
    """A Global is a name of the kernel's module: a function, a dtype or another constant, with its module."""

    text: str

    def __call__(self, *arguments: Operand, **keywords: Operand) -> Call:
        named = tuple((name, lift(value)) for name, value in keywords.items())
        return Call(self, tuple(map(lift, arguments)), named)


@dataclass(frozen=True)
class Literal(Expression):
    value: float | str | None


@dataclass(frozen=True)
class Call(Expression):
    function: Expression
    arguments: tuple[Expression, ...]
    keywords: tuple[tuple[str, Expression], ...] = ()

    def parts(self) -> tuple[Expression, ...]:
        return (self.function, *self.arguments, *(value for _, value in self.keywords))


@dataclass(frozen=True)
class Member(Expression):
    """A Member is a method of a tile: value.name."""

    value: Expression
    name: str

    def parts(self) -> tuple[Expression, ...]:
        return (self.value,)


@dataclass(frozen=True)
class Unary(Expression):
    sign: str
    operand: Expression

    def parts(self) -> tuple[Expression, ...]:
        return (self.operand,)


@dataclass(frozen=True)
class Binary(Expression):
    """A Binary has two operands of an arithmetic operator or of a comparison."""

    sign: str
    left: Expression
    right: Expression

    def parts(self) -> tuple[Expression, ...]:
        return (self.left, self.right)


@dataclass(frozen=True)
class Subscript(Expression):
    value: Expression
    items: tuple[Expression, ...]

    def parts(self) -> tuple[Expression, ...]:
        return (self.value, *self.items)


@dataclass(frozen=True)
class Slice(Expression):
    """A Slice is the `:` of x[None, :]."""


@dataclass(frozen=True)
class Items(Expression):
    """An Items is a list, such as a shape, or a tuple."""

    items: tuple[Expression, ...]
    is_tuple: bool = False

    def parts(self) -> tuple[Expression, ...]:
        return self.items


Variable = Var | Name


class Module:
    """A Module stands for a module that kernels import; its attributes are `Global`s."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Global:
        return Global(f"{self._name}.{name}")


tl, fm, libdevice = Module("tl"), Module("fm"), Module("libdevice")
INFINITY, MINUS_INFINITY = Literal(math.inf), Literal(-math.inf)
PROPAGATE_NAN = Global("tl.PropagateNan.ALL")


# -- building ------------------------------------------------------------------------------------------


def lift(value: Operand) -> Expression:
    """Return the expression of a Python value."""
    match value:
        case Expression():
            return value
        case bool() | int() | float() | None:
            return Literal(value)
        case sympy.Expr():
            return _size(sympy.expand(value))
        case torch.dtype():
            return Global(f"tl.{DTYPES[value]}")
        case list():
            return Items(tuple(map(lift, value)))
        case tuple():
            return Items(tuple(map(lift, value)), is_tuple=True)
        case slice():
            return Slice()
        case _:
            raise TypeError(f"{value!r} is not an expression")


def _size(size: sympy.Basic) -> Expression:
    """Return a symbolic size as an integer expression, with powers as products, which Triton can parse."""
    if isinstance(size, sympy.Integer):
        return Literal(int(size))
    if isinstance(size, sympy.Symbol):
        return Name(size.name)
    parts = [_size(argument) for argument in size.args]
    match size:
        case sympy.Pow() if isinstance(size.exp, sympy.Integer) and size.exp > 0:
            return _joined("*", [parts[0]] * int(size.exp))
        case sympy.Add():
            return _joined("+", parts)
        case sympy.Mul():
            return _joined("*", parts)
        case sympy.Min():
            return tl.minimum(*parts)
        case _ if type(size).__name__ in ("FloorDiv", "Mod", "PythonMod") and len(parts) == 2:
            return _joined("//" if type(size).__name__ == "FloorDiv" else "%", parts)
        case _:
            raise ValueError(f"size {size} has no Triton text")


def _joined(sign: str, parts: Iterable[Expression]) -> Expression:
    return functools.reduce(functools.partial(Binary, sign), parts)


def plus(*terms: Operand) -> Expression:
    """Return the sum of integers from left to right. None is left out.

    The terms of a sum are added one by one: pointer + (row + col) is pointer + row + col.
    """
    parts = [lift(term) for term in terms if term is not None]
    return functools.reduce(_plus, parts) if parts else Literal(0)


def _plus(left: Expression, right: Expression) -> Expression:
    match right:
        case Binary("+" | "-"):
            return replace(right, left=_plus(left, right.left))
        case Literal(int() as value) if value < 0:
            return left - -value
        case _:
            return left + right


def times(*factors: Operand) -> Expression:
    return _joined("*", map(lift, factors))


def every(*conditions: Expression | None) -> Expression | None:
    """Return the conjunction of the conditions that are not None, or None if there are none."""
    parts = [condition for condition in conditions if condition is not None]
    return _joined("&", parts) if parts else None


# -- reading and rewriting -------------------------------------------------------------------------------


def reads(expression: Expression) -> Iterator[Variable]:
    """Yield the variables and parameters in an expression."""
    return (name for name in expression.names if not isinstance(name, Global))


def renamed(expression: Expression, names: Mapping[Variable, Expression]) -> Expression:
    """Return an expression with some variables replaced."""

    def new(part: Expression) -> Expression:
        return renamed(part, names)

    match expression:
        case Var() | Name():
            return names.get(expression, expression)
        case Call(function, arguments, keywords):
            return Call(new(function), tuple(map(new, arguments)), tuple((k, new(v)) for k, v in keywords))
        case Member(value):
            return replace(expression, value=new(value))
        case Unary(_, operand):
            return replace(expression, operand=new(operand))
        case Binary(sign, left, right):
            return Binary(sign, new(left), new(right))
        case Subscript(value, items):
            return Subscript(new(value), tuple(map(new, items)))
        case Items(items):
            return replace(expression, items=tuple(map(new, items)))
        case _:
            return expression


# -- printing ----------------------------------------------------------------------------------------------

_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")
_LEVELS = (_COMPARISONS, ("|",), ("^",), ("&",), ("<<", ">>"), ("+", "-"), ("*", "/", "//", "%"))
_BINDS = {sign: level for level, signs in enumerate(_LEVELS) for sign in signs}
_SIGNED, _ATOM = len(_LEVELS), len(_LEVELS) + 1  # precedence of -x, and of a name or a call


def printed(expression: Expression, name: Callable[[Variable], str] = lambda v: v.base) -> str:
    """Return an expression's text with the necessary parentheses. `name` returns a variable's name."""

    def text(part: Expression, level: int) -> str:
        return f"({written(part)})" if _binds(part) < level else written(part)

    def listed(parts: Iterable[Expression]) -> str:
        return ", ".join(map(written, parts))

    def written(part: Expression) -> str:
        match part:
            case Var() | Name():
                return name(part)
            case Global(qualified):
                return qualified
            case Literal(value):
                return literal(value)
            case Call(function, arguments, keywords):
                named = (f"{keyword}={written(value)}" for keyword, value in keywords)
                return f"{text(function, _ATOM)}({', '.join([*map(written, arguments), *named])})"
            case Member(value, member):
                return f"{text(value, _ATOM)}.{member}"
            case Unary(sign, operand):
                return f"{sign}{text(operand, _SIGNED)}"
            case Binary(sign, left, right):
                level = _BINDS[sign]  # chained comparisons would have another meaning
                first = text(left, level + 1 if sign in _COMPARISONS else level)
                return f"{first} {sign} {text(right, level + 1)}"
            case Subscript(value, items):
                return f"{text(value, _ATOM)}[{listed(items)}]"
            case Slice():
                return ":"
            case Items(items, is_tuple):
                if is_tuple:
                    return f"({listed(items)}{',' if len(items) == 1 else ''})"
                return f"[{listed(items)}]"
            case _:
                raise TypeError(part)

    return written(expression)


def _binds(expression: Expression) -> int:
    match expression:
        case Binary(sign):
            return _BINDS[sign]
        case Unary():
            return _SIGNED
        case Literal(int() | float() as value) if value < 0 and math.isfinite(value):
            return _SIGNED
        case _:
            return _ATOM


def literal(value: object) -> str:
    """Return the text of a Python scalar in a kernel."""
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, float) and not value and math.copysign(1, value) < 0:
        return "fm.minus_zero()"  # Triton reads every zero literal as 0.0
    return repr(value)
