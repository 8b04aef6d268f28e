"""Nests whose reductions are over different axes: a tile holds the axes that are reduced."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.codegen.emit import fills_threads
from fusion_compiler.ir.device import DeviceSpec, device_spec
from fusion_compiler.ir.loops import INNER, LARGEST_TILE, Load, LoopNest
from fusion_compiler.schedule import tiles
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.verifier import refusal
from tests.exactness import Compiled, Schedules, not_as_close, rounding_noise, wide


def sinkhorn(x: Tensor) -> Tensor:
    """Rows, then columns, then rows again sum to one."""
    e = (x - x.amax((-2, -1), keepdim=True)).exp()
    e = e / e.sum(-1, keepdim=True)
    e = e / e.sum(-2, keepdim=True)
    return e / e.sum(-1, keepdim=True)


def doubly_centred(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, cols = x.mean(-1, keepdim=True), x.mean(-2, keepdim=True)
    centred = x - rows - cols + x.mean((-2, -1), keepdim=True)
    return centred, centred.square().sum((-2, -1), keepdim=True)


def pooled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Columns weighted by how large their row is: a sum over rows of what a reduction along them gives."""
    scores = x.square().sum(-1, keepdim=True)
    shares = (scores - scores.amax(-2, keepdim=True)).exp()
    return (shares * x).sum(-2, keepdim=True), shares.sum(-2, keepdim=True)


def weighted(x: Tensor) -> Tensor:
    """One of the sums has no columns."""
    shares = x[..., :1].sigmoid()
    return (shares * x).sum(-2, keepdim=True) / shares.sum(-2, keepdim=True)


PROGRAMS: tuple[Callable[[Tensor], object], ...] = (sinkhorn, doubly_centred, pooled, weighted)


def checked(f: Callable[[Tensor], object], x: Tensor, number: int = 0) -> Compiled:
    """Return a compiled function whose results are as close to float64 as eager's."""
    fast = Compiled(f, number)
    with torch.no_grad():
        ours, eager, exact = fast(x), f(x), f(wide(x))
    tuples = (list(r) if isinstance(r, tuple | list) else [r] for r in (ours, eager, exact))
    results = list(zip(*tuples, strict=True))
    noise = rounding_noise([x], [truth for *_, truth in results])
    for our, theirs, truth in results:
        assert not (problem := not_as_close(our, theirs, truth, noise)), problem
    return fast


def in_one_tile(fast: Compiled) -> bool:
    """True if one kernel computes all of a program under a placement of tiles."""
    (runner,) = fast.compiler.runners.values()
    (cluster,) = fast.plans[0].clusters
    return any(axis.group == INNER for axis in cluster.loops.axes) and len(runner.candidates[0].kernels) == 1


@pytest.mark.sample(20)
@pytest.mark.parametrize("number", range(8))
@pytest.mark.parametrize("shape", [(3, 2, 16, 32), (5, 7, 24), (4, 1, 33)], ids=str)
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_every_placement(f: Callable[[Tensor], object], shape: tuple[int, ...], number: int) -> None:
    checked(f, torch.randn(shape), number)


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_one_kernel_for_all_of_it(f: Callable[[Tensor], object], dtype: torch.dtype) -> None:
    assert in_one_tile(checked(f, torch.randn(6, 3, 24, 40, dtype=dtype)))


def test_infinities_and_nan() -> None:
    x = torch.randn(7, 6, 16)
    x[0, 0, 0], x[1, 1, 1], x[2] = float("inf"), float("nan"), float("-inf")
    for f in PROGRAMS:
        checked(f, x)


def chain(seed: int) -> Callable[[Tensor], tuple[Tensor, ...]]:
    """Return a function of a tensor of five dimensions: three reductions over different ones of them, each of
    what the one before it has changed."""
    dice = random.Random(seed)
    dims = list[tuple[int, ...]]()
    while len(dims) < 3:
        drawn = tuple(sorted(dice.sample(range(1, 5), dice.randint(1, 3))))
        if drawn not in dims:
            dims.append(drawn)
    kinds = [dice.choice(("sum", "amax", "mean", "amin", "logsumexp")) for _ in dims]

    def function(x: Tensor) -> tuple[Tensor, ...]:
        y, reduced = x, list[Tensor]()
        for kind, over in zip(kinds, dims, strict=True):
            value = getattr(torch, kind)(y, over, keepdim=True)
            y = torch.tanh(y - value)
            reduced.append(value)
        return (y, *reduced)

    return function


