"""Products of few rows as clusters: values against float64, what is one kernel, and what stays a call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import fusion_compiler as fc
from fusion_compiler.codegen.emit import schedules_of
from fusion_compiler.compiler.runners import emit_cluster
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import DeviceSpec, device_spec
from fusion_compiler.ir.loops import LoopNest
from fusion_compiler.runtime.target import compile_for
from fusion_compiler.schedule import few_rows
from fusion_compiler.schedule.placement import Placement
from tests.exactness import Compiled, Schedules, cramped, not_as_close
from tests.versions import of_measured_versions

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


pytestmark = pytest.mark.usefixtures("small_matrices")


def doubled(value: object) -> object:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    return value


def check(f: Callable[..., object], *inputs: Tensor, kernels: int | None = None) -> fc.FusionPlan:
    """The plan of `f`, whose results are as close to those in float64 as eager's are."""
    fast = fc.compile(f, backend="interpret", strict=True)
    with torch.no_grad():
        ours, eager, exact = fast(*inputs), f(*inputs), f(*map(doubled, inputs))
    tuples = (r if isinstance(r, tuple) else (r,) for r in (ours, eager, exact))
    for our, theirs, truth in zip(*tuples, strict=True):
        assert our.dtype == theirs.dtype and our.shape == theirs.shape
        scale = truth.abs().max().item()
        bound = (theirs.double() - truth).abs().max().item() + 1e-6 * scale
        assert (our.double() - truth).abs().max().item() <= bound
    (plan,) = fast.plan
    if kernels is not None:
        assert not [left for left in plan.leftovers if left.rule == "library call"], str(plan)
        assert len(plan.clusters) == kernels, str(plan)
    return plan


def linear(rows: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, k, dtype=dtype), torch.randn(n, k, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16])
def test_linear(rows: int, dtype: torch.dtype) -> None:
    check(F.linear, *linear(rows, 48, 160, dtype), kernels=1)


@pytest.mark.parametrize(("n", "k"), [(1, 96), (7, 33), (130, 257), (48, 1), (33, 4100)])
@pytest.mark.parametrize("rows", [1, 3])
def test_odd_sizes(rows: int, n: int, k: int) -> None:
    check(F.linear, *linear(rows, n, k))


@pytest.mark.parametrize("rows", [1, 4])
def test_the_matrix_in_the_other_order(rows: int) -> None:
    x, w = linear(rows, 48, 160)
    check(lambda x, w: x @ w, x, w.t().contiguous(), kernels=1)


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize("turned", [True, False])
def test_products_of_another_width_are_summed_along_their_own(turned: bool, inner: bool) -> None:
    """As many terms in all, but fewer results of more each: they keep a part of the other's columns."""
    n, parts, k = 32, 4, 48
    shape = (parts, n) if inner else (n, parts)
    (x, w), (z, v) = linear(1, n * parts, k), linear(1, n, k * parts)
    if turned:
        w, v = w.t().contiguous().t(), v.t().contiguous().t()

    def added(x: Tensor, w: Tensor, z: Tensor, v: Tensor) -> Tensor:
        return F.linear(x, w).view(shape) + F.linear(z, v).view((1, n) if inner else (n, 1))

    check(added, x, w, z, v)


@pytest.mark.parametrize("columns", [1, 3])
def test_few_columns(columns: int) -> None:
    check(lambda a, x: a @ x, torch.randn(80, 96), torch.randn(96, columns), kernels=1)


@pytest.mark.parametrize("rows", [1, 3])
def test_batches(rows: int) -> None:
    check(lambda q, k: q @ k.mT, torch.randn(6, rows, 64), torch.randn(6, 40, 64), kernels=1)


@pytest.mark.parametrize("rows", [1, 3])
def test_batches_in_the_other_order(rows: int) -> None:
    check(lambda p, v: p @ v, torch.randn(6, rows, 40), torch.randn(6, 40, 64), kernels=1)


def test_seventeen_rows_stay_a_call() -> None:
    plan = check(F.linear, *linear(17, 48, 160))
    assert [left.reason for left in plan.leftovers] == ["library call"]


