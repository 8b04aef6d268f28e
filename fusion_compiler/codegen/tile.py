"""The tile program: the statements of one program of a kernel, between the loop nest and the text.

    program    := statement*
    statement  := Assign(targets, value)          a, b = ...
                | Update(target, sign, value)     a += ...
                | Store(pointer, value, mask)
                | For(variable, range, body) | If(condition, body)
                | Check(index, low, high, mask)   an index outside ends the program in an error
                | Signal(boxes, values, scope)    a message for other programs
                | Wait(targets, boxes, like)      what other programs sent, once it has come
                | Do(value)                       a call that returns nothing
                | Return(values)
    value      := Combine(reduction, tiles, axis) | expression (`ops/syntax.py`)

Variables are objects (`syntax.Var`) that get their names when the program is printed (`text.py`), so passes
(`passes.py`) can move and repeat statements. A loop's variable has a fixed name (`syntax.Name`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import cast

from fusion_compiler.ir.loops import Reduce
from fusion_compiler.ops import syntax
from fusion_compiler.ops.syntax import Expression, Global, Literal, Name, Variable


@dataclass(frozen=True)
class Combine:
    """The reduction of one tile along an axis, or of several tiles with one barrier.

    axis: the dimension, or None for all of them.
    keep: keep the axis with one element.
    plain: a maximum need not propagate NaN.
    join_key: two sums with equal keys may be reduced together (`passes.joined`); None forbids it.
    """

    reduce: Reduce
    tiles: tuple[Expression, ...]
    axis: int | None
    keep: bool
    plain: bool = False
    join_key: object = None


Value = Expression | Combine
NO_VARIABLES = frozenset[Variable]()


class Simple:
    """A statement without blocks."""

    @functools.cached_property
    def names(self) -> frozenset[Variable | Global]:
        """Return the variables, parameters and module names that the statement reads."""
        values = [value.names for value in expressions(cast(Statement, self))]
        return values[0] if len(values) == 1 else frozenset[Variable | Global]().union(*values)


@dataclass(frozen=True)
class Assign(Simple):
    """targets = value. node: the node of the nest whose value the target holds."""

    targets: tuple[Variable, ...]
    value: Value
    node: int | None = None


@dataclass(frozen=True)
class Update(Simple):
    """target <sign>= value."""

    target: Variable
    sign: str
    value: Expression


@dataclass(frozen=True)
class Store(Simple):
    """tl.store(pointer, value, mask). node: the node of the nest that is stored."""

    pointer: Expression
    value: Expression
    mask: Expression | None = None
    node: int | None = None


@dataclass(frozen=True)
class Range:
    """The values of a loop variable.

    stages: pipeline stages; None uses the kernel's number.
    unroll: iterations that the compiler unrolls together.
    static: the compiler unrolls the whole loop.
    """

    start: Expression
    end: Expression
    step: int | None = None
    stages: int | None = None
    unroll: int | None = None
    static: bool = False

    def turns(self) -> tuple[int, int] | None:
        """Return (end, step) of a loop that starts at zero with a constant end; None for any other."""
        end = self.end.value if isinstance(self.end, Literal) else None
        is_constant = self.start == Literal(0) and isinstance(end, int) and self.step is not None
        return (cast(int, end), cast(int, self.step)) if is_constant else None


@dataclass(frozen=True)
class For:
    variable: Name
    values: Range
    body: list[Statement] = field(default_factory=list["Statement"])


@dataclass(frozen=True)
class If:
    condition: Expression
    body: list[Statement] = field(default_factory=list["Statement"])
    otherwise: list[Statement] = field(default_factory=list["Statement"])


@dataclass(frozen=True)
class Check(Simple):
    """Abort the program unless low <= index < high wherever the mask is true.

    what: the operator that uses the index.
    zero: a tile of zeros with the index's shape and dtype.
    """

    index: Expression
    low: Expression
    high: Expression
    what: str
    mask: Expression | None
    zero: Expression


class Scope(StrEnum):
    """A scope names the programs that see what another stored before its signal: one device's, or all."""

    DEVICE = "gpu"
    SYSTEM = "sys"


@dataclass(frozen=True)
class Boxes:
    """Boxes hold messages of programs for each other: int64, each written by one program and read by one.

    pointers: a tile of addresses, in memory of this device or of others. inside: the lanes that have a box.
    rows: of a block whose rows have boxes each, how many rows exist from the first on, how far they lie apart
    and how many boxes one has.
    """

    pointers: Expression
    inside: Expression
    rows: tuple[Expression, ...] = ()

    @property
    def parts(self) -> tuple[Expression, ...]:
        return (self.pointers, self.inside, *self.rows)


@dataclass(frozen=True)
class Signal(Simple):
    """Leave a message for other programs, in a box of each.

    values: one or two numbers of 32 bits, which are all that the others read. With a scope, the number of the
    round, one more than the boxes held: the others then read what this program has stored before.
    """

    boxes: Boxes
    values: tuple[Expression, ...]
    scope: Scope | None = None


