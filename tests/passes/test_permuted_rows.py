"""Rows that are looked up in the order of a sort, and put back: gradients are lookups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.ops.own.permuted_rows import permuted_rows
from fusion_compiler.passes.rewrites.permuted_rows import permute_rows
from tests.passes.test_rewrites import targets, traced

aten = torch.ops.aten


def routed(x: Tensor, weight: Tensor, scores: Tensor) -> Tensor:
    """As transformers' experts are written: two of four experts for each row, rows sorted by expert."""
    values, chosen = scores.topk(2, -1)
    numbers, order = torch.sort(chosen.reshape(-1))
    rows = x[order // 2]
    rows.masked_fill_((numbers >= 3).unsqueeze(-1), 0.0)
    result = torch.tanh(rows * weight[numbers]) * values.reshape(-1)[order].unsqueeze(-1)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.size(0), device=order.device)
    return result[inverse].view(len(x), 2, -1).sum(1)


def shuffled(x: Tensor, keys: Tensor) -> Tensor:
    """An order that nobody undoes, and of which a part is looked up."""
    order = keys.argsort(descending=True)
    return x[order].cumsum(0) + x[order[:1]]


def arguments(rows: int = 12) -> tuple[Tensor, ...]:
    tensors = (torch.randn(rows, 5), torch.randn(4, 5), torch.randn(rows, 4))
    return tuple(t.double().requires_grad_() for t in tensors)


def gradients(function: Callable[..., Tensor], args: tuple[Tensor, ...], grad: Tensor) -> list[Tensor]:
    out = function(*args)
    leaves = [t for t in args if t.requires_grad]
    return [out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))]


@pytest.mark.parametrize("dynamic", [False, True])
def test_experts_have_no_scatter_and_eagers_gradients(dynamic: bool) -> None:
    fast = fc.compile(routed, backend="interpret", dynamic=dynamic)
    for rows in (12, 12, 20) if dynamic else (12,):
        args, grad = arguments(rows), torch.randn(rows, 5, dtype=torch.float64)
        for ours, truth in zip(gradients(fast, args, grad), gradients(routed, args, grad), strict=True):
            torch.testing.assert_close(ours, truth)
    left = [leftover.target for leftover in fast.plan[1].leftovers]
    assert "gradients of 3 lookups" in fast.plan[0].notes["permuted rows"]
    assert not [target for target in left if "index_put" in target]


def test_an_order_that_is_not_undone() -> None:
    x, keys = torch.randn(9, 3, dtype=torch.float64, requires_grad=True), torch.randn(9)
    fast = fc.compile(shuffled, backend="interpret")
    grad = torch.randn(9, 3, dtype=torch.float64)
    args = x, keys
    for ours, truth in zip(gradients(fast, args, grad), gradients(shuffled, args, grad), strict=True):
        torch.testing.assert_close(ours, truth)
    assert "gradients of 1 lookups" in fast.plan[0].notes["permuted rows"]


def partly(x: Tensor, ids: Tensor) -> Tensor:
    return x[torch.sort(ids)[1]]  # fewer places than rows


def by_columns(x: Tensor, ids: Tensor) -> Tensor:
    return x[:6, torch.sort(ids)[1]]


def changed(x: Tensor, ids: Tensor) -> Tensor:
    order = torch.sort(ids)[1]
    order.clamp_(min=2)
    return x[:6][order]


def values(x: Tensor, ids: Tensor) -> Tensor:
    return x[:6][torch.sort(ids)[0]]


def several(x: Tensor, ids: Tensor) -> Tensor:
    return x[:6][torch.sort(ids.view(2, 3))[1]]


@pytest.mark.parametrize("function", [partly, by_columns, changed, values, several])
def test_lookups_whose_places_may_come_twice_or_never_stay(function: Callable[..., Tensor]) -> None:
    x, ids = torch.randn(8, 6, dtype=torch.float64, requires_grad=True), torch.randint(6, (6,))
    gm = traced(function, x, ids)
    assert permute_rows(gm) == (gm, ())
    ours, truth = (
        torch.autograd.grad(f(x, ids).sin().sum(), x)[0]
        for f in (fc.compile(function, backend="interpret"), function)
    )
    torch.testing.assert_close(ours, truth)


def read_elsewhere(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    order = torch.sort(ids)[1]
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(6)
    return x[order][inverse], inverse


def filled_in_part(x: Tensor, ids: Tensor) -> Tensor:
    order = torch.sort(ids)[1]
    inverse = torch.zeros_like(order)
    inverse[order] = torch.arange(6)
    inverse[0] = 3
    return x[inverse]


@pytest.mark.parametrize("function", [read_elsewhere, filled_in_part])
def test_what_else_an_inverse_is_for_stays_right(function: Callable[..., Any]) -> None:
    x, ids = torch.randn(6, 4, dtype=torch.float64, requires_grad=True), torch.randint(6, (6,))
    new, _ = permute_rows(traced(function, x, ids))
    torch.testing.assert_close(new(x, ids), function(x, ids))
    restored = [n for n in new.graph.nodes if n.target is permuted_rows]
    assert len(restored) == (function is read_elsewhere) and aten.index_put_.default in targets(new)


def test_the_operator_has_gradients_of_any_order() -> None:
    order = torch.randperm(6)
    x = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda t: permuted_rows(t, order, order.argsort(), 2), x)
    torch.library.opcheck(permuted_rows, (x, order, order.argsort(), 2))
