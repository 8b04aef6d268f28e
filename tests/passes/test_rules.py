"""Every rewrite of the project that is code before and code after is equal on its examples, gradients too."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from tests.passes.test_rewrites import traced

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
    def more(x: Any, dim: Any) -> Any:
        return aten.mul.Tensor(aten.sum.dim_IntList(x, dim), 1.0001)

    wrong = rule(lambda x, dim: aten.sum.dim_IntList(x, dim), more, (torch.ones(3, 4), [1]))
    with pytest.raises(RewriteNotEqualError):
        check_equal(as_users(wrong, wrong.examples[0]))


SCALED_SUMS = Rules(
    "scaled sums",
    (
        rule(
            lambda x, c, dim: aten.sum.dim_IntList(aten.mul.Tensor(x, c), dim),
            lambda x, c, dim: aten.mul.Tensor(aten.sum.dim_IntList(x, dim), c),
            (torch.ones(2, 5), 0.5, [1]),
            where=lambda result, x, c, dim: isinstance(c, float),
            pays=lambda result, x, c, dim: x.shape[-1] > 4 or "rows are short",
            note=lambda result, x, c, dim: f"{c} times sums of {dim}",
        ),
    ),
)


def test_the_example_of_the_contributors_page_is_right() -> None:
    check_equal(as_users(SCALED_SUMS.rules[0], SCALED_SUMS.rules[0].examples[0]))


def test_literals_are_those_of_the_model() -> None:
    def twice(x: Tensor) -> Tensor:
        return (x * 3.0).sum(-1).exp() + (x * 0.25).sum((0, 1)).sum()

    x = torch.randn(3, 5)
    new, notes = SCALED_SUMS(traced(twice, x))
    assert [note.reason for note in notes] == ["3.0 times sums of [-1]", "0.25 times sums of [-2, -1]"]
    torch.testing.assert_close(new(x), twice(x))


def read_twice(x: Tensor) -> Tensor:
    y = x * 3.0
    return y.sum(1) + y[:, 0]


def by_a_tensor(x: Tensor) -> Tensor:
    return (x * x[:1]).sum(1)


def in_another_dtype(x: Tensor) -> Tensor:
    return (x * 3.0).sum(1, dtype=torch.float64)


@pytest.mark.parametrize("function", [read_twice, by_a_tensor, in_another_dtype])
def test_what_is_no_match_leaves_the_graph_alone(function: Callable[[Tensor], Tensor]) -> None:
    gm = traced(function, torch.randn(3, 5))
    assert SCALED_SUMS(gm) == (gm, ())


def written_between(x: Tensor) -> Tensor:
    x = x + 1
    y = x * 3.0
    x.zero_()
    return y.sum(1) + x.sum()


@pytest.mark.parametrize(
    ("function", "width", "reason"),
    [
        (written_between, 5, "written in place"),
        (lambda x: (x * 3.0).sum(1), 4, "rows are short"),
    ],
)
def test_what_is_left_has_a_reason(function: Callable[[Tensor], Tensor], width: int, reason: str) -> None:
    gm = traced(function, torch.randn(3, width))
    new, (note,) = SCALED_SUMS(gm)
    assert new is gm and note.is_done is False and reason in note.reason


def by_rows(x: Any) -> Any:
    return aten.relu.default(aten.clone.default(x, memory_format=torch.contiguous_format))


def by_columns(x: Any) -> Any:
    return aten.t.default(by_rows(aten.t.default(x)))


def laid(after: Callable[..., Any]) -> Rules:
    """The rule that computes ReLU in some order."""
    return Rules("laid", (rule(lambda x: aten.relu.default(x), after, (torch.ones(2, 5),)),))


@pytest.mark.parametrize("function", [torch.relu, lambda x: torch.relu(x) + 1, lambda x: torch.relu(x).sum()])
def test_strides_that_show_are_eagers(function: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(3, 5)
    new, (note,) = laid(by_columns)(traced(function, x))
    assert note.is_done and new(x).stride() == function(x).stride()
    torch.testing.assert_close(new(x), function(x))


def test_an_order_that_shows_and_is_no_rows_is_left() -> None:
    x = torch.randn(3, 5).t()
    gm = traced(torch.relu, x)
    new, (note,) = laid(by_rows)(gm)
    assert new is gm and not note.is_done and "other strides" in note.reason
    new, (note,) = laid(by_rows)(traced(lambda x: torch.relu(x).sum(), x))
    assert note.is_done
    torch.testing.assert_close(new(x), torch.relu(x).sum())
