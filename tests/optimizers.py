"""Optimizers for the tests: those that are fused, one of a user's own, and how a run of steps is compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import (
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

import fusion_compiler as fc
from fusion_compiler.optimizer.kernels import Kernels
from tests.exactness import not_as_close
from tests.fake_gpu import FakeGpu

Pair = tuple[Any, Optimizer]


class Lion(Optimizer):
    """Chen et al. (2023), as a user writes it: a class with a step of its own."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state["exp_avg"] = torch.zeros_like(param)
                first, second = group["betas"]
                param.data.mul_(1 - group["lr"] * group["weight_decay"])
                average = state["exp_avg"]
                param.add_((average * first + param.grad * (1 - first)).sign_(), alpha=-group["lr"])
                average.mul_(second).add_(param.grad, alpha=1 - second)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd momentum": lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd nesterov": lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, maximize=True),
    "adam": lambda p: Adam(p, lr=0.01, weight_decay=0.1),
    "adam amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "adamw": lambda p: AdamW(p, lr=0.01, betas=(0.4, 0.9)),
    "adamw amsgrad": lambda p: AdamW(p, lr=torch.tensor(0.01), amsgrad=True),
    "adagrad": lambda p: Adagrad(p, lr=0.05, lr_decay=0.1, initial_accumulator_value=0.1, weight_decay=0.1),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, maximize=True),
    "rmsprop centered": lambda p: RMSprop(p, lr=0.01, centered=True, momentum=0.5, weight_decay=0.1),
    "adadelta": lambda p: Adadelta(p, lr=0.7, weight_decay=0.01),
    "nadam": lambda p: NAdam(p, lr=0.01, weight_decay=0.1),
    "nadam decoupled": lambda p: NAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda p: RAdam(p, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adamax": lambda p: Adamax(p, lr=0.01, weight_decay=0.1),
    "lion": lambda p: Lion(p, weight_decay=0.1),
}


class Sizes(nn.Module):
    """Parameters of many sizes: none is a power of two of blocks, one is empty, one is frozen."""

    def __init__(self, dtype: torch.dtype = torch.float32, sizes: Sequence[tuple[int, ...]] = ()) -> None:
        super().__init__()
        chosen = sizes or ((3, 7), (1,), (1024,), (37, 71), (0, 3), (2, 3, 5), (2, 1024))
        self.all = nn.ParameterList(nn.Parameter(torch.randn(s, dtype=dtype)) for s in chosen)
        self.frozen = nn.Parameter(torch.randn(5, dtype=dtype), requires_grad=False)

    def groups(self) -> list[dict[str, Any]]:
        """Two, with learning rates and weight decays of their own."""
        params = list(self.parameters())
        return [{"params": params[:3]}, {"params": params[3:], "lr": 0.02, "weight_decay": 0.05}]


