"""Fused optimizers on the device, beside torch.optim's own and float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import fusion_compiler as fc
from tests.optimizers import OPTIMIZERS, Sizes, check_close, copies, give, gradients, values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_as_close_to_the_truth_as_eager(name: str, dtype: torch.dtype) -> None:
    ours = Sizes(dtype).cuda()
    models = (ours, *copies(ours))
    optimizers = [OPTIMIZERS[name](model.groups()) for model in models]  # type: ignore[operator]
    fused = fc.fuse_optimizer(ours, optimizers[0], strict=True)
    for step in range(20):
        grads = gradients(ours, step)
        for model, optimizer in zip(models, optimizers, strict=True):
            give(model, grads)
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.9
            optimizer.step()
    check_close(*(values(model, o) for model, o in zip(models, optimizers, strict=True)))
    assert not fused.own


def test_in_a_backward_pass_the_same_as_at_its_end() -> None:
    layers = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6))).cuda()
    other = copy.deepcopy(layers)
    pairs = [(layers, AdamW(layers.parameters())), (other, AdamW(other.parameters(), fused=True))]
    fc.fuse_optimizer(layers, pairs[0][1], when="backward", strict=True)
    fc.fuse_optimizer(other, pairs[1][1], strict=True)
    for _ in range(5):
        x = torch.randn(16, 300, device="cuda")
        for model, optimizer in pairs:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    for one, two in zip(layers.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
        assert one.grad is None


def test_a_checkpoint_of_torchs_fused_optimizer_goes_on_and_back() -> None:
    """Its counters are on the device; ours are on the host."""
    model = nn.Linear(300, 300).cuda()
    eager = copy.deepcopy(model)
    torchs, whole = (AdamW(m.parameters(), fused=True) for m in (model, eager))
    steps = [[torch.randn_like(p) for p in model.parameters()] for _ in range(9)]

    def go(m: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
        for grads in steps[first:last]:
            give(m, grads)
            optimizer.step()

    go(model, torchs, 0, 3)
    ours = AdamW(model.parameters(), fused=True)
    fc.fuse_optimizer(model, ours, strict=True)
    ours.load_state_dict(copy.deepcopy(torchs.state_dict()))
    go(model, ours, 3, 6)
    back = AdamW(model.parameters(), fused=True)
    back.load_state_dict(copy.deepcopy(ours.state_dict()))
    go(model, back, 6, 9)
    go(eager, whole, 0, 9)
    for one, two in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    assert back.state[model.weight]["step"] == 9


def test_before_the_next_use_the_same_as_at_the_step() -> None:
    layers = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6))).cuda()
    other = copy.deepcopy(layers)
    pairs = [(layers, AdamW(layers.parameters())), (other, AdamW(other.parameters()))]
    for (model, optimizer), when in zip(pairs, ("forward", "step"), strict=True):
        fc.fuse_optimizer(model, optimizer, when=when, strict=True)  # type: ignore[arg-type]
    for _ in range(5):
        x = torch.randn(16, 300, device="cuda")
        for model, optimizer in pairs:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, two in zip(layers.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=0)


def test_stochastic_rounding_draws_what_aten_draws() -> None:
    """One step of SGD, by the same seed."""
    grad = torch.randn(5000, device="cuda").bfloat16()
    made: list[torch.Tensor] = []
    for backend in ("auto", "eager"):
        model = nn.ParameterList([nn.Parameter(torch.ones(5000, device="cuda").bfloat16())])
        optimizer = SGD(model, lr=0.01)
        fc.fuse_optimizer(model, optimizer, backend=backend, strict=True, rounding="stochastic")  # type: ignore[arg-type]
        torch.manual_seed(1)
        for one in (torch.zeros_like(grad), grad):
            model[0].grad = one
            optimizer.step()
        made.append(model[0].detach())
    differ = (made[0] != made[1]).float().mean().item()  # where a fused product has another last digit
    assert differ < 1e-3 and not torch.equal(made[0], (1 - 0.01 * grad.float()).bfloat16())
