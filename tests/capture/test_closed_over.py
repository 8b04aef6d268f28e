"""Tensors that a function holds without taking them as arguments: capture leaves them alone, the compiled
graph reads and writes those very tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

import fusion_compiler as fc
from tests.capture.test_capture import Captured
from tests.versions import TORCH, not_before

OPTIMIZERS = {
    name: getattr(torch.optim, name)
    for name in (
        *("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax"),
        *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
    )
}


class Intercepted(Exception):
    pass


class Late:
    """A backend whose graphs refuse to run until they are let."""

    def __init__(self) -> None:
        self.captured = Captured()
        self.backend = self.captured.backend()
        self.waiting = True

    def __call__(self, gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        run = self.backend(gm, inputs)

        def late(*args: Any) -> Any:
            if self.waiting:
                raise Intercepted
            return run(*args)

        return late


def untouched_by_capture(function: Callable[..., Any], args: Sequence[Any], held: Iterable[Tensor]) -> Any:
    """`function` compiled, after a capture that wrote no tensor of `held`, not even back and forth."""
    late, held = Late(), list(held)
    before = [(t._version, t.detach().clone()) for t in held]
    fast = torch.compile(function, backend=late)
    with pytest.raises(Intercepted):
        fast(*args)
    for tensor, (version, value) in zip(held, before, strict=True):
        assert tensor._version == version
        assert torch.equal(tensor, value)
    late.waiting = False
    return fast


def parameters(shared: bool = False) -> list[Tensor]:
    """Two matrices with gradients; shared: which are parts of one tensor, and so are their gradients."""
    generator = torch.Generator().manual_seed(3)
    memory, grads = torch.randn(2, 15, generator=generator), torch.randn(2, 15, generator=generator)
    leaves: list[Tensor] = []
    for row, grad in zip(memory, grads, strict=True):
        parameter = (row if shared else row.clone()).view(5, 3).detach().requires_grad_()
        parameter.grad = (grad if shared else grad.clone()).view(5, 3)
        leaves.append(parameter)
    return leaves


def optimizer(name: str, **options: Any) -> tuple[Any, list[Tensor]]:
    """After one step, which makes its states; and all its tensors."""
    shared = options.pop("shared", False)
    # A compiled optimizer counts its steps in a tensor of float32, where 1 - 0.999**2 would lose most of its
    # digits; an eager one in Python's floats.
    settings = {"lr": 0.1, "momentum": 0.9, "betas": (0.9, 0.9), **options}
    signature = inspect.signature(OPTIMIZERS[name]).parameters
    created = OPTIMIZERS[name](parameters(shared), **{k: v for k, v in settings.items() if k in signature})
    created.step()
    params = created.param_groups[0]["params"]
    states = [v for p in params for v in created.state[p].values() if isinstance(v, Tensor)]
    return created, [*params, *(p.grad for p in params), *states]


# It iterates in bfloat16, which makes much of little.
ROUNDED = [not_before((2, 12), "Muon's products are rounded in another order by any backend")]


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        *(pytest.param(n, {}, marks=ROUNDED * (n == "Muon")) for n in OPTIMIZERS),
        ("Adam", {"foreach": True}),
        ("SGD", {"shared": True}),
    ],
    ids=str,
)
def test_an_optimizer_makes_each_step_once(name: str, options: dict[str, Any]) -> None:
    mine, held = optimizer(name, **options)
    theirs, reference = optimizer(name, **options)
    step = untouched_by_capture(mine.step, (), held)
    for _ in range(5):
        step()
        theirs.step()
        torch.testing.assert_close(held, reference)


def test_a_compiled_optimizer_trains() -> None:
    """The same with kernels, among them those that write a parameter."""
    mine, held = optimizer("AdamW", foreach=False)
    theirs, reference = optimizer("AdamW", foreach=False)
    step = fc.compile(mine.step, backend="interpret")
    for _ in range(3):
        step()
        theirs.step()
        torch.testing.assert_close(held, reference)
    assert any(cluster.eager for plan in step.plan for cluster in plan.clusters)


def _closures() -> dict[str, Callable[[Tensor], tuple[Callable[..., Any], list[Tensor]]]]:
    def counter(state: Tensor) -> Any:
        def add(x: Tensor) -> Tensor:
            state.add_(1)
            return x * state

        return add, [state]

    def view(state: Tensor) -> Any:
        part = state[1:]

        def add(x: Tensor) -> Tensor:
            part.mul_(2)
            return x * state

        return add, [state]

    def region(state: Tensor) -> Any:
        def inner(x: Tensor) -> Tensor:
            return torch.sin(x * state)

        def add(x: Tensor) -> Tensor:
            return checkpoint(inner, x, use_reentrant=False) + state.add_(1)

        return add, [state]

    def module(state: Tensor) -> Any:
        norm = nn.BatchNorm1d(3)
        norm.register_buffer("calls", state)
        plain = nn.Sequential(norm, nn.Tanh())

        def add(x: Tensor) -> Tensor:
            norm.calls += 1
            return plain(x * torch.arange(4.0)[:, None])

        return add, [*norm.parameters(), *norm.buffers()]

    return {"counter": counter, "view": view, "checkpointed region": region, "module": module}


@pytest.mark.parametrize("inlined", [True, False])
@pytest.mark.parametrize("name", _closures())
def test_a_closure_is_written_once_a_call(name: str, inlined: bool) -> None:
    """inlined: Dynamo passes what modules hold as arguments; else they stay modules that its graph calls."""
    if name == "module" and not inlined and TORCH < (2, 12):
        pytest.skip("AOTAutograd of PyTorch before 2.12 raises an IndexError for any backend")
    make = _closures()[name]
    (function, held), (other, reference) = make(torch.ones(3)), make(torch.ones(3))
    with torch._dynamo.config.patch(inline_inbuilt_nn_modules=inlined):
        fast = untouched_by_capture(function, (torch.ones(3),), held)
        for _ in range(3):
            x = torch.randn(3)
            torch.testing.assert_close(fast(x), other(x))
            torch.testing.assert_close(held, reference)
