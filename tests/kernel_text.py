"""Kernels' text as trees: what tests of passes are written in."""

from __future__ import annotations

import ast
from collections.abc import Mapping

from fusion_compiler.ops.syntax import (
    Binary,
    Call,
    Expression,
    Global,
    Items,
    Literal,
    Member,
    Name,
    Slice,
    Subscript,
    Unary,
)

MODULES = ("tl", "fm", "libdevice")


def parsed(text: str) -> Expression:
    """Return the tree of an expression's text; its names are `Name`s."""
    return _parsed(ast.parse(text, mode="eval").body)


def _parsed(node: ast.expr) -> Expression:
    match node:
        case ast.Constant(value) if isinstance(value, bool | int | float | str | None):
            return Literal(value)
        case ast.Name(name):
            return Name(name)
        case ast.Attribute():
            text = ast.unparse(node)
            if text.split(".")[0] in MODULES:
                return Global(text)
            return Member(_parsed(node.value), node.attr)
        case ast.Call(ast.Name("float"), [ast.Constant(str() as value)]):
            return Literal(float(value))
        case ast.Call(function, arguments, keywords):
            named = tuple((k.arg or "", _parsed(k.value)) for k in keywords)
            return Call(_parsed(function), tuple(map(_parsed, arguments)), named)
        case ast.UnaryOp(sign, operand):
            value = _parsed(operand)
            match sign, value:
                case ast.USub(), Literal(int() | float() as number):
                    return Literal(-number)
                case _:
                    return Unary(_SIGNS[type(sign)], value)
        case ast.BinOp(left, sign, right) | ast.Compare(left, [sign], [right]):
            return Binary(_SIGNS[type(sign)], _parsed(left), _parsed(right))
        case ast.Tuple(items) | ast.List(items):
            return Items(tuple(map(_parsed, items)), is_tuple=isinstance(node, ast.Tuple))
        case ast.Subscript(value, index):
            items = index.elts if isinstance(index, ast.Tuple) else [index]
            return Subscript(_parsed(value), tuple(map(_parsed, items)))
        case ast.Slice():
            return Slice()
        case _:
            raise ValueError(f"{ast.unparse(node)} is no expression of a kernel")


_SIGNS: Mapping[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.BitAnd: "&", ast.BitOr: "|", ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=",
    ast.USub: "-", ast.Invert: "~",
}  # fmt: skip
