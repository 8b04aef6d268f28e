"""A tile program as Triton text. Nothing is decided here but the variables' names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fusion_compiler.codegen.monoids import fold
from fusion_compiler.codegen.tile import (
    Assign,
    Check,
    Combine,
    Do,
    For,
    If,
    Range,
    Return,
    Statement,
    Store,
    Update,
    Value,
    Wait,
)
from fusion_compiler.ir import syntax
from fusion_compiler.ir.syntax import Expression, Literal, Operand, Var, Variable, fm, tl


def printed(body: Sequence[Statement], taken: Iterable[str]) -> str:
    """Return the lines of a function's body; taken: names that are none of its variables'."""
    printer = _Printer(set(taken))
    printer.block(body, 1)
    return "\n".join(printer.lines)


class _Printer:
    def __init__(self, taken: set[str]) -> None:
        self.taken = taken
        self.names: dict[Var, str] = {}
        self.lines: list[str] = []

    def block(self, body: Sequence[Statement], depth: int) -> None:
        for statement in body:
            self.statement(statement, depth)

    def statement(self, statement: Statement, depth: int, prefix: str = "") -> None:
        self.lines.append("    " * depth + prefix + self.line(statement))
        if isinstance(statement, For | If):
            self.block(statement.body, depth + 1)
        match statement:
            case If(_, _, [If() as other]):
                self.statement(other, depth, "el")
            case If(_, _, [_, *_] as otherwise):
                self.lines.append("    " * depth + "else:")
                self.block(otherwise, depth + 1)
            case _:
                pass

    def line(self, statement: Statement) -> str:
        match statement:
            case Assign(targets, value) | Wait(targets, value):
                text = self.text(_value(value))
                return f"{', '.join(map(self.name, targets))} = {text}"
            case Update(target, sign, value):
                return f"{self.name(target)} {sign}= {self.text(value)}"
            case Store(pointer, value, mask):
                return self.text(tl.store(pointer, value, **_unless_none(mask=mask)))
            case Check(index, low, high, what, mask):
                masks = () if mask is None else (mask,)
                return self.text(fm.check_index(index, low, high, Literal(what), *masks))
            case Do(value):
                return self.text(value)
            case Return(values):
                return f"return {', '.join(map(self.text, values))}"
            case For(variable, values):
                return f"for {self.name(variable)} in {self.text(_range(values))}:"
            case If(condition):
                return f"if {self.text(condition)}:"

    def text(self, value: Expression) -> str:
        return syntax.printed(value, self.name)

    def name(self, variable: Variable) -> str:
        """Return the name of a variable, found where it is first assigned; one of its own in the kernel."""
        if not isinstance(variable, Var):
            return variable.base
        if variable not in self.names:
            base = name = variable.base
            number = 0
            while name in self.taken:
                number += 1
                name = f"{base}_{number}"
            self.taken.add(name)
            self.names[variable] = name
        return self.names[variable]


def _value(value: Value) -> Expression:
    match value:
        case Combine(reduce, (tile,), axis, keep, plain):
            return fold(reduce, tile, axis, keep, plain)
        case Combine(_, tiles, axis, keep):
            return fm.sums(*tiles, axis, keep)
        case Expression():
            return value


def _range(values: Range) -> Expression:
    if values.static:
        return tl.static_range(values.end)
    steps = () if values.step is None else (values.step,)
    options = _unless_none(num_stages=values.stages, loop_unroll_factor=values.unroll)
    return tl.range(values.start, values.end, *steps, **options)


def _unless_none(**keywords: Operand) -> dict[str, Operand]:
    return {name: value for name, value in keywords.items() if value is not None}