class Layers(nn.Module):
    """Matrices and vectors, of which one fills a block."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        shapes = ((37, 71), (71,), (3, 7), (7,), (1024,), (0, 3))
        self.all = nn.ParameterList(nn.Parameter(torch.randn(s, dtype=dtype)) for s in shapes)

    def by_decay(self) -> list[dict[str, Any]]:
        """As most training loops have them: no weight decay for vectors."""
        decayed, others = ([p for p in self.all if (p.dim() > 1) is matrix] for matrix in (True, False))
        return [{"params": decayed}, {"params": others, "weight_decay": 0.0}]

    def by_layer(self) -> list[dict[str, Any]]:
        """A learning rate for each."""
        return [{"params": [param], "lr": 0.01 * 0.8**i} for i, param in enumerate(self.all)]


def gradients(model: nn.Module, step: int) -> list[Tensor | None]:
    """Fresh random ones; every third step one parameter has none, and frozen ones never have."""
    params = list(model.parameters())
    return [
        torch.randn_like(p) if p.requires_grad and (step % 3 or i) else None for i, p in enumerate(params)
    ]


def give(model: nn.Module, grads: Iterable[Tensor | None]) -> None:
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = None if grad is None else grad.to(param.dtype, copy=True)


def copies(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """(another, one in float64)."""
    return copy.deepcopy(model), copy.deepcopy(model).double()


def three(
    model: nn.Module, make: Callable[[Any], Optimizer], of: Callable[[Any], Any] = nn.Module.parameters
) -> tuple[Pair, ...]:
    """A model, its copy and one in float64, with an optimizer each of their parameters or groups, `of` it."""
    return tuple((each, make(of(each))) for each in (model, *copies(model)))


def two(
    model: nn.Module, make: Callable[[Any], Optimizer], of: Callable[[Any], Any] = nn.Module.parameters
) -> tuple[Pair, ...]:
    """A model and its copy."""
    return three(model, make, of)[:2]


def both(model: nn.Module, make: Callable[[Any], Optimizer], **options: Any) -> tuple[Pair, Pair, Any]:
    """(a model and its fused optimizer, its copy with torch.optim's own, what the first is fused by)."""
    ours, eager = two(model, make)
    options = {"backend": "eager"} | options
    return ours, eager, fc.fuse_optimizer(*ours, **options)


def schedule(step: int, model: nn.Module, optimizer: Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * 0.9


def take_steps(
    pairs: Iterable[Pair],
    steps: int,
    before: Callable[[int, Any, Any], object] = lambda step, model, optimizer: None,
    all_of_them: bool = False,
) -> None:
    """The same steps of all, with fresh gradients, of all parameters or in some steps not of the first.

    before: called with the step's number, model and optimizer when there are gradients.
    """
    pairs = list(pairs)
    for step in range(steps):
        grads = gradients(pairs[0][0], 1 if all_of_them else step)
        for model, optimizer in pairs:
            give(model, grads)
            before(step, model, optimizer)
            optimizer.step()


def fused_on(gpu: FakeGpu, optimizer: Optimizer, patch: pytest.MonkeyPatch) -> fc.FusedOptimizer:
    """Kernels that are launched for tensors on the CPU."""
    patch.setattr(Kernels, "backend_for", lambda *_: "triton")  # pyright: ignore[reportUnknownLambdaType]
    fused = fc.FusedOptimizer(optimizer, {}, strict=True, gpus=lambda _: gpu)
    fused.install()
    return fused


def values(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameters and all of their state, by name."""
    all_ = {name: param.detach() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        all_ |= {f"{key} of {name}": torch.as_tensor(v) for key, v in optimizer.state.get(param, {}).items()}
    return all_


def check(*pairs: Pair) -> None:
    """The first is the same as the second; where there is a third, as close to that as the second is."""
    states = [values(*pair) for pair in pairs]
    if len(states) == 3:
        check_close(*states)
    else:
        check_same(*states)


def check_nearly(ours: Pair, eager: Pair) -> None:
    """A few steps by kernels beside torch.optim's own."""
    for name, value in values(*ours).items():
        torch.testing.assert_close(value, values(*eager)[name], rtol=1e-5, atol=1e-6)


def check_close(ours: dict[str, Tensor], eager: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """As close to the truth as eager is, and the counters the same."""
    assert ours.keys() == eager.keys() == truth.keys()
    wrong = {name: not_as_close(value, eager[name], truth[name]) for name, value in ours.items()}
    assert not {name: reason for name, reason in wrong.items() if reason}


def check_same(ours: dict[str, Tensor], eager: dict[str, Tensor]) -> None:
    assert ours.keys() == eager.keys()
    assert not [name for name, value in ours.items() if not torch.equal(value, eager[name])]


class Tied(nn.Module):
    """Two layers with one weight, an embedding that is the head's, a frozen scale, one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.randn(6), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = torch.tanh(self.first(x)) * self.scale
        return self.head(torch.tanh(self.second(x)))


def data() -> tuple[Tensor, Tensor]:
    return torch.randint(11, (4, 5)), torch.randint(11, (20,))


def loss_of(model: Callable[..., Any], batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets)
