"""Facts in the rows of the operator table, besides the expressions, against eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion_compiler.ops import arithmetic
from fusion_compiler.ops.syntax import Binary, Call, Literal, Name
from fusion_compiler.ops.table import OPS, OpSpec

EXPRESSIONS = [spec for spec in OPS if spec.expr is not None and spec.operator is not None]
NAMES = {name: value for name, value in vars(arithmetic).items() if isinstance(value, torch._ops.OpOverload)}


def called(spec: OpSpec, tensor: Callable[[], torch.Tensor], number: float) -> Any:
    """Return the result of an operator for new tensors and one number; a condition or a mask is random."""
    arguments: dict[str, object] = {}
    for argument in spec.target._schema.arguments:
        if argument.name in ("condition", "mask"):
            arguments[argument.name] = torch.rand(64) < 0.5
        elif str(argument.type) in ("Tensor", "Optional[Tensor]"):
            arguments[argument.name] = tensor()
        elif str(argument.type) in ("number", "Optional[number]") and argument.name != "alpha":
            arguments[argument.name] = number
    return spec.target(**arguments)


def rows(has: Callable[[OpSpec], object]) -> Any:
    """Return the parameters of a test of the rows that have a fact."""
    specs = [spec for spec in EXPRESSIONS if has(spec)]
    assert specs
    return pytest.mark.parametrize("spec", specs, ids=lambda spec: str(spec.target))


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_the_overload_that_stands_for_its_row(name: str) -> None:
    spec = next(spec for spec in OPS if spec.target is NAMES[name])
    assert spec.operator is spec.target
    result = called(spec, lambda: torch.randint(1, 9, (64,)), 2)
    assert spec.is_condition == (result.dtype is torch.bool)


@rows(lambda spec: spec.is_condition)
def test_a_condition_is_a_bool(spec: OpSpec) -> None:
    assert called(spec, lambda: torch.randn(64), 0.5).dtype is torch.bool


@rows(lambda spec: spec.compare)
def test_a_comparison_of_numbers_is_that_of_tensors(spec: OpSpec) -> None:
    values = [*torch.randn(3).tolist(), 0.0, -0.0, float("inf"), float("nan")]
    for a in values:
        for b in values:
            other = b if spec.target._overloadname == "Scalar" else torch.tensor(b)
            assert spec.compare is not None
            assert spec.compare(a, b) == bool(spec.target(torch.tensor(a), other))


@rows(lambda spec: spec.keeps_zero)
def test_zeros_stay_zero(spec: OpSpec) -> None:
    assert not called(spec, lambda: torch.zeros(64), 0.0).any()


@rows(lambda spec: spec.chooses)
def test_a_choice_is_one_of_the_numbers_that_it_is_made_from(spec: OpSpec) -> None:
    result = called(spec, lambda: torch.randn(64).bfloat16().float(), 0.5)
    assert torch.equal(result.bfloat16().float(), result)


@rows(lambda spec: spec.selects_bits)
def test_selected_bits_are_bits_of_an_operand(spec: OpSpec) -> None:
    operands: list[torch.Tensor] = []

    def tensor() -> torch.Tensor:
        operands.append(torch.randint(0, 7, (64,), dtype=torch.uint8))
        return operands[-1]

    result = called(spec, tensor, 2)
    assert (result <= torch.stack([*operands, torch.full((64,), 2, dtype=torch.uint8)]).amax(0)).all()


def fused(expression: object) -> bool:
    """True if a value is a product, or a sum of one and another value, which a compiler may round once."""
    match expression:
        case Binary("*", _, Literal(-1)):  # exact
            return False
        case Binary("*"):
            return True
        case Binary("+" | "-", left, right):
            return fused(left) or fused(right)
        case Call(_, arguments):
            sums = (a for a in arguments if isinstance(a, Binary) and a.sign in ("+", "-"))
            return any(map(fused, sums))
        case _:
            return False


@pytest.mark.parametrize("spec", [spec for spec in OPS if spec.expr is not None], ids=lambda s: str(s.target))
def test_a_row_whose_expression_has_a_product_says_so(spec: OpSpec) -> None:
    assert spec.expr is not None
    for number in (2, 0.25):
        arguments = {
            a.name: Name(a.name) if "Tensor" in str(a.type) else Literal(1 if a.name == "alpha" else number)
            for a in spec.target._schema.arguments
            if any(name in str(a.type) for name in ("Tensor", "number", "int"))
        }
        if fused(spec.applied(spec.expr, arguments)):
            assert spec.multiplies
