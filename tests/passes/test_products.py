"""Products with many rows are one kernel with what is behind them, where an option or a measurement says."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_compiler as fc
from fusion_compiler.ir.dag import OpDag, build
from fusion_compiler.ir.decision import Outcome
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.passes.fuse import choice
from fusion_compiler.passes.fuse.choice import Times, Ways, with_products
from fusion_compiler.passes.fuse.cluster import plan as plan_clusters
from fusion_compiler.passes.fuse.why import Why

H200 = device_spec("h200")


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int, approximate: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x), approximate=self.approximate))


class Swiglu(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


class Attention(nn.Module):
    """The projections of an attention block, with a norm in front and a residual sum behind."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(width), heads
        self.projected, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.projected(self.norm(x)).view(*x.shape[:2], 3, self.heads, -1).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(x.shape)
        return self.norm(x + self.out(y))


def step(run: nn.Module, x: Tensor, weights: Tensor) -> list[Tensor]:
    """Return the result and all gradients."""
    x = x.clone().requires_grad_()
    run.zero_grad()
    y = run(x)
    y.backward(weights.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in run.parameters())]  # type: ignore[list-item]


def held(plan: FusionPlan) -> list[str]:
    """Return the targets of the products that are in clusters."""
    targets = (str(plan.dag.op(n).target) for c in plan.clusters for n in c.ops)
    return [t.split(".")[1] for t in targets if "mm" in t]


@pytest.mark.parametrize(
    ("model", "dtype", "forward", "backward"),
    [
        (Mlp(32, 48, "none"), torch.bfloat16, 2, 2),
        (Mlp(32, 48, "tanh"), torch.float16, 2, 2),
        (Swiglu(32, 48), torch.bfloat16, 3, 2),
        (Attention(32, 2), torch.bfloat16, 0, 0),
    ],
    ids=["gelu", "tanh gelu", "swiglu", "attention"],
)
def test_values_and_gradients_are_as_close_as_eagers(
    model: nn.Module, dtype: torch.dtype, forward: int, backward: int
) -> None:
    eager = copy.deepcopy(model).to(dtype)
    truth, compiled = copy.deepcopy(eager).double(), copy.deepcopy(eager)
    fast = fc.compile(compiled, backend="interpret", products="always", strict=True)
    errors = dict[int, list[float]]()
    for _ in range(3):
        x, weights = torch.randn(2, 17, 32).to(dtype), torch.randn(2, 17, 32).to(dtype)
        both = zip(step(fast, x, weights), step(eager, x, weights), strict=True)
        for i, (results, right) in enumerate(zip(both, step(truth, x.double(), weights), strict=True)):
            assert results[0].stride() == results[1].stride()
            squares = ((result.double() - right).square().sum().item() for result in results)
            errors[i] = [a + b for a, b in zip(errors.get(i, [0.0, 0.0]), squares, strict=True)]
    assert all(ours <= 1.05 * theirs for ours, theirs in errors.values()), errors
    counts = {plan.phase: len(held(plan)) for plan in fast.plan}
    assert counts["forward"] >= forward and counts["backward"] >= backward


def test_rows_that_are_several_dimensions_elsewhere_are_right() -> None:
    def heads(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).view(2, 19, 4, 16).transpose(1, 2).contiguous() * 1.5

    x, w = torch.randn(38, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    fast = fc.compile(heads, backend="interpret", products="always", strict=True)
    errors = [(run(x, w).double() - heads(x.double(), w.double())).norm() for run in (fast, heads)]
    assert errors[0] <= errors[1] and held(fast.plan[0]) == ["mm"]


def test_what_the_backward_needs_is_stored_by_the_kernel_of_the_product() -> None:
    fast = fc.compile(Mlp(48, 80, "none").bfloat16(), backend="interpret", products="always")
    fast(torch.randn(40, 48).bfloat16()).sum().backward()
    forward, backward = fast.plan
    first = next(c for c in forward.clusters if held(forward) and "addmm" in c.outputs)
    assert len(first.outputs) == 2 and "addmm" in first.ops
    assert any("gelu_backward" in c.name and "mm" in "".join(c.ops) for c in backward.clusters)


def traced(fn: Any, *shapes: Sequence[int], dtype: torch.dtype = torch.bfloat16) -> OpDag:
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes]
        return build(make_fx(fn, decomposition_table())(*inputs))


def planned(dag: OpDag) -> FusionPlan:
    return plan_clusters("graph.inference", dag, H200, {})


def forced(dag: OpDag, ways: Sequence[Ways]) -> list[Times]:
    return [Times(3.0, 2.0, 1.0, forced=True) for _ in ways]


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


BERT = (32, 512, 1024), (4096, 1024), (4096,)


def test_a_plan_lists_both_ways_with_their_times() -> None:
    asked = list[Ways]()

    def measured(dag: OpDag, ways: Sequence[Ways]) -> list[Times]:
        asked.extend(ways)
        return [Times(61.0, 48.0, 21.0, device="NVIDIA H200") for _ in ways]

    plan = with_products(planned(traced(gelu, *BERT)), measured)
    (way,), (cluster,) = asked, plan.clusters
    assert way.calls == ("addmm",) and way.reader.inputs == ("addmm",) and way.fused[0].ops == cluster.ops
    assert way.predicted.calls_us > 100 and way.predicted.reader_us > 30 and not way.predicted.device
    decision = plan.decision("products")
    assert decision is not None and decision.outcome is Outcome.DONE and decision.us == 8.0
    assert decision.reason.startswith("product with bias + ")
    assert "as one kernel: 61 us against 48 + 21 us (measured on NVIDIA H200)" in decision.reason
    assert not plan.leftovers and cluster.cost.flops and "addmm" in cluster.ops


