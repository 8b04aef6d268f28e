"""Fuse an optimizer of your own, Lion (Chen et al., 2023), into one kernel for all parameters.

    python -m examples.own_optimizer

The compiler reads the formula from the optimizer's `step`. The example trains half of its steps with the
plain optimizer, and the other half from its checkpoint, with updates that are fused into the backward pass.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import fusion_compiler as fc


class Lion(Optimizer):
    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            first, second = group["betas"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                if not self.state[param]:
                    self.state[param]["average"] = torch.zeros_like(param)
                average = self.state[param]["average"]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                param.add_(torch.sign(average * first + param.grad * (1 - first)), alpha=-group["lr"])
                average.mul_(second).add_(param.grad, alpha=1 - second)


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> float:
    """Train a model to compute the sine with a falling learning rate, and return the last loss."""
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.5, total_iters=steps)
    loss = torch.zeros(())
    for _ in range(steps):
        x = 6 * torch.rand(128, 1, device=next(model.parameters()).device) - 3
        loss = nn.functional.mse_loss(model(x), torch.sin(x))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
    return loss.item()


def main(steps: int = 100) -> float:
    """Train twice and return the last loss."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = nn.Linear(1, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1)
    model = nn.Sequential(*layers).to(device)
    plain = Lion(model.parameters(), lr=2e-3)
    print(f"as it is: loss {train(model, plain, steps):.4f}")
    optimizer = Lion(model.parameters(), lr=2e-3)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    backend: Any = "auto" if device == "cuda" else "interpret"
    fused = fc.fuse_optimizer(model, optimizer, when="backward", backend=backend, strict=True)
    loss = train(model, optimizer, steps)
    print(f"fused, from its checkpoint: loss {loss:.4f}")
    print(fused)
    (kernel,) = fused.kernels
    print(kernel.source)
    return loss


if __name__ == "__main__":
    main()