@pytest.mark.parametrize("rows", [1, 4])
def test_bias_activation_and_residual(rows: int) -> None:
    x, w = linear(rows, 48, 160)
    b, r = torch.randn(48), torch.randn(rows, 48)
    check(lambda x, w, b, r: r + F.silu(F.linear(x, w, b)), x, w, b, r, kernels=1)


@pytest.mark.parametrize("rows", [1, 4])
def test_factors(rows: int) -> None:
    x, w = linear(rows, 48, 160)
    c = torch.randn(rows, 48)
    check(lambda c, x, w: torch.addmm(c, x, w.t(), beta=0.5, alpha=2), c, x, w, kernels=1)


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_swiglu(rows: int, dtype: torch.dtype) -> None:
    x, gate = linear(rows, 48, 160, dtype)
    check(swiglu, x, gate, torch.randn_like(gate), kernels=1)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * (wide * scale).to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("n", [48, 160])
def test_a_norm_before_it(rows: int, n: int, dtype: torch.dtype) -> None:
    x, gate = linear(rows, n, 160, dtype)
    norm = torch.rand(160, dtype=dtype) + 0.5
    check(lambda x, s, a, b: swiglu(rms_norm(x, s), a, b), x, norm, gate, torch.randn_like(gate), kernels=1)


@pytest.mark.parametrize("rows", [1, 4])
def test_projections_share_a_launch(rows: int) -> None:
    x, q = linear(rows, 64, 160)
    k, v = torch.randn(2, 16, 160).unbind()
    plan = check(lambda x, q, k, v: tuple(F.linear(x, w) for w in (q, k, v)), x, q, k, v)
    assert len(plan.clusters) == 1


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("per_channel", [True, False])
def test_int8_weights(rows: int, per_channel: bool) -> None:
    x, _ = linear(rows, 48, 160, torch.bfloat16)
    w = torch.randint(-128, 128, (48, 160), dtype=torch.int8)
    scale = torch.rand(48, 1 if per_channel else 160, dtype=torch.bfloat16)
    check(lambda x, w, s: F.linear(x, w.to(x.dtype) * s), x, w, scale, kernels=1)


def test_int8_weights_scaled_behind() -> None:
    x, _ = linear(2, 48, 160, torch.bfloat16)
    w, scale = torch.randint(-128, 128, (48, 160), dtype=torch.int8), torch.rand(48, dtype=torch.bfloat16)
    check(lambda x, w, s: F.linear(x, w.to(x.dtype)) * s, x, w, scale, kernels=1)


@pytest.mark.parametrize("rows", [1, 4])
def test_a_training_step(rows: int) -> None:
    model = nn.Sequential(nn.Linear(96, 80), nn.GELU(), nn.Linear(80, 48))
    x = torch.randn(rows, 96)
    fast = fc.compile(model, backend="interpret", strict=True)
    results: list[list[Tensor]] = []
    wide = nn.Sequential(nn.Linear(96, 80), nn.GELU(), nn.Linear(80, 48)).double()
    wide.load_state_dict(model.state_dict())
    for called, held, at in ((fast, model, x), (wide, wide, x.double())):
        at = at.clone().requires_grad_()
        called(at).square().sum().backward()
        results.append([at.grad, *(p.grad for p in held.parameters())])
    for our, truth in zip(*results, strict=True):
        torch.testing.assert_close(our.double(), truth, rtol=1e-4, atol=1e-4)


# -- every schedule, and what is planned ----------------------------------------------------------------


