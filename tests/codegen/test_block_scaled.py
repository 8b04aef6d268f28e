"""Clusters that end in a block-scaled quantisation: one kernel with its scales, where a tile holds a row."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusion_compiler as fc
from benchmarks.kernels.block_scaled import F8, groups_of_128, layer_norm, mx, rms_norm
from benchmarks.kernels.block_scaled import swiglu as swiglu_of
from fusion_compiler.codegen.emit import emit
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import device_spec
from tests.exactness import Compiled, wide

Quantise = Callable[[Tensor], tuple[Tensor, ...]]


def swiglu(x: Tensor, w: Tensor) -> Tensor:
    return swiglu_of(*x.chunk(2, -1))


def gelu(x: Tensor, w: Tensor) -> Tensor:
    return F.gelu(x)


def check(ours: tuple[Tensor, ...], eager: tuple[Tensor, ...], truth: tuple[Tensor, ...]) -> None:
    """Check that dequantised values are as close to the truth as eager's, and that few quantised ones
    differ."""
    mine, eagers = (
        q.double().unflatten(-1, (s.shape[-1], -1)) * s.double()[..., None] for q, s in (ours, eager)
    )
    exact = truth[0].unflatten(-1, mine.shape[-2:])
    assert ours[0].dtype is F8 and ours[1].dtype is eager[1].dtype
    assert (mine - exact).abs().max() <= 1.1 * (eagers - exact).abs().max()
    torch.testing.assert_close(ours[1], eager[1], rtol=0.01, atol=0)
    differ = (ours[0].float() != eager[0].float()).double().mean()
    assert differ < 2e-3, f"{differ:.2%} of the quantised differ"


@pytest.mark.sample(20)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("quantise", [groups_of_128, mx])
@pytest.mark.parametrize("function", [rms_norm, layer_norm, swiglu, gelu])
@pytest.mark.parametrize("shape", [(5, 256), (3, 2, 1280), (2, 20480), (1, 65536), (2, 131072)], ids=str)
def test_quantised_results_are_as_close_as_eagers(
    function: Callable[..., Tensor], quantise: Quantise, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, w = torch.randn(*shape, dtype=dtype), torch.randn(shape[-1], dtype=dtype)

    def quantised(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        return quantise(function(x, w))

    fast = fc.compile(quantised, backend="interpret", strict=True)
    with torch.no_grad():
        ours = fast(x, w)
        check(ours, quantised(x, w), (function(*wide((x, w))),))
    (plan,) = fast.plan
    normalised_first = shape[-1] > 8192 and function in (rms_norm, layer_norm)  # one tile may be slower
    assert len(plan.clusters) <= 1 + normalised_first and not plan.leftovers, plan


@pytest.mark.sample(16)
@pytest.mark.parametrize("schedule", range(8))
@pytest.mark.parametrize("quantise", [groups_of_128, mx])
@pytest.mark.parametrize("shape", [(7, 384), (6, 512)], ids=str)
def test_any_placement(schedule: int, quantise: Quantise, shape: tuple[int, int]) -> None:
    def quantised(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, ...]:
        y = x + r
        return (*quantise(rms_norm(y, w)), y)

    x, w, r = (
        torch.randn(*shape).bfloat16(),
        torch.randn(shape[-1]).bfloat16(),
        torch.randn(*shape).bfloat16(),
    )
    fast = Compiled(quantised, schedule=schedule)
    with torch.no_grad():
        ours, eager = fast(x, w, r), quantised(x, w, r)
        check(ours[:2], eager[:2], (rms_norm((x + r).double(), w.double()),))
    assert torch.equal(ours[2], eager[2])
    (plan,) = fast.plans
    assert len(plan.clusters) == 1 and not plan.leftovers, plan


def test_scales_are_computed_once_for_each_block() -> None:
    """Logarithms are taken of a thirty-second of the elements, and so are reciprocals."""
    fast = Compiled(lambda x, w: mx(rms_norm(x, w)))
    with torch.no_grad():
        fast(torch.randn(4, 512), torch.randn(512))
    (runner,) = fast.compiler.runners.values()
    source = runner.candidates[0].kernels[0].source
    steps = ("max_1 = fm.maximum_of(abs_1, 2, True)", "clamp = tl.maximum(max_1,", "log2 = tl.log2(clamp)",
             "sub = floor - 8", "exp2 = libdevice.exp2(sub)", "per_exp2 = 1.0 / exp2")  # fmt: skip
    assert all(step in source for step in steps) and source.count(" / ") == 1, source


def test_a_tile_is_summed_at_once_and_a_weight_is_loaded_behind_the_sums() -> None:
    """Threads wait for each other once a sum, and the weight, which all programs read, needs no registers
    until then."""
    with FakeTensorMode(), torch.no_grad():
        x, w = torch.empty(8192, 4096, dtype=torch.bfloat16), torch.empty(4096, dtype=torch.bfloat16)
        (plan,) = fc.explain(lambda x, w: groups_of_128(layer_norm(x, w)), x, w, device="h200").plans
    (cluster,) = plan.clusters
    key = canonical(cluster, plan.dag)
    first, *_ = emit(key.nests, cluster.name, "", {b.name: b for b in key.buffers}, device_spec("h200"))
    source = first.kernels[0].source
    assert source.count("tl.sum(") == source.count("axis=None, keep_dims=True)") == 2, source
    assert source.rindex("tl.sum(") < source.index("tl.load(in1_ptr"), source


def test_values_of_blocks_that_are_only_stored_come_from_the_same_kernel() -> None:
    """A row of a nest of rows would leave partial results for a second kernel."""

    def largest(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = rms_norm(x, w)
        return y, y.unflatten(-1, (-1, 64)).abs().amax(-1)

    x, w, fast = torch.randn(5, 256), torch.randn(256), Compiled(largest)
    with torch.no_grad():
        for ours, exact in zip(fast(x, w), largest(x.double(), w.double()), strict=True):
            torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-6)
    (runner,) = fast.compiler.runners.values()
    assert len(runner.candidates[0].kernels) == 1


def test_padding_and_a_weight_that_all_programs_load_cost_no_memory_traffic() -> None:
    """A tile of 40 blocks is padded to 64, and the weight stays in the L1 cache."""
    device = device_spec("h200")
    with FakeTensorMode(), torch.no_grad():
        x, w = torch.empty(8192, 5120, dtype=torch.bfloat16), torch.empty(5120, dtype=torch.bfloat16)
        (plan,) = fc.explain(lambda x, w: groups_of_128(rms_norm(x, w)), x, w, device="h200").plans
    (cluster,) = plan.clusters
    copied = 1e6 * (cluster.cost.bytes_read + cluster.cost.bytes_written) / device.copy_bandwidth
    assert cluster.cost.us < 1.3 * copied


@pytest.mark.parametrize("group", [2, 48, 256])
def test_other_groups_are_right_too(group: int) -> None:
    def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.layer_norm(x, (x.shape[-1],)).unflatten(-1, (-1, group))
        scale = y.abs().amax(-1, keepdim=True)
        return (y / scale).flatten(-2), scale.squeeze(-1)

    x = torch.randn(4, 768)
    torch.testing.assert_close(fc.compile(quantised, backend="interpret")(x), quantised(x))


def test_sums_and_minima_of_blocks_with_what_is_made_of_them() -> None:
    def centred(x: Tensor) -> tuple[Tensor, ...]:
        y = torch.softmax(x, -1).unflatten(-1, (-1, 16))
        mean, least = y.sum(-1, keepdim=True) / 16, y.amin(-1, keepdim=True)
        return (
            (y - mean).flatten(-2),
            mean.squeeze(-1) * 2,
            (y - least).sum((-1, -2)),
            (mean - least).squeeze(-1),
        )

    x = torch.randn(6, 160)
    fast = fc.compile(centred, backend="interpret", strict=True)
    torch.testing.assert_close(fast(x), centred(x), rtol=1e-5, atol=1e-6)
    (plan,) = fast.plan
    assert len(plan.clusters) == 1, plan


def test_sums_over_rows_stand_beside_norms_of_the_rows() -> None:
    """The first norm is over one axis, the second over the next: neither may take the other's place."""

    def twice(x: Tensor, w: Tensor) -> Tensor:
        y = (x - x.mean(-2, True)) / (x.var(-2, correction=0, keepdim=True) + 0.1).sqrt()
        return F.rms_norm(y, y.shape[-1:], w, 1e-3)

    inputs = torch.randn(2, 2, 8), torch.randn(8)
    exact = twice(*(x.double() for x in inputs))
    torch.testing.assert_close(Compiled(twice)(*inputs).double(), exact, rtol=1e-5, atol=1e-5)
