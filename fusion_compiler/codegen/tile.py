"""The tile program: what one program of a kernel does, between the loop nest and the text.

    program    := statement*
    statement  := Assign(targets, expression)     a, b = ...
                | Store(pointer, value, mask)
                | For(variable, range, body) | If(condition, body)
                | Check(index, bounds, mask)      an index outside ends the program in an error
                | Wait(targets, value)            what other programs sent, once it has come
                | Line(text)                      any other statement of Triton's
    expression := Load(pointer, mask, ...) | Combine(reduction, tiles, axis) | text

Text is Triton's, with a variable wherever it reads one: `new` makes variables, whose names are found when
the program is printed (`text.py`), so that passes (`passes.py`) can move and repeat statements. The few that
mean the same in every kernel, `row` and `col` say, are called so from the beginning (`names.Own`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fusion_compiler.ir.loops import Reduce

VARIABLE = re.compile(r"«\d+»")
NAME = re.compile(r"«\d+»|\b[a-z]\w*")


@dataclass(frozen=True)
class Load:
    """tl.load(pointer, mask=..., other=..., options). then: what is made of it: "{}.to(tl.float32)"."""

    pointer: str
    mask: str | None = None
    other: str = "0"
    options: str = ""
    then: str = "{}"


@dataclass(frozen=True)
class Combine:
    """One tile, or several for which the threads wait for each other once, reduced along an axis.

    keep: the axis stays, of one element. plain: of maxima, NaN need not be kept. alike: what two sums have to
    have in common to be made together; None where they are not to.
    """

    reduce: Reduce
    tiles: tuple[str, ...]
    axis: str
    keep: bool
    plain: bool = False
    alike: object = None


Expression = Load | Combine | str


@dataclass(frozen=True)
class Assign:
    """node: that of the nest which the target holds."""

    targets: tuple[str, ...]
    value: Expression
    node: int | None = None


@dataclass(frozen=True)
class Store:
    """node: that of the nest which is stored."""

    pointer: str
    value: str
    mask: str | None = None
    node: int | None = None


@dataclass(frozen=True)
class For:
    variable: str
    values: str
    body: list[Statement] = field(default_factory=list["Statement"])


@dataclass(frozen=True)
class If:
    condition: str
    body: list[Statement] = field(default_factory=list["Statement"])


@dataclass(frozen=True)
class Check:
    """low <= index < high wherever the mask holds. what: whose index it is. shape, dtype: the index's."""

    index: str
    bounds: str
    what: str
    mask: str | None
    shape: str
    dtype: str


@dataclass(frozen=True)
class Wait:
    """Programs tell each other what they reduced. Statements behind it run when all have."""

    targets: tuple[str, ...]
    value: str


@dataclass(frozen=True)
class Line:
    text: str


Statement = Assign | Store | For | If | Check | Wait | Line


class Variables:
    """The variables of a kernel, by what their names are made of."""

    def __init__(self) -> None:
        self.bases: list[str] = []

    def new(self, base: str) -> str:
        """A variable as it stands in text."""
        self.bases.append(base)
        return f"«{len(self.bases) - 1}»"

    def base(self, variable: str) -> str:
        """What its name is made of; a name that is given is made of itself."""
        return self.bases[int(variable[1:-1])] if is_variable(variable) else variable


def is_variable(text: str) -> bool:
    return VARIABLE.fullmatch(text) is not None


def texts(statement: Statement) -> Iterator[str]:
    """What a statement reads, as text; of a block, its header alone."""
    match statement:
        case Assign(_, Load(pointer, mask)) | Store(pointer, _, mask):
            yield pointer
            yield from () if mask is None else (mask,)
            yield from (statement.value,) if isinstance(statement, Store) else ()
        case Assign(_, Combine(tiles=tiles)):
            yield from tiles
        case Assign(_, str() as text) | Wait(_, text) | Line(text) | For(_, text) | If(text):
            yield text
        case Check(index, _, _, mask):
            yield index
            yield from () if mask is None else (mask,)
        case _:
            raise TypeError(statement)


def reads(statement: Statement) -> set[str]:
    """The names in a statement's text, those of the blocks in it included."""
    found = {name for text in texts(statement) for name in NAME.findall(text)}
    if isinstance(statement, For | If):
        found.update(*(reads(inner) for inner in statement.body))
    return found


def writes(statement: Statement) -> set[str]:
    """The variables that a statement assigns, those of the blocks in it included."""
    match statement:
        case Assign(targets) | Wait(targets):
            return set(targets)
        case Line(text):
            left = re.match(r"(\S+) [-+*|&]?= ", text)
            return {left.group(1)} if left else set()
        case For(_, _, body) | If(_, body):
            return {name for inner in body for name in writes(inner)}
        case _:
            return set()


def renamed(statement: Statement, names: Mapping[str, str]) -> Statement:
    """A statement that is no block, with other names."""

    def text(given: str) -> str:
        return NAME.sub(lambda name: names.get(name[0], name[0]), given)

    def optional(given: str | None) -> str | None:
        return None if given is None else text(given)

    match statement:
        case Assign(targets, value, node):
            if isinstance(value, Load):
                value = replace(value, pointer=text(value.pointer), mask=optional(value.mask))
            elif isinstance(value, Combine):
                value = replace(value, tiles=tuple(map(text, value.tiles)))
            else:
                value = text(value)
            return Assign(tuple(map(text, targets)), value, node)
        case Store(pointer, value, mask):
            return replace(statement, pointer=text(pointer), value=text(value), mask=optional(mask))
        case Check(index, _, _, mask):
            return replace(statement, index=text(index), mask=optional(mask))
        case Line(given):
            return Line(text(given))
        case _:
            raise TypeError(statement)


def blocks(body: list[Statement]) -> Iterator[list[Statement]]:
    """A block and all that lie in it, the inner ones first."""
    for statement in body:
        if isinstance(statement, For | If):
            yield from blocks(statement.body)
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
