"""Biases of convolutions apart from them, depthwise convolutions, interpolation, pooling to one element."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.ops.decompositions import images
from fusion_compiler.ops.decompositions.images import TABLE
from fusion_compiler.ops.own import depthwise
from fusion_compiler.passes.rewrites.pools import GLOBAL_AVERAGE_POOL
from tests.convolutions import Depthwise, depthwise_cases
from tests.exactness import Compiled, not_as_close, wide

aten = torch.ops.aten
GEOMETRY: tuple[Any, ...] = ([2, 1], [1, 0], [1, 1], False, [0, 0], 2)
TRANSPOSED: tuple[Any, ...] = ([2, 2], [1, 1], [1, 1], True, [1, 1], 1)


def on_cuda(function: Callable[..., Any], *args: Tensor) -> fx.GraphModule:
    """Return the graph into which `function` decomposes for CUDA tensors like `args`; it runs anywhere."""
    with FakeTensorMode():
        like = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cuda") for t in args]
    with torch._guards.detect_fake_mode(like):
        return make_fx(function, decomposition_table=TABLE)(*like)


def assert_close(ours: Any, eager: Any, truth: Any) -> None:
    for our, their, true in zip(ours, eager, truth, strict=True):
        if our is not None:
            assert not_as_close(our, their, true) is None
            assert our.stride() == their.stride()


def targets(gm: fx.GraphModule) -> list[Any]:
    return [n.target for n in gm.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]


def image(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    order = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return torch.randn(shape, dtype=dtype).contiguous(memory_format=order)


@pytest.mark.parametrize("geometry", [GEOMETRY, TRANSPOSED], ids=["grouped", "transposed"])
def test_a_convolutions_bias_is_added_beside_it(geometry: tuple[Any, ...]) -> None:
    outputs = 4 if geometry is TRANSPOSED else 6
    weight = image(4, 4, 3, 3) if geometry is TRANSPOSED else image(6, 2, 3, 3)
    x, bias = image(2, 4, 7, 9), torch.randn(outputs)

    def conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return aten.convolution.default(x, weight, bias, *geometry)

    apart = on_cuda(conv, x, weight, bias)
    assert targets(apart) == [aten.convolution.default, aten.view.default, aten.add.Tensor]
    assert next(n for n in apart.graph.nodes if n.target is aten.convolution.default).args[2] is None
    args = (x, weight, bias)
    assert_close([apart(*args)], [conv(*args)], [conv(*wide(args))])


@pytest.mark.parametrize("wanted", [[True, True, True], [False, True, True], [False, False, True]], ids=str)
def test_its_gradient_is_a_sum_beside_the_others(wanted: list[bool]) -> None:
    args = (image(2, 6, 4, 7), image(2, 4, 7, 9), image(6, 2, 3, 3))

    def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> Any:
        return aten.convolution_backward.default(gradient, x, weight, [6], *GEOMETRY, wanted)

    apart = on_cuda(backward, *args)
    assert targets(apart).count(aten.sum.dim_IntList) == 1
    assert targets(apart).count(aten.convolution_backward.default) == any(wanted[:2])
    assert_close(apart(*args), backward(*args), backward(*wide(args)))


def test_without_a_bias_or_on_a_cpu_convolutions_stay_whole() -> None:
    x, weight, bias = image(2, 4, 7, 9), image(6, 2, 3, 3), torch.randn(6)
    plain = on_cuda(lambda x, w: aten.convolution.default(x, w, None, *GEOMETRY), x, weight)
    assert targets(plain) == [aten.convolution.default]
    convolution = functools.partial(aten.convolution.default, x, weight, bias)
    on_cpu = make_fx(lambda: convolution(*GEOMETRY), decomposition_table=TABLE)()
    assert targets(on_cpu) == [aten.convolution.default]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "scale"), [((2, 3, 5), 2.0), ((2, 3, 4, 5), (2.0, 4.0)), ((1, 2, 3, 2, 3), 2.0)]
)
def test_the_gradient_of_interpolation_is_a_sum_over_blocks(shape: Any, scale: Any, dtype: Any) -> None:
    x = image(*shape, dtype=dtype)

    def gradient(x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=scale) * torch.cos(x).sum()

    def results(fn: Any, x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        y = fn(x)
        y.backward(torch.arange(y.numel()).view(y.shape).remainder(7).to(y.dtype))
        assert x.grad is not None
        return [y.detach(), x.grad]

    compiled = Compiled(gradient)
    ours = results(compiled, x)
    assert not {t for t in compiled.eager_ops() if "upsample" in t}
    for our, eager, true in zip(ours, results(gradient, x), results(gradient, x.double()), strict=True):
        assert not_as_close(our, eager, true) is None


@pytest.mark.parametrize("size", [(15, 8), (10, 12)], ids=str)
def test_a_gradient_by_other_factors_stays_a_call(size: tuple[int, int]) -> None:
    x = image(2, 3, 5, 7).requires_grad_()
    compiled = Compiled(lambda x: F.interpolate(x, size=size))
    y = compiled(x)
    y.backward(torch.ones_like(y))
    assert "aten.upsample_nearest2d_backward.default" in compiled.eager_ops()


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 4, 5), (2, 3, 2, 4, 5)], ids=str)
def test_pooling_to_one_element_is_a_mean(shape: tuple[int, ...]) -> None:
    pool: Any = (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d)[len(shape) - 3]
    x = image(*shape)
    gm = make_fx(lambda x: pool(x, 1), pre_dispatch=True, tracing_mode="fake")(x)
    new, notes = GLOBAL_AVERAGE_POOL.apply(gm)
    assert [note.is_done for note in notes] == [True]
    assert aten.mean.dim in targets(new) and aten.mean.dim not in targets(gm)
    assert not_as_close(new(x), pool(x, 1), pool(x.double(), 1)) is None


@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 3, 4, 5), (2, 3, 2, 4, 5)], ids=str)
def test_pooling_by_one_window_is_a_mean(shape: tuple[int, ...]) -> None:
    pool: Any = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(shape) - 3]
    x, kernel = image(*shape), shape[2:]
    gm = make_fx(lambda x: pool(x, kernel), pre_dispatch=True, tracing_mode="fake")(x)
    new, notes = GLOBAL_AVERAGE_POOL.apply(gm)
    assert [note.is_done for note in notes] == [True] and aten.mean.dim in targets(new)
    assert not_as_close(new(x), pool(x, kernel), pool(x.double(), kernel)) is None


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.avg_pool2d(x, 4),
        lambda x: F.avg_pool2d(x, (4, 6), divisor_override=3),
        lambda x: F.avg_pool2d(x, (4, 6), padding=1),
    ],
    ids=["a part", "another divisor", "padded"],
)
def test_pooling_by_other_windows_stays(pool: Any) -> None:
    gm = make_fx(pool, pre_dispatch=True, tracing_mode="fake")(image(2, 3, 4, 6))
    assert GLOBAL_AVERAGE_POOL.apply(gm) == (gm, ())


def test_pooling_to_more_stays() -> None:
    gm = make_fx(lambda x: F.adaptive_avg_pool2d(x, (1, 2)), pre_dispatch=True, tracing_mode="fake")(
        image(2, 3, 4, 6)
    )
    assert GLOBAL_AVERAGE_POOL.apply(gm) == (gm, ())


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=["first", "last"])
@pytest.mark.parametrize("faster", ["", "forward", "dgrad", "wgrad", "forward dgrad wgrad"])
def test_each_pass_runs_in_its_faster_order_and_returns_its_operands(
    order: torch.memory_format, faster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faster: the passes that are faster with channels last."""
    monkeypatch.setattr(
        images, "faster_is_last", lambda shape, name, last: name in faster.split()
    )
    args = [
        torch.randn(shape, dtype=torch.bfloat16).contiguous(memory_format=order)
        for shape in ((2, 6, 4, 7), (2, 4, 7, 9), (6, 2, 3, 3))
    ]

    def passes(gradient: Tensor, x: Tensor, weight: Tensor) -> Any:
        y = aten.convolution.default(x, weight, None, *GEOMETRY)
        return y, *aten.convolution_backward.default(
            gradient, x, weight, None, *GEOMETRY, [True, True, False]
        )[:2]

    apart = on_cuda(passes, *args)
    last = {
        (n.target, tuple(n.args[-1]) if n.target is aten.convolution_backward.default else ()): [
            v.meta["val"].stride(1) == 1 for v in n.all_input_nodes
        ]
        for n in apart.graph.nodes
        if n.target in (aten.convolution.default, aten.convolution_backward.default)
    }
    names = {(): "forward", (True, False, False): "dgrad", (False, True, False): "wgrad"}
    for (_, mask), orders in last.items():
        (expected,) = {names[mask] in faster} if mask in names else {n in faster for n in ("dgrad", "wgrad")}
        assert orders == [expected] * len(orders)
    for our, eager, true, operand in zip(
        apart(*args), passes(*args), passes(*wide(args)), args, strict=True
    ):
        # eager rounds more on a CPU without 16-bit products
        error = (eager.double() - true).abs().max().item()
        torch.testing.assert_close(our.double(), true, rtol=2e-2, atol=max(2e-2, 2 * error))
        assert our.stride() == operand.stride()


