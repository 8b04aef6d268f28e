"""The operators of depthwise convolutions against float64, by their library form and on FakeTensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.ir import dag
from fusion_compiler.ops.own import depthwise
from fusion_compiler.ops.own.channel_order import order_of_result
from fusion_compiler.ops.table import Kind, is_always_held
from tests.convolutions import Depthwise, depthwise_cases
from tests.exactness import not_as_close

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def results(case: Depthwise, x: Tensor, weight: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """The convolution and its two gradients."""
    return (
        depthwise.depthwise(x, weight, *case.geometry),
        depthwise.depthwise_input_gradient(gradient, weight, x.shape, *case.geometry),
        depthwise.depthwise_weight_gradient(gradient, x, case.kernel, *case.geometry),
    )


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_values_and_gradients_are_those_of_a_convolution_in_float64(dtype: torch.dtype) -> None:
    for case in depthwise_cases(40):
        x, weight, gradient = case.tensors(dtype)
        truth = case.eager(x.double(), weight.double(), gradient.double())
        for ours, true in zip(results(case, x, weight, gradient), truth, strict=True):
            assert ours.dtype is dtype
            # A sum in float32 at least, rounded once: of 16 bits the nearest number or its neighbour.
            noise = 2e-6 * (1 + true.abs().max().item())
            assert not_as_close(ours, true.to(dtype), true, noise) is None, case


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_fake_results_have_the_strides_of_real_ones(dtype: torch.dtype) -> None:
    for case in depthwise_cases(20):
        tensors = case.tensors(dtype)
        with FakeTensorMode() as mode:
            fakes = results(case, *map(mode.from_tensor, tensors))
        for real, fake in zip(results(case, *tensors), fakes, strict=True):
            assert (real.shape, real.dtype) == (fake.shape, fake.dtype), case
            assert steps(real) == steps(fake), case


def test_a_result_has_channels_last_if_an_operand_has() -> None:
    for case in depthwise_cases(20):
        x, weight, gradient = case.tensors(torch.float32)
        values = results(case, x, weight, gradient)
        orders = [order_of_result(*pair) for pair in ((x, weight), (gradient, weight), (gradient, x))]
        assert all(y.is_contiguous(memory_format=f) for y, f in zip(values, orders, strict=True))


def steps(x: Tensor) -> list[Any]:
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def test_a_convolution_of_no_images_has_a_gradient_of_zeros() -> None:
    x, weight = torch.randn(0, 3, 5, 4), torch.randn(3, 1, 2, 2)
    geometry = ([1, 1], [0, 0], [1, 1])
    y = depthwise.depthwise(x, weight, *geometry)
    assert y.shape == (0, 3, 4, 3)
    assert not depthwise.depthwise_weight_gradient(y, x, [2, 2], *geometry).any()
    assert depthwise.depthwise_input_gradient(y, weight, x.shape, *geometry).shape == x.shape


def test_the_graph_counts_two_operations_for_each_tap() -> None:
    x, weight, gradient = torch.randn(2, 3, 9, 8), torch.randn(3, 1, 3, 2), torch.randn(2, 3, 4, 8)
    geometry: Any = ([2, 1], [0, 1], [1, 2])

    def run(x: Tensor, weight: Tensor, gradient: Tensor) -> Any:
        return (
            depthwise.depthwise(x, weight, *geometry),
            depthwise.depthwise_input_gradient(gradient, weight, x.shape, *geometry),
            depthwise.depthwise_weight_gradient(gradient, x, [3, 2], *geometry),
        )

    built = dag.build(make_fx(run, tracing_mode="fake")(x, weight, gradient))
    ops = [built.op(name) for name in built.outputs]
    assert [op.kind for op in ops] == [Kind.CONTRACTION] * 3
    assert [op.flops for op in ops] == [2 * 6 * gradient.numel()] * 3


def test_only_a_kernel_for_each_channel_is_depthwise() -> None:
    x, weight = torch.randn(2, 4, 5, 5), torch.randn(4, 1, 3, 3)
    assert depthwise.is_depthwise(x, weight, False, 4)
    assert not depthwise.is_depthwise(x, weight, True, 4)
    assert not depthwise.is_depthwise(x, torch.randn(8, 1, 3, 3), False, 4)
    assert not depthwise.is_depthwise(x, torch.randn(4, 2, 3, 3), False, 2)
    assert not depthwise.is_depthwise(x.double(), weight.double(), False, 4)
    assert not depthwise.is_depthwise(torch.randn(2, 4, 5, 5, 5), torch.randn(4, 1, 3, 3, 3), False, 4)


def test_a_library_may_be_called_for_contractions_alone() -> None:
    aten = torch.ops.aten
    assert is_always_held(aten.add.Tensor) and is_always_held(aten.sum.dim_IntList)
    assert not any(map(is_always_held, (*depthwise.CALLS, aten.mm.default, aten.convolution.default)))
