"""Hooks that are registered, replaced or removed after a module was compiled."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as modules

import fusion_compiler as fc

Handle = Any
HOOKS: dict[str, Callable[[nn.Module], Handle]] = {
    "forward": lambda m: m[0].register_forward_hook(lambda *a: a[-1] * 3),  # type: ignore[index]
    "forward pre": lambda m: m[1].register_forward_pre_hook(lambda m, a: (a[0] * 3,)),  # type: ignore[index]
    "backward": lambda m: m[0].register_full_backward_hook(lambda m, g, o: tuple(t * 2 for t in g)),  # type: ignore[index]
    "backward pre": lambda m: m[0].register_full_backward_pre_hook(lambda m, o: tuple(t * 2 for t in o)),  # type: ignore[index]
    "global": lambda _: modules.register_module_forward_hook(
        lambda m, a, out: out * 2 if isinstance(m, nn.Linear) else None
    ),
}


@pytest.fixture
def handles() -> Generator[list[Handle]]:
    registered: list[Handle] = []
    yield registered
    for handle in registered:
        handle.remove()


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 2)).double()


def step(model: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = call(x)
    return [y, *torch.autograd.grad(y.sum(), [x, *model.parameters()])]


@pytest.mark.filterwarnings("ignore:TorchDynamo breaks")
@pytest.mark.parametrize("drop_in", [False, True], ids=["torch.compile", "fc.compile"])
@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_a_hook_registered_later_is_called(
    register: Callable[[nn.Module], Handle], drop_in: bool, handles: list[Handle]
) -> None:
    torch._dynamo.reset()
    model, x = net(), torch.randn(3, 4, dtype=torch.float64)
    fast = (
        fc.compile(model, backend="eager")
        if drop_in
        else torch.compile(model.forward, backend="fusion_compiler", options={"backend": "eager"})
    )
    plain = step(model, model, x)
    torch.testing.assert_close(step(model, fast, x), plain)
    handles.append(register(model))
    hooked = step(model, model, x)
    assert not all(torch.equal(a, b) for a, b in zip(hooked, plain, strict=True))
    for _ in range(2):
        torch.testing.assert_close(step(model, fast, x), hooked)
    handles.pop().remove()
    torch.testing.assert_close(step(model, fast, x), plain)


def test_hooks_of_other_modules_compile_nothing_anew(handles: list[Handle]) -> None:
    model, other = net(), net()
    fast = fc.compile(model, backend="eager")
    x = torch.randn(3, 4, dtype=torch.float64)
    fast(x)
    handles += [register(other) for name, register in HOOKS.items() if name != "global"]
    torch.ones(3, requires_grad=True).register_hook(lambda g: g)
    fast(x)
    assert len(fast.plan) == 1


def test_a_module_that_is_put_in_later_may_have_hooks(handles: list[Handle]) -> None:
    model, x = net(), torch.randn(3, 4, dtype=torch.float64)
    fast = fc.compile(model, backend="eager")
    fast(x)
    model[1] = nn.GELU()
    fast(x)
    handles.append(model[1].register_forward_hook(lambda *a: a[-1] + 1))
    torch.testing.assert_close(fast(x), model(x))
