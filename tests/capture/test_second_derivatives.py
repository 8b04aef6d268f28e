"""Gradients of gradients: within compiled code, and of what compiled code returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import grad

import fusion_compiler as fc
from fusion_compiler.errors import DoubleBackwardError, FusionWarning

pytestmark = pytest.mark.filterwarnings("ignore:.*is on cpu.*")


@pytest.fixture
def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1))


def penalty(net: nn.Module, x: Tensor) -> Tensor:
    (slope,) = grad(net(x).sum(), x, create_graph=True)
    return (slope.norm(dim=-1) - 1).square().mean()


def laplace(net: nn.Module, x: Tensor) -> Tensor:
    (slope,) = grad(net(x).sum(), x, create_graph=True)
    return sum(grad(slope[:, i].sum(), x, create_graph=True)[0][:, i].square().mean() for i in range(3))  # type: ignore[return-value]


def functional(net: nn.Module, x: Tensor) -> Tensor:
    return torch.func.grad(lambda x: net(x).sum())(x).square().mean()


def inner_step(net: Any, x: Tensor) -> Tensor:
    weight = net[0].weight
    (step,) = grad((x @ weight.T).square().mean(), weight, create_graph=True)
    return (x @ (weight - 0.1 * step).T).square().mean()


def check(net: nn.Module, compiled: Callable[..., Tensor], plain: Callable[..., Tensor]) -> None:
    """The same loss and gradients as in float64."""
    x = torch.randn(5, 3, requires_grad=True)
    loss = compiled(x)
    got = [loss, *grad(loss, [x, *net.parameters()], allow_unused=True)]
    net.double()
    wide = x.detach().double().requires_grad_()
    loss = plain(wide)
    for ours, truth in zip(
        got, [loss, *grad(loss, [wide, *net.parameters()], allow_unused=True)], strict=True
    ):
        assert (ours is None) == (truth is None)
        if ours is not None:
            torch.testing.assert_close(ours, truth.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", [penalty, laplace, functional, inner_step])
def test_an_inner_gradient_is_part_of_the_graph(net: nn.Module, function: Any) -> None:
    compiled = fc.compile(lambda x: function(net, x))
    check(net, compiled, lambda x: function(net, x))
    assert len(compiled.plan) == 2 and not compiled.plan.breaks


def test_forces_without_a_graph(net: nn.Module) -> None:
    x = torch.randn(5, 3, requires_grad=True)
    compiled = fc.compile(lambda x: -grad(net(x).sum(), x)[0])
    torch.testing.assert_close(compiled(x), -grad(net(x).sum(), x)[0])
    assert len(compiled.plan) == 1 and not compiled.plan.breaks


@pytest.mark.parametrize("several", [False, True])
def test_a_gradient_of_compiled_code_says_how_to_differentiate_it(net: nn.Module, several: bool) -> None:
    x = torch.randn(5, 3, requires_grad=True)
    compiled = fc.compile((lambda x: (net(x), net(x).exp())) if several else net)
    y = compiled(x)
    (slope,) = grad((sum(y) if several else y).sum(), x, create_graph=True)  # type: ignore[arg-type]
    with pytest.raises(DoubleBackwardError, match=r"torch\.func\.grad"):
        slope.square().sum().backward()


def test_a_kept_graph_is_no_double_backward(net: nn.Module) -> None:
    x = torch.randn(5, 3, requires_grad=True)
    y = fc.compile(net)(x).sum()
    first, second = (grad(y, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


class Tripled(torch.autograd.Function):
    """A square whose gradient is 3x, which no derivation gives."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return 3 * g * ctx.saved_tensors[0]


def test_a_custom_function_keeps_its_gradient(net: nn.Module) -> None:
    def loss(x: Tensor) -> Tensor:
        return (grad(Tripled.apply(x).sum(), x, create_graph=True)[0] * net(x)).sum()

    with pytest.warns(FusionWarning, match="Tripled"):
        check(net, fc.compile(loss), loss)


def test_backward_in_a_compiled_function_runs_hooks(net: Any) -> None:
    seen: list[Tensor] = []
    net[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))

    def step(x: Tensor) -> Tensor:
        loss = net(x).square().mean()
        loss.backward()
        return loss.detach()

    x = torch.randn(5, 3)
    with pytest.warns(FusionWarning, match="backward"):
        fc.compile(step)(x)
    net.zero_grad()
    step(x)
    assert len(seen) == 2
    torch.testing.assert_close(*seen)