@pytest.mark.sample(12)
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (0, 2, 4, 1, 3), (4, 3, 2, 1, 0)], ids=str)
@pytest.mark.parametrize("seed", range(30))
def test_reductions_over_any_of_five_dimensions_are_one_kernel(
    seed: int, order: tuple[int, ...], number: int
) -> None:
    """order: of the dimensions in memory, of which a tile holds the innermost one."""
    sizes, f = (3, 4, 5, 2, 8), chain(seed)
    x = torch.randn([sizes[d] for d in order]).permute([order.index(d) for d in range(5)])
    fast = checked(f, x, number)
    reduced = {d for result in f(x)[1:] for d in range(5) if result.shape[d] != x.shape[d]}
    if order[-1] in reduced:
        assert in_one_tile(fast)


@pytest.mark.parametrize("seed", range(4))
def test_gradients_of_reductions_over_any_dimensions(seed: int) -> None:
    f, results = chain(seed), list[list[Tensor]]()
    x = torch.randn(2, 4, 3, 2, 8)
    weights = [torch.randn_like(r) for r in f(x)]
    for function, dtype in ((Compiled(f), torch.float32), (f, torch.float32), (f, torch.float64)):
        leaf = x.detach().to(dtype).requires_grad_()
        outs: Any = function(leaf)
        loss = sum((out * w.to(dtype)).sum() for out, w in zip(outs, weights, strict=True))
        results.append([*outs, *torch.autograd.grad(loss, leaf)])
    for ours, eager, truth in zip(*results, strict=True):
        assert not (problem := not_as_close(ours, eager, truth)), problem


def test_a_norm_over_channels_of_a_norm_over_pixels() -> None:
    def block(x: Tensor, w: Tensor) -> Tensor:
        y = F.instance_norm(x)
        return F.layer_norm(y.transpose(1, 2), (x.shape[1],), w)

    x, w = torch.randn(3, 16, 20), torch.randn(16)
    fast = Compiled(block)
    ours, eager, truth = fast(x, w), block(x, w), block(x.double(), w.double())
    assert not (problem := not_as_close(ours, eager, truth)), problem


