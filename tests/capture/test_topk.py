"""The largest few elements of each row, as reductions that clusters hold, and the router of a mixture."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusion_compiler as fc
from fusion_compiler.capture import decompositions
from fusion_compiler.ir.plan import FusionPlan
from tests.exactness import Compiled, not_as_close

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHAPES: dict[str, tuple[tuple[int, ...], int]] = {
    "rows": ((5, 37), -1),
    "a row": ((19,), 0),
    "one of two": ((6, 2), 1),
    "columns": ((40, 6), 0),
    "a dimension between": ((3, 17, 4), 1),
    "tokens of sequences": ((2, 3, 24), -1),
    "a long row": ((1, 4096), -1),
}


@pytest.fixture
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take apart on this machine what is taken apart on a GPU."""
    monkeypatch.setattr(decompositions, "on_gpu", lambda tensor: True)


def checked(x: Tensor, k: int, dim: int = -1, **options: bool) -> None:
    """Assert that values are eager's, and indices those of different elements with these values."""
    compiled = Compiled(lambda x: torch.topk(x, k, dim, **options))
    values, indices = compiled(x)
    eager = torch.topk(x, k, dim, **{**options, "sorted": True})
    assert not compiled.eager_ops() and len(compiled.plans[0].clusters) == 1, str(compiled.plans[0])
    torch.testing.assert_close(values, eager.values, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(x.gather(dim, indices), values, rtol=0, atol=0, equal_nan=True)
    assert (indices.sort(dim).values.diff(dim=dim) > 0).all(), "no element twice"
    for ours, theirs in ((values, eager.values), (indices, eager.indices)):
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())


@pytest.mark.sample(12)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 2, 3, 6, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_values_are_those_of_eager(name: str, k: int, dtype: torch.dtype, like_a_gpu: None) -> None:
    shape, dim = SHAPES[name]
    checked(torch.randn(shape, dtype=dtype), min(k, shape[dim] - 1), dim)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_ties_infinities_and_nan(dtype: torch.dtype, largest: bool, like_a_gpu: None) -> None:
    special = torch.tensor([-math.inf, math.inf, math.nan, 0.0, -0.0, 1.0])
    x = special[torch.randint(6, (64, 12))]
    x[0], x[1], x[2], x[3] = -math.inf, math.nan, math.inf, 1.0
    x[4, 2:], x[5, 2:] = -math.inf, math.inf
    x[6], x[6, 3:5] = torch.finfo(dtype).min, -math.inf
    checked(x.to(dtype), 7, largest=largest)


@pytest.mark.parametrize("options", [{"largest": False}, {"sorted": False}], ids=str)
def test_options(options: dict[str, bool], like_a_gpu: None) -> None:
    checked(torch.randn(7, 21), 4, **options)
    checked(torch.randn(9, 5, 3), 3, 0, **options)


def test_layouts_are_those_of_eager(like_a_gpu: None) -> None:
    checked(torch.randn(12, 30).t(), 3)
    checked(torch.randn(2, 9, 4, 5).contiguous(memory_format=torch.channels_last), 3, 1)
    checked(torch.randn(4, 1).expand(4, 9), 2)
    checked(torch.randn(8, 20)[:, ::2], 2)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x.topk(9, -1),
        lambda x: x[:, :5].topk(5, -1),
        lambda x: x.repeat(1, 300).topk(2, -1),
        lambda x: x.int().topk(2, -1),
        lambda x: x[0, 0].topk(1),
    ],
    ids=["nine", "all of them", "of long rows", "of integers", "of a number"],
)
def test_others_stay_calls(call: Callable[[Tensor], tuple[Tensor, Tensor]], like_a_gpu: None) -> None:
    x = torch.randn(4, 20)
    compiled = Compiled(call)
    for ours, eager in zip(compiled(x), call(x), strict=True):
        assert torch.equal(ours, eager)
    assert compiled.eager_ops() == {"aten.topk.default"}


def test_on_a_cpu_it_stays_a_call() -> None:
    compiled = Compiled(lambda x: x.topk(2, -1))
    compiled(torch.randn(4, 20))
    assert compiled.eager_ops() == {"aten.topk.default"}


def gradients(function: Callable[[Tensor], tuple[Tensor, Tensor]], x: Tensor) -> tuple[Tensor, ...]:
    x = x.detach().requires_grad_()
    values, indices = function(x)
    weight = torch.linspace(-1, 2, values.numel(), dtype=x.dtype).view(values.shape)
    return values.detach(), indices, *torch.autograd.grad(values, x, weight)


