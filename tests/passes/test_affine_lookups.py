"""Lookups whose indices are functions of their coordinates: slices, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.passes.rewrites.affine_lookups import AFFINE_LOOKUPS
from tests.passes.test_rewrites import targets, traced

aten = torch.ops.aten
LOOKUPS = {aten.index_select.default, aten.index.Tensor, aten.embedding.default}

# x: [7, 6, 5]
AFFINE: dict[str, Callable[[Tensor], Tensor]] = {
    "the first of the last dimension": lambda x: x.index_select(2, torch.arange(3)),
    "the first as int32": lambda x: x.index_select(2, torch.arange(3, dtype=torch.int32)),
    "shifted": lambda x: x[torch.arange(4) + 2],
    "every second": lambda x: x[:, torch.arange(3) * 2],
    "by float steps": lambda x: x[:, torch.arange(0, 6, 2.0, dtype=torch.int64)],
    "reversed": lambda x: x[:, torch.arange(5, -1, -1)],
    "flipped": lambda x: x[torch.arange(7).flip(0)],
    "every second, reversed": lambda x: x[6 - 2 * torch.arange(3)],
    "from the end": lambda x: x[torch.arange(-3, 0)],
    "as a matrix": lambda x: x[:, torch.arange(2)[:, None] * 3 + torch.arange(3)],
    "repeated": lambda x: x[torch.arange(4).expand(3, 4)],
    "one row": lambda x: x[torch.zeros(3, dtype=torch.int64) + 2],
    "embedding": lambda x: torch.nn.functional.embedding(torch.arange(4)[None].expand(2, 4), x[0]),
    "one of each": lambda x: x[torch.arange(7), x[:, 0, 0].long() % 6],
    "one of each, from the end": lambda x: x[torch.arange(7), x[:, 0, 0].long() % 6 - 6],
    "one of each, the other way": lambda x: x[:, x[0, :5, 0].long() % 6, torch.arange(5)],
}

NOT_AFFINE: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda x: x[x[:, 0, 0].argsort()],
    "beyond the end": lambda x: x[torch.arange(3) + 5],
    "squares": lambda x: x[torch.arange(3) * torch.arange(3)],
    "across zero": lambda x: x[torch.arange(-2, 2)],
    "overlapping windows": lambda x: x[:, torch.arange(3)[:, None] + torch.arange(3)],
    "written": lambda x: x[torch.arange(3).add_(1)],
    "a part of each": lambda x: x[torch.arange(5), x[:5, 0, 0].argsort()],
}


@pytest.mark.parametrize("name", AFFINE)
def test_values_layouts_and_gradients_are_eagers(name: str) -> None:
    function = AFFINE[name]
    x = (torch.randn(7, 6, 5, dtype=torch.float64) * 9).requires_grad_()
    fast = fc.compile(function, backend="interpret", strict=True)
    ours, theirs = fast(x), function(x)
    assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()
    sent = torch.randn_like(theirs)
    torch.testing.assert_close(*(torch.autograd.grad(out, x, sent)[0] for out in (ours, theirs)))
    assert "affine lookups" in fast.plan[0].notes
    assert [op.target for plan in fast.plan for op in plan.leftovers] == []


@pytest.mark.parametrize("name", AFFINE)
def test_no_lookup_is_left(name: str) -> None:
    after, notes = AFFINE_LOOKUPS.apply(traced(AFFINE[name], torch.randn(7, 6, 5)))
    assert len(notes) == 1 and not LOOKUPS & {node.target for node in after.graph.nodes}


@pytest.mark.parametrize("name", NOT_AFFINE)
def test_others_are_left_alone(name: str) -> None:
    graph = traced(NOT_AFFINE[name], torch.randn(7, 6, 5))
    after, notes = AFFINE_LOOKUPS.apply(graph)
    assert notes == () and targets(after) == targets(graph)


def test_sizes_that_differ() -> None:
    def cut(x: Tensor, y: Tensor) -> Tensor:
        n = y.shape[0]
        return x.index_select(1, torch.arange(n)) + x[:, torch.arange(n).flip(0)]

    fast = fc.compile(cut, backend="interpret", strict=True, dynamic=True)
    for count in (4, 9):
        x, y = torch.randn(3, 2 * count, requires_grad=True), torch.randn(count)
        torch.testing.assert_close(fast(x, y), cut(x, y))


def test_a_choice_that_lies_outside_is_an_error() -> None:
    x, chosen = torch.randn(3, 4), torch.tensor([0, -5, 1])
    fast = fc.compile(lambda x, c: x[torch.arange(3), c] * 2, backend="interpret", strict=True)
    with pytest.raises(IndexError):
        fast(x, chosen)


def test_a_result_is_no_view() -> None:
    x = torch.randn(6)
    fast = fc.compile(lambda x: x[torch.arange(3)], backend="interpret", strict=True)
    fast(x).zero_()
    assert x[:3].all()
