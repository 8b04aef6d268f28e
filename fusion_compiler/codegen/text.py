"""Print tile programs as Triton text. Printing only decides the names of variables.

It refuses programs that break a rule of names: a statement reads parameters and variables that were assigned
before it in its block or a surrounding one, and no variable has the name of a parameter or of a name of the
module or of Python.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion_compiler.codegen.monoids import fold
from fusion_compiler.codegen.names import GLOBAL, HEADER, TAKEN
from fusion_compiler.codegen.tile import (
    Assign,
    Check,
    Combine,
    Do,
    For,
    Function,
    If,
    Range,
    Return,
    Signal,
    Statement,
    Store,
    Update,
    Value,
    Wait,
    expressions,
    names,
    writes,
)
from fusion_compiler.ops import syntax
from fusion_compiler.ops.syntax import Expression, Global, Literal, Operand, Var, Variable, fm, tl


def module(functions: Sequence[Function]) -> str:
    """Return the text of a kernel's module. Raises ValueError if names break a rule."""
    function_names = [function.name for function in functions]
    if len(set(function_names)) < len(function_names) or not GLOBAL.isdisjoint(function_names):
        raise ValueError(f"function names are equal or reserved: {', '.join(function_names)}")
    return HEADER + "\n\n".join(_Printer(function).printed() for function in functions)


class _Printer:
    """Prints one function.

    taken: names that its variables cannot have.
    bound: variables that are assigned here.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self.taken = set(TAKEN) | {parameter.base for parameter in function.parameters}
        self.bound = set[Variable](function.parameters)
        self.names: dict[Var, str] = {}
        self.lines: list[str] = []
        for statement in function.body:
            for name in (*names(statement), *writes(statement)):
                if not isinstance(name, Var):
                    self.taken.add(name.text if isinstance(name, Global) else name.base)

    def printed(self) -> str:
        function = self.function
        self.lines = ["@triton.jit", f"def {function.name}({', '.join(map(str, function.parameters))}):"]
        if function.doc:
            quoted = "\n    ".join(function.doc.split("\n")).replace("\n    \n", "\n\n")
            self.lines.append(f'    """{quoted}"""')
        self.block(function.body, 1)
        return "\n".join([*self.lines, ""])

    def block(self, body: Sequence[Statement], depth: int) -> set[Variable]:
        """Print a block and return the variables assigned after it. Surrounding blocks do not see them."""
        before = set(self.bound)
        for statement in body:
            self.statement(statement, depth)
        after, self.bound = self.bound, before
        return after

    def statement(self, statement: Statement, depth: int, prefix: str = "") -> None:
        for variable in (v for value in expressions(statement) for v in syntax.reads(value)):
            if variable not in self.bound:
                raise ValueError(f"{self.function.name} reads {variable} before it is assigned")
        self.lines.append("    " * depth + prefix + self.line(statement))
        match statement:
            case Assign(targets) | Wait(targets):
                self.bound.update(map(self.assigned, targets))
            case For(variable, _, body):
                before = set(self.bound)
                self.bound.add(self.assigned(variable))
                self.block(body, depth + 1)
                self.bound = before
            case If(_, body, []):
                self.block(body, depth + 1)
            case If(_, body, [If() as other]):
                self.block(body, depth + 1)
                self.statement(other, depth, "el")
            case If(_, body, otherwise):
                after = self.block(body, depth + 1)
                self.lines.append("    " * depth + "else:")
                self.bound = after & self.block(otherwise, depth + 1)
            case _:
                pass

    def assigned(self, variable: Variable) -> Variable:
        """Return a variable, or raise ValueError if it may not be assigned."""
        if variable in self.function.parameters or self.name(variable) in TAKEN:
            raise ValueError(f"{self.function.name} assigns to {variable}, which is not a variable")
        return variable

    def line(self, statement: Statement) -> str:
        match statement:
            case Assign(targets, value):
                return self.assignment(targets, _value(value))
            case Wait(targets):
                return self.assignment(targets, _received(statement))
            case Signal():
                return self.text(_sent(statement))
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

    def assignment(self, targets: Sequence[Variable], value: Expression) -> str:
        text = self.text(value)  # names that it reads come first
        return f"{', '.join(map(self.name, targets))} = {text}"

    def text(self, value: Expression) -> str:
        return syntax.printed(value, self.name)

    def name(self, variable: Variable) -> str:
        """Return the name of a variable, chosen at its first assignment and unique in the kernel."""
        if not isinstance(variable, Var):
            return variable.base
        if variable not in self.names:
            base = name = variable.base
            if not base.isidentifier():
                raise ValueError(f"{self.function.name} has a variable called {base}")
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


def _sent(signal: Signal) -> Expression:
    boxes, values, scope = signal.boxes, signal.values, signal.scope
    if scope is not None:
        return fm.signal(boxes.pointers, *values, boxes.inside, Literal(scope.value))
    send = fm.send_pair if len(values) == 2 else fm.send
    return send(boxes.pointers, *values, boxes.inside, *boxes.rows)


def _received(wait: Wait) -> Expression:
    boxes, scope = wait.boxes, wait.scope
    if scope is not None:
        return fm.arrived(boxes.pointers, wait.like, boxes.inside, Literal(scope.value))
    receive = fm.receive_pair if len(wait.neutrals) == 2 else fm.receive
    return receive(boxes.pointers, wait.like, boxes.inside, *wait.neutrals, *boxes.rows)


def _range(values: Range) -> Expression:
    if values.static:
        return tl.static_range(values.end)
    steps = () if values.step is None else (values.step,)
    options = _unless_none(num_stages=values.stages, loop_unroll_factor=values.unroll)
    return tl.range(values.start, values.end, *steps, **options)


def _unless_none(**keywords: Operand) -> dict[str, Operand]:
    return {name: value for name, value in keywords.items() if value is not None}