def normed_swiglu(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return swiglu(rms_norm(x, norm), gate, up)


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w + 1


@pytest.mark.sample(6)
@pytest.mark.parametrize("schedules", [schedules_of, cramped], ids=["own", "cramped"])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("rows", [1, 3])
def test_every_schedule(rows: int, number: int, schedules: Schedules) -> None:
    x, gate = linear(rows, 24, 300)
    tensors = x, torch.rand(300) + 0.5, gate, torch.randn_like(gate)
    w = torch.randn(300, 24)
    for fn, inputs in ((normed_swiglu, tensors), (product, (x, w))):
        fast = Compiled(fn, number, schedules)
        with torch.no_grad():
            ours, eager, exact = fast(*inputs), fn(*inputs), fn(*map(doubled, inputs))
        assert not_as_close(ours, eager, exact) is None
        assert not any(left.rule == "library call" for plan in fast.plans for left in plan.leftovers)


def test_long_sums_of_few_rows_are_shared() -> None:
    """Programs share the terms of a matrix that has too few rows to fill the device."""
    x, w = linear(2, 3, 40000)
    fast = Compiled(lambda x, w: F.linear(x, w))
    with torch.no_grad():
        ours = fast(x, w)
    assert not_as_close(ours, F.linear(x, w), F.linear(x.double(), w.double())) is None
    (runner,) = fast.compiler.runners.values()
    assert any("LAST" in program.schedule for program in runner.candidates)


@pytest.mark.parametrize("width", [1, 2, 4, 17])
@pytest.mark.parametrize("count", [1, 3])
def test_matrices_of_a_few_numbers(count: int, width: int) -> None:
    """Less than an element for each thread of any tile."""
    check(lambda x, w: F.linear(x, w) + 1, *linear(2, count, width), kernels=1)


def of_sums(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return ((a[::2, None] + b) * x).sum(1)


def of_coordinates(a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return ((torch.arange(64)[:, None] * torch.arange(300)) % 7 * x).sum(1)


@pytest.mark.parametrize("f", [of_sums, of_coordinates], ids=lambda f: f.__name__)
def test_a_matrix_that_lies_nowhere_is_none(f: Callable[..., Tensor]) -> None:
    """It is computed of vectors and coordinates, so that nothing is read as matrices are."""
    check(f, torch.randn(600), torch.randn(300), torch.randn(300), kernels=1)


def test_numerics_of_eager_stay_with_the_library() -> None:
    fast = fc.compile(F.linear, backend="interpret", numerics="eager")
    fast(*linear(2, 48, 160))
    assert [left.target for left in next(iter(fast.plan)).leftovers] == ["aten.mm.default"]


def decode_step(
    x: Tensor, norms: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, gate: Tensor, up: Tensor,
    down: Tensor, head: Tensor, keys: Tensor, values: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """A layer of Llama and the head, for one token of each sequence; rotation and cache left out."""
    y = rms_norm(x, norms[0])
    query, key, value = (F.linear(y, w).unflatten(-1, (-1, 64)).transpose(1, 2) for w in (q, k, v))
    attended = F.scaled_dot_product_attention(query, keys, values, enable_gqa=True)
    x = x + F.linear(attended.transpose(1, 2).flatten(2), o)
    x = x + F.linear(swiglu(rms_norm(x, norms[1]), gate, up), down)
    return F.linear(rms_norm(x, norms[2]), head), key, value


def llama_1b(tokens: int) -> list[Tensor]:
    shapes = [
        (tokens, 1, 2048), (3, 2048), (2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048),
        (8192, 2048), (2048, 8192), (128256, 2048), (tokens, 8, 1024, 64), (tokens, 8, 1024, 64),
    ]  # fmt: skip
    return [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_a_decode_step_of_llama_1b(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All products are clusters, with norms, gate and residuals in them, and attention is two; together they
    take what their bytes do."""
    monkeypatch.undo()
    with FakeTensorMode():
        tensors = llama_1b(tokens)
        (plan,) = fc.explain(decode_step, *tensors, device="h200").plans
    assert not plan.leftovers
    rows = "row" if tokens == 1 else "rows"
    assert plan.notes["phase"].startswith(f"decode: 8 products of {tokens} {rows}")
    assert len(plan.clusters) <= 8
    us = sum(cluster.cost.us for cluster in plan.clusters)
    copied = 1e6 * 2 * sum(t.numel() for t in tensors[2:]) / 4.28e12
    assert copied < us < 1.2 * copied


def planned_linear(tokens: int) -> fc.FusionPlan:
    shapes = (tokens, 4096), (14336, 4096)
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes]
        (plan,) = fc.explain(F.linear, *tensors, device="h200").plans
    return plan


@pytest.mark.parametrize("tokens", [17, 64])
def test_arithmetic_belongs_to_the_library(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    plan = planned_linear(tokens)
    assert not plan.clusters and "phase" not in plan.notes


def test_tensor_units_make_the_sums_of_sixteen_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take as long as those of four: as the matrix is read."""
    monkeypatch.undo()
    (few,), (many,) = (planned_linear(tokens).clusters for tokens in (4, 16))
    assert many.cost.us < 1.02 * few.cost.us


def test_tensor_units_have_three_matrices_side_by_side_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tile of sixteen matrices in one loop fits in shared memory."""
    monkeypatch.undo()
    with FakeTensorMode():
        x, *matrices = (torch.empty(n, 2048, dtype=torch.bfloat16, device="cuda") for n in (12, *16 * [2048]))
        plan = fc.explain(lambda x, *ws: [F.linear(x, w) for w in ws], x, *matrices, device="h200").plans[0]
    nests = [nest for cluster in plan.clusters for nest in cluster.nests]
    products = [few_rows.Products.of(nest, {}) for nest in nests]
    counts = [len(of.matrices) for of in products if of is not None]
    assert sum(counts) == 16 and max(counts) <= few_rows.MOST_MATRICES


@pytest.mark.parametrize(("rows", "kernels"), [(1, 1), (2, 1), (8, 1)])
def test_few_terms_are_unrolled_beside_a_product(rows: int, kernels: int) -> None:
    """The terms of all rows are unrolled together."""
    x, w = torch.randn(rows, 8, 160), torch.randn(48, 160)
    check(lambda x, w: F.linear(x.sum(1), w), x, w, kernels=kernels)


def shares_of_rows(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w).softmax(0).amax(0, keepdim=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [2, 3, 8])
def test_what_is_reduced_across_the_rows(rows: int, dtype: torch.dtype) -> None:
    """Each program has all rows of some columns."""
    x, w = linear(rows, 48, 160, dtype)
    check(lambda x, w: F.linear(x, w).sum(0), x, w, kernels=1)
    check(lambda x, w: F.linear(x, w).view(rows, 48).mean(0, keepdim=True) + 1, x, w, kernels=1)
    check(shares_of_rows, x, w, kernels=1)


def test_the_rows_are_summed() -> None:
    check(lambda x, w: F.linear(x, w).sum(0), *linear(9, 48, 160), kernels=1)


@pytest.mark.sample(10)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [4, 8, 16])
@pytest.mark.parametrize("number", range(4))
def test_a_norm_is_read_with_the_matrix(rows: int, number: int, dtype: torch.dtype) -> None:
    """Its factor is the product's: one loop, of every tile."""

    def f(x: Tensor, w: Tensor, norm: Tensor) -> Tensor:
        return F.silu(F.linear(F.rms_norm(x, norm.shape, norm), w))

    def tiled(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[Placement, ...]:
        tiles = [s for s in schedules_of(loops, name, device) if not s.early]
        if dtype is torch.float32:  # tensor cores take fewer digits
            tiles = [s for s in tiles if "TENSOR_CORE" not in str(s)]
        return (tiles[number % len(tiles)],)

    x, w = linear(rows, 144, 1024, dtype)
    inputs = [x, w, torch.rand(1024).to(dtype)]
    fast = Compiled(f, 0, tiled)
    with torch.no_grad():
        ours, eager, truth = fast(*inputs), f(*inputs), f(*(i.double() for i in inputs))
    assert not_as_close(ours, eager, truth) is None
    (runner,) = fast.compiler.runners.values()
    source, schedule = runner.candidates[0].kernels[0].source, runner.candidates[0].schedule
    assert source.count("tl.range(") == ("LOOP" in schedule)
    assert rows == 4 or ("fm.contract" in source) == (dtype is not torch.float32)


@of_measured_versions
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
def test_norms_in_front_of_products_compile(rows: int) -> None:
    """For devices, which add up tiles of one form alone at once."""
    with FakeTensorMode():
        x, norm = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in ((rows, 2048), 2048))
        gate, up = (torch.empty(8192, 2048, dtype=torch.bfloat16, device="cuda") for _ in range(2))

        def f(x: Tensor) -> Tensor:
            y = F.rms_norm(x, norm.shape, norm)
            return F.silu(F.linear(y, gate)) * F.linear(y, up)

        fast = fc.compile(f, backend="eager", device="h200")
        with torch.no_grad():
            fast(x)
    (plan,) = fast.plan
    (cluster,) = plan.clusters
    for program in emit_cluster(canonical(cluster, plan.dag), cluster, plan.dag, device_spec("h200")):
        (kernel,) = program.kernels
        assert not compile_for(kernel, "sm_90").spills
