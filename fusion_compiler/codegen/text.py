"""A tile program as Triton text. Nothing is decided here but the variables' names."""

from __future__ import annotations

from collections.abc import Sequence

from fusion_compiler.codegen.monoids import fold_text
from fusion_compiler.codegen.tile import (
    VARIABLE,
    Assign,
    Check,
    Combine,
    Expression,
    For,
    If,
    Line,
    Load,
    Statement,
    Store,
    Variables,
    Wait,
)


def printed(body: Sequence[Statement], variables: Variables, taken: set[str]) -> str:
    """The lines of a function's body; taken: names that are none of its variables'."""
    printer = _Printer(variables, set(taken))
    printer.block(body, 1)
    return "\n".join(printer.lines)


class _Printer:
    def __init__(self, variables: Variables, taken: set[str]) -> None:
        self.variables, self.taken = variables, taken
        self.names: dict[str, str] = {}
        self.lines: list[str] = []

    def block(self, body: Sequence[Statement], depth: int) -> None:
        for statement in body:
            self.statement(statement, depth)

    def statement(self, s: Statement, depth: int) -> None:
        match s:
            case Assign(targets, value):
                text = self.value(value)
                self.line(depth, f"{', '.join(self.name(t) for t in targets)} = {text}")
            case Wait(targets, value):
                text = self.named(value)
                self.line(depth, f"{', '.join(self.name(t) for t in targets)} = {text}")
            case Store(pointer, value, mask):
                options = f", mask={mask}" if mask else ""
                self.line(depth, self.named(f"tl.store({pointer}, {value}{options})"))
            case Check(index, bounds, what, mask):
                options = f", {mask}" if mask else ""
                self.line(depth, self.named(f'fm.check_index({index}, {bounds}, "{what}"{options})'))
            case Line(text):
                self.line(depth, self.named(text))
            case For(variable, values, body):
                self.line(depth, f"for {variable} in {self.named(values)}:")
                self.block(body, depth + 1)
            case If(condition, body):
                self.line(depth, f"if {self.named(condition)}:")
                self.block(body, depth + 1)

    def value(self, value: Expression) -> str:
        match value:
            case Load(pointer, mask, other, options, then):
                masked = f", mask={mask}, other={other}" if mask else ""
                return self.named(then.replace("{}", f"tl.load({pointer}{masked}{options})", 1))
            case Combine(reduce, (tile,), axis, keep, plain):
                return self.named(fold_text(reduce, tile, axis, keep, plain))
            case Combine(_, tiles, axis, keep):
                return self.named(f"fm.sums({', '.join(tiles)}, {axis}, {keep})")
            case str():
                return self.named(value)

    def line(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def named(self, text: str) -> str:
        return VARIABLE.sub(lambda found: self.name(found.group()), text)

    def name(self, variable: str) -> str:
        """The name of a variable, found where it is first assigned; one of its own in the kernel."""
        if not VARIABLE.fullmatch(variable):
            return variable
        if variable not in self.names:
            base = name = self.variables.base(variable)
            number = 0
            while name in self.taken:
                number += 1
                name = f"{base}_{number}"
            self.taken.add(name)
            self.names[variable] = name
        return self.names[variable]
