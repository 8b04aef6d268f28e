"""The largest few elements of each row, as reductions that clusters hold, and the router of a mixture."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

import fusion_compiler as fc
from fusion_compiler.codegen.emit import schedules_of
from fusion_compiler.ir.loops import ROWS, Reduce
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ops.decompositions import lookups, reductions
from tests.exactness import Compiled, Schedules, cramped, not_as_close

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
    for module in (reductions, lookups):
        monkeypatch.setattr(module, "on_gpu", lambda tensor: True)


def checked(
    x: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    sorted: bool = True,
    schedule: int | None = None,
) -> None:
    """Assert that values are eager's, and indices those of different elements with these values.

    schedule: the number of a schedule with small blocks, or None for the one that the compiler chooses.
    """

    def search(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.topk(x, k, dim, largest, sorted)

    compiled = Compiled(search) if schedule is None else Compiled(search, schedule, cramped)
    values, indices = compiled(x)
    eager = torch.topk(x, k, dim, largest)
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


@pytest.mark.sample(6)
@pytest.mark.parametrize("schedule", [0, 1])
@pytest.mark.parametrize("name", SHAPES)
def test_values_are_those_of_eager_under_any_schedule(name: str, schedule: int, like_a_gpu: None) -> None:
    shape, dim = SHAPES[name]
    x = torch.randint(-4, 5, shape) / 4  # with ties
    checked(x, min(4, shape[dim] - 1), dim, schedule=schedule)


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_infinities_and_nan(dtype: torch.dtype, largest: bool, like_a_gpu: None) -> None:
    special = torch.tensor([-math.inf, math.inf, math.nan, 0.0, -0.0, 1.0], dtype=dtype)
    x = special[torch.randint(6, (64, 12))]
    x[0], x[1], x[2], x[3] = -math.inf, math.nan, math.inf, 1.0
    x[4, 2:], x[5, 2:] = -math.inf, math.inf
    x[6], x[6, 3:5] = torch.finfo(dtype).min, -math.inf
    checked(x, 7, largest=largest)


@pytest.mark.parametrize(("largest", "sorted"), [(False, True), (True, False), (False, False)])
def test_options(largest: bool, sorted: bool, like_a_gpu: None) -> None:
    checked(torch.randn(7, 21), 4, -1, largest, sorted)
    checked(torch.randn(9, 5, 3), 3, 0, largest, sorted)


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
        lambda x: x.repeat(550, 1).topk(2, 0),
        lambda x: x.int().topk(2, -1),
        lambda x: x[0, 0].topk(1),
        lambda x: x[:0].topk(2, -1),
        lambda x: x.topk(0, -1),
    ],
    ids=[
        "nine",
        "all of them",
        "of long rows",
        "of long columns",
        "of integers",
        "of a number",
        "of no rows",
        "none",
    ],
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


def sigmoid_router(k: int) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """The same with scores that depend on one logit each, as in DeepSeek-V3 without groups."""

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(logits.dtype, torch.float32)
        scores, chosen = torch.sigmoid(logits.to(wide)).topk(k, -1)
        return (scores / (scores.sum(-1, keepdim=True) + 1e-20) * 2.5).to(logits.dtype), chosen

    return route


ROUTERS = {"softmax": router, "sigmoid": sigmoid_router}


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_are_those_of_eager(name: str, k: int, dtype: torch.dtype, like_a_gpu: None) -> None:
    shape, dim = SHAPES[name]
    k = min(k, shape[dim] - 1)
    x = torch.randn(shape, dtype=dtype)
    compiled = Compiled(lambda x: torch.topk(x, k, dim))
    values, indices, gradient = gradients(compiled, x)
    assert torch.equal(values, torch.topk(x, k, dim).values)
    weight = torch.linspace(-1, 2, values.numel(), dtype=dtype).view(values.shape)
    assert torch.equal(gradient, torch.zeros_like(x).scatter(dim, indices, weight))
    assert [len(plan.clusters) for plan in compiled.plans] == [1, 1] and not compiled.eager_ops()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("experts", "k"), [(8, 2), (128, 8), (64, 6), (60, 4)])
@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_in_the_interpreter(
    name: str, experts: int, k: int, dtype: torch.dtype, like_a_gpu: None
) -> None:
    route = ROUTERS[name](k)
    logits = torch.randn(9, experts).to(dtype)
    compiled = Compiled(route)
    ours, eager = gradients(compiled, logits), gradients(route, logits)
    exact = exact_gradients(logits, ours[1], name)
    assert (ours[1].sort(-1).values.diff(dim=-1) > 0).all(), "no expert twice"
    assert torch.equal(logits.gather(-1, ours[1]), logits.topk(k, -1).values)
    for our, their, true in zip(ours[::2], eager[::2], exact, strict=True):
        if dtype is torch.float64:
            torch.testing.assert_close(our, true)
        elif torch.equal(ours[1], eager[1]):
            assert not_as_close(our, their, true) is None
        else:  # of equal logits eager takes others
            torch.testing.assert_close(our.double(), true, rtol=0.02, atol=1e-3)
    assert [len(plan.clusters) for plan in compiled.plans] == [1, 1] and not compiled.eager_ops()


def exact_gradients(logits: Tensor, chosen: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """The weights of these experts and the gradient of the logits in float64, without topk."""
    x = logits.double().requires_grad_()
    scores = x.softmax(-1) if name == "softmax" else x.sigmoid()
    weights = scores.gather(-1, chosen)
    weights = weights / weights.sum(-1, keepdim=True) * (1 if name == "softmax" else 2.5)
    shares = torch.linspace(-1, 2, weights.numel(), dtype=logits.dtype).double().view(weights.shape)
    return weights.detach(), torch.autograd.grad(weights, x, shares)[0]


@pytest.mark.parametrize("schedules", [schedules_of, cramped])
@pytest.mark.parametrize("schedule", [0, 1, 3])
@pytest.mark.parametrize("name", ROUTERS)
def test_any_schedule_routes_alike(name: str, schedule: int, schedules: Schedules, like_a_gpu: None) -> None:
    route, logits = ROUTERS[name](3), torch.randn(7, 21, dtype=torch.float64)
    compiled = Compiled(route, schedule, schedules)
    for ours, exact in zip(gradients(compiled, logits), gradients(route, logits), strict=True):
        torch.testing.assert_close(ours, exact)
    assert [len(plan.clusters) for plan in compiled.plans] == [1, 1]


@pytest.mark.parametrize(
    ("tokens", "experts", "k"), [(6, 8, 2), (21, 4, 3), (1, 8, 2), (3, 128, 8), (2, 8, 2), (4, 6, 4)]
)
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


@pytest.mark.parametrize("name", ROUTERS)
def test_any_number_of_tokens(name: str, like_a_gpu: None) -> None:
    route = ROUTERS[name](3)
    fast = fc.compile(route, backend="interpret", strict=True)
    for tokens in (5, 9, 2):
        logits = torch.randn(tokens, 24, requires_grad=True)
        torch._dynamo.mark_dynamic(logits, 0)
        (ours, chosen), (eager, expected) = fast(logits), route(logits)
        assert torch.equal(chosen, expected)
        shares = torch.randn_like(eager)
        torch.testing.assert_close(ours, eager)
        torch.testing.assert_close(*(torch.autograd.grad(y, logits, shares) for y in (ours, eager)))
    assert [len(plan.clusters) for plan in fast.plan] == [1, 1]


class Mixture(nn.Module):
    """Experts of a token with the weights that its router gives them."""

    def __init__(self, experts: int, k: int) -> None:
        super().__init__()
        self.gate = nn.Linear(12, experts, bias=False)
        self.route, self.experts = router(k), nn.Parameter(torch.randn(experts, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.gate(x)
        weights, chosen = self.route(probabilities)
        load = F.one_hot(chosen, len(self.experts)).sum(1).float().mean(0)
        balance = (load * probabilities.softmax(-1).mean(0)).sum()
        return (weights[..., None] * torch.tanh(x[:, None] * self.experts[chosen])).sum(1), balance


def test_a_whole_mixture_is_as_close_to_float64_as_eager(like_a_gpu: None) -> None:
    model = Mixture(16, 4)
    x = torch.randn(10, 12, requires_grad=True)
    results = []
    for call, inputs in (
        (fc.compile(model, backend="interpret", strict=True), x),
        (model, x),
        (copy.deepcopy(model).double(), x.detach().double().requires_grad_()),
    ):
        y, balance = call(inputs)
        weights = list(model.parameters()) if inputs is x else list(call.parameters())
        gradients = torch.autograd.grad(y.square().sum() + balance, (inputs, *weights))
        results.append((y.detach(), balance.detach(), *gradients))
    for ours, eager, exact in zip(*results, strict=True):
        assert not_as_close(ours, eager, exact, 1e-6) is None


def test_experts_of_the_best_groups(like_a_gpu: None) -> None:
    """Top-k of top-k, as in DeepSeek-V3."""

    def route(logits: Tensor) -> tuple[Tensor, Tensor]:
        scores = logits.sigmoid()
        biased = scores + torch.linspace(0, 1, 24, dtype=logits.dtype)
        best = biased.view(-1, 4, 6).topk(2, -1).values.sum(-1).topk(2, -1).indices
        kept = torch.zeros(len(logits), 4).scatter(1, best, 1).repeat_interleave(6, 1) > 0
        chosen = biased.masked_fill(~kept, 0.0).topk(3, -1).indices
        weights = scores.gather(1, chosen)
        return weights / weights.sum(-1, keepdim=True), chosen

    logits = torch.randn(11, 24, dtype=torch.float64)
    compiled = Compiled(route)
    for ours, eager in zip(gradients(compiled, logits), gradients(route, logits), strict=True):
        torch.testing.assert_close(ours, eager)


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
    function: Callable[..., Any], *shape: int, dtype: torch.dtype = torch.bfloat16, gradient: bool = True
) -> list[FusionPlan]:
    with FakeTensorMode():
        x = torch.empty(shape, dtype=dtype, device="cuda", requires_grad=gradient)
        return list(fc.explain(function, x, device="h200").plans)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(4096, 8, 2), (4096, 128, 8), (16384, 64, 6), (16, 128, 8), (32768, 64, 8)],
)
@pytest.mark.parametrize("name", ROUTERS)
def test_a_routers_plan_has_one_kernel(
    name: str, tokens: int, experts: int, k: int, dtype: torch.dtype
) -> None:
    """Scores, the best experts and their weights, which add up to one, and the gradient: a kernel each."""
    plans = plans_of(ROUTERS[name](k), tokens, experts, dtype=dtype)
    assert len(plans) == 2
    for plan in plans:
        assert len(plan.clusters) == 1 and not plan.leftovers, str(plan)
        axes = plan.clusters[0].loops.axes
        rows = {k for k, axis in enumerate(axes) if axis.group == ROWS}
        reductions = [node for node in plan.clusters[0].loops.nodes if isinstance(node, Reduce)]
        assert all(rows.isdisjoint(node.axes) for node in reductions), "no token's row waits for another's"
    assert plans[0].clusters[0].cost.bytes_read == tokens * experts * dtype.itemsize, "logits are read once"


@pytest.mark.parametrize("name", ROUTERS)
def test_a_routers_plan_has_one_kernel_for_a_single_token(name: str) -> None:
    with torch.no_grad():
        (plan,) = plans_of(ROUTERS[name](8), 1, 256, gradient=False)
    assert len(plan.clusters) == 1 and not plan.leftovers, str(plan)


def test_a_router_of_more_experts_than_are_searched_for_calls_topk() -> None:
    forward, backward = plans_of(router(10), 2048, 512)
    assert [left.target for left in forward.leftovers] == ["aten.topk.default"]
    assert any("scatter" in left.target for left in backward.leftovers)


@pytest.mark.parametrize(
    ("shape", "dim", "k"),
    [
        ((4096, 128), 1, 8),
        ((4, 512, 64), -1, 4),
        ((8, 4096), 1, 1),
        ((2048, 4096), 1, 8),
        ((2048, 4096), 0, 8),
        ((16, 512, 300), 1, 4),
    ],
)
def test_a_plan_of_topk_alone_has_one_kernel(shape: tuple[int, ...], dim: int, k: int) -> None:
    for plan in plans_of(lambda x: x.topk(k, dim), *shape):
        assert len(plan.clusters) == 1 and not plan.leftovers, str(plan)