def test_where_the_library_is_faster_the_plan_stays_and_says_so() -> None:
    before = planned(traced(gelu, *BERT))
    clusters = before.clusters
    times = Times(70.0, 48.0, 21.0, device="NVIDIA H200")
    plan = with_products(before, lambda _, ways: [times for _ in ways])
    assert plan.clusters == clusters and [d.subject for d in plan.leftovers] == ["addmm"]
    (pair,) = (d for d in plan.refusals if d.rule == "products")
    assert (pair.subject, pair.other) == ("addmm", clusters[0].name) and pair.us == -1.0
    assert pair.reason == (
        "the library's product and a kernel are faster: "
        "one kernel takes 70 us against 48 + 21 us (measured on NVIDIA H200)"
    )
    assert Why(plan).refusal("addmm", clusters[0].name) == pair


def test_a_difference_within_noise_leaves_the_library_alone() -> None:
    assert not Times(68.5, 48.0, 21.0).pays and Times(67.0, 48.0, 21.0).pays
    assert not Times(10.0, 48.0, 21.0, failed="no memory").pays and Times(99.0, 48.0, 21.0, forced=True).pays


def test_a_bias_gradient_is_a_sum_beside_the_product() -> None:
    def gradient(dy: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        dx = torch.ops.aten.gelu_backward(dy @ w, x)
        return dx, dx.sum(0)

    plan = with_products(planned(traced(gradient, (4096, 1024), (1024, 4096), (4096, 4096))), forced)
    (cluster,) = plan.clusters
    assert held(plan) == ["mm"] and len(cluster.outputs) == 2 and not plan.leftovers
    assert plan.decision("products").subject == cluster.name  # type: ignore[union-attr]


def test_two_products_with_a_shared_operand_are_one_kernel() -> None:
    def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    plan = with_products(planned(traced(swiglu, (8192, 4096), (14336, 4096), (14336, 4096))), forced)
    (cluster,) = plan.clusters
    assert len(held(plan)) == 2 and len(cluster.inputs) == 3 and not plan.leftovers
    assert "2 products with" in plan.notes["products"]


def test_a_norm_behind_a_product_stays_a_kernel_of_its_own() -> None:
    def block(x: Tensor, w: Tensor, r: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        y = r + F.linear(x, w)
        return y, F.layer_norm(y, (1024,), g)

    plan = with_products(planned(traced(block, (4096, 4096), (1024, 4096), (4096, 1024), (1024,))), forced)
    product, norm = plan.clusters
    assert held(plan) == ["mm"] and product.outputs == ("add",) and norm.inputs[0] == "add"
    assert "and another of the rest" in plan.notes["products"]


def test_questions_about_a_plan_without_its_search_find_its_products_again() -> None:
    def block(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        y = r + F.linear(x, w)
        return y, torch.softmax(y, -1)

    plan = with_products(planned(traced(block, (4096, 4096), (1024, 4096), (4096, 1024))), forced)
    first, second = (c.name for c in plan.clusters)
    forgetful = replace(plan, solved=None, decisions=())
    assert Why(forgetful).refusal(first, second) == Why(replace(plan, decisions=())).refusal(first, second)


@pytest.mark.parametrize(
    ("fn", "dtype", "reason"),
    [
        (gelu, torch.float32, "float32 is multiplied without tensor cores"),
        (gelu, torch.float64, "no schedule multiplies float64"),
    ],
)
def test_a_dtype_without_tensor_cores_is_refused_with_the_reason(
    fn: Any, dtype: torch.dtype, reason: str
) -> None:
    plan = with_products(planned(traced(fn, (4096, 256), (512, 256), (512,), dtype=dtype)), forced)
    assert not held(plan)
    assert any(d.rule == "products" and reason in d.reason for d in plan.refusals)


def test_of_two_products_without_a_shared_operand_one_is_taken_and_the_other_read() -> None:
    def both(x: Tensor, y: Tensor, v: Tensor, w: Tensor) -> Tensor:
        return F.gelu(x @ v + y @ w)

    plan = with_products(planned(traced(both, (4096, 512), (4096, 256), (512, 512), (256, 512))), forced)
    (cluster,) = plan.clusters
    assert held(plan) == ["mm"] and [d.subject for d in plan.leftovers] == ["mm_1"]
    assert cluster.inputs == ("x_1", "v_1", "mm_1")


def test_what_needs_the_product_and_feeds_its_reader_is_refused() -> None:
    def ring(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        return F.gelu(y) * torch.sort(y, -1).values

    plan = with_products(planned(traced(ring, (4096, 512), (512, 512))), forced)
    assert not held(plan)
    assert any(d.rule == "convex" and d.subject == "mm" for d in plan.refusals)


def test_the_pass_is_off_where_nothing_was_measured_and_where_it_is_disabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = Mlp(48, 80, "none").bfloat16(), torch.randn(40, 48).bfloat16()

    def products(**options: Any) -> list[str]:
        torch._dynamo.reset()
        fast = fc.compile(copy.deepcopy(model), backend="eager", device="h200", **options)
        with torch.no_grad():
            fast(x)
        (plan,) = fast.plan
        return held(plan)

    assert "h200" not in choice.MEASURED or products()
    monkeypatch.setattr(choice, "MEASURED", {})
    assert not products()
    assert products(products="always") == ["addmm", "addmm"]
    assert not products(products="always", disable=("products",))
    assert not products(products="always", numerics="eager")
