"""`compile(model, optimizer=...)`: one call for both, and what it does with an optimizer that is fused."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import fusion_compiler as fc
from fusion_compiler.errors import InvalidOptionError, NotAnOptimizerError, OptimizerStepError
from tests.optimizers import check_same, values


def model_of() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def trained(called: Any, optimizer: torch.optim.Optimizer, batches: list[torch.Tensor]) -> None:
    for batch in batches:
        called(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("when", ["step", "backward"])
def test_the_loop_that_the_user_has(when: Any) -> None:
    ours = model_of()
    eager = copy.deepcopy(ours)
    one, other = AdamW(ours.parameters(), lr=0.02), AdamW(eager.parameters(), lr=0.02)
    fast = fc.compile(ours, optimizer=one, when=when, backend="eager", strict=True)
    batches = [torch.randn(3, 4) for _ in range(5)]
    trained(fast, one, batches)
    trained(eager, other, batches)
    # The models' own kernels sum in another order.
    for name, value in values(ours, one).items():
        torch.testing.assert_close(value, values(eager, other)[name], rtol=1e-5, atol=1e-6)
    assert type(fast).__name__ == "Sequential" and not fast.plan.optimizer.unfused
    assert str(fast.plan).endswith(str(fast.plan.optimizer)) and "AdamW: 1 kernel" in str(fast.plan)


def test_kernels_of_both() -> None:
    ours = model_of()
    optimizer = SGD(ours.parameters(), lr=0.1, momentum=0.9)
    fast = fc.compile(optimizer=optimizer, backend="interpret", strict=True)(ours)
    trained(fast, optimizer, [torch.randn(3, 4) for _ in range(3)])
    assert len(fast.plan.optimizer.kernels) == 1 and fast.plan[0].clusters


def test_compiled_again_it_is_fused_anew() -> None:
    """A second compilation has its own choices; copies are compiled without an optimizer."""
    model = model_of()
    eager = copy.deepcopy(model)
    one, other = SGD(model.parameters(), lr=0.1), SGD(eager.parameters(), lr=0.1)
    first = fc.compile(model, optimizer=one, when="backward", backend="eager")
    batches = [torch.randn(3, 4) for _ in range(6)]
    trained(first, one, batches[:2])
    second = fc.compile(first, optimizer=one, backend="eager")
    assert second.plan.optimizer is not first.plan.optimizer
    trained(second, one, batches[2:4])
    for again in (copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert again.plan.optimizer is None
    second.plan.optimizer.remove()
    assert "step" not in one.__dict__
    trained(second, one, batches[4:])
    trained(eager, other, batches)
    for name, value in values(model, one).items():
        torch.testing.assert_close(value, values(eager, other)[name], rtol=1e-5, atol=1e-6)


def test_what_does_not_go_together_is_an_error_and_changes_nothing() -> None:
    model = model_of()
    optimizer = SGD(model.parameters(), lr=0.1)
    fused = fc.fuse_optimizer(model, optimizer, backend="eager")
    before = {name: value.clone() for name, value in values(model, optimizer).items()}
    with pytest.raises(InvalidOptionError, match="give when one of"):
        fc.compile(model, optimizer=optimizer, when="later")  # type: ignore[arg-type]
    with pytest.raises(InvalidOptionError, match="together with optimizer="):
        fc.compile(model, when="backward")
    with pytest.raises(InvalidOptionError, match=r"with an nn\.Module"):
        fc.compile(torch.tanh, optimizer=optimizer)
    with pytest.raises(InvalidOptionError, match=r"with an nn\.Module"):
        fc.compile(nn.Linear, optimizer=optimizer)
    with pytest.raises(NotAnOptimizerError):
        fc.compile(model, optimizer=model.parameters())  # type: ignore[arg-type]
    assert optimizer.step.fused_by is fused  # type: ignore[attr-defined]
    check_same(values(model, optimizer), before)
    with pytest.raises(OptimizerStepError, match="needs a closure"):
        fc.compile(model, optimizer=torch.optim.LBFGS(model.parameters()))
