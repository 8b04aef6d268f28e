"""Depthwise convolutions that clusters hold, and those that stay calls of a library."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.ir import dag
from fusion_compiler.ir.device import DeviceSpec, device_spec
from fusion_compiler.ir.dims import hint
from fusion_compiler.ir.loops import INNER, LoopNest
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_data import Cost
from fusion_compiler.ops.convolution_times import MEASURED, PASSES, Convolution
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.ops.own import depthwise
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.fuse import candidates, legality
from fusion_compiler.passes.fuse.cluster import plan
from fusion_compiler.passes.fuse.cost import contraction_cost, cost_of
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.windowed import work_in_windows
from fusion_compiler.schedule.work import BufferInfo, Work
from tests.convolutions import Depthwise, depthwise_cases
from tests.exactness import Compiled, not_as_close, wide

aten = torch.ops.aten
H200 = device_spec("h200")


def has_windows(loops: LoopNest) -> bool:
    return any(axis.group == INNER for axis in loops.axes)


@pytest.fixture(autouse=True)
def decomposed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Convolutions of CPU tensors are taken apart as those of a GPU."""
    monkeypatch.setattr(depthwise, "IS_FUSED", True, raising=False)
    monkeypatch.setattr("fusion_compiler.ops.decompositions.images._on_gpu", lambda x: x.is_floating_point())


@pytest.fixture
def scheduled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nests with windows take as long as their bytes and what is computed again."""

    def cost(
        loops: LoopNest, device: DeviceSpec, buffers: Mapping[str, BufferInfo], hints: Any, analysis: Any
    ) -> Cost:
        if not has_windows(loops):
            return cost_of(loops, device, buffers, hints, analysis)
        moved = sum(hint(info.numel) * info.itemsize for info in buffers.values())
        again = work_in_windows(Work(analysis or Analysis(loops), buffers, {})) / device.fp32_per_s
        memory = moved / device.copy_bandwidth
        us = device.launch_us - device.floor_us + max(device.floor_us, 1e6 * (memory + again))
        return Cost(us, moved, 0, 0, "memory")

    monkeypatch.setattr(legality, "refusal", lambda a, device: None)
    monkeypatch.setattr(candidates, "cost_of", cost)


@pytest.fixture
def left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster holds a convolution."""

    def law(a: Any) -> str | None:
        return "no windows" if has_windows(a.loops) else None

    monkeypatch.setattr(legality, "LAWS", (("windows", law), *legality.LAWS))


def planned(function: Callable[..., Any], *args: Tensor, **options: Any) -> FusionPlan:
    built = dag.build(make_fx(function, decomposition_table(), tracing_mode="fake")(*args))
    return plan("graph", built, H200, {}, **options)


def images(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16().contiguous(memory_format=torch.channels_last)


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1) -> Tensor:
    return F.conv2d(x, weight, bias, stride, 1, 1, x.shape[1])


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = F.batch_norm(convolved(x, weight, bias), bias, bias.abs(), bias, bias)
    return F.relu6(y)


X, WEIGHT, BIAS = images(32, 96, 28, 28), images(96, 1, 3, 3), torch.randn(96).bfloat16()


@pytest.mark.usefixtures("scheduled")
def test_a_layer_of_inference_is_one_kernel() -> None:
    fused = planned(layer, X, WEIGHT, BIAS)
    (cluster,) = fused.clusters
    assert any(fused.dag.op(name).target is depthwise.depthwise for name in cluster.ops)
    assert not [left for left in fused.leftovers if left.rule == "library call"]
    assert set(cluster.inputs) == set(fused.dag.inputs) and len(cluster.outputs) == 1


@pytest.mark.usefixtures("scheduled")
def test_what_is_cheap_joins_from_before_a_convolution_and_what_is_not_stays() -> None:
    cheap = planned(lambda x, w: convolved(F.relu(x * 2), w) + 1, X, WEIGHT)
    assert len(cheap.clusters) == 1
    dear = planned(lambda x, w: convolved(F.silu(x * 2), w) + 1, X, WEIGHT)
    assert len(dear.clusters) == 2
    assert "would be computed again for each window that reads it" in str(dear.refusals)


@pytest.mark.usefixtures("scheduled")
def test_a_slower_cluster_leaves_a_convolution_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(candidates, "contraction_cost", lambda *_: Cost(0.5, 0, 0, 0, "launch"))
    fused = planned(layer, X, WEIGHT, BIAS)
    (left,) = (left for left in fused.leftovers if left.rule == "library call")
    assert left.reason.startswith("library: it takes 0.5 us")


@pytest.mark.usefixtures("scheduled")
def test_numbers_as_eagers_leave_a_convolution_to_the_library() -> None:
    fused = planned(layer, X, WEIGHT, BIAS, numerics="eager")
    assert [left.target for left in fused.leftovers] == [str(depthwise.depthwise)]


