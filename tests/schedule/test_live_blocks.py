"""The bounds on axes that masks are, compared with the masks at all places."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.ir.dag import build
from fusion_compiler.ir.loops import LoopNest, Reduce
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.passes.lower.chains import lower_chain
from fusion_compiler.schedule.live_blocks import Bounds, live_of

ROWS, KEYS = 11, 13
LOWEST = torch.finfo(torch.bfloat16).min
Shown = Callable[[Tensor, Tensor], Tensor]
Masked = Callable[[Tensor, Tensor], Tensor]

CONDITIONS: dict[str, Shown] = {
    "causal": lambda i, j: j <= i,
    "causal from the last key": lambda i, j: i + (KEYS - ROWS) >= j,
    "window": lambda i, j: (j <= i + 2) & (j > i - 3),
    "not after": lambda i, j: ~(j > i + 2),
    "not far": lambda i, j: ~((j > i + 2) | (j < i - 1)),
    "not far, twice": lambda i, j: ~(j > i + 2) & ~(j < i - 1),
    "the same": lambda i, j: j == i,
}
FORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fill": lambda s, shown: s.masked_fill(~shown, -math.inf),
    "where": lambda s, shown: torch.where(shown, s, -math.inf),
    "added": lambda s, shown: s + torch.where(shown, 0.0, -math.inf),
    "filled, less a number": lambda s, shown: s.masked_fill(~shown, -math.inf) - 1.0,
    "lowest": lambda s, shown: s + torch.where(shown, 0.0, LOWEST),
    "lowest in 16 bits": lambda s, shown: s + torch.where(shown, 0.0, LOWEST).to(torch.bfloat16),
}
EVERY_ROW_AND_KEY = ("causal from the last key", "window", "not after", "not far", "not far, twice")


def nest_of(masked: Masked, bias: Tensor | None = None) -> LoopNest:
    """Return the nest of a softmax's weights times values, of masked products."""

    def attention(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        i, j = torch.arange(ROWS)[:, None], torch.arange(KEYS)[None, :]
        scores = masked(q @ k.T + sum(more), (i, j))  # type: ignore[arg-type]
        return scores.softmax(-1) @ v

    shapes = (ROWS, 4), (KEYS, 4), (KEYS, 4)
    inputs = [torch.randn(shape) for shape in shapes] + ([] if bias is None else [bias])
    return lower_chain(build(make_fx(attention, decomposition_table())(*inputs)))


def bounds_by_combine(loops: LoopNest) -> dict[str, Bounds]:
    """Return the bounds of the maximum over keys, and of the last sum over them, that need no guard."""
    over_keys = [
        node
        for node in loops.nodes
        if isinstance(node, Reduce) and KEYS in {loops.axes[axis].size for axis in node.axes}
    ]
    neutral = {"max": -math.inf, "sum": 0.0}
    live = {node.combine: live_of(loops, node.operand, neutral[node.combine]) for node in over_keys}
    return {c: {n: of for n, of in each.bounds.items() if n not in each.lowest} for c, each in live.items()}


def holds(loops: LoopNest, bounds: Bounds) -> Tensor:
    """Return where all bounds hold, by row and key."""
    i, j = torch.arange(ROWS)[:, None], torch.arange(KEYS)[None, :]
    place = {n: i if axis.size == ROWS else j for n, axis in enumerate(loops.axes)}
    result = torch.ones(ROWS, KEYS, dtype=torch.bool)
    for _, of_part in bounds.values():
        for bound in of_part:
            result &= sum((c * place[axis] for axis, c in bound.terms), torch.tensor(bound.const)) >= 0
    return result


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("form", FORMS)
def test_bounds_hold_where_nothing_is_masked_and_nowhere_else(form: str, condition: str) -> None:
    shown = CONDITIONS[condition]
    loops = nest_of(lambda s, at: FORMS[form](s, shown(*at)))
    expected = shown(torch.arange(ROWS)[:, None], torch.arange(KEYS)[None, :])
    assert expected.any() and not expected.all()
    if "lowest" in form and condition not in EVERY_ROW_AND_KEY:
        expected = torch.ones_like(expected)  # a key that no row has, so nothing is left out
    for combine, bounds in bounds_by_combine(loops).items():
        assert torch.equal(holds(loops, bounds), expected), combine


@pytest.mark.parametrize(
    "masked",
    [
        lambda s, at: s + torch.where(at[1] <= at[0] - 1, 0.0, LOWEST),  # nothing is left of the first row
        lambda s, at: s + torch.where((at[1] <= at[0] + 2) & (at[1] > at[0] + 3), 0.0, LOWEST),
        lambda s, at: (s + torch.where(at[1] <= at[0] + 2, 0.0, LOWEST)).masked_fill(s > 0, -math.inf),
        lambda s, at: s + torch.where((at[1] <= at[0] + 2) & (s > 0), 0.0, LOWEST),
        lambda s, at: s + torch.where(at[1] <= at[0] + 2, 0.0, -100.0),  # exp(-100) is not zero
    ],
)
def test_lowest_numbers_leave_nothing_out_where_a_row_may_have_no_other_key(masked: Masked) -> None:
    loops = nest_of(masked)
    assert all(holds(loops, bounds).all() for bounds in bounds_by_combine(loops).values())


def test_a_condition_joined_with_a_literal_is_no_conjunction_of_the_others() -> None:
    for literal in (False, True):
        loops = nest_of(lambda s, at, x=literal: torch.where((at[1] <= at[0]) & x, s, -math.inf))
        assert all(holds(loops, bounds).all() for bounds in bounds_by_combine(loops).values())


def test_a_loaded_bias_may_be_a_mask() -> None:
    def causal(fill: float) -> Masked:
        return lambda s, at: s + torch.where(at[1] <= at[0] + 2, 0.0, fill)  # type: ignore[index]

    for fill, is_bounded in ((-math.inf, True), (LOWEST, False)):
        loops = nest_of(causal(fill), torch.randn(ROWS, KEYS))
        for bounds in bounds_by_combine(loops).values():
            assert holds(loops, bounds).all().item() != is_bounded
