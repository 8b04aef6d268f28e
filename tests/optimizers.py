"""Optimizers for the tests: those that are fused, one of a user's own, and how a run of steps is compared."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

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

from tests.exactness import not_as_close


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


def values(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Parameters and all of their state, by name."""
    found = {name: param.detach() for name, param in model.named_parameters()}
    for name, param in model.named_parameters():
        found |= {f"{key} of {name}": torch.as_tensor(v) for key, v in optimizer.state.get(param, {}).items()}
    return found


def check_close(ours: dict[str, Tensor], eager: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """As close to the truth as eager is, and the counters the same."""
    assert ours.keys() == eager.keys() == truth.keys()
    wrong = {name: not_as_close(value, eager[name], truth[name]) for name, value in ours.items()}
    assert not {name: reason for name, reason in wrong.items() if reason}


def check_same(ours: dict[str, Tensor], eager: dict[str, Tensor]) -> None:
    assert ours.keys() == eager.keys()
    assert not [name for name, value in ours.items() if not torch.equal(value, eager[name])]
