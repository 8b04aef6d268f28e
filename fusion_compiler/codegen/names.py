"""The names in a kernel's text: those that every kernel has, and what every text has to keep to."""

from __future__ import annotations

import ast
import builtins
import keyword
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

from fusion_compiler.ir.syntax import Name

HEADER = """import triton
import triton.language as tl
from triton.language.extra import libdevice

from fusion_compiler.codegen import math as fm


"""
# Variables that are no values of a loop nest. `Builder.define` takes no other, so none is missing here.
Own = Literal[
    "batch", "row", "first_row", "row_inside", "col", "first_col", "col_inside", "start", "r", "program",
    "group", "part", "parts", "block",
    "lead", "begin", "lane", "in_words", "whole_words",
    "x", "new_max", "shift", "tops", "off", "counts", "block_mean", "block_squares",
    "top", "left", "move", "apart", "turn",
]  # fmt: skip


def own(name: Own) -> Name:
    """Return the variable that has this name in every kernel."""
    return Name(name)


def imported(source: str) -> frozenset[str]:
    """The names that the imports of a module bind."""
    statements = [s for s in ast.parse(source).body if isinstance(s, ast.Import | ast.ImportFrom)]
    return frozenset(alias.asname or alias.name for s in statements for alias in s.names)


GLOBAL = frozenset(keyword.kwlist) | imported(HEADER)  # a kernel that was called so would hide them
TAKEN = GLOBAL | frozenset(dir(builtins))  # a variable
RESERVED: frozenset[str] = TAKEN | frozenset(get_args(Own))


def problem(source: str) -> str | None:
    """What is wrong with the text of a kernel's module, None where nothing is.

    It has to be Python, and of statements that Triton knows. A name that is read is a parameter, a variable
    that was assigned before in the same block or around it, or one of the module's or Python's own; of
    parameters and those none is ever assigned.
    """
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        return f"line {error.lineno} is no Python: {error.msg}: {(error.text or '').strip()}"
    functions = [s for s in module.body if isinstance(s, ast.FunctionDef)]
    names = [f.name for f in functions]
    if len(set(names)) < len(names) or not GLOBAL.isdisjoint(names):
        return f"the functions are called {', '.join(names)}, as others are"
    try:
        for function in functions:
            _Reader(function, TAKEN.union(names))
    except _Wrong as wrong:
        return str(wrong)
    return None


class _Wrong(Exception):
    """A statement that breaks the rules."""


class _Reader:
    """Goes through a function as it runs. outside: the names that it finds in the module."""

    def __init__(self, function: ast.FunctionDef, outside: frozenset[str]) -> None:
        self.parameters = {a.arg for a in function.args.args}
        self.outside, self.found = outside, dict[str, int]()  # and where
        self.locals = set[str]()
        self.block(function.body, set(self.parameters))
        for name in self.locals & self.found.keys():
            raise _Wrong(f"line {self.found[name]} reads {name} before it is assigned")

    def block(self, statements: Sequence[ast.stmt], bound: set[str]) -> set[str]:
        """`bound` with what the statements bind for those behind them."""
        for statement in statements:
            bound = self.statement(statement, bound)
        return bound

    def statement(self, s: ast.stmt, bound: set[str]) -> set[str]:
        match s:
            case ast.Expr(value) | ast.Return(ast.expr() as value):
                self.reads(value, bound)
            case ast.Assign([target], value):
                self.reads(value, bound)
                bound = bound | self.assigned(target)
            case ast.AugAssign(target, _, value):
                self.reads(value, bound)
                if not self.assigned(target) <= bound:
                    raise _Wrong(f"line {s.lineno} adds to what is not assigned: {ast.unparse(s)}")
            case ast.For(target, source, body, []):
                self.reads(source, bound)
                self.block(body, bound | self.assigned(target))
            case ast.If(test, body, orelse):
                self.reads(test, bound)
                bound = self.block(body, bound) & self.block(orelse, bound)
            case _:
                raise _Wrong(f"line {s.lineno} is no statement of a kernel: {ast.unparse(s)}")
        return bound

    def reads(self, value: ast.expr, bound: set[str]) -> None:
        for name in _names(value):
            if name.id not in bound:
                if name.id not in self.outside:
                    raise _Wrong(f"line {name.lineno} reads {name.id} before it is assigned")
                self.found[name.id] = name.lineno

    def assigned(self, target: ast.expr) -> set[str]:
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        names = {part.id for part in parts if isinstance(part, ast.Name)}
        if len(names) < len(parts) or names & (TAKEN | self.parameters):
            raise _Wrong(f"line {target.lineno} assigns to {ast.unparse(target)}, which is no variable")
        self.locals |= names
        return names


def _names(value: ast.expr) -> Iterator[ast.Name]:
    """The names in an expression; `ast.walk` takes three times as long."""
    stack: list[ast.AST] = [value]
    while stack:
        match node := stack.pop():
            case ast.Name():
                yield node
            case ast.Constant():
                pass
            case ast.Attribute():
                stack.append(node.value)
            case ast.BinOp():
                stack += (node.left, node.right)
            case ast.Call():
                stack += (node.func, *node.args, *(k.value for k in node.keywords))
            case _:
                stack += ast.iter_child_nodes(node)