def test_operands_in_two_orders_are_copied_by_the_graph() -> None:
    """ATen would copy the image and the gradient inside of its calls."""
    gradient, x, weight = image(2, 6, 4, 7).contiguous(), image(2, 4, 7, 9).contiguous(), image(6, 2, 3, 3)

    def backward(gradient: Tensor, x: Tensor, weight: Tensor) -> Any:
        return aten.convolution_backward.default(gradient, x, weight, None, *GEOMETRY, [True, True, False])[
            :2
        ]

    apart = on_cuda(backward, gradient, x, weight)
    (call,) = (n for n in apart.graph.nodes if n.target is aten.convolution_backward.default)
    assert all(v.meta["val"].stride(1) == 1 for v in call.all_input_nodes)
    ours, truth = apart(gradient, x, weight), backward(*wide((gradient, x, weight)))
    for our, true, operand in zip(ours, truth, (x, weight), strict=True):
        torch.testing.assert_close(our.double(), true, rtol=1e-4, atol=1e-4)
        assert our.stride() == operand.stride()


def geometry_of(case: Depthwise) -> tuple[Any, ...]:
    return *case.geometry, False, [0] * len(case.size), case.channels


def with_bias(geometry: tuple[Any, ...]) -> Callable[..., Any]:
    """A convolution with a bias, and its three gradients."""

    def passes(x: Tensor, weight: Tensor, gradient: Tensor, bias: Tensor) -> Any:
        y = aten.convolution.default(x, weight, bias, *geometry)
        every = (gradient, x, weight, bias.shape, *geometry, [True, True, True])
        return y, *aten.convolution_backward.default(*every)

    return passes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_depthwise_convolution_and_its_gradients_are_operators_of_their_own(dtype: torch.dtype) -> None:
    for case in depthwise_cases(6):
        passes = with_bias(geometry_of(case))
        args = (*case.tensors(dtype), torch.randn(case.channels).to(dtype))
        apart = on_cuda(passes, *args)
        assert not {aten.convolution.default, aten.convolution_backward.default} & {*targets(apart)}, case
        assert {*depthwise.CALLS} <= {*targets(apart)}, case
        for our, true in zip(apart(*args), passes(*wide(args)), strict=True):
            # A result is rounded before the bias is added, as by a library on a GPU.
            allowed = 4 * torch.finfo(dtype).eps * (1 + float(true.abs().max()))
            torch.testing.assert_close(our.double(), true, rtol=0, atol=allowed)