def scores(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    wide = [x if x.dtype is torch.float64 else x.float() for x in (q, k)]
    s = (wide[0][:, :, None] * wide[1][:, None]).sum(-1, keepdim=True)
    peak = s.amax(-2, keepdim=True)
    return peak, (s - peak).exp().sum(-2, keepdim=True)


def placed(word: str) -> Schedules:
    """Return what has the placements of a nest with a word in them."""

    def schedules(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[Any, ...]:
        every = tiles.candidates(Analysis(loops))
        return tuple(p for p in every if word in str(p) and refusal(loops, p) is None)

    return schedules


@pytest.mark.parametrize("word", ["TENSOR_CORE", "UNROLL"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("queries", "keys", "size"), [(4, 32, 16), (3, 40, 24), (8, 16, 64)])
def test_queries_of_a_head_share_the_load_of_its_keys(
    queries: int, keys: int, size: int, dtype: torch.dtype, word: str
) -> None:
    """Tensor cores take no more bits than two numbers of bfloat16 have, so that no float32 goes there."""
    q, k = torch.randn(3, queries, size).to(dtype), torch.randn(3, keys, size).to(dtype)
    is_exact = word == "UNROLL" or dtype is not torch.float32
    fast = Compiled(scores, schedules=placed(word if is_exact else "LANES"))
    with torch.no_grad():
        results = fast(q, k), scores(q, k), scores(q.double(), k.double())
    for ours, eager, truth in zip(*results, strict=True):
        assert not (problem := not_as_close(ours, eager, truth)), problem
    (runner,) = fast.compiler.runners.values()
    assert (word in runner.candidates[0].schedule) == is_exact
    if is_exact:
        source = runner.candidates[0].kernels[0].source
        assert source.count("tl.load(") == (2 if word == "TENSOR_CORE" else 1 + queries)


def test_what_is_not_there_is_no_infinity_times_zero() -> None:
    """Lanes behind the last key hold no number of their own: exp(0 - peak) is infinite for such a peak."""

    def weighted_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s = (q[:, :, None] * k[:, None]).sum(-1, keepdim=True)
        p = (s - s.amax(-2, keepdim=True)).exp()
        return (p * v[:, None]).sum(-2)

    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = (torch.randn(2, n, 16) for n in (4, 19, 19))
        inputs = [(-9.0 - x.abs()).to(dtype) if i < 2 else x.to(dtype) for i, x in enumerate((q, -k, v))]
        inputs[0] = -inputs[0]
        fast = Compiled(weighted_values)
        ours, eager = fast(*inputs), weighted_values(*inputs)
        truth = weighted_values(*(x.double() for x in inputs))
        assert not (problem := not_as_close(ours, eager, truth)), problem


def test_a_tile_that_is_too_large_is_several_kernels() -> None:
    side = 256
    assert side * side > LARGEST_TILE
    fast = checked(sinkhorn, torch.randn(2, side, side))
    assert len(fast.plans[0].clusters) > 1
    assert not any(a.group == INNER for c in fast.plans[0].clusters for a in c.loops.axes)


def test_neighbours_in_memory_are_in_one_tile() -> None:
    """Each of these would gather single elements."""
    fast = checked(lambda x: sinkhorn(x.permute(2, 0, 1)), torch.randn(8, 8, 64))
    assert not any(a.group == INNER for c in fast.plans[0].clusters for a in c.loops.axes)


def test_unknown_sizes_of_what_is_kept() -> None:
    fast: Any = fc.compile(sinkhorn, backend="interpret", strict=True)
    with torch.no_grad():
        for n in (3, 5, 17):
            x = torch.randn(n, 12, 9)
            torch._dynamo.mark_dynamic(x, 0)
            assert not (problem := not_as_close(fast(x), sinkhorn(x), sinkhorn(x.double()))), problem


def test_a_placement_is_what_the_plan_shows() -> None:
    fast = checked(sinkhorn, torch.randn(64, 16, 32))
    (runner,) = fast.compiler.runners.values()
    for candidate in runner.candidates:
        assert str(Placement.parse(candidate.schedule)) == candidate.schedule


def test_a_tile_over_an_input_that_is_overwritten_has_an_element_for_every_thread() -> None:
    """Axes that a tile holds whole count, as those that are split do."""
    (cluster,) = checked(sinkhorn, torch.randn(4, 16, 16)).plans[0].clusters
    buffers = {node.buffer for node in cluster.loops.nodes if isinstance(node, Load)}
    batch, row, col = (axis.name for axis in cluster.loops.axes)
    for warps, fills in ((1, True), (8, True), (16, False)):
        text = f"place({batch}, GRID); place({row}, LANES); place({col}, LANES); {warps} warps"
        assert fills_threads(cluster.loops, Placement.parse(text), buffers, device_spec("h200")) is fills


@pytest.mark.parametrize("shape", [(2, 8, 12, 12), (2, 4, 128, 128)], ids=["one tile", "parts"])
@pytest.mark.parametrize(("kind", "most"), [("equal", 5e-6), ("far from zero", 2**-15)])
def test_means_of_any_axes_are_corrected(shape: tuple[int, ...], kind: str, most: float) -> None:
    """Elements of a group that are all 1000.1 have just that mean, and no variance. A mean near 1000 is off
    by at most half a unit in its last place, 2^-15."""

    def fn(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, ...]:
        return F.group_norm(x, 2, w, b), x.sum((0, 2, 3))

    x = torch.full(shape, 1000.1) if kind == "equal" else torch.randn(shape) + 1000
    w, b = torch.rand(shape[1]), torch.rand(shape[1])
    compiled = Compiled(fn)
    y, _ = compiled(x, w, b)
    (plan,) = compiled.plans
    assert len(plan.clusters) == 1
    exact, _ = fn(x.double(), w.double(), b.double())
    assert (y - exact).abs().max() < most
