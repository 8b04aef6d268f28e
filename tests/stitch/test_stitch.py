"""The stitched graph as text: what it calls, what it views, when it frees, in which order it runs."""

from __future__ import annotations

import ast
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_compiler as fc
from fusion_compiler.ir.canonical import Canonical, canonical
from fusion_compiler.ir.dag import build
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cluster
from fusion_compiler.ir.views import reinterpreted, restrided
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.passes.fuse.cluster import plan as plan_clusters
from fusion_compiler.stitch.order import Step, curve, ordered, sparkline
from fusion_compiler.stitch.stitch import stitch, subgraph


def planned(function: Callable[..., Any], *inputs: Tensor) -> FusionPlan:
    gm = make_fx(function, decomposition_table(), tracing_mode="fake")(*inputs)
    return plan_clusters("graph", build(gm), device_spec("h200"), {})


def runner_of(cluster: Cluster, plan: FusionPlan) -> Callable[..., Any]:
    function = subgraph(cluster, plan.dag)

    def run(*arguments: Tensor) -> tuple[Tensor, ...]:
        return function(*arguments)

    return run


def stitched(plan: FusionPlan, view: Callable[..., Tensor] = restrided) -> fx.GraphModule:
    return stitch(plan, {c.name: runner_of(c, plan) for c in plan.clusters}, ordered(plan), view=view)


def check(function: Callable[..., Any], *inputs: Tensor) -> fx.GraphModule:
    """Stitches, compares with the function, and returns the module."""
    plan = planned(function, *inputs)
    modules = [stitched(plan, view) for view in (reinterpreted, restrided)]
    for module in modules:
        arguments = list(inputs)
        results = module.forward(arguments)
        assert not arguments
        expected = function(*inputs)
        assert len(results) == len(expected)
        for mine, theirs in zip(results, expected, strict=True):
            assert mine.stride() == theirs.stride()
            torch.testing.assert_close(mine, theirs)
    return modules[-1]


def calls_of(module: fx.GraphModule) -> list[str]:
    tree = ast.parse(module.code.strip())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return [node.func.id for node in calls if isinstance(node.func, ast.Name)]