def router(k: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The experts of each token and their weights, which add up to one, as in Mixtral and Qwen3-MoE."""

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        weights, chosen = torch.softmax(logits, -1, dtype=wide).topk(k, -1)
        return (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), chosen

    return route


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_eager(name: str, k: int, dtype: torch.dtype, like_a_gpu: None) -> None:
    shape, dim = SHAPES[name]
    k = min(k, shape[dim] - 1)
    x = torch.randn(shape, dtype=dtype)
    compiled = Compiled(lambda x: torch.topk(x, k, dim))
    ours, eager = gradients(compiled, x), gradients(lambda x: torch.topk(x, k, dim), x)
    if x.unique().numel() == x.numel():  # else any of several equal elements is taken
        assert all(map(torch.equal, ours, eager))
    assert [len(plan.clusters) for plan in compiled.plans] == [1, 1] and not compiled.eager_ops()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (128, 8), (64, 6)])
def test_a_router_in_the_interpreter(experts: int, k: int, dtype: torch.dtype, like_a_gpu: None) -> None:
    logits = torch.randn(9, experts, dtype=dtype)
    compiled = Compiled(router(k))
    ours, eager = gradients(compiled, logits), gradients(router(k), logits)
    exact = gradients(router(k), logits.double())
    assert torch.equal(ours[1], exact[1])
    for our, their, true in zip(ours[::2], eager[::2], exact[::2], strict=True):
        if dtype is torch.float64:
            torch.testing.assert_close(our, their)
        else:
            assert not_as_close(our, their, true) is None
    assert [len(plan.clusters) for plan in compiled.plans] == [1, 1] and not compiled.eager_ops()


@pytest.mark.parametrize(("tokens", "experts", "k"), [(6, 8, 2), (21, 4, 3), (1, 8, 2), (3, 128, 8)])
def test_a_router_with_its_product(tokens: int, experts: int, k: int, like_a_gpu: None) -> None:
    """The product of eight experts' rows, and what is searched for in its results, are one kernel."""

    def route(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return router(k)(F.linear(x, weight))

    x, weight = (torch.randn(n, 48, requires_grad=True) for n in (tokens, experts))
    compiled = Compiled(route)
    (ours, chosen), (eager, expected) = compiled(x, weight), route(x, weight)
    assert torch.equal(chosen, expected)
    shares = torch.randn_like(eager)
    theirs = (eager, *torch.autograd.grad(eager, (x, weight), shares))
    for a, b in zip((ours, *torch.autograd.grad(ours, (x, weight), shares)), theirs, strict=True):
        torch.testing.assert_close(a, b)
    assert not compiled.eager_ops()
    if tokens > 1 and experts <= 8:
        assert len(compiled.plans[0].clusters) == 1, str(compiled.plans[0])


def test_any_number_of_tokens(like_a_gpu: None) -> None:
    fast = fc.compile(router(3), backend="interpret", strict=True)
    for tokens in (5, 9, 2):
        logits = torch.randn(tokens, 24)
        torch._dynamo.mark_dynamic(logits, 0)
        for ours, eager in zip(gradients(fast, logits), gradients(router(3), logits), strict=True):
            torch.testing.assert_close(ours, eager)
    assert [len(plan.clusters) for plan in fast.plan] == [1, 1]


def test_a_gradient_that_is_scattered_by_the_user_keeps_its_meaning(like_a_gpu: None) -> None:
    def added(x: Tensor, index: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter_add(1, index, x[:, :3]) * x

    def gathered(x: Tensor, index: Tensor) -> Tensor:
        return x.gather(1, index).square()

    index = torch.tensor([[0, 0, 3], [1, 2, 1]])
    for function in (added, gathered):
        x = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
        ours, eager = Compiled(function)(x, index), function(x, index)
        torch.testing.assert_close(ours, eager)
        weight = torch.randn_like(eager)
        mine, theirs = (torch.autograd.grad(y, x, weight)[0] for y in (ours, eager))
        torch.testing.assert_close(mine, theirs)


def plans_of(
    function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.bfloat16
) -> list[FusionPlan]:
    with FakeTensorMode():
        x = torch.empty(shape, dtype=dtype, device="cuda", requires_grad=True)
        return list(fc.explain(function, x, device="h200").plans)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(4096, 8, 2), (4096, 128, 8), (16384, 64, 6), (16, 128, 8), (1, 256, 8), (2048, 512, 10)],
)
def test_a_routers_plan_has_one_kernel(tokens: int, experts: int, k: int, dtype: torch.dtype) -> None:
    """Softmax, the best experts and their weights, which add up to one, and the gradient: a kernel each."""
    plans = plans_of(router(k), tokens, experts, dtype=dtype)
    if k > decompositions.MOST_SEARCHED:
        assert "aten.topk.default" in {left.target for left in plans[0].leftovers}
        return
    for plan in plans:
        assert len(plan.clusters) == 1 and not plan.leftovers, str(plan)
    moved = plans[0].clusters[0].cost
    assert moved.bytes_read == tokens * experts * dtype.itemsize, "logits are read once, and nothing else"


@pytest.mark.parametrize(("shape", "k"), [((4096, 128), 8), ((4, 512, 64), 4), ((8, 4096), 1)])
def test_a_plan_of_topk_alone_has_one_kernel(shape: tuple[int, ...], k: int) -> None:
    for plan in plans_of(lambda x: x.topk(k, -1), *shape):
        assert len(plan.clusters) == 1 and not plan.leftovers, str(plan)
