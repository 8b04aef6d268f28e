"""Factors of a product's rows are multiplied into its operand, where a kernel makes that."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from benchmarks.harness.accuracy import InFloat64
from benchmarks.models.nets import deepseek
from fusion_compiler.ir.graph_pass import Level
from fusion_compiler.passes.rewrites.scaled_rows import SCALED_ROWS
from fusion_compiler.pipeline import passes_at
from tests.exactness import not_as_close
from tests.passes.test_rewrites import targets, traced

aten = torch.ops.aten


def products(*operands: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype) for shape in operands]


def experts(a: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return torch.bmm(F.silu(a), w) * s[..., None]


def mixed(a: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return s.float().flatten()[:, None] * F.linear(torch.sigmoid(a).flatten(0, 1), w[0].t())


def written(a: Tensor, w: Tensor, s: Tensor) -> Tensor:
    product = torch.bmm(F.silu(a), w)
    w.mul_(2)
    return product * s[..., None]


MATRICES = products((3, 5, 8), (3, 8, 16), (3, 5))


def test_the_factor_goes_before_the_product() -> None:
    gm, notes = SCALED_ROWS.apply(traced(experts, *MATRICES))
    (note,) = notes
    assert note.is_done and note.reason == "8 columns are multiplied before the product, not 16 behind"
    order = targets(gm)
    assert order.index(aten.mul.Tensor) < order.index(aten.bmm.default)


@pytest.mark.parametrize(
    "function",
    [
        lambda a, w, s: torch.bmm(a, w) * s[..., None],  # no kernel makes the operand
        lambda a, w, s: torch.bmm(F.silu(a), w) * s[:, None, :1].expand(3, 5, 16).contiguous(),
        lambda a, w, s: torch.bmm(F.silu(a), w) * w[:, :1, :],  # a factor of columns
        lambda a, w, s: (y := torch.bmm(F.silu(a), w)) * s[..., None] + y,  # the product is read besides
        lambda a, w, s: torch.bmm(b := F.silu(a), w) * s[..., None] + b.sum(),  # its operand is
        lambda a, w, s: torch.bmm(F.silu(w), w.mT) * torch.cat([s, s[:, :3]], 1)[..., None],  # 16 -> 8
        lambda a, w, s: torch.bmm(F.silu(a).half(), w.half()) * s.half()[..., None],  # a small range
        lambda a, w, s: torch.bmm(F.silu(a), w).relu_().mul(s[..., None]),
        written,
    ],
)
def test_others_stay(function: Callable[..., Tensor]) -> None:
    gm = traced(function, *MATRICES)
    assert SCALED_ROWS.apply(gm) == (gm, ())


def test_not_with_numerics_of_eager() -> None:
    fast, eager = (passes_at(Level.ABOVE_AUTOGRAD, numerics) for numerics in ("float32", "eager"))
    assert SCALED_ROWS in fast and SCALED_ROWS not in eager


@pytest.mark.parametrize("function", [experts, mixed])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_values_and_gradients(function: Callable[..., Tensor], dtype: torch.dtype) -> None:
    """As exact as eager, beside float64."""
    tensors = products((3, 40, 24), (3, 24, 48), (3, 40), dtype=dtype)
    operands = [t.requires_grad_() for t in tensors]
    wide = [t.detach().double().requires_grad_() for t in operands]
    fast = fc.compile(function, backend="interpret", strict=True)
    upstream = torch.randn(3, 40, 48, dtype=torch.float64).view(function(*operands).shape)

    def results(called: Callable[..., Tensor], leaves: list[Tensor]) -> list[Tensor]:
        out = called(*leaves)
        return [out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]

    eager, ours = results(function, operands), results(fast, operands)
    with InFloat64():
        exact = results(function, wide)
    for got, theirs, truth in zip(ours, eager, exact, strict=True):
        assert (reason := not_as_close(got, theirs, truth)) is None, reason
    assert "scaled rows" in fast.plan[0].notes


def test_the_products_result_is_not_saved() -> None:
    """In a mixture of experts that result is the largest tensor: the gradient of the factors reads the
    operand."""
    torch.manual_seed(0)
    model, batch = deepseek(2, 40, 32, 24, 8, 2)
    exact: nn.Module = deepseek(2, 40, 32, 24, 8, 2)[0].double()
    exact.load_state_dict(model.state_dict())
    x = batch["x"].double().detach().requires_grad_()
    fast = fc.compile(model, backend="interpret")
    for called, argument in ((fast, batch["x"]), (exact, x)):
        called(argument).square().sum().backward()
    torch.testing.assert_close(batch["x"].grad.double(), x.grad, rtol=1e-4, atol=1e-4)
    for ours, truth in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), truth.grad, rtol=1e-4, atol=1e-4)
    forward = fast.plan[0]
    products = [n for n in forward.dag.order if "bmm" in str(forward.dag.op(n).target)]
    assert products[0] in forward.dag.outputs and products[1] not in forward.dag.outputs