def test_a_chain_of_views_is_one_view_and_products_are_called_directly() -> None:
    def attend(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        y = (x.view(6, 8) @ w.t()).view(2, 3, 4, 2).permute(0, 2, 1, 3).select(2, 1)
        return (y, y.transpose(0, 1).transpose(0, 1)[:, 1:])

    module = check(attend, torch.randn(2, 3, 8), torch.randn(8, 8))
    assert calls_of(module) == ["restrided", "restrided", "mm", "restrided", "restrided"]


def test_views_that_change_nothing_vanish() -> None:
    def gradients(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return ((x @ y).t().t().view(4, 6),)

    assert calls_of(check(gradients, torch.randn(4, 5), torch.randn(5, 6))) == ["mm"]


def test_results_that_were_separate_tensors_stay_separate() -> None:
    def twice(x: Tensor) -> tuple[Tensor, ...]:
        y = x @ x
        return (y, y.view(4, 4), y.view(4, 4), x.view(4, 4))

    x = torch.randn(4, 4)
    module = check(twice, x)
    results = module.forward([x])
    assert len({id(r) for r in (*results, x)}) == 5
    assert len({r.untyped_storage().data_ptr() for r in results}) == 2


def test_views_of_an_input_at_an_offset() -> None:
    def tail(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return (x[1:].t() @ w, F.gelu(x[2:]))

    storage = torch.randn(100)
    check(tail, storage[7:].as_strided((5, 6), (8, 1)), torch.randn(4, 3))


def test_every_value_is_freed_at_its_last_use() -> None:
    def layers(x: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        h = torch.softmax(x @ a, -1)
        left, right = torch.linalg.qr(h)
        return (F.gelu(h @ b) + left @ right,)

    module = check(layers, *(torch.randn(6, 6) for _ in range(3)))
    (function,) = ast.parse(module.code.strip()).body
    assert isinstance(function, ast.FunctionDef)
    held: set[str] = set()
    loaded = [_names(statement, ast.Load) for statement in function.body]
    for i, statement in enumerate(function.body):
        held = (held | _names(statement, ast.Store)) - _names(statement, ast.Del)
        following = function.body[i + 1 : i + 2]
        due = held - _names(following[0], ast.Del) if following else set[str]()
        assert due <= set[str]().union(*loaded[i + 1 :]), ast.unparse(statement)


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    return {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, context)}


class Counted:
    """A runner that asks to be replaced by a function once it has been called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = "counted"
        self.function, self.calls = function, 0
        self.links: list[Callable[[Callable[..., Any]], None]] = []

    def link(self, replace: Callable[[Callable[..., Any]], None]) -> None:
        self.links.append(replace)

    def __call__(self, *arguments: Tensor) -> Any:
        self.calls += 1
        for replace in self.links:
            replace(self.function)
        return self.function(*arguments)


def test_a_runner_is_left_out_once_its_function_is_known() -> None:
    x = torch.randn(4, 4)
    plan = planned(lambda x: (torch.softmax(x, -1), torch.softmax(x @ x, -1)), x)
    runners = {c.name: Counted(subgraph(c, plan.dag)) for c in plan.clusters}
    module = stitch(plan, runners, ordered(plan))
    first, second = module.forward([x]), module.forward([x])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert {runner.calls for runner in runners.values()} == {1}


@torch.library.custom_op("test_stitch::turned", mutates_args=())
def turned(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride()[::-1]).copy_(x)


@turned.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)  # which lies otherwise


@pytest.mark.parametrize("wrong", [True, False])
def test_an_operator_whose_description_is_wrong(wrong: bool) -> None:
    """Kernels and views go by the strides that it is said to have; only what differs is copied."""

    def function(x: torch.Tensor) -> torch.Tensor:
        scanned = turned(x) if wrong else torch.cumsum(x, 0)
        return scanned[1:].sigmoid() + scanned[0]

    x = torch.randn(5, 5)
    fast = fc.compile(function, backend="interpret")
    for _ in range(2):
        torch.testing.assert_close(fast(x), function(x))
    x = torch.randn(5, 5)
    torch.testing.assert_close(fast(x), function(x))


def test_links_do_not_keep_a_module_alive() -> None:
    x = torch.randn(4, 4)
    plan = planned(lambda x: (torch.softmax(x, -1),), x)
    runners = {c.name: Counted(subgraph(c, plan.dag)) for c in plan.clusters}
    module = stitch(plan, runners, ordered(plan))
    alive = weakref.ref(module)
    del module
    gc.collect()
    assert alive() is None
    for runner in runners.values():
        runner(x)


def test_an_unread_result_of_a_library_call_is_freed() -> None:
    def values(x: Tensor) -> tuple[Tensor, ...]:
        return (torch.topk(x, 2).indices,)

    code = check(values, torch.randn(5, 6)).code
    assert "del" in code.split("topk(", 1)[1].splitlines()[0]


# -- the fx subgraph of a cluster ---------------------------------------------------------------------


def form_of_a_product(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    return (torch.zeros_like(x @ x) + x.sum(0), i)


def index_into_one_row(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    return (F.embedding(i, x[:1]) * 2, F.embedding(i, x[:1]) + 1)


def overwritten(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    return (torch.slice_scatter(x @ x, torch.tanh(x)) * 2, i)


def cut_off(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    return (torch.cat([x, x @ x])[:4] * 2, i)


def without_inputs(x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
    return (torch.ones_like(x.t()), i)


@pytest.mark.parametrize(
    "function",
    [form_of_a_product, index_into_one_row, overwritten, cut_off, without_inputs],
    ids=lambda f: f.__name__,
)
def test_a_subgraph_is_a_function_of_what_the_kernel_reads(function: Callable[..., Any]) -> None:
    x, i = torch.randn(4, 4), torch.zeros(3, 2, dtype=torch.long)
    plan = planned(function, x, i)
    for cluster in plan.clusters:
        module: Any = subgraph(cluster, plan.dag)
        assert [n.name for n in module.graph.find_nodes(op="placeholder")] == [*cluster.inputs]
        assert "mm" not in module.code
    check(function, x, i)


def test_memory_that_nothing_was_written_to_is_zero_as_in_a_kernel() -> None:
    plan = planned(lambda x: (torch.empty_like(x) + 1,), torch.randn(4, 4))
    module: Any = subgraph(plan.clusters[0], plan.dag)
    assert torch.equal(module()[0], torch.ones(4, 4)) and "empty" not in module.code


def test_only_clusters_of_one_device_share_a_runner() -> None:
    """Their kernels are the same; what a subgraph makes out of nothing lies on its own device."""
    keys: list[Canonical] = []
    for device in ("cuda:0", "cuda:0", "cuda:1"):
        with FakeTensorMode():
            x = torch.empty(4, 4, device=device)
        plan = planned(lambda x: (x + torch.arange(4, device=x.device),), x)
        keys += [canonical(cluster, plan.dag) for cluster in plan.clusters]
    assert keys[0] == keys[1] != keys[2] and keys[0].nests == keys[2].nests


# -- order ------------------------------------------------------------------------------------------


def test_the_order_with_the_lower_peak_is_taken() -> None:
    def late(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        wide = [x @ (w + i).repeat(1, 8) for i in range(4)]  # all of them at once in program order
        return tuple(y.sum(1) for y in wide)

    plan = planned(late, torch.randn(64, 64), torch.randn(64, 64))
    chosen = ordered(plan)
    by_name = {step.name: step for step in chosen.steps}
    program = sorted(by_name.values(), key=lambda c: "sum" in c.name)
    returned = frozenset(plan.dag.outputs)
    assert chosen.curve == curve(chosen.steps, {}, returned)
    assert chosen.peak <= max(curve(program, {}, returned))


@pytest.mark.parametrize("owned", [False, True])
def test_the_predicted_peak(owned: bool) -> None:
    calls = [
        Step("f", ("x",), ("a",), (100,)),
        Step("g", ("a",), ("b", "c"), (10, 20)),
        Step("h", ("b",), ("d",), (5,)),
    ]
    held = {"x": 1000} if owned else {}
    # x, a | a, b, c (c is not read: freed) | b, d
    assert max(curve(calls, held, frozenset({"d"}))) == (1100 if owned else 130)
    assert max(curve(calls, held, frozenset({"a", "d"}))) == (1100 if owned else 130)


def test_memory_is_shown_as_a_curve_with_what_is_alive_at_its_peak() -> None:
    assert sparkline([1, 2, 4, 8]) == "▂▃▅█" and len(sparkline(range(1, 1000))) <= 40
    fast: Any = fc.compile(lambda x: torch.softmax(x @ x, -1).sum(), backend="eager", device="h200")
    with torch.no_grad():
        fast(torch.randn(512, 512))
    (plan,) = fast.plan
    assert plan.notes["memory"].startswith("█") and "mm 1.0 MB" in plan.notes["memory"]
    assert plan.notes["memory"] in str(plan)


SHOWN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "unfold": lambda x: x.unfold(0, 2, 1),
    "as_strided": lambda x: x.as_strided((4, 3), (3, 2)),
    "view": lambda x: x.view(torch.int8),
}


@pytest.mark.parametrize("shown", SHOWN)
def test_what_a_call_shows_is_read_before_it_is_written_over(shown: str) -> None:
    """Views that no kernel reads through remain calls; who reads their results reads the argument."""

    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = SHOWN[shown](x)
        wide = before.to(torch.int32)
        quotient = torch.div(wide, before.abs() + 1, rounding_mode="floor")
        x[:, ::2].mul_(2)
        return quotient.clamp(-2, 3), wide

    x = torch.randint(-6, 7, (5, 5)).to(torch.uint8 if shown == "view" else torch.int8)
    mine, theirs = x.clone(), x.clone()
    got, truth = fc.compile(f, backend="interpret")(mine), f(theirs)
    assert all(map(torch.equal, got, truth)) and torch.equal(mine, theirs)
