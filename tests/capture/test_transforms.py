"""Custom autograd functions under function transforms within compiled code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

import fusion_compiler as fc
from fusion_compiler.errors import FusionError, FusionWarning


class Sine(Function):
    """A sine with gradients of its own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.sin(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 2

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:  # type: ignore[override]
        return tangent * 5


class Cosine(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return x.cos()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient * 3


def _dual(x: Tensor) -> Tensor | None:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(Sine.apply(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


TRANSFORMS: dict[str, Callable[[Tensor], Any]] = {
    "grad": lambda x: torch.func.grad(lambda t: Sine.apply(t).sum())(x) + x.exp(),
    "vjp": lambda x: torch.func.vjp(Sine.apply, x)[1](x),
    "jvp": lambda x: torch.func.jvp(Sine.apply, (x,), (x,)),
    "dual_level": _dual,
}


@pytest.mark.filterwarnings(
    "ignore:TorchDynamo breaks", "ignore:a graph is not compiled", "ignore:.*jit.script"
)
@pytest.mark.parametrize("function", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_functions_own_gradient_is_kept_under_a_transform(function: Callable[[Tensor], Any]) -> None:
    x = torch.randn(4)
    # Since PyTorch 2.15, TorchDynamo itself leaves reverse-mode transforms alone.
    with pytest.warns(FusionWarning, match="Sine, which runs under torch.func|Unsupported functorch tracing"):
        got = fc.compile(function, backend="interpret")(x)
    torch.testing.assert_close(got, function(x))
    with pytest.raises(FusionError):
        fc.compile(function, backend="interpret", strict=True)(x)


def test_it_is_compiled_without_a_transform_and_a_transform_without_it() -> None:
    x = torch.randn(4, requires_grad=True)
    fast = fc.compile(lambda x: Cosine.apply(x) * 2, backend="interpret", strict=True)
    torch.testing.assert_close(*torch.autograd.grad(fast(x).sum(), x), torch.full((4,), 6.0))
    gradient = fc.compile(torch.func.grad(lambda x: (x * x).sum()), backend="interpret", strict=True)
    torch.testing.assert_close(gradient(x.detach()), 2 * x.detach())


class Product(Function):
    """A product with gradients of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, y = ctx.saved_tensors
        return gradient * y * 2, gradient * x * 3


def _changed_by(change: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    class Changed(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
            y = x * 2
            change(y)
            ctx.save_for_backward(x)
            return y

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 3 * ctx.saved_tensors[0]

    return lambda x: Changed.apply(x * 1)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "one tensor twice": lambda x: Product.apply(x, x),
    "a tensor and its view": lambda x: Product.apply(x, x.view(-1)),
    "add_": _changed_by(lambda y: y.add_(1)),
    "relu_": _changed_by(lambda y: y.relu_()),
    "out=": _changed_by(lambda y: torch.add(y, 1, out=y)),
    "through a view": _changed_by(lambda y: y[:2].mul_(3)),
}


@pytest.mark.filterwarnings("ignore:TorchDynamo breaks", "ignore:TorchDynamo would lose")
@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_gradients_of_repeated_and_changed_tensors_are_the_functions_own(
    function: Callable[[Tensor], Tensor],
) -> None:
    """TorchDynamo loses them before PyTorch 2.13."""
    x = torch.randn(4, requires_grad=True)
    fast = fc.compile(function, backend="interpret")
    torch.testing.assert_close(
        torch.autograd.grad(fast(x).sum(), x), torch.autograd.grad(function(x).sum(), x)
    )
