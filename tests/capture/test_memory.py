"""A forward never saves more than its budget, and recomputed values are right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fusion_compiler as fc
from fusion_compiler.capture.saved_values import Budget
from fusion_compiler.ir.dims import hint, numel


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(F.gelu(self.wide(self.norm(x))))


def blocks(count: int, width: int) -> nn.Module:
    return nn.Sequential(*(Block(width) for _ in range(count)))


def saved_bytes(model: nn.Module, x: Tensor, memory: Budget) -> int:
    """Bytes that the forward hands to the backward beside its result."""
    fast: Any = fc.compile(model, backend="eager", device="h200", memory=memory)
    fast(x).sum().backward()
    plan = next(p for p in fast.plan if p.name.endswith("forward"))
    saved = set(plan.dag.outputs) - set(plan.dag.inputs)
    return sum(hint(numel(m.shape)) * m.dtype.itemsize for n in saved for m in plan.dag.op(n).outputs)


@pytest.mark.parametrize("memory", ["fast", 0.5, 0.1, 0.0])
def test_gradients_do_not_depend_on_the_budget(memory: Budget) -> None:
    torch.manual_seed(0)
    model, x = blocks(3, 32), torch.randn(5, 32)
    exact = blocks(3, 32).double()
    exact.load_state_dict(model.state_dict())
    fast: Any = fc.compile(model, backend="interpret", memory=memory)
    fast(x).sin().sum().backward()
    exact(x.double()).sin().sum().backward()
    for ours, theirs in zip(model.parameters(), exact.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.double(), theirs.grad, rtol=1e-4, atol=1e-4)


def test_an_activation_that_a_product_reads_is_not_saved_beside_its_operand() -> None:
    """Its gradient's kernel reads that operand, and writes the activation again."""
    with FakeTensorMode():
        torch._dynamo.reset()
        width, rows = 256, 64
        saved = saved_bytes(blocks(1, width), torch.randn(rows, width, requires_grad=True), "fast")
    wide = 4 * rows * 4 * width
    assert wide <= saved < 2 * wide


@pytest.mark.parametrize("memory", [-0.1, 1.5, 1, True, "slow"])
def test_other_budgets_are_refused(memory: object) -> None:
    with pytest.raises(fc.errors.InvalidOptionError, match="memory"):
        fc.compile(nn.Identity(), memory=memory)  # type: ignore[arg-type]
