"""One value, one number: whatever holds a value, a register or memory, in forward or backward."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.ir.layout import is_view
from fusion_compiler.ir.loops import Compute, rounding_of
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ops.schema import short_name
from fusion_compiler.schedule.analysis import Analysis

HALVES = (torch.bfloat16, torch.float16)
X = torch.randn(4, 32, dtype=torch.bfloat16)


def compiled(function: Callable[..., Any]) -> Any:
    torch._dynamo.reset()
    return fc.compile(function, backend="interpret", progress=False, dynamic=False)


def plan_of(function: Callable[..., Any], *tensors: Tensor) -> FusionPlan:
    fast = compiled(function)
    fast(*tensors)
    return fast.plan[0]


def kernels_of(plan: FusionPlan) -> list[Compute]:
    return [n for c in plan.clusters for loops in c.nests for n in loops.nodes if isinstance(n, Compute)]


# -- the law -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "reproducible"),
    [
        (lambda x: (x * 1.1).sin() > 0.5, {"mul", "sin"}),
        (lambda x: (x.sin() + 1).floor(), {"sin", "add"}),
        (lambda x: x.sin().to(torch.int32), {"sin"}),
        (lambda x: x.sin().argmax(-1), {"sin"}),
        (lambda x: x.sin().topk(2).values, {"sin"}),
        (lambda x: x.sin() - x.sin().amax(-1, keepdim=True), {"sin"}),
        (lambda x: ((x * 2) @ x.T).cos() == 1, {"mm", "cos"}),  # the product is stored, and made once
        (lambda x: F.softmax(x * 2, -1), set()),  # whose maximum decides nothing
        (lambda x: torch.logsumexp(x * 2, -1), set()),
        (lambda x: F.layer_norm(F.gelu(x + 1), (32,)), set()),
        (lambda x: F.relu(x * 2), set()),
    ],
)
def test_operands_of_discontinuous_operations_are_reproducible(
    function: Callable[..., Any], reproducible: set[str]
) -> None:
    dag = plan_of(function, X).dag
    ops = [dag.op(name) for name in dag.order]
    assert {short_name(op.target) for op in ops if op.reproducible and not is_view(op)} == reproducible


def test_the_joint_graph_decides() -> None:
    """Nothing in this forward compares; its gradient does."""

    def largest(x: Tensor) -> Tensor:
        y = x.sin() * 3
        return torch.maximum(y, 1 - y)

    fast = compiled(largest)
    fast(X.clone().requires_grad_()).float().sum().backward()
    forward, backward = fast.plan
    for plan in (forward, backward):
        sines = [n for n in plan.dag.order if short_name(plan.dag.op(n).target) == "sin"]
        assert sines and all(plan.dag.op(n).reproducible for n in sines)
    assert "reproducible" in str(forward)


def test_pinned_values_are_made_alike_everywhere() -> None:
    """Every kernel uses the table's first expression, and rounds products before it adds them."""

    def largest(x: Tensor) -> Tensor:
        y = torch.tanh(x * 1.5) + x * x
        return torch.maximum(y, 1 - y)

    fast = compiled(largest)
    fast(X.clone().requires_grad_()).float().sum().backward()
    forward, _ = fast.plan
    (loops,) = (c.loops for c in forward.clusters)
    reproducible = {i: n for i, n in enumerate(loops.nodes) if isinstance(n, Compute) and n.reproducible}
    assert {"tanh", "mul", "add"} <= {n.target._opname for n in reproducible.values()}
    assert not any(n.single_producer for n in reproducible.values()), "the backward makes them again"
    fp16 = Analysis(loops).fp16_values(dict.fromkeys([s.buffer for s in loops.stores], torch.bfloat16))
    assert not fp16 & reproducible.keys()
    free = plan_of(lambda x: torch.tanh(x * 1.5) + x * x, X)
    assert not any(n.reproducible or rounding_of(n) for n in kernels_of(free))


def test_what_one_kernel_alone_makes_may_be_made_in_any_way() -> None:
    """It is rounded all the same, and its products before they are added: passes over a row agree."""
    plan = plan_of(lambda x: (torch.tanh(x * 1.5) + x * x) > 0.25, X)
    assert all(n.reproducible and n.single_producer for n in kernels_of(plan) if n.dtype is torch.float32)
    (cluster,) = plan.clusters
    assert Analysis(cluster.loops).rounds_products
    (source,) = fc.explain(lambda x: (torch.tanh(x * 1.5) + x * x) > 0.25, X).json()["kernels"].values()
    assert "fm.tanh" not in source and "fm.to_bfloat16(" in source


def test_what_is_stored_is_used_as_stored() -> None:
    def residual(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        total = x + y
        return total, F.layer_norm(total, (32,))

    y = torch.randn_like(X)
    plan = plan_of(residual, X, y)
    assert [rounding_of(n) for n in kernels_of(plan) if rounding_of(n)] == ["torch.bfloat16"]
    total, normed = compiled(residual)(X, y)
    truth = F.layer_norm(total.double(), (32,))
    assert (normed.double() - truth).abs().max() <= torch.finfo(torch.bfloat16).eps / 2 * truth.abs().max()


def test_what_is_stored_and_rounded_for_other_uses_is_stored() -> None:
    """A power of zero dimensions, whose gradient looks at it where it is reproducible and where it is not."""

    def power(x: Tensor, y: Tensor) -> Tensor:
        return torch.pow(x.abs() + 0.5, y.clamp(-2, 2))

    x, y = torch.tensor(-1.5, dtype=torch.bfloat16), torch.tensor(0.5, dtype=torch.bfloat16).requires_grad_()
    got, want = compiled(power)(x, y), power(x, y)
    assert torch.equal(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, y), torch.autograd.grad(want, y))


