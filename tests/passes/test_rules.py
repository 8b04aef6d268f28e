"""Every rewrite of the project that is code before and code after is equal on its examples, gradients too."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.errors import RewriteNotEqualError
from fusion_compiler.passes.rewrites.engine import Rule, Rules, rule
from fusion_compiler.passes.rewrites.equality import check_equal
from fusion_compiler.patterns import Rewrite
from fusion_compiler.pipeline import PASSES

aten = torch.ops.aten
PAIRS = [(each.name, each.apply) for each in PASSES if isinstance(each.apply, Rules)]


def examples() -> Iterator[Any]:
    for name, rules in PAIRS:
        for i, each in enumerate(rules.rules):
            for j, example in enumerate(each.examples):
                yield pytest.param(each, example, not rules.inference, id=f"{name}, rule {i}, example {j}")


def as_users(rule: Rule, example: tuple[Any, ...], trains: bool = True) -> Rewrite:
    """Return the rule for tensors like those of an example, where it says that the two are equal.

    The engine copies a result in eager's order where its strides would be seen, and so does this.
    """
    places = [i for i, value in enumerate(example) if isinstance(value, Tensor)]

    def filled(tensors: tuple[Tensor, ...]) -> list[Any]:
        values = list(example)
        for i, tensor in zip(places, tensors, strict=True):
            values[i] = tensor
        return values

    def before(*tensors: Tensor) -> Tensor:
        arguments = filled(tuple(t.clone() for t in tensors))  # which the code may write
        with torch.set_grad_enabled(trains):
            result = rule.code(*arguments)
        if rule.where is not None and rule.where(result, *filled(tensors)) is not True:
            raise ValueError("the rule is not for such arguments")
        return result

    def after(*tensors: Tensor) -> Tensor:
        with torch.set_grad_enabled(trains):
            result = rule.after(*filled(tensors))
        return result.contiguous() if before(*tensors).is_contiguous() else result

    return fc.rewrite(before, after, *(example[i] for i in places), name="rule")


@pytest.mark.parametrize(("rule", "example", "trains"), [*examples()])
def test_both_sides_are_equal(rule: Rule, example: tuple[Any, ...], trains: bool) -> None:
    check_equal(as_users(rule, example, trains))


def test_a_wrong_rule_is_found() -> None:
    def doubled(x: Any, dim: Any) -> Any:
        return aten.mul.Tensor(aten.sum.dim_IntList(x, dim), 1.0001)

    wrong = rule(lambda x, dim: aten.sum.dim_IntList(x, dim), doubled, (torch.ones(3, 4), [1]))
    with pytest.raises(RewriteNotEqualError):
        check_equal(as_users(wrong, wrong.examples[0]))
