"""Scans along a row: values and gradients of each, alone and among neighbours, and what is refused."""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusion_compiler as fc
from benchmarks.kernels import ranking
from fusion_compiler.codegen.emit import emit
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import DeviceSpec, device_spec
from fusion_compiler.ir.loops import LoopNest, Scan
from fusion_compiler.runtime.target import compile_for
from fusion_compiler.schedule import looped, space
from fusion_compiler.schedule.analysis import Analysis
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.row_tiles import Cols, RowTile
from tests.exactness import Compiled, cramped, fits, misaligned_forms, not_as_close, rounding_noise, wide

H200 = device_spec("h200")

SCANS: dict[str, Callable[..., Tensor]] = {
    "cumsum": torch.cumsum,
    "cumprod": torch.cumprod,
    "cummax": lambda x, dim: torch.cummax(x, dim)[0],
    "cummin": lambda x, dim: torch.cummin(x, dim)[0],
    "logcumsumexp": torch.logcumsumexp,
    "where_max": lambda x, dim: torch.cummax(x, dim)[1],
    "where_min": lambda x, dim: torch.cummin(x, dim)[1],
}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.bool, torch.uint8, torch.int32, torch.int64)
SHAPES = {  # of any rank, widths of one, odd and long, along the last dimension and before it
    "one": ((3, 1), 1),
    "vector": ((37,), 0),
    "odd": ((2, 3, 61), -1),
    "long": ((3, 1000), 1),
    "before": ((2, 24, 5), 1),
    "first": ((33, 3), 0),
    "scalar": ((), 0),
    "empty": ((0, 4), 1),
    "no width": ((4, 0), 1),
}


def backwards(scan: Callable[..., Tensor], x: Tensor, dim: int) -> Tensor:
    return scan(x.flip(dim), dim).flip(dim) if x.ndim else scan(x, dim)


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Numbers near 1, so that products stay in range; few integers, so that many are equal."""
    if dtype.is_floating_point:
        return (torch.rand(shape, dtype=torch.float64) * 0.4 + 0.8).to(dtype)
    return torch.randint(0, 2 if dtype is torch.bool else 5, shape).to(dtype)


def check(fn: Callable[..., Any], x: Tensor, fast: Compiled, width: int) -> None:
    """Values and gradients of one tensor, beside eager's and float64's.

    Kernels scan in float32, as eager does on a GPU; on a CPU it does in float64. So besides there may be what
    float32 loses in log2(width) steps, of what all terms come to without their signs.
    """
    grads = x.dtype.is_floating_point
    inputs = [wide(x).requires_grad_(grads), *(x.clone().requires_grad_(grads) for _ in range(2))]
    truth, eager, ours = (f(i) for f, i in zip((fn, fn, fast), inputs, strict=True))
    steps = (8 + math.log2(max(width, 1))) / 8
    kinds = [x if x.dtype is torch.float64 else x.float()]
    noise = steps * rounding_noise(kinds, [truth])
    assert (problem := not_as_close(ours, eager, truth, noise)) is None, problem
    if not eager.requires_grad:
        return
    outer = torch.randn(truth.shape, dtype=torch.float64)
    most = torch.autograd.grad(truth, inputs[0], outer.abs(), retain_graph=True)[0]
    results = zip((truth, eager, ours), inputs, strict=True)
    gradients = [torch.autograd.grad(y, i, outer.to(y.dtype))[0] for y, i in results]
    noise = steps * rounding_noise(kinds, [most])
    assert (problem := not_as_close(gradients[2], gradients[1], gradients[0], noise)) is None, problem


@pytest.mark.sample(20)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("reverse", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("name", SCANS)
def test_each_scan_beside_float64(name: str, reverse: bool, shape: str) -> None:
    sizes, dim = SHAPES[shape]
    scan = SCANS[name]

    def fn(x: Tensor) -> Tensor:
        return backwards(scan, x, dim) if reverse else scan(x, dim)

    for dtype in (*FLOATS, *(() if name == "logcumsumexp" else INTEGERS)):
        fast = Compiled(fn)
        check(fn, drawn(sizes, dtype), fast, sizes[dim] if sizes else 1)
        assert not fast.eager_ops() - {"aten.scatter_add.default", "aten.scatter_add_.default"}


def segment_sums(x: Tensor) -> Tensor:
    """Mamba-2's decay between any two steps (Dao and Gu, 2024): what lies between them, summed."""
    size = x.shape[-1]
    below = torch.ones(size, size, dtype=torch.bool, device=x.device)
    steps = x[..., None].expand(*x.shape, size).masked_fill(~below.tril(-1), 0)
    sums = steps.cumsum(-2)
    return sums.masked_fill(~below.tril(0), -torch.inf).exp()