def test_numbers_that_tensors_are_compared_with_are_of_their_dtype() -> None:
    limit = torch.tensor(0.7)

    def compared(x: Tensor) -> Tensor:
        return torch.stack((x >= 0.7, x == 0.1, x < 0.3, x >= limit))

    for dtype in HALVES:
        x = torch.tensor([0.1, 0.7, 0.3], dtype=dtype)
        assert torch.equal(compiled(compared)(x), compared(x)), dtype


def test_a_size_is_compared_with_as_it_is() -> None:
    def modulo(x: Tensor) -> Tensor:
        return (x * 4).remainder(x.shape[0]) >= x.shape[0] - 2

    for rows in (3, 5):
        x = torch.arange(rows, dtype=torch.bfloat16)
        fast = fc.compile(modulo, backend="interpret", dynamic=True, progress=False)
        assert torch.equal(fast(x), modulo(x))
    x = torch.randn(2, 1)
    fast = fc.compile(lambda x: torch.roll(x, -3, 0), backend="interpret", dynamic=True, progress=False)
    assert torch.equal(fast(x), torch.roll(x, -3, 0))


# -- what it is for ----------------------------------------------------------------------------------

GRADIENTS: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda x: x.sin().amax(-1),
    "amin": lambda x: (x * 1.1).amin(-1),
    "max": lambda x: (x * 1.1).max(),
    "matrix norm": lambda x: torch.linalg.matrix_norm(x * 1.1, 1),
    "vector norm": lambda x: torch.linalg.vector_norm(x.sin(), float("inf"), -1),
    "largest one": lambda x: (x * 1.1) / (x * 1.1).abs().amax(-1, keepdim=True),
    "scatter_reduce": lambda x: torch.zeros(4, 2, dtype=x.dtype).scatter_reduce(
        1, (torch.arange(32) % 2).expand(4, 32), x * 1.1, "amax", include_self=False
    ),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", GRADIENTS)
def test_the_gradient_of_a_maximum_finds_it(name: str, dtype: torch.dtype) -> None:
    function, x = GRADIENTS[name], torch.randn(4, 32).to(dtype)
    eager, ours = (x.clone().requires_grad_() for _ in range(2))
    function(eager).sum().backward()
    compiled(function)(ours).sum().backward()
    assert eager.grad is not None and ours.grad is not None
    slack = 4 * torch.finfo(dtype).eps * eager.grad.abs().max()
    assert (ours.grad.double() - eager.grad.double()).abs().max() <= slack


# -- any program -------------------------------------------------------------------------------------

STEPS = (
    "y * 1.1", "y.sin()", "y + z", "torch.tanh(y)", "y / (1 + y.abs())", "F.gelu(y)", "y - z.amax(0)",
    "y * torch.sigmoid(z)", "(y @ w) * 0.1", "y.T.contiguous().T + 0.1", "torch.cat((y[:, 8:], y[:, :8]), 1)",
    "y.exp().log1p()", "F.softmax(y, -1) + z",
)  # fmt: skip
JUMPS = (
    "y == y.amax(-1, keepdim=True)", "y == y.amax()", "y >= y.topk(3, -1).values[..., -1:]",
    "(y * 8).floor()",
    "torch.sign(y - y[:, :1])", "y.gather(1, y.argmax(-1, keepdim=True)) == y.amax(-1, keepdim=True)",
    "y == y.sort(-1)[0][:, -1:]", "y >= 0.1", "(y * 4).round()", "(y * 100).to(torch.int32)",
    "y == y.amin(0)",
    "y - y.amax((0, 1))", "y.median() <= y",
)  # fmt: skip


@pytest.mark.parametrize("case", range(10))
def test_every_place_that_uses_a_value_sees_the_same(case: int) -> None:
    """A comparison decides as it would on the value that is returned, whether that is returned or not."""
    seed = random.SystemRandom().getrandbits(32)
    draw = random.Random(seed)
    steps = draw.choices(STEPS, k=draw.randint(1, 5))
    side = draw.randint(0, len(steps))  # what stands there is stored as well
    jump = draw.choice(JUMPS)
    body = "\n    ".join(
        line for i, step in enumerate(steps) for line in (["side = y"] * (i == side) + [f"y = {step}"])
    )
    text = f"def program(x, z, w, shown):\n    y, side = x, x\n    {body}\n"
    text += f"    jumped = {jump}\n    return (jumped, y, side) if shown else (jumped, side)\n"
    scope: dict[str, Any] = {"torch": torch, "F": F}
    exec(text, scope)
    dtype = draw.choice(HALVES)
    generator = torch.Generator().manual_seed(seed)
    rows = draw.choice((3, 40))
    x, z = (torch.randn(rows, 48, generator=generator).to(dtype) for _ in range(2))
    w = torch.randn(48, 48, generator=generator).to(dtype)
    message = f"seed {seed}, {dtype}, rows {rows}\n{text}"
    jumped, y, _ = compiled(scope["program"])(x, z, w, True)
    assert torch.equal(jumped, eval(jump, scope, {"y": y})), message
    alone, _ = compiled(scope["program"])(x, z, w, False)
    assert torch.equal(alone, jumped), message
