"""Maxima over windows: eager's, their gradients too, in the clusters around them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_compiler as fc
from fusion_compiler.ops.own.group_norm import group_norm
from fusion_compiler.ops.own.max_pool import max_pool
from fusion_compiler.passes.rewrites.pools import MAX_POOL

# kernel, stride, padding, ceil_mode
GEOMETRIES: dict[str, tuple[Any, ...]] = {
    "3 x 3 by 2": ([3, 3], [2, 2], [1, 1], False),
    "side by side": ([2, 2], [2, 2], [0, 0], False),
    "beyond the image": ([3, 3], [2, 2], [1, 1], True),
    "by 1": ([3, 3], [1, 1], [1, 1], False),
    "by 3": ([4, 4], [3, 3], [2, 1], True),
    "flat": ([1, 8], [1, 5], [0, 4], False),
    "all": ([2, 3], [1, 2], [1, 1], False),
}
IMAGES = {
    "random": torch.randn,
    "equal": lambda *shape: torch.randint(0, 2, shape).float(),
    "nan": lambda *shape: torch.randn(shape).masked_fill(torch.rand(shape) < 0.2, math.nan),
    "infinite": lambda *shape: torch.full(shape, -math.inf),
}


def pooled(x: Tensor, geometry: tuple[Any, ...]) -> Tensor:
    kernel, stride, padding, ceil_mode = geometry
    return F.max_pool2d(x, kernel, stride, padding, ceil_mode=ceil_mode)


def with_gradient(function: Any, x: Tensor, sent: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    leaf = x.detach().requires_grad_()
    result = function(leaf)
    sent = torch.randn_like(result) if sent is None else sent
    return result.detach(), torch.autograd.grad(result, leaf, sent)[0], sent


@pytest.mark.parametrize("kind", IMAGES)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_the_operator_takes_what_eager_takes(name: str, kind: str) -> None:
    """Both take the first of equal elements, the last of several NaN, and the first -inf inside the image."""
    geometry = GEOMETRIES[name]
    for shape in ((2, 3, 7, 9), (3, 8, 10)):
        x = IMAGES[kind](*shape).double()
        value, slope, sent = with_gradient(lambda x: pooled(x, geometry), x)
        ours, gradient, _ = with_gradient(lambda x: max_pool(x, *geometry)[0], x, sent)
        torch.testing.assert_close(ours, value, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(gradient, slope, rtol=1e-14, atol=1e-14)


@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_pooling_is_in_a_cluster_both_ways(name: str, order: torch.memory_format, dtype: torch.dtype) -> None:
    geometry = GEOMETRIES[name]

    def fn(x: Tensor) -> Tensor:
        return pooled((x * 2).relu(), geometry).sin()

    x = torch.randn(2, 3, 8, 9, dtype=dtype).contiguous(memory_format=order)
    fast: Any = fc.compile(fn, backend="interpret", strict=True)
    exact, slope, wide = with_gradient(fn, x.double())
    ours, gradient, _ = with_gradient(fast, x, wide.to(dtype))
    eager, theirs, _ = with_gradient(fn, x, wide.to(dtype))
    for our, their, true in ((ours, eager, exact), (gradient, theirs, slope)):
        assert our.stride() == their.stride()
        error, allowed = ((v.double() - true).abs().max().item() for v in (our, their))
        assert error <= 2 * allowed + torch.finfo(dtype).eps
    forward, backward = fast.plan
    assert not forward.leftovers and not backward.leftovers
    inputs = [backward.dag.op(n).outputs[0] for n in backward.dag.inputs]
    saved, shapes = [meta.dtype for meta in inputs], [meta.shape for meta in inputs]
    if name in ("3 x 3 by 2", "side by side"):
        # The choice takes fewer bytes than the image, of which nothing is saved.
        assert torch.int8 in saved and all(shape != x.shape for shape in shapes)


def relu_of_pooled(x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu(x * 2), 3, 2, 1)


def relu_in_place(x: Tensor) -> Tensor:
    return F.max_pool2d(F.relu_(x * 2), 3, 2, 1)


def relu_read_twice(x: Tensor) -> Any:
    y = F.relu(x * 2)
    return F.max_pool2d(y, 3, 2, 1) + y.sum()


def relu_of_what_is_read(x: Tensor) -> Any:
    y = x * 2
    return F.max_pool2d(F.relu_(y), 3, 2, 1) + y.sum()


def relu_of_a_view(x: Tensor) -> Any:
    y = x * 2
    return F.max_pool2d(F.relu_(y[1:]), 3, 2, 1) + y.sum()


@pytest.mark.parametrize(
    ("fn", "is_behind"),
    [
        (relu_of_pooled, True), (relu_in_place, True), (relu_read_twice, False),
        (relu_of_what_is_read, False), (relu_of_a_view, False),
    ],
)  # fmt: skip
def test_relu_that_pooling_alone_reads_is_computed_behind_it(fn: Any, is_behind: bool) -> None:
    x = torch.randint(-2, 3, (2, 3, 8, 9)).float()  # equal elements, and zeros, in most windows
    gm = make_fx(fn, pre_dispatch=True)(x)
    new, notes = MAX_POOL.apply(gm)
    targets = [getattr(n.target, "_opname", "") for n in new.graph.nodes]
    relu = next(i for i, name in enumerate(targets) if name in ("relu", "relu_"))
    assert (relu > targets.index("max_pool")) is is_behind and [note.is_done for note in notes] == [True]
    sent = torch.randint(-4, 5, fn(x).shape).float()  # whose sums are exact in any order
    value, slope, _ = with_gradient(fn, x, sent)
    ours, gradient, _ = with_gradient(new, x, sent)
    assert torch.equal(ours, value) and torch.equal(gradient, slope)


@pytest.mark.parametrize(
    "pool",
    [
        lambda x: F.max_pool2d(x, 2, dilation=2),
        lambda x: F.max_pool2d(x, 5),
        lambda x: F.max_pool2d(x, 2, 3),
        lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    ],
    ids=["dilated", "large", "with gaps", "indices"],
)
def test_other_pooling_stays_a_call(pool: Any) -> None:
    x = torch.randn(1, 2, 12, 12, dtype=torch.float64)
    fast: Any = fc.compile(lambda x: pool(x * 2) + 1, backend="interpret")
    torch.testing.assert_close(fast(x), pool(x * 2) + 1)
    assert any("max_pool2d" in item.target for item in fast.plan[0].leftovers)


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last], ids=str)
def test_the_operators_are_well_defined(order: torch.memory_format) -> None:
    """Their fakes, gradients and schemas agree with what they compute."""
    x = torch.randn(2, 4, 6, 5, dtype=torch.float64).contiguous(memory_format=order).requires_grad_()
    weight, bias = (torch.randn(4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.library.opcheck(max_pool, (x, *GEOMETRIES["all"]))
    torch.library.opcheck(group_norm, (x, weight, bias, 2, 1e-5))
