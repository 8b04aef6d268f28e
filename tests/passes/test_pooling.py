"""Pooling: loop nests, evaluated node by node, against float64; what clusters hold beside it."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_compiler as fc
from fusion_compiler.ir import dag
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.loops import INNER, resized
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.passes.fuse.cluster import plan
from fusion_compiler.passes.lower.lower import lower
from fusion_compiler.passes.lower.simplify import simplify
from fusion_compiler.passes.lower.space import Illegal
from tests.exactness import not_as_close
from tests.nest_values import stored
from tests.passes.test_windows import (
    AFTER,
    BEFORE,
    Recorder,
    check,
    graph,
    law,
    ops_of,
    outputs,
    sized,
)
from tests.pooling import POOLINGS, Pooling, pooling_cases

H200 = device_spec("h200")
AVERAGES = ("average", "average gradient")


def around(case: Pooling, name: str, before: str = "nothing", after: str = "nothing") -> Callable[..., Any]:
    def run(*operands: Tensor) -> Any:
        return AFTER[after](POOLINGS[name](case, *map(BEFORE[before], operands)))

    return run


@pytest.mark.parametrize("name", POOLINGS)
def test_a_nest_gives_what_a_library_computes(name: str) -> None:
    for case in pooling_cases(60):
        check(around(case, name), *case.tensors(torch.float32))


@pytest.mark.sample(12)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", POOLINGS)
def test_what_is_around_pooling_is_in_its_nest(name: str, before: str, after: str) -> None:
    for case in pooling_cases(6):
        check(around(case, name, before, after), *case.tensors(torch.float32))


@pytest.mark.parametrize("name", ["maximum", "place"])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 1.0], ids=str)
def test_maxima_take_what_eager_takes(name: str, value: float) -> None:
    """Both take the first of equal elements, the last of several NaN, and the first -inf inside the image."""
    for case in pooling_cases(10):
        x, gradient = case.tensors(torch.float32)
        for share in (0.3, 1.0):
            check(around(case, name), x.masked_fill(torch.rand_like(x) < share, value), gradient)


@pytest.mark.parametrize("name", AVERAGES)
def test_in_16_bits_nothing_is_rounded_but_what_is_stored(name: str) -> None:
    for case in pooling_cases(10):
        args = case.tensors(torch.bfloat16)
        built = graph(around(case, name, "numbers", "twice"), *args)
        recorder = Recorder(built)
        recorder.run(*(arg.double() for arg in args))
        (result,) = outputs(built)
        loops = simplify(lower(built, ops_of(built), (result,)))
        assert not [node for node in loops.nodes if "rounding" in dict(getattr(node, "operands", ()))]
        ours = stored(loops, recorder.values, {result: recorder.values[result].bfloat16()})[result]
        torch.testing.assert_close(ours, recorder.values[result].bfloat16(), rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("name", ["average", "average gradient"])
def test_sizes_may_be_symbols(name: str) -> None:
    for case in pooling_cases(8):
        args = case.tensors(torch.float32)
        function = around(case, name, "numbers", "twice")
        gm = make_fx(function, decomposition_table(), tracing_mode="symbolic")(*args)
        built = dag.build(gm)
        hints = dag.size_hints([n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")])
        wide = [arg.double() for arg in args]
        (result,) = outputs(built)
        loops = resized(simplify(lower(built, ops_of(built), (result,))), functools.partial(sized, hints))
        truth = function(*wide)
        ours = stored(loops, dict(zip(built.inputs, wide, strict=True)), {result: truth})[result]
        torch.testing.assert_close(ours, truth, rtol=1e-9, atol=1e-9)


def pooling(kernel: int, stride: int, padding: int = 0, **more: Any) -> Pooling:
    geometry = (kernel, kernel), (stride, stride), (padding, padding)
    named: Any = {"ceil_mode": False, "count_include_pad": True, "divisor_override": None} | more
    return Pooling(2, 4, (8, 6), *geometry, **named, last=(True, True), seed=0)


def test_windows_side_by_side_have_a_gradient_without_taps() -> None:
    for case, taps in ((pooling(2, 2), 0), (pooling(2, 3), 0), (pooling(3, 2, 1), 2)):
        loops = check(around(case, "average gradient"), *case.tensors(torch.float32))
        assert sum(axis.group == INNER for axis in loops.axes) == taps


def test_a_divisor_is_a_number_where_all_windows_have_as_many_places() -> None:
    borders = pooling(3, 2, 1, count_include_pad=False)
    for case, is_number in ((pooling(3, 2, 1), True), (borders, False), (pooling(2, 2), True)):
        loops = check(around(case, "average"), *case.tensors(torch.float32))
        assert ("minimum" in "".join(loops.names)) is not is_number or "maximum" in "".join(loops.names)


def test_averages_of_whole_numbers_stay_a_call() -> None:
    with pytest.raises(Illegal, match="whole numbers"):
        check(lambda x: F.avg_pool2d(x, 2), torch.randint(0, 9, (1, 2, 4, 4)))


def normalized(pool: Callable[[Tensor], Tensor], x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y = F.batch_norm(pool(x), bias, bias.abs(), weight, bias)
    return F.silu(y)


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "3 x 3 by 2": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "2 x 2": lambda x: F.avg_pool2d(x, 2),
    "3 x 3": lambda x: F.avg_pool2d(x, 3, 1, 1, count_include_pad=False),
    "with the last": lambda x: F.avg_pool2d(x, 3, 2, 0, True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_pooling_a_norm_in_inference_and_an_activation_are_one_cluster(
    name: str, order: torch.memory_format, dtype: torch.dtype
) -> None:
    x = torch.randn(8, 64, 28, 28, dtype=dtype).contiguous(memory_format=order)
    weight, bias = torch.randn(64, dtype=dtype), torch.randn(64, dtype=dtype)
    function = functools.partial(normalized, POOLS[name])
    built = graph(function, x, weight, bias)
    fused = plan("graph", built, H200, {})
    (cluster,) = fused.clusters
    assert not fused.leftovers and any("avg_pool2d" in op for op in cluster.ops)


def test_an_activation_before_windows_side_by_side_is_in_their_nest() -> None:
    x = torch.randn(2, 4, 8, 6)
    apart = law(lambda x: F.avg_pool2d(F.silu(x), 2, 2), x)
    overlapping = law(lambda x: F.avg_pool2d(F.silu(x), 3, 2), x)
    assert apart is None
    assert overlapping is not None and "for each window that reads it" in overlapping[1]


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", POOLS)
def test_averages_are_in_clusters_both_ways(
    name: str, order: torch.memory_format, dtype: torch.dtype
) -> None:
    def fn(x: Tensor) -> Tensor:
        return POOLS[name]((x * 2).sin()).sigmoid()

    x = torch.randn(2, 3, 8, 9, dtype=dtype).contiguous(memory_format=order)
    fast: Any = fc.compile(fn, backend="interpret", strict=True)
    sent = torch.randn_like(fn(x))
    exact = step(fn, x.double(), sent.double())
    ours, eager = (step(function, x, sent) for function in (fast, fn))
    for our, their, true in zip(ours, eager, exact, strict=True):
        assert our.stride() == their.stride()
        assert not_as_close(our, their, true) is None
    forward, backward = fast.plan
    assert not forward.leftovers and not backward.leftovers
    assert not [op for op in forward.dag.outputs if op.startswith("sin")], "no gradient needs what is pooled"


def step(function: Any, x: Tensor, sent: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    result = function(leaf)
    return result.detach(), torch.autograd.grad(result, leaf, sent)[0]


def test_gradients_of_an_empty_batch() -> None:
    x = torch.randn(0, 1, 3, 3, requires_grad=True)
    result = fc.compile(lambda x: F.avg_pool2d(x, 2), backend="interpret", strict=True)(x)
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert result.shape == (0, 1, 1, 1) and gradient.shape == x.shape
