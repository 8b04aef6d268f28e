"""States of looped rows: sums that are rescaled with their maximum, and moments, of rows of all sorts."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.row_tiles import Cols, RowTile
from tests.exactness import Compiled, not_as_close

LOOPS = (
    RowTile(1, 64, Cols.LOOP, num_warps=1),
    RowTile(1, 1024, Cols.LOOP, num_warps=1),  # each lane has a state
    RowTile(4, 64, Cols.LOOP, num_warps=1),
    RowTile(1, 64, Cols.LOOP, 2, num_warps=1),
    RowTile(4, 64, Cols.LOOP, 2, num_warps=1),
)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def logsumexp(x: Tensor) -> Tensor:
    return torch.logsumexp(x, -1)


def twice(x: Tensor) -> Tensor:
    return (2 * (x - x.amax(-1, keepdim=True))).exp().sum(-1)


def below(x: Tensor) -> Tensor:
    return (x.amin(-1, keepdim=True) - x).exp().sum(-1)


def squared(x: Tensor) -> Tensor:
    power = (x - x.amax(-1, keepdim=True)).exp()
    return (power * power).sum(-1)


def normed(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:])


@pytest.mark.sample(6)
@pytest.mark.parametrize("form", LOOPS, ids=str)
@pytest.mark.parametrize("fn", [softmax, logsumexp, twice, below, squared, normed])
def test_values_are_as_close_to_float64_as_eagers(fn: Callable[[Tensor], Tensor], form: RowTile) -> None:
    """Also far from zero, where a maximum of nothing has to be told from a number."""
    rows = torch.randn(6, 2100) * torch.tensor([1.0, 1, 1, 10, 100, 1])[:, None]
    x = rows + torch.tensor([0.0, -1e4, 1e4, 0, 0, -500])[:, None]
    ours = Compiled(fn, schedules=lambda *_: (form,))(x)
    assert (problem := not_as_close(ours, fn(x), fn(x.double()))) is None, problem


@pytest.mark.sample(6)
@pytest.mark.parametrize("form", LOOPS, ids=str)
@pytest.mark.parametrize("fn", [softmax, logsumexp, twice, below, squared, normed])
def test_infinite_elements_and_nan_are_eagers(fn: Callable[[Tensor], Tensor], form: RowTile) -> None:
    x = torch.randn(7, 2100)
    x[0], x[1, :1500], x[2, 1500:], x[3, 7] = -math.inf, -math.inf, -math.inf, math.inf
    x[4, 2099], x[5], x[6, 0] = math.nan, math.inf, -math.inf
    ours, eager = Compiled(fn, schedules=lambda *_: (form,))(x), fn(x)
    assert torch.equal(ours.isnan(), eager.isnan())
    torch.testing.assert_close(ours, eager, equal_nan=True)


def test_sums_that_read_a_maximum_need_no_pass_of_their_own() -> None:
    """The ratio of a guarded maximum is infinite before the first element, so that logsumexp takes two."""
    for fn, passes in ((softmax, 1), (twice, 1), (below, 1), (squared, 1), (logsumexp, 2)):
        compiled = Compiled(fn)
        compiled(torch.randn(3, 40))
        (analysis,) = (Analysis(cluster.loops) for plan in compiled.plans for cluster in plan.clusters)
        assert max(analysis.level) == passes, fn.__name__
