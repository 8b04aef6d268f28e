"""The tile program: what one program of a kernel does, between the loop nest and the text.

    program    := statement*
    statement  := Assign(targets, value)          a, b = ...
                | Update(target, sign, value)     a += ...
                | Store(pointer, value, mask)
                | For(variable, range, body) | If(condition, body)
                | Check(index, low, high, mask)   an index outside ends the program in an error
                | Wait(targets, value)            what other programs sent, once it has come
                | Do(value)                       a call that returns nothing
                | Return(values)
    value      := Combine(reduction, tiles, axis) | expression (`syntax.py`)

Variables are objects (`syntax.Var`), whose names are found when the program is printed (`text.py`), so that
passes (`passes.py`) can move and repeat statements. The few that mean the same in every kernel, `row` and
`col` say, are called so from the beginning (`names.Own`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from fusion_compiler.ir import syntax
from fusion_compiler.ir.loops import Reduce
from fusion_compiler.ir.syntax import Expression, Global, Literal, Name, Variable


@dataclass(frozen=True)
class Combine:
    """One tile, or several for which the threads wait for each other once, reduced along an axis.

    keep: the axis stays, of one element. plain: of maxima, NaN need not be kept. alike: what two sums have to
    have in common to be made together; None where they are not to.
    """

    reduce: Reduce
    tiles: tuple[Expression, ...]
    axis: int
    keep: bool
    plain: bool = False
    alike: object = None


Value = Expression | Combine


@dataclass(frozen=True)
class Assign:
    """node: that of the nest which the target holds."""

    targets: tuple[Variable, ...]
    value: Value
    node: int | None = None


@dataclass(frozen=True)
class Update:
    """target <sign>= value."""

    target: Variable
    sign: str
    value: Expression


@dataclass(frozen=True)
class Store:
    """node: that of the nest which is stored."""

    pointer: Expression
    value: Expression
    mask: Expression | None = None
    node: int | None = None


@dataclass(frozen=True)
class Range:
    """The values of a loop's variable. stages: of software pipelining; None leaves them to the kernel's
    number. unroll: turns that run together. static: the compiler unrolls the loop."""

    start: Expression
    end: Expression
    step: int | None = None
    stages: int | None = None
    unroll: int | None = None
    static: bool = False

    def turns(self) -> tuple[int, int] | None:
        """Return (end, step) of a loop that starts at zero and whose end is known; None for any other."""
        end = self.end.value if isinstance(self.end, Literal) else None
        known = self.start == Literal(0) and isinstance(end, int) and self.step is not None
        return (cast(int, end), cast(int, self.step)) if known else None


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
class Check:
    """low <= index < high wherever the mask holds. what: whose index it is. zero: a tile of the index's shape
    and dtype."""

    index: Expression
    low: Expression
    high: Expression
    what: str
    mask: Expression | None
    zero: Expression


@dataclass(frozen=True)
class Wait:
    """Programs tell each other what they reduced. Statements behind it run when all have."""

    targets: tuple[Variable, ...]
    value: Expression


@dataclass(frozen=True)
class Do:
    value: Expression


@dataclass(frozen=True)
class Return:
    values: tuple[Expression, ...]


Statement = Assign | Update | Store | For | If | Check | Wait | Do | Return


@dataclass(frozen=True)
class Function:
    """A function of a kernel's module; the kernel itself has a docstring."""

    name: str
    parameters: tuple[Name, ...]
    body: list[Statement]
    doc: str | None = None


def expressions(statement: Statement) -> Iterator[Expression]:
    """Yield the expressions that a statement computes; of a block, those of its header alone."""
    match statement:
        case Assign(_, Combine(_, tiles)) | Return(tiles):
            yield from tiles
        case Assign(_, Expression() as value) | Wait(_, value) | Do(value) | If(value):
            yield value
        case Update(target, _, value):
            yield from (target, value)
        case Store(pointer, value, mask):
            yield from (pointer, value) if mask is None else (pointer, value, mask)
        case For(_, values):
            yield from (values.start, values.end)
        case Check(index, low, high, _, mask):
            yield from (index, low, high) if mask is None else (index, low, high, mask)
        case _:
            raise TypeError(statement)


def names(statement: Statement) -> set[Variable | Global]:
    """What a statement reads, and the names of the module in it, those of the blocks in it included."""
    inner = (names(inner) for body in bodies(statement) for inner in body)
    return set[Variable | Global]().union(*(value.names for value in expressions(statement)), *inner)


def reads(statement: Statement) -> set[Variable]:
    """The variables and parameters that a statement reads, those of the blocks in it included."""
    return {name for name in names(statement) if not isinstance(name, Global)}


def writes(statement: Statement) -> set[Variable]:
    """The variables that a statement assigns, those of the blocks in it included."""
    match statement:
        case Assign(targets) | Wait(targets):
            return set(targets)
        case Update(target):
            return {target}
        case _:
            return {name for body in bodies(statement) for inner in body for name in writes(inner)}


def renamed(statement: Statement, names: Mapping[Variable, Expression]) -> Statement:
    """A statement that is no block, with other expressions in the place of some variables."""

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
        case Do(value):
            return Do(new(value))
        case _:
            raise TypeError(statement)


def bodies(statement: Statement) -> tuple[list[Statement], ...]:
    """The blocks that lie directly in a statement."""
    match statement:
        case For():
            return (statement.body,)
        case If():
            return (statement.body, statement.otherwise)
        case _:
            return ()


def blocks(body: list[Statement]) -> Iterator[list[Statement]]:
    """A block and all that lie in it, the inner ones first."""
    for statement in body:
        for inner in bodies(statement):
            yield from blocks(inner)
    yield body


def with_operands(body: Sequence[Statement], wanted: Iterable[int]) -> set[int]:
    """The positions of some statements of a block, and of those before them that they are made of."""
    found: set[int] = set()
    stack = list(wanted)
    while stack:
        if (i := stack.pop()) not in found:
            found.add(i)
            missing = reads(body[i])
            for j in range(i - 1, -1, -1):
                if made := missing & writes(body[j]):
                    stack.append(j)
                    missing -= made
    return found