def decays(x: Tensor) -> Tensor:
    """Multiply x by the decay from each step to the last."""
    sums = x.cumsum(-1)
    return (sums[..., -1:] - sums).exp() * x


def probabilities(x: Tensor) -> Tensor:
    """Producers, a reduction before and one after."""
    return (x.exp() / x.exp().sum(-1, keepdim=True)).cumsum(-1).square().sum(-1, keepdim=True) * x


def distances(x: Tensor) -> Tensor:
    """Two scans of one row, in both directions."""
    forth = torch.cumsum(x, -1)
    back = torch.cumsum(x.flip(-1), -1).flip(-1)
    return torch.sigmoid(forth - back) * x


def in_turn(x: Tensor) -> Tensor:
    return torch.cumsum(torch.cummax(x.sin(), -1)[0], -1).tanh()


def of_rows(x: Tensor) -> Tensor:
    """One scan is summed over the rows, the other along them."""
    sums = torch.cumsum(x * 2, -1).tanh()
    return sums.flatten(0, -2).sum(0) + sums.sum()


def stabilized(x: Tensor) -> Tensor:
    return (x - torch.logcumsumexp(x * 2, -1)).exp()


FUSED = (segment_sums, decays, probabilities, distances, in_turn, stabilized)


@pytest.mark.parametrize(
    "schedules", [None, cramped, misaligned_forms], ids=["tuned", "cramped", "misaligned"]
)
@pytest.mark.parametrize("fn", (*FUSED, of_rows), ids=lambda fn: fn.__name__)
def test_scans_among_their_neighbours(fn: Callable[[Tensor], Tensor], schedules: Any) -> None:
    shapes: tuple[tuple[int, ...], ...] = (
        ((2, 3, 7), (2, 12)) if fn is segment_sums else ((3, 5, 61), (2, 531))
    )
    for shape in shapes:
        # a running maximum's gradient is a scatter that adds up in 16 bits
        for dtype in (torch.float32, torch.bfloat16)[: 1 if fn is in_turn else 2]:
            fast = Compiled(fn) if schedules is None else Compiled(fn, schedules=schedules)
            check(fn, torch.randn(shape).div(16).to(dtype), fast, shape[-1])
            assert not fast.eager_ops() - {"aten.scatter_add.default", "aten.scatter_add_.default"}
            kernels = 1 if fn in FUSED[1:] else 2  # a mask is made once; sums over all wait for all rows
            assert len(fast.plans[0].clusters) <= kernels


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("reverse", [False, True], ids=["forth", "back"])
def test_nan_infinities_zeros_and_ties(name: str, reverse: bool) -> None:
    special = torch.tensor([0.0, -0.0, 1.0, 1.0, -1.0, math.inf, -math.inf, math.nan])
    for seed in range(8):
        torch.manual_seed(seed)
        x = special[torch.randint(0, 5 + seed % 4, (16, 13))]

        def fn(x: Tensor) -> Tensor:
            return backwards(SCANS[name], x, 1) if reverse else SCANS[name](x, 1)

        ours, eager = Compiled(fn)(x), fn(x)
        assert torch.equal(ours.isnan(), eager.isnan())
        torch.testing.assert_close(ours, eager, equal_nan=True)


@pytest.mark.parametrize("scan", [torch.cumsum, torch.cumprod])
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.float64, torch.bfloat16])
def test_dtype_of_the_result(dtype: torch.dtype, scan: Callable[..., Tensor]) -> None:
    def fn(x: Tensor) -> Tensor:
        return scan(x, -1, dtype=dtype)

    x = torch.randint(-9, 9, (4, 33), dtype=torch.int16)
    fast = Compiled(fn)
    assert fast(x).dtype is dtype
    torch.testing.assert_close(fast(x), fn(x), rtol=0.02, atol=0)
    assert not fast.eager_ops()


def test_any_place_of_a_scan_and_rows_that_are_repeated() -> None:
    def fn(x: Tensor) -> Tensor:
        sums = x.cumsum(-1)
        return (sums[:, 3:4] + sums[:, -2:-1]) * sums

    def repeated(x: Tensor, y: Tensor) -> Tensor:
        return x.cumsum(-1)[:, None] * y

    fast, twice = Compiled(fn), Compiled(repeated)
    x, y = torch.randn(4, 33), torch.randn(4, 5, 33)
    check(fn, x, fast, 33)
    assert len(fast.plans[0].clusters) == 1
    torch.testing.assert_close(twice(x, y), repeated(x, y))


