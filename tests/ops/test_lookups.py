"""The row of each lookup, against the elements that the operator itself returns."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._ops import OpOverload

from fusion_compiler.ir.writes import indexed
from fusion_compiler.ops.lookups import GATHERS, Lookups, looks_up, lookups_of
from fusion_compiler.ops.own.experts import expert_mm
from fusion_compiler.ops.own.put import put
from fusion_compiler.ops.schema import bound

aten = torch.ops.aten
SHAPE = (3, 4, 5)


def numbers(size: int, *shape: int, least: int = 0) -> Tensor:
    return torch.randint(least, size, shape)


def described(target: OpOverload, *args: Any) -> Lookups:
    assert looks_up(target)
    return lookups_of(target, bound(target, args, {}), lambda tensor: tensor.dim())


def element(lookups: Lookups, source: Tensor, at: tuple[int, ...]) -> Tensor:
    """The element of `source` that a lookup's result has at `at`."""
    dims = [dim for dim, _ in lookups.indices]
    start, common = indexed(dims, [index.shape for _, index in lookups.indices])
    rest = iter((*at[:start], *at[start + len(common) :]))
    place, here = list(at), at
    if not lookups.is_pointwise:
        place = [0 if d in dims else next(rest) for d in range(source.dim())]
        here = at[start : start + len(common)]
    for dim, index in lookups.indices:
        number = int(index.expand(common)[here])
        assert lookups.wraps or number >= 0
        place[dim] = number
    return source[tuple(place)]


def calls(target: OpOverload) -> list[tuple[Any, ...]]:
    x = torch.randn(SHAPE)
    if target is aten.embedding.default:
        return [(x[0], numbers(4, 2, 3))]
    if target is aten.gather.default:
        return [(x, dim, numbers(SHAPE[dim], *SHAPE)) for dim in (0, 1, -1)]
    if target is aten.index_select.default:
        return [(x, dim, numbers(SHAPE[dim], 6)) for dim in (0, 1, -1)]
    first, second = numbers(3, 2, 1, least=-3), numbers(4, 2, least=-4)
    third = numbers(5, 2, least=-5)
    indices = [first], [None, second], [first, second], [first, None, third], [None, None, third]
    return [(x, [*each]) for each in indices]


@pytest.mark.parametrize("target", GATHERS, ids=str)
def test_a_lookup_returns_the_elements_that_its_description_names(target: OpOverload) -> None:
    for call in calls(target):
        lookups, result = described(target, *call), target(*call)
        source = bound(target, call, {})[lookups.operand]
        for at in itertools.product(*map(range, result.shape)):
            assert element(lookups, source, at) == result[at]


def test_negative_indices_are_those_that_eager_takes() -> None:
    for target in GATHERS:
        call = calls(target)[0]
        negative = [-1 - i if isinstance(i, Tensor) and i is not call[0] else i for i in call]
        if isinstance(call[1], list):
            negative[1] = [-1 - call[1][0]]
        if described(target, *call).wraps:
            target(*negative)
        else:
            with pytest.raises((IndexError, RuntimeError)):
                target(*negative)


def test_what_is_looked_up_besides() -> None:
    rows, matrices, expert = torch.randn(2, 3), torch.randn(4, 3, 5), numbers(4, 2)
    assert described(expert_mm, rows, matrices, expert) == Lookups("matrices", ((0, expert),))
    base, value = torch.zeros(3, 4), torch.ones(2)
    assert described(put, base, base, value) == Lookups("view", wraps=True)
    assert described(put, base, base, value, [None, expert]) == Lookups("view", ((1, expert),), wraps=True)
    assert not looks_up(aten.add.Tensor) and not looks_up("placeholder")
