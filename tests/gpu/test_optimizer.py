"""Fused optimizers on the device, beside torch.optim's own and float64."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW, Optimizer

import fusion_compiler as fc
from fusion_compiler.optimizer import backward
from fusion_compiler.options import When
from tests.optimizers import (
    OPTIMIZERS,
    Layers,
    Sizes,
    check,
    check_same,
    give,
    schedule,
    take_steps,
    three,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_are_as_close_to_the_truth_as_eager(name: str, dtype: torch.dtype) -> None:
    pairs = three(Sizes(dtype).cuda(), OPTIMIZERS[name], Sizes.groups)
    fused = fc.fuse_optimizer(*pairs[0], strict=True)
    take_steps(pairs, 20, schedule)
    check(*pairs)
    assert not fused.unfused


@pytest.mark.parametrize(("when", "flag"), [("backward", True), ("forward", None)])
def test_whenever_parameters_are_updated_they_are_the_same(when: When, flag: bool | None) -> None:
    """To the bit, the first step as well: that is the class's own, by foreach, whatever `fused` says."""
    layers = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6))).cuda()
    other = copy.deepcopy(layers)
    pairs = [(layers, AdamW(layers.parameters())), (other, AdamW(other.parameters(), fused=flag))]
    for (model, optimizer), moment in zip(pairs, (when, "step"), strict=True):
        fc.fuse_optimizer(model, optimizer, when=moment, strict=True)
    for _ in range(5):
        x = torch.randn(16, 300, device="cuda")
        for model, optimizer in pairs:
            model(x).square().mean().backward()
            optimizer.step()
            if (model, when) == (layers, "backward"):
                assert all(param.grad is None for param in model.parameters())
            optimizer.zero_grad()
    check_same(*(dict(model.named_parameters()) for model, _ in pairs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipped_in_the_update_as_close_to_the_truth_as_eager(dtype: torch.dtype) -> None:
    """In groups with and without weight decay, in one launch."""
    pairs = three(Layers(dtype).cuda(), lambda p: AdamW(p, lr=0.01), Layers.by_decay)
    fused = fc.fuse_optimizer(*pairs[0], strict=True)

    def clip(_: int, model: nn.Module, optimizer: Optimizer) -> None:
        if model is pairs[0][0]:
            fused.clip_grad_norm_(2.0)
        else:
            clip_grad_norm_(model.parameters(), 2.0)

    take_steps(pairs, 10, clip, all_of_them=True)
    check(*pairs)
    (kernel,) = fused.kernels
    assert "adamw_1_block" in kernel.source


def test_a_checkpoint_of_torchs_fused_optimizer_goes_on_and_back() -> None:
    """Its counters are on the device; ours are on the host."""
    model = nn.Linear(300, 300).cuda()
    eager = copy.deepcopy(model)
    torchs, uninterrupted = (AdamW(m.parameters(), fused=True) for m in (model, eager))
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
    go(eager, uninterrupted, 0, 9)
    for one, two in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
    assert back.state[model.weight]["step"] == 9


def test_stochastic_rounding_draws_what_aten_draws() -> None:
    """One step of SGD, by the same seed."""
    grad = torch.randn(5000, device="cuda").bfloat16()
    stepped: list[torch.Tensor] = []
    for backend in ("auto", "eager"):
        model = nn.ParameterList([nn.Parameter(torch.ones(5000, device="cuda").bfloat16())])
        optimizer = SGD(model, lr=0.01)
        fc.fuse_optimizer(model, optimizer, backend=backend, strict=True, rounding="stochastic")  # type: ignore[arg-type]
        torch.manual_seed(1)
        for one in (torch.zeros_like(grad), grad):
            model[0].grad = one
            optimizer.step()
        stepped.append(model[0].detach())
    differ = (stepped[0] != stepped[1]).float().mean().item()  # where a fused product has another last digit
    assert differ < 1e-3 and not torch.equal(stepped[0], (1 - 0.01 * grad.float()).bfloat16())


def test_a_compiled_backward_frees_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak of a step is lower by the gradients; parameters are what updates at its end leave."""
    monkeypatch.setattr(backward, "BUCKET_BYTES", 4 << 20)
    peaks: dict[str, int] = {}
    left: dict[str, list[torch.Tensor]] = {}
    for when in ("step", "backward"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(16))).cuda()
        optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
        fast = fc.compile(model, optimizer=optimizer, when=when, strict=True, cudagraphs=False)
        for _ in range(5):
            torch.cuda.reset_peak_memory_stats()
            fast(torch.randn(64, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        peaks[when] = torch.cuda.max_memory_allocated()
        left[when] = [param.detach() for param in model.parameters()]
    gradients = sum(param.nbytes for param in left["step"])
    peaks["backward"] -= 2 * gradients  # the first model and its state are there still
    assert peaks["step"] - peaks["backward"] >= 0.8 * gradients
    for one, two in zip(left["backward"], left["step"], strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