@pytest.mark.usefixtures("scheduled")
def test_both_gradients_are_in_clusters() -> None:
    def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> Any:
        every = ([1, 1], [1, 1], [1, 1], False, [0, 0], 96, [True, True, True])
        return aten.convolution_backward.default(gradient * 2, x, weight, [96], *every)

    fused = planned(backward, X, X, WEIGHT)
    held = [{fused.dag.op(name).target for name in cluster.ops} for cluster in fused.clusters]
    for target in (depthwise.depthwise_input_gradient, depthwise.depthwise_weight_gradient):
        assert [target in targets for targets in held].count(True) == 1


@pytest.mark.usefixtures("left_alone")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_calls_of_the_library_compute_values_and_gradients(dtype: torch.dtype) -> None:
    called = set[str]()
    for case in depthwise_cases(4):
        x, weight, gradient = case.tensors(dtype)
        bias = torch.randn(case.channels).to(dtype)
        compiled = Compiled(sigmoid_of(case))
        ours, eager, true = (
            results(fn, *args, gradient)
            for fn, args in (
                (compiled, (x, weight, bias)),
                (sigmoid_of(case), (x, weight, bias)),
                (sigmoid_of(case), wide((x, weight, bias))),
            )
        )
        called |= {left.target for fused in compiled.plans for left in fused.leftovers}
        for our, their, truth in zip(ours, eager, true, strict=True):
            noise = 8 * torch.finfo(dtype).eps * truth.abs().max().item()
            assert not_as_close(our, their, truth, noise) is None, case
    assert called == set(map(str, depthwise.CALLS))


@pytest.mark.usefixtures("left_alone")
def test_eager_is_predicted_to_compute_both_gradients() -> None:
    case = Depthwise(2, 3, (8, 6), (3, 3), (1, 1), (1, 1), (1, 1), (False,) * 3, 0)
    x, weight, gradient = case.tensors(torch.float32)
    compiled = Compiled(sigmoid_of(case))
    results(compiled, x, weight, torch.randn(3), gradient)
    (call,) = (c for fused in compiled.plans for c in fused.calls if c.target == "convolution_backward")
    (backward,) = (fused for fused in compiled.plans if call in fused.calls)
    assert backward.setting is not None
    convolutions = [op for op in map(backward.dag.op, call.ops) if op.kind is Kind.CONTRACTION]
    assert len(convolutions) == 2
    device = backward.setting.device
    assert call.cost.us == pytest.approx(sum(contraction_cost(op, device).us for op in convolutions))


def sigmoid_of(case: Depthwise) -> Callable[..., Tensor]:
    rest: Any = (*case.geometry, False, [0] * len(case.size), case.channels)
    return lambda x, weight, bias: torch.sigmoid(aten.convolution.default(x, weight, bias, *rest))


def results(fn: Callable[..., Tensor], *args: Tensor) -> list[Tensor]:
    """A function's result, and the gradients of its arguments for the last one as gradient of the result."""
    *operands, gradient = (arg.clone().requires_grad_() for arg in args)
    y = fn(*operands)
    y.backward(gradient.detach().to(y.dtype))
    return [y.detach(), *(operand.grad for operand in operands if operand.grad is not None)]


def predicted(convolution: Convolution, last: bool) -> list[float]:
    """Microseconds of the calls of forward, gradient of the image and gradient of the kernel."""
    c, order = convolution, torch.channels_last if last else torch.contiguous_format
    geometry: Any = ([c.stride] * 2, [c.dilation * (c.kernel // 2)] * 2, [c.dilation] * 2)

    def passes(x: Tensor, weight: Tensor) -> Any:
        y = depthwise.depthwise(x, weight, *geometry)
        of_image = depthwise.depthwise_input_gradient(y, weight, list(x.shape), *geometry)
        return y, of_image, depthwise.depthwise_weight_gradient(y, x, [c.kernel] * 2, *geometry)

    with torch.device("meta"):
        x = torch.empty(c.batch, c.inputs, c.side, c.side, dtype=torch.bfloat16, memory_format=order)
        weight = torch.empty(c.inputs, 1, c.kernel, c.kernel, dtype=torch.bfloat16)
    built = dag.build(make_fx(passes, tracing_mode="fake")(x, weight))
    return [contraction_cost(built.op(name), H200).us for name in built.outputs]


def test_a_library_is_predicted_as_it_was_measured() -> None:
    """For the usual convolutions, in their faster order."""
    ratios: dict[str, list[float]] = {name: [] for name in PASSES}
    for row in MEASURED:
        c = row[0]
        if c.kind[1] and c.kernel <= 7 and c.dilation == 1 and c.batch >= 64:
            rows = zip(PASSES, predicted(c, False), predicted(c, True), row[1], row[2], strict=True)
            for name, *ours, first, last in rows:
                ratios[name].append(ours[last < first] / min(first, last))
    for of_pass in ratios.values():
        assert len(of_pass) > 20 and all(0.25 < ratio < 2.2 for ratio in of_pass)
        assert 0.5 < sorted(of_pass)[len(of_pass) // 2] < 1.2
