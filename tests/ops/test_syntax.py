"""Expressions print with the parentheses that they need, and say what they read."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
import sympy
import torch
import triton.language
from triton.language.extra import libdevice

import fusion_compiler.codegen.math as device
from fusion_compiler.ops.syntax import (
    Binary,
    Expression,
    Literal,
    Name,
    Unary,
    Var,
    every,
    fm,
    lift,
    plus,
    reads,
    renamed,
    times,
    tl,
)
from tests.kernel_text import parsed

a, b, c, x = map(Name, "abcx")
n, m = sympy.symbols("n m", integer=True, nonnegative=True)


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (a * 2048 + b, "a * 2048 + b"),
        ((a + b) * 2, "(a + b) * 2"),
        (a - (b - c), "a - (b - c)"),
        (a - b - c, "a - b - c"),
        (a * (b // c), "a * (b // c)"),
        (a // 8 * 64 + b % 2, "a // 8 * 64 + b % 2"),
        ((a < b) & (a >= 0) | c, "(a < b) & (a >= 0) | c"),
        (a ^ (b & c), "a ^ b & c"),
        ((a < b).eq(c), "(a < b) == c"),
        ((a + b).to(torch.bfloat16), "(a + b).to(tl.bfloat16)"),
        (x[None, :], "x[None, :]"),
        ((a + b)[:, None] * c, "(a + b)[:, None] * c"),
        (tl.where(a < b, x, -1.0), "tl.where(a < b, x, -1.0)"),
        (tl.load(a + b, mask=c, other=0), "tl.load(a + b, mask=c, other=0)"),
        (tl.full([4, 1], float("-inf"), torch.float32), 'tl.full([4, 1], float("-inf"), tl.float32)'),
        (tl.full((), -0.0, torch.float64), "tl.full((), fm.minus_zero(), tl.float64)"),
        (x * -1.5, "x * -1.5"),
        (x - Unary("-", a), "x - -a"),
        (Unary("~", a & b), "~(a & b)"),
        (a + -5, "a + -5"),
        (1.0 / (a * b), "1.0 / (a * b)"),
        (x.reshape(4, 2), "x.reshape(4, 2)"),
        (a * n, "a * n"),
        (a * (n * m), "a * (m * n)"),
        (a < n**2 + 1, "a < 1 + n * n"),
        (lift(sympy.Min(1, n)), "tl.minimum(1, n)"),
    ],
    ids=str,
)
def test_text_has_the_parentheses_that_it_needs(expression: Expression, text: str) -> None:
    assert str(expression) == text
    assert str(parsed(text)) == text


def test_printing_keeps_the_structure_of_any_two_operators() -> None:
    signs = ("|", "^", "&", "<<", "+", "-", "*", "/", "//", "%", "<", "==")
    for one, other in itertools.product(signs, signs):
        for tree in (Binary(one, Binary(other, a, b), c), Binary(one, a, Binary(other, b, c))):
            assert parsed(str(tree)) == tree


def test_a_sum_is_added_from_left_to_right() -> None:
    assert str(plus(a, None, b * 4 + c, -5)) == "a + b * 4 + c - 5"
    assert str(plus(a, b - c)) == "a + b - c"
    assert str(plus(a, b * n + (n + 1))) == "a + b * n + (1 + n)"
    assert plus(None, x) is x and plus() == Literal(0)
    assert str(times(4, a + b)) == "4 * (a + b)"


def test_a_conjunction_is_of_the_conditions_that_are_there() -> None:
    assert str(every(a, None, b < 3)) == "a & (b < 3)"
    assert every(None, None) is None and every(a) is a


def test_variables_of_one_name_are_different() -> None:
    one, other = Var("x"), Var("x")
    value = tl.where(one < a, other, fm.div(one, b)[None, :]).to(torch.float32)
    assert set(reads(value)) == {one, other, a, b} and one != other
    changed = renamed(value, {one: c, a: Literal(3)})
    assert set(reads(changed)) == {other, b, c}
    assert str(changed) == "tl.where(c < 3, x, fm.div(c, b)[None, :]).to(tl.float32)"


def test_what_is_no_expression_is_refused() -> None:
    with pytest.raises(TypeError, match="is not an expression"):
        lift("a + b")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no Triton text"):
        lift(sympy.sqrt(n))
    with pytest.raises(ValueError, match="is no expression of a kernel"):
        parsed("[a for a in b]")


def test_every_function_that_emission_code_names_exists() -> None:
    """A misspelled function of Triton's would be noticed only where its kernel is compiled."""
    modules = {"tl": triton.language, "fm": device, "libdevice": libdevice}
    for file in Path(device.__file__).parent.rglob("*.py"):
        if file.name in ("math.py", "tensor_units.py"):
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                module = modules.get(node.value.id)
                assert module is None or hasattr(module, node.attr), f"{file.name}: {ast.unparse(node)}"