def planned(fn: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Any:
    with FakeTensorMode():
        return fc.explain(fn, *(torch.empty(s, device="cuda") for s in shapes), device="h200", **options)


def in_loops(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[RowTile | Placement, ...]:
    """Every scan in a loop over blocks of 16 columns, of several rows where these lie side by side."""
    plain, analysis = space.schedules(loops, device), Analysis(loops)
    in_blocks = analysis.scans and fits(looped, analysis, device) and not analysis.across_rows
    return (RowTile(4 if analysis.tall else 1, 16, Cols.LOOP),) if in_blocks else plain


@pytest.mark.sample(5)
@pytest.mark.parametrize("reverse", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("name", SCANS)
def test_wide_rows_go_on_from_block_to_block(name: str, reverse: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return backwards(SCANS[name], x, 1) if reverse else SCANS[name](x, 1)

    for shape in ((3, 61), (2, 64), (2, 7), (1, 200)):
        for dtype in (*FLOATS, *(() if name == "logcumsumexp" else INTEGERS)):
            check(fn, drawn(shape, dtype), Compiled(fn, schedules=in_loops), shape[1])
    x = drawn((61, 7), torch.float32).t()  # across memory: tiles of several rows
    check(fn, x, Compiled(fn, schedules=in_loops), 61)


@pytest.mark.parametrize("fn", FUSED, ids=lambda fn: fn.__name__)
def test_wide_rows_among_their_neighbours(fn: Callable[[Tensor], Tensor]) -> None:
    width = 21 if fn is segment_sums else 77
    check(fn, torch.randn(3, width).div(16), Compiled(fn, schedules=in_loops), width)


def test_rows_that_no_program_holds_are_a_loop() -> None:
    (cluster,) = (plan := planned(lambda x: (x * 2).cumsum(-1).exp(), (4, 40_000)).plans[0]).clusters
    assert not plan.leftovers
    tiles = ranking.ranked(cluster.nests[0], H200)
    assert all(isinstance(s, RowTile) and s.cols is Cols.LOOP and s.splits == 1 for s in tiles)


def test_wide_rows_in_both_directions_are_two_kernels_and_the_report_says_so() -> None:
    report = planned(distances, (4, 40_000))
    assert len(report.plans[0].clusters) == 2
    assert "40000 columns do not fit in registers" in " ".join(str(report).split())


def test_a_scan_in_another_order_than_it_is_read_is_two_kernels() -> None:
    report = planned(lambda x: x.cumsum(-1) * x.cumsum(-1).t(), (64, 64))
    assert len(report.plans[0].clusters) == 2
    assert "is needed at other rows for each column" in " ".join(str(report).split())


def test_both_results_of_a_running_maximum_are_one_kernel() -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        value, place = torch.cummax(x * 2, -1)
        return value + 1, place

    plan = planned(fn, (64, 128)).plans[0]
    (cluster,) = plan.clusters
    scans = [n for n in cluster.nests[0].nodes if isinstance(n, Scan)]
    assert [n.combine for n in scans] == ["max", "max"] and not plan.leftovers


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100", "gfx942"])
def test_machine_code(target: str) -> None:
    """Along rows and across them, of which a tile has a sector's; none of it in local memory."""
    for name, scan in SCANS.items():
        for dim in (0, 1):
            (cluster,) = (
                plan := planned(lambda x, s=scan, d=dim: s(x * 2, d), (1024, 1024)).plans[0]
            ).clusters
            key = canonical(cluster, plan.dag)
            kernels = emit(key.nests, name, "", {b.name: b for b in key.buffers}, H200)[0].kernels
            assert [compile_for(kernel, target).spills for kernel in kernels] == [0], (name, dim)


@pytest.mark.parametrize("reverse", [False, True], ids=["forth", "back"])
@pytest.mark.parametrize("name", SCANS)
def test_sizes_that_are_known_at_run_time(name: str, reverse: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        return (backwards(SCANS[name], x, 1) if reverse else SCANS[name](x, 1)) * 2

    fast = fc.compile(fn, backend="interpret", strict=True, dynamic=True)
    for rows, width in ((6, 33), (14, 4), (3, 200)):
        x = drawn((rows, width), torch.float32)
        torch.testing.assert_close(fast(x), fn(x))


class Switch(torch.nn.Module):
    """A router of one expert a token, each of which takes so many: where a token stands is a running sum."""

    def __init__(self, width: int, experts: int, most: int) -> None:
        super().__init__()
        self.gate, self.experts, self.most = torch.nn.Linear(width, experts, bias=False), experts, most

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        chances = self.gate(x).softmax(-1)
        hot = torch.nn.functional.one_hot(chances.argmax(-1), self.experts)
        place = (hot.cumsum(0) * hot).sum(-1) - 1
        weights = (chances * hot).sum(-1) * (place < self.most)
        return weights, place


def test_a_router_is_two_products_and_the_kernels_between_them() -> None:
    model, x = Switch(32, 4, 12), torch.randn(64, 32)
    fast: Any = fc.compile(copy.deepcopy(model), backend="interpret", strict=True)
    (weights, place), (ours, ours_place) = model(x), fast(x)
    assert torch.equal(place, ours_place)
    torch.testing.assert_close(ours, weights)
    results = [
        torch.autograd.grad(y.square().sum(), m.gate.weight)[0] for y, m in ((weights, model), (ours, fast))
    ]
    torch.testing.assert_close(results[1], results[0])
    assert not [left for plan in fast.plan for left in plan.leftovers if left.rule != "library call"]


def mamba() -> torch.nn.Module:
    config = transformers.Mamba2Config(
        hidden_size=16, num_heads=4, head_dim=8, state_size=8, n_groups=1, num_hidden_layers=1, vocab_size=50,
        chunk_size=8, use_cache=False,
    )  # fmt: skip
    return transformers.Mamba2Model(config)


def test_mamba_2_has_no_eager_scan_and_is_as_close_as_eager() -> None:
    """Three chunks, the last of which is not full."""
    model, tokens = mamba(), torch.randint(0, 50, (2, 20))

    def step(called: Any, of: torch.nn.Module) -> list[Tensor]:
        of.zero_grad(set_to_none=True)
        output = called(tokens).last_hidden_state
        output.square().sum().backward()
        return [output.detach(), *(p.grad.clone() for p in of.parameters() if p.grad is not None)]

    fast: Any = fc.compile(model, backend="interpret")
    ours, eager = step(fast, model), step(model, model)
    truth = step(model.double(), model)
    ratios = [((a - t).norm() / (e - t).norm()).item() for a, e, t in zip(ours, eager, truth, strict=True)]
    assert statistics.geometric_mean(ratios) < 2, ratios
    left = {item.target for plan in fast.plan for item in plan.leftovers if item.rule != "library call"}
    assert left == {"aten.embedding_dense_backward.default"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "dim"), [((5, 61), -1), ((61, 5), 0), ((3, 1), 1), ((), 0), ((3, 0), 1)])
def test_the_gradient_of_a_running_product_is_one_formula(
    shape: tuple[int, ...], dim: int, dtype: torch.dtype
) -> None:
    """Rows without a zero, with one (at the ends too) and with several."""
    fast = Compiled(lambda x: torch.cumprod(x * 1.0, dim))
    x = torch.randn(shape) / 4 + 1
    if x.numel() > 60:
        rows = x.movedim(dim, -1)  # written to in place
        rows[1, 0], rows[2, -1], rows[3, 7], rows[4, 5], rows[4, 9] = 0, 0, 0, 0, 0
    x, sent = x.to(dtype), torch.randn(shape).to(dtype)

    def gradient(fn: Callable[[Tensor], Tensor], kind: torch.dtype) -> Tensor:
        leaf = x.to(kind).requires_grad_()
        return torch.autograd.grad(fn(leaf), leaf, sent.to(kind))[0]

    ours, eager, true = (
        gradient(fast, dtype),
        *(gradient(lambda x: torch.cumprod(x * 1.0, dim), kind) for kind in (dtype, torch.float64)),
    )
    assert ours.dtype is dtype and not_as_close(ours, eager, true) is None
    assert not fast.eager_ops()
    assert sum(len(plan.clusters) for plan in fast.plans) <= 2 + 2 * (dim == 0)


def test_the_gradient_of_a_running_product_in_another_dtype_is_computed_in_that() -> None:
    def fn(x: Tensor) -> Tensor:
        return torch.cumprod(x * 1.0, -1, dtype=torch.float64)

    x, sent = torch.randn(4, 300) / 4 + 1, torch.randn(4, 300, dtype=torch.float64)

    def gradient(fn: Callable[[Tensor], Tensor], kind: torch.dtype) -> Tensor:
        leaf = x.to(kind).requires_grad_()
        return torch.autograd.grad(fn(leaf), leaf, sent)[0]

    true, eager, ours = (
        gradient(f, kind)
        for f, kind in ((fn, torch.float64), (fn, torch.float32), (Compiled(fn), torch.float32))
    )
    error, least = ((t.double() - true).square().mean().sqrt() for t in (ours, eager))
    assert error <= 1.5 * least  # eager's is that of rounding once
