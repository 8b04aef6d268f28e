"""In seconds: does it work at all? python -m pytest -x -q tests/test_tiny.py"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import fusion_compiler as fc


class Tiny(nn.Module):
    """A gated feed-forward with a norm written out: element-wise, a reduction, contractions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(24) + 0.5)
        self.up = nn.Linear(24, 40)
        self.down = nn.Linear(40, 24)

    def forward(self, x: Tensor) -> Tensor:
        normal = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight
        return x + self.down(torch.tanh(self.up(normal)) * 2)


def results(called: nn.Module, model: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    model.zero_grad(set_to_none=True)
    y = called(x)
    y.backward(gradient)
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def test_forward_and_backward_in_the_interpreter() -> None:
    model = Tiny()
    x, gradient = torch.randn(2, 5, 7, 24)
    fast = fc.compile(model, backend="interpret", strict=True)
    ours = results(fast, model, x, gradient)
    wide = Tiny().double()
    wide.load_state_dict(model.state_dict())
    exact = results(wide, wide, x.double(), gradient.double())
    for our, truth in zip(ours, exact, strict=True):
        assert our.dtype == torch.float32
        torch.testing.assert_close(our.double(), truth, rtol=1e-5, atol=1e-5)
    plans = list(fast.plan)
    assert [len(p.clusters) > 0 for p in plans] == [True, True]
    assert not [left for p in plans for left in p.leftovers if left.rule != "library call"]
