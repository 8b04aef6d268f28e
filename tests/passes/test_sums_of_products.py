"""Sums of products over broadcast operands are products of matrices, values and gradients as eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.passes.rewrites.sums_of_products import SUMS_OF_PRODUCTS
from tests.passes.test_rewrites import targets, traced

aten = torch.ops.aten
RULE = "sums of products"


def inner(a: Tensor, b: Tensor) -> Tensor:
    """[2, 17, 3, 18], [2, 19, 3, 18] -> [2, 17, 19, 3]"""
    return (a[:, :, None] * b[:, None]).sum(-1)


def outer(a: Tensor, b: Tensor) -> Tensor:
    """Over the second dimension, where heads stand between what is multiplied."""
    return (a[:, :, :, None, :] * b[:, :17, :, :, None]).sum(dim=1) + 1


def kept(a: Tensor, b: Tensor) -> Tensor:
    return (a[:, :, None] * b[:, None]).sum((0, -1), keepdim=True).tanh()


def lower(a: Tensor, b: Tensor) -> Tensor:
    """A dimension that nobody has, and an operand of fewer dimensions."""
    return (a[0, :, 0, None, None] * b[0, :, 1].exp()).sum(-1)[:, 0] * 2


def several(a: Tensor, b: Tensor) -> Tensor:
    """Two rows of what is summed make one inner dimension."""
    return (a[:, :, None].transpose(2, 3) * b[:, None].transpose(2, 3)).sum((2, 4))


def half(a: Tensor, b: Tensor) -> Tensor:
    return inner(a.bfloat16(), b.bfloat16()).to(a.dtype)


FOUND = [inner, outer, kept, lower, several]


def operands() -> tuple[Tensor, Tensor]:
    shapes = (2, 17, 3, 18), (2, 19, 3, 18)
    a, b = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    return a, b


def compared(function: Callable[..., Tensor], *args: Tensor, **options: object) -> fc.Compiled:
    fast = fc.compile(function, backend="interpret", **options)
    truth, ours = function(*args), fast(*args)
    torch.testing.assert_close(ours, truth)
    assert ours.stride() == truth.stride()
    grad = torch.randn_like(truth)
    for a, b in zip(*(torch.autograd.grad(y, args, grad) for y in (ours, truth)), strict=True):
        torch.testing.assert_close(a, b)
    return fast


@pytest.mark.parametrize("function", FOUND)
def test_products_of_matrices(function: Callable[..., Tensor]) -> None:
    fast = compared(function, *operands(), strict=True)
    assert "done" in fast.plan[0].notes[RULE]
    for plan in fast.plan:
        assert {plan.dag.op(left.subject).kind for left in plan.leftovers} == {"contraction"}


@pytest.mark.parametrize("function", FOUND)
def test_numerics_of_eager_add_up_as_eager_does(function: Callable[..., Tensor]) -> None:
    fast = compared(function, *operands(), strict=True, numerics="eager")
    assert RULE not in fast.plan[0].notes


def test_sizes_that_are_only_known_at_run_time() -> None:
    fast = None
    for batch in (2, 2, 5):
        a, b = (torch.randn(batch, n, 3, 18, dtype=torch.float64, requires_grad=True) for n in (17, 19))
        fast = fast or fc.compile(inner, backend="interpret", dynamic=True)
        torch.testing.assert_close(fast(a, b), inner(a, b))


def matrix_and_vector(a: Tensor, b: Tensor) -> Tensor:
    return (a * b[:, :1]).sum(-1)


def too_short(a: Tensor, b: Tensor) -> Tensor:
    return (a[..., None, :3] * b[:, :1, :, :, None]).sum(0)


def summed_before(a: Tensor, b: Tensor) -> Tensor:
    return (a[:, :, None] * b[:, None]).sum((1, 4))


def read_twice(a: Tensor, b: Tensor) -> Tensor:
    c = a[:, :, None] * b[:, None]
    return c.sum(-1) + c[..., 0]


def wider(a: Tensor, b: Tensor) -> Tensor:
    return (a[:, :, None].float() * b[:, None].float()).sum(-1, dtype=torch.float64)


def scaled(a: Tensor, b: Tensor) -> Tensor:
    return (a * 2).sum(-1) + b.sum()


def changed(a: Tensor, b: Tensor) -> Tensor:
    a = a + 1
    c = a[:, :, None] * b[:, None]
    a.zero_()
    return c.sum(-1) + a.sum()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        *((f, "") for f in (matrix_and_vector, too_short, summed_before, read_twice, wider, scaled)),
        (changed, "an operand is written in place before the result is computed"),
    ],
)
def test_what_stays_a_sum(function: Callable[..., Tensor], reason: str) -> None:
    args = operands()
    gm = traced(function, *(t.detach() for t in args))
    new, notes = SUMS_OF_PRODUCTS.apply(gm)
    assert new is gm and [note.reason for note in notes] == ([reason] if reason else [])
    with torch.no_grad():
        torch.testing.assert_close(fc.compile(function, backend="interpret")(*args), function(*args))


def test_fewer_digits_are_not_taken() -> None:
    a, b = (t.detach().float() for t in operands())
    gm = traced(inner, a, b)
    assert aten.einsum.default in targets(SUMS_OF_PRODUCTS.apply(gm)[0])
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        assert SUMS_OF_PRODUCTS.apply(gm) == (gm, ())
    finally:
        torch.set_float32_matmul_precision(before)


def test_16_bits_are_closer_than_eagers() -> None:
    a, b = (t.detach() for t in operands())
    truth = inner(a.bfloat16().double(), b.bfloat16().double())
    fast = fc.compile(half, backend="interpret")
    ours, eager = fast(a, b), half(a, b)
    assert "done" in fast.plan[0].notes[RULE]
    assert (ours - truth).norm() <= (eager - truth).norm()