@pytest.mark.parametrize("wanted", [[True, False], [False, True], [False, False]], ids=str)
def test_only_the_gradients_that_are_wanted_are_computed(wanted: list[bool]) -> None:
    (case,) = depthwise_cases(1)

    def backward(x: Tensor, weight: Tensor, gradient: Tensor) -> Any:
        return aten.convolution_backward.default(
            gradient, x, weight, [case.channels], *geometry_of(case), [*wanted, True]
        )

    apart = on_cuda(backward, *case.tensors(torch.float32))
    expected = (depthwise.depthwise_input_gradient, depthwise.depthwise_weight_gradient)
    assert [target in targets(apart) for target in expected] == wanted


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("faster", ["", "forward", "dgrad", "wgrad", "forward dgrad wgrad"])
def test_each_depthwise_pass_runs_in_its_faster_order(
    last: bool, faster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faster: the passes that are faster with channels last."""
    monkeypatch.setattr(images, "faster_is_last", lambda shape, name, _: name in faster.split())
    case = Depthwise(2, 4, (7, 9), (3, 3), (2, 1), (1, 1), (1, 1), (last, last, last), 0)
    args = case.tensors(torch.bfloat16)

    def passes(x: Tensor, weight: Tensor, gradient: Tensor) -> Any:
        return case.eager(x, weight, gradient)

    apart = on_cuda(passes, *args)
    names = dict(zip(depthwise.CALLS, ("forward", "dgrad", "wgrad"), strict=True))
    for node in apart.graph.nodes:
        if node.target in names:
            values = [value.meta["val"] for value in (node, *node.all_input_nodes)]
            orders = {value.stride(1) == 1 for value in values if value.shape[1] > 1}  # a kernel has both
            assert orders == {names[node.target] in faster.split()}, node.target
    for our, true, like in zip(apart(*args), passes(*wide(args)), (args[2], *args[:2]), strict=True):
        torch.testing.assert_close(our.double(), true, rtol=2e-2, atol=2e-2)
        assert our.stride() == like.stride() or our.shape[1] == 1


def test_depthwise_convolutions_stay_as_they_are_on_a_cpu() -> None:
    x, weight = image(2, 4, 7, 9), image(4, 1, 3, 3)
    geometry = ([1, 1], [1, 1], [1, 1], False, [0, 0], 4)

    def conv(x: Tensor, weight: Tensor) -> Tensor:
        return aten.convolution.default(x, weight, None, *geometry)

    assert targets(on_cuda(conv, x, weight)) == [depthwise.depthwise]
    assert targets(make_fx(conv, decomposition_table=TABLE)(x, weight)) == [aten.convolution.default]