@dataclass(frozen=True)
class Wait(Simple):
    """Receive what other programs have signalled. Later statements run when each of them has.

    like: a tile that has the dtype of the values. With a scope, the number of the round, which the target is
    too: loads of what the others stored have to be addressed by the target, as rewrites keep the order of
    statements by the variables alone. neutrals: of each value, what the lanes without a box get.
    """

    targets: tuple[Variable, ...]
    boxes: Boxes
    like: Expression
    neutrals: tuple[Expression, ...] = ()
    scope: Scope | None = None


@dataclass(frozen=True)
class Do(Simple):
    """Call a function that returns nothing."""

    value: Expression


@dataclass(frozen=True)
class Return(Simple):
    values: tuple[Expression, ...]


Statement = Assign | Update | Store | For | If | Check | Signal | Wait | Do | Return


@dataclass(frozen=True)
class Function:
    """A function of a kernel's module; the kernel itself has a docstring."""

    name: str
    parameters: tuple[Name, ...]
    body: list[Statement]
    doc: str = ""


def expressions(statement: Statement) -> tuple[Expression, ...]:
    """Return the expressions that a statement computes; for a block, only its header's."""
    match statement:
        case Assign(_, Expression() as value) | Do(value) | If(value):
            return (value,)
        case Assign(_, Combine(_, tiles)) | Return(tiles):
            return tiles
        case Update(target, _, value):
            return (target, value)
        case Store(pointer, value, mask):
            return (pointer, value) if mask is None else (pointer, value, mask)
        case For(_, values):
            return (values.start, values.end)
        case Check(index, low, high, _, mask):
            return (index, low, high) if mask is None else (index, low, high, mask)
        case Signal(boxes, values):
            return (*boxes.parts, *values)
        case Wait(_, boxes, like, neutrals):
            return (*boxes.parts, like, *neutrals)
        case _:
            raise TypeError(statement)


def names(statement: Statement) -> Set[Variable | Global]:
    """Return the variables, parameters and module names that a statement reads, including its blocks."""
    if isinstance(statement, Simple):
        return statement.names
    header = (value.names for value in expressions(statement))
    return frozenset[Variable | Global]().union(
        *header, *(names(inner) for body in bodies(statement) for inner in body)
    )


def reads(statement: Statement) -> set[Variable]:
    """Return the variables and parameters that a statement reads, including its blocks."""
    return {name for name in names(statement) if not isinstance(name, Global)}


def writes(statement: Statement) -> Set[Variable]:
    """Return the variables that a statement assigns, including its blocks."""
    match statement:
        case Assign(targets) | Wait(targets):
            return {*targets}
        case Update(target):
            return {target}
        case For() | If():
            return {name for body in bodies(statement) for inner in body for name in writes(inner)}
        case _:
            return NO_VARIABLES


def renamed(statement: Statement, names: Mapping[Variable, Expression]) -> Statement:
    """Return a statement without blocks, with some variables replaced by expressions."""

    def new(value: Expression) -> Expression:
        return syntax.renamed(value, names)

    def target(variable: Variable) -> Variable:
        return cast(Variable, new(variable))

    match statement:
        case Assign(targets, value):
            if isinstance(value, Combine):
                value = replace(value, tiles=tuple(map(new, value.tiles)))
            else:
                value = new(value)
            return replace(statement, targets=tuple(map(target, targets)), value=value)
        case Update(variable, _, value):
            return replace(statement, target=target(variable), value=new(value))
        case Store(pointer, value, mask):
            mask = None if mask is None else new(mask)
            return replace(statement, pointer=new(pointer), value=new(value), mask=mask)
        case Check(index, _, _, _, mask):
            return replace(statement, index=new(index), mask=None if mask is None else new(mask))
        case Signal(boxes, values):
            pointers, inside, *rows = map(new, boxes.parts)
            boxes = Boxes(pointers, inside, tuple(rows))
            return replace(statement, boxes=boxes, values=tuple(map(new, values)))
        case Do(value):
            return Do(new(value))
        case _:
            raise TypeError(statement)


def bodies(statement: Statement) -> tuple[list[Statement], ...]:
    """Return the blocks directly in a statement."""
    match statement:
        case For():
            return (statement.body,)
        case If():
            return (statement.body, statement.otherwise)
        case _:
            return ()


def blocks(body: list[Statement]) -> Iterator[list[Statement]]:
    """Yield a block and all blocks in it, inner ones first."""
    for statement in body:
        for inner in bodies(statement):
            yield from blocks(inner)
    yield body


def with_operands(body: Sequence[Statement], wanted: Iterable[int]) -> set[int]:
    """Return the positions of some statements of a block and of all earlier ones on which they depend."""
    needed: set[int] = set()
    stack = list(wanted)
    while stack:
        if (i := stack.pop()) not in needed:
            needed.add(i)
            missing = reads(body[i])
            for j in range(i - 1, -1, -1):
                if defined := missing & writes(body[j]):
                    stack.append(j)
                    missing -= defined
    return needed
