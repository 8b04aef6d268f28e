"""The ranges of integers that the graph proves."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.ir.dag import build
from fusion_compiler.ops.syntax import Literal, Name
from fusion_compiler.ops.table import OPS
from fusion_compiler.passes.lower.intervals import evaluated
from fusion_compiler.passes.lower.ranges import range_of

LIMITS = torch.iinfo(torch.int64)
Range = tuple[int, int]


def some(x: Tensor) -> Tensor:
    """Numbers from 2 to 7."""
    return x.clamp(2, 7)


# Each function of eleven integers, and the range of its result.
EXPECTED: dict[str, tuple[Callable[[Tensor], Tensor], Range]] = {
    "clamped": (some, (2, 7)),
    "from below": (lambda x: some(x).clamp_min(4), (4, 7)),
    "from above": (lambda x: some(x).clamp_max(4), (2, 4)),
    "by fractions": (lambda x: some(x).float().clamp_min(7.5).to(torch.int64), (7, 8)),
    "NaN, perhaps": (
        lambda x: x.view(torch.float64).clamp(0, 3).to(torch.int64),
        (LIMITS.min, LIMITS.max),
    ),
    "sum": (lambda x: some(x) + 3, (5, 10)),
    "sum of two": (lambda x: torch.add(some(x), some(x), alpha=2), (6, 21)),
    "difference": (lambda x: some(x) - some(x), (-5, 5)),
    "from a number": (lambda x: 1 - some(x), (-6, -1)),
    "negative": (lambda x: -some(x), (-7, -2)),
    "product": (lambda x: some(x) * -3, (-21, -6)),
    "remainder": (lambda x: x % 5, (0, 4)),
    "quotient": (lambda x: (some(x) - 10) // 3, (-3, -1)),
    "masked": (lambda x: x & 6, (0, 6)),
    "chosen": (lambda x: torch.where(x > 0, some(x), 11), (2, 11)),
    "filled": (lambda x: some(x).masked_fill(x > 0, 0), (0, 7)),
    "larger": (lambda x: torch.maximum(some(x), some(x) * 2), (4, 14)),
    "smaller": (lambda x: torch.minimum(some(x), some(x) * 2), (2, 7)),
    "counted": (lambda x: torch.arange(9, 0, -2), (1, 9)),
    "constant": (lambda x: torch.full_like(x, 4), (4, 4)),
    "zeros": (torch.zeros_like, (0, 0)),
    "side by side": (lambda x: torch.cat([some(x), torch.arange(2)]), (0, 7)),
    "stacked": (lambda x: torch.stack([some(x), some(x) + 1]), (2, 8)),
    "overlaid": (lambda x: torch.slice_scatter(some(x), torch.ones_like(x[2:4]), 0, 2, 4), (1, 7)),
    "reversed": (lambda x: some(x).flip(0), (2, 7)),
    "looked up": (lambda x: some(x)[x % 11], (2, 7)),
    "gathered": (lambda x: some(x).gather(0, x % 11), (2, 7)),
    "largest": (lambda x: some(x).amax(0), (2, 7)),
    "place of the largest": (lambda x: x.argmax(0), (0, 10)),
    "place of all": (lambda x: x.reshape(11, 1).argmax(), (0, 10)),
    "places of a sort": (lambda x: x.sort()[1], (0, 10)),
    "places of the largest": (lambda x: x.topk(3)[1], (0, 10)),
    "cast": (lambda x: some(x).to(torch.int8).to(torch.int64), (2, 7)),
    "wrapped around": (lambda x: (some(x) * 40).to(torch.int8), (-128, 127)),
    "truth": (lambda x: (x > 0).long(), (0, 1)),
    "data": (lambda x: x ^ 1, (LIMITS.min, LIMITS.max)),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_the_range_is_the_smallest_that_follows_and_has_every_value(name: str) -> None:
    function, expected = EXPECTED[name]
    x = torch.randint(-50, 50, (11,))
    gm = make_fx(function, tracing_mode="fake")(x)
    dag = build(gm)
    assert range_of(dag, dag.outputs[0]) == expected
    result = function(x)
    assert expected[0] <= int(result.min()) and int(result.max()) <= expected[1]


def test_a_size_known_at_run_time_bounds_a_range() -> None:
    gm = make_fx(lambda x: torch.arange(x.shape[0]).clamp_min(0) + 1, tracing_mode="symbolic")(torch.ones(7))
    dag = build(gm)
    (size,) = dag.op(dag.outputs[0]).outputs[0].shape
    assert range_of(dag, dag.outputs[0]) == (1, size) and not isinstance(size, int)


ROWS = [spec for spec in OPS if spec.expr is not None and spec.form is None]


def argument(kind: str, random: Random) -> Any:
    """An argument of a schema's type, an integer tensor with the range of its elements, or None."""
    if kind == "Tensor":
        low, high = sorted(random.choices(range(-9, 10), k=2))
        return torch.randint(low, high + 1, (16,)), (low, high)
    return random.randrange(1, 5) if kind in ("number", "Scalar") else None


def test_rows_of_integers_have_no_value_outside_the_range_of_their_expression() -> None:
    random, bounded = Random(secrets.randbelow(2**32)), set[str]()
    for spec, _ in itertools.product(ROWS, range(8)):
        values: dict[str, Any] = {}
        ranges: dict[str, Range] = {}
        for a in spec.target._schema.arguments:
            values[a.name] = argument(str(a.type), random) if a.default_value is None else a.default_value
            if isinstance(values[a.name], tuple):
                values[a.name], ranges[a.name] = values[a.name]
        try:
            result = spec.target(**values)
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # eager refuses integers
        arguments = {n: Literal(v) if isinstance(v, int | float) else v for n, v in values.items()}
        expression = spec.applied(spec.expr, arguments | {name: Name(name) for name in ranges})
        expected = evaluated(expression, ranges.__getitem__)
        if expected is not None and result.dtype is torch.int64:
            bounded.add(spec.target._opname)
            assert expected[0] <= int(result.min()) and int(result.max()) <= expected[1], spec.target
    assert bounded >= {"add", "sub", "rsub", "mul", "remainder", "floor_divide", "maximum", "minimum", "relu"}
