"""Models from transformers, kernels in the interpreter: results and every gradient against float64.

At least as close as eager is meant of the model as a whole: rounding differs along it, and one tensor
may be luckier in eager. So the geometric mean of (our error / eager's) may not be above 1 by more than
chance, and no tensor alone may be far off, which a missing or wrong term always is.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import fusion_compiler as fc
from benchmarks.accuracy import error_of
from tests.models import NAMES, Batch, exact, small

EACH = pytest.mark.parametrize("name", NAMES)
# How far the mean over a small model's tensors, few and dependent on each other, is off by chance, and
# a single one: that of a loss is a single number.
CHANCE, FAR_OFF = 1.1, 3
STEP = 1e-3


@dataclass(frozen=True)
class Run:
    """What one step computed: "logits", "loss" and "d <parameter>", by name."""

    tensors: dict[str, Tensor]


def step(called: nn.Module, model: nn.Module, batch: Batch) -> Run:
    """One forward and backward of `called`, which shares its parameters with `model`."""
    model.zero_grad(set_to_none=True)
    output = called(**batch)
    output.loss.backward()
    tensors = {"logits": output.logits.detach(), "loss": output.loss.detach()}
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return Run(tensors | {f"d {n}": g.detach() for n, g in gradients.items()})


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    return {n: t.to(dtype) if t.is_floating_point() else t for n, t in batch.items()}


def ratios(ours: Run, eager: Run, truth: Run, dtype: torch.dtype) -> dict[str, float]:
    """Our RMS error over eager's, for each tensor.

    What both round to the same is 1. An error counts from a unit in the last place of the tensor's
    largest element on; of a gradient that is zero in truth (a key's bias moves all scores of a row
    alike), of the largest gradient of all.
    """
    assert ours.tensors.keys() == eager.tensors.keys() == truth.tensors.keys()
    eps = torch.finfo(dtype).eps
    largest = max(t.abs().max().item() for n, t in truth.tensors.items() if n.startswith("d "))
    found: dict[str, float] = {}
    for name, true in truth.tensors.items():
        assert ours.tensors[name].dtype == eager.tensors[name].dtype
        our, their = error_of(ours.tensors[name], true), error_of(eager.tensors[name], true)
        scale = their.scale if their.scale > eps * largest else largest
        floor = eps * scale / math.sqrt(12)
        found[name] = max(our.rms, floor) / max(their.rms, floor)
    return found


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_results_and_every_gradient_are_as_close_as_eagers(name: str, dtype: torch.dtype) -> None:
    model, batch = small(name, dropout=False)
    model, batch = model.to(dtype), cast(batch, dtype)
    wide = exact(model)
    truth = step(wide, wide, cast(batch, torch.float64))
    plain = copy.deepcopy(model)
    eager = step(plain, plain, batch)
    ours = step(fc.compile(model, backend="interpret", strict=True), model, batch)
    found = ratios(ours, eager, truth, dtype)
    assert {n for n, p in model.named_parameters() if p.requires_grad} >= {
        n.removeprefix("d ") for n in found if n.startswith("d ")
    }
    mean = math.exp(sum(map(math.log, found.values())) / len(found))
    worst = max(found, key=lambda n: found[n])
    assert mean <= CHANCE, {n: r for n, r in found.items() if r > CHANCE}
    assert found[worst] <= FAR_OFF, (worst, found[worst])


def loss_of(called: nn.Module, batch: Batch, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return called(**batch).loss


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("llama", "mistral", "mixtral")])
def test_dropout_draws_by_the_seed_and_its_gradient_is_that_of_its_loss(name: str) -> None:
    """A difference quotient along the gradient tells whether backward has forward's masks.

    In float64, in which the loss and norms of some models still compute in float32: that bounds the step.
    """
    model, batch = small(name, batch=1, length=9)
    model, batch = model.double(), cast(batch, torch.float64)
    fast = fc.compile(model, backend="interpret", strict=True)
    loss = loss_of(fast, batch, seed=1)
    loss.backward()
    with torch.no_grad():
        assert abs(loss - copy.deepcopy(model).eval()(**batch).loss) > 1e-4 * loss, "nothing was dropped"
    moves = [(p, p.grad.clone()) for p in model.parameters() if p.grad is not None]
    length = math.sqrt(sum(g.square().sum().item() for _, g in moves))

    def after(distance: float) -> float:
        with torch.no_grad():
            for p, g in moves:
                p.add_(g, alpha=distance / length)
        return loss_of(fast, batch, seed=1).item()

    assert after(0) == loss.item() != loss_of(fast, batch, seed=2).item()
    ahead, behind = after(STEP), after(-2 * STEP)
    assert (ahead - behind) / (2 * STEP) == pytest.approx(length, rel=2e-3)
