"""Tensors whose memory does not hold their values: arguments, parameters, gradients, intermediate results."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

import fusion_compiler as fc
from fusion_compiler.errors import ArgumentKindError, FusionWarning


def negated(*shape: int) -> Tensor:
    """A tensor with the lazy negative bit, contiguous."""
    return torch._neg_view(torch.randn(*shape, dtype=torch.float64))


def conjugated(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex128).conj()


def zeros(*shape: int) -> Tensor:
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    (lazy,) = torch.autograd.grad(torch.sgn(x).sum(), x)
    assert lazy._is_zerotensor()  # type: ignore[attr-defined]
    return lazy


def copied(tensor: Tensor) -> Tensor:
    """A copy with the same bits."""
    plain = tensor.clone()
    plain = torch._conj(plain.conj().resolve_conj()) if tensor.is_conj() else plain
    return torch._neg_view(-plain) if tensor.is_neg() else plain


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "read": lambda x: x.abs() * 2 + 1,
    "read through a view": lambda x: x[1:].abs() * 2,
    "a view returned": lambda x: (x[1:], x.abs()),
    "written": lambda x: x.mul_(3),
    "written through a view": lambda x: (x[1:].add_(1), x.abs().sum())[1],
    "written and returned": lambda x: (x.add_(1), x, x.abs().sum(0)),
}


@pytest.mark.parametrize("function", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("make", [negated, conjugated])
def test_lazy_arguments_are_resolved_and_written_back(
    make: Callable[..., Tensor], function: Callable[[Tensor], Any]
) -> None:
    fast = fc.compile(function, backend="interpret")
    theirs = make(4, 3)
    mine = copied(theirs)
    assert (mine.is_neg(), mine.is_conj()) == (theirs.is_neg(), theirs.is_conj())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no kernel supports")
        got, want = fast(mine), function(theirs)
    results = [torch.utils._pytree.tree_leaves(r) for r in (got, want)]
    torch.testing.assert_close(*results)
    torch.testing.assert_close(mine, theirs)
    assert [r is mine for r in results[0]] == [r is theirs for r in results[1]]


def test_a_lazily_negated_argument_after_a_plain_one_has_a_gradient() -> None:
    fast = fc.compile(lambda x: (x * 2).sin(), backend="interpret", strict=True)
    fast(torch.randn(5, dtype=torch.float64, requires_grad=True))
    x = negated(5).requires_grad_()
    (gradient,) = torch.autograd.grad(fast(x).sum(), x)
    torch.testing.assert_close(gradient, 2 * (2 * x.detach().resolve_neg()).cos())


def test_a_parameter_and_a_buffer_may_be_lazily_negated() -> None:
    model = nn.Linear(3, 3, dtype=torch.float64)
    fast, x = fc.compile(model, backend="interpret"), torch.randn(2, 3, dtype=torch.float64)
    fast(x)
    model.bias = nn.Parameter(negated(3))
    torch.testing.assert_close(fast(x), x @ model.weight.T + model.bias.resolve_neg())


def test_lazily_negated_intermediate_results_are_computed() -> None:
    z = torch.randn(3, 4, dtype=torch.complex128, requires_grad=True)
    fast = fc.compile(lambda z: z.conj().imag.sin() * 2, backend="interpret")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no kernel supports")
        (gradient,) = torch.autograd.grad(fast(z).sum(), z)
    torch.testing.assert_close(fast(z), -2 * z.detach().imag.sin())
    torch.testing.assert_close(
        gradient, torch.complex(torch.zeros(3, 4).double(), -2 * z.detach().imag.cos())
    )


def test_lazy_zeros_run_eager_with_a_warning() -> None:
    fast = fc.compile(lambda x, y: x * 2 + y, backend="interpret")
    y = torch.randn(3, dtype=torch.float64)
    with pytest.warns(FusionWarning, match="is a lazy tensor of zeros"):
        torch.testing.assert_close(fast(zeros(3), y), y)
    x = torch.randn(3, dtype=torch.float64)
    torch.testing.assert_close(fast(x, y), x * 2 + y)
    with pytest.raises(ArgumentKindError):
        fc.compile(lambda x: x * 2, backend="interpret", strict=True)(zeros(3))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # by which PyTorch decomposes tangents
@pytest.mark.parametrize("when", ["first", "after a plain call", "a parameter"])
def test_a_dual_tensor_keeps_its_tangent(when: str) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.randn(3))
    model.forward = lambda x: (x * model.weight).sin()
    fast, x, tangent = fc.compile(model, backend="interpret"), torch.randn(3), torch.randn(3)
    if when == "after a plain call":
        fast(x)
    with forward_ad.dual_level(), pytest.warns(FusionWarning, match="forward-mode"):
        weight = model.weight.detach()
        if when == "a parameter":
            del model.weight
            model.weight = forward_ad.make_dual(weight, tangent)
            got, scale = forward_ad.unpack_dual(fast(x)), x
        else:
            got, scale = forward_ad.unpack_dual(fast(forward_ad.make_dual(x, tangent))), weight
        torch.testing.assert_close(got.tangent, (x * weight).cos() * scale * tangent)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("kind", ["negated", "zeros", "batched", "dual"])
def test_gradients_that_arrive_may_be_of_any_kind(kind: str, several: bool) -> None:
    x = torch.randn(4, dtype=torch.float64, requires_grad=True)
    fast = fc.compile(lambda x: (x.sin(), x * 3) if several else x.sin(), backend="interpret")
    y = fast(x)[0] if several else fast(x)
    slope = x.detach().cos()
    if kind == "batched":
        batch = torch.randn(5, 4, dtype=torch.float64)
        (got,) = torch.autograd.grad(y, x, batch, is_grads_batched=True)
        torch.testing.assert_close(got, batch * slope)
    elif kind == "dual":
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(torch.randn(4).double(), torch.randn(4).double())
            (got,) = torch.autograd.grad(y, x, dual)
            torch.testing.assert_close(forward_ad.unpack_dual(got).tangent, dual_tangent(dual) * slope)
    else:
        gradient = {"negated": negated, "zeros": zeros}[kind](4)
        (got,) = torch.autograd.grad(y, x, gradient)
        torch.testing.assert_close(got, gradient.clone() * slope)


def dual_tangent(dual: Tensor) -> Tensor:
    tangent = forward_ad.unpack_dual(dual).tangent
    assert tangent is not None
    return tangent


class Named(Tensor):
    """A subclass without code of its own."""


@pytest.mark.parametrize("leaf", [False, True])
def test_a_subclass_without_dispatch_is_compiled_and_kept(leaf: bool) -> None:
    x = torch.randn(3, dtype=torch.float64).as_subclass(Named).requires_grad_(leaf)
    fast = fc.compile(lambda x: (torch.nn.functional.gelu(x) * 2, x[1:]), backend="interpret", strict=True)
    got, view = fast(x)
    assert (type(got), type(view)) == (Named, Named)
    assert view.data_ptr() == x[1:].data_ptr()
    want = torch.nn.functional.gelu(x) * 2
    torch.testing.assert_close(got.as_subclass(Tensor), want.as_subclass(Tensor))
    if leaf:
        gradients = [torch.autograd.grad(y.sum(), x)[0].as_subclass(Tensor) for y in (got, want)]
        torch.testing.assert_close(*gradients)
