"""Attention of few queries as clusters: values against float64, masks of all sorts, what stays a call."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import fusion_compiler as fc
from benchmarks.harness.accuracy import InFloat64
from fusion_compiler.ops.decompositions.few_queries import in_chunks
from fusion_compiler.ops.own.few_queries import attend
from fusion_compiler.passes.rewrites.few_queries import MOST_QUERIES
from fusion_compiler.runtime.target import compile_for
from tests.codegen.test_dependent_launch import programs_of
from tests.exactness import not_as_close, wide

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """As models write it: keys' heads repeated where a mask keeps PyTorch from grouping queries."""
    groups = q.shape[1] // k.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=groups > 1)
    k, v = (x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(*q.shape[:2], *x.shape[2:]) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, mask)


def tensors(
    batch: int,
    heads: int,
    groups: int,
    keys: int,
    size: int,
    dtype: torch.dtype = torch.float32,
    queries: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    q = torch.randn(batch, heads * groups, queries, size, dtype=dtype)
    k, v = torch.randn(2, batch, heads, keys, size, dtype=dtype)
    return q, k, v


def checked(f: Callable[..., Tensor], *inputs: Tensor | None) -> fc.FusionPlan:
    """The plan of `f`: no call is left, and its result is as close to float64 as eager's."""
    torch._dynamo.reset()  # sizes of other cases are no symbols here
    fast = fc.compile(f, backend="interpret", strict=True)
    with torch.no_grad():
        ours, eager = fast(*inputs), f(*inputs)
    with torch.no_grad(), InFloat64():
        exact = f(*map(wide, inputs))
    assert not_as_close(ours, eager, exact) is None
    (plan,) = fast.plan
    assert not plan.leftovers, str(plan)
    return plan


@pytest.mark.sample(5)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(1, 2, 4, 256, 64), (2, 3, 1, 300, 80), (1, 1, 8, 1000, 128), (3, 1, 2, 33, 16), (40, 2, 1, 128, 32)],
    ids=str,
)
def test_one_query(sizes: tuple[int, int, int, int, int], dtype: torch.dtype) -> None:
    plan = checked(attention, *tensors(*sizes, dtype))
    assert len(plan.clusters) <= 2, "one of the chunks, one of what they add up to, or one of all"
    assert "decode attention: done" in str(plan)


def test_keys_that_are_values_as_well() -> None:
    """Both products take the same tile, as it is in memory."""

    def shared(q: Tensor, k: Tensor) -> Tensor:
        return attention(q, k, k)

    for size in (64, 80):
        q, k, _ = tensors(2, 2, 4, 200, size, torch.bfloat16)
        assert len(checked(shared, q, k).clusters) <= 2


def padding(batch: int, keys: int) -> Tensor:
    """Left padding of different lengths; of the last one all."""
    first = torch.linspace(0, keys, batch).long()
    return (torch.arange(keys) >= first[:, None])[:, None, None]


def window(batch: int, keys: int) -> Tensor:
    at = torch.arange(keys)
    return ((at > keys // 3) & (at <= keys // 2))[None, None, None]


def alibi(batch: int, keys: int) -> Tensor:
    return (-0.1 * torch.arange(keys).flip(0)).view(1, 1, 1, keys).float()


def lowest(batch: int, keys: int) -> Tensor:
    return torch.where(padding(batch, keys), 0.0, torch.finfo(torch.float32).min)


def scattered(batch: int, keys: int) -> Tensor:
    mask = torch.rand(batch, 1, 1, keys) > 0.5
    return torch.where(mask, torch.randn(batch, 1, 1, keys), -torch.inf)


@pytest.mark.sample(3)
@pytest.mark.parametrize("keys", [100, 256, 700])
@pytest.mark.parametrize("mask", [padding, window, alibi, lowest, scattered], ids=lambda f: f.__name__)
def test_masks(mask: Callable[[int, int], Tensor], keys: int) -> None:
    plan = checked(attention, *tensors(3, 2, 2, keys, 32), mask(3, keys))
    assert len(plan.clusters) <= 2


def test_a_query_without_keys_gets_zeros() -> None:
    q, k, v = tensors(2, 2, 1, 200, 16)
    mask = torch.zeros(2, 1, 1, 200, dtype=torch.bool)
    mask[1, ..., 5] = True
    fast = fc.compile(attention, backend="interpret", strict=True)
    result = fast(q, k, v, mask)
    assert not result[0].any()
    torch.testing.assert_close(result[1], v[1, :, 5:6])


def test_nan_reaches_the_result() -> None:
    for place in range(3):
        inputs = tensors(1, 2, 1, 300, 16)
        inputs[place][0, 1, -1, 3] = float("nan")
        fast = fc.compile(attention, backend="interpret", strict=True)
        for mask in (None, torch.ones(1, 1, 1, 300, dtype=torch.bool)):
            result = fast(*inputs, mask)
            assert not result[0, 0].isnan().any() and result[0, 1].isnan().any()
            assert torch.equal(result.isnan(), attention(*inputs, mask).isnan())


def test_several_queries_and_a_mask_for_each() -> None:
    """As a draft of some tokens that is verified at once."""
    keys, queries = 90, 4
    mask = torch.ones(queries, keys).tril(keys - queries).bool()
    checked(attention, *tensors(2, 3, 1, keys, 32, queries=queries), mask)


def test_rotation_and_scale_are_in_the_kernel() -> None:
    def rotated(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = q.shape[-1] // 2
        q = q * cos + torch.cat((-q[..., half:], q[..., :half]), -1) * sin
        return F.scaled_dot_product_attention(q, k, v, scale=0.3)

    plan = checked(rotated, *tensors(2, 2, 1, 256, 32), torch.rand(32), torch.rand(32))
    assert len(plan.clusters) <= 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("groups", [1, 4])
def test_capped_scores(groups: int, masked: bool) -> None:
    """As transformers writes them for Gemma."""

    def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        k, v = (
            x[:, :, None].expand(-1, -1, groups, -1, -1).reshape(*q.shape[:2], *x.shape[2:]) for x in (k, v)
        )
        scores = torch.matmul(q, k.transpose(2, 3)) * 0.3
        scores = torch.tanh(scores / 5) * 5
        if mask is not None:
            scores = scores + mask
        return torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), v)

    mask = torch.where(padding(4, 200)[:3], 0.0, torch.finfo(torch.float32).min) if masked else None
    plan = checked(capped, *tensors(3, 2, groups, 200, 32), mask)
    # One more tells the queries all of whose keys are masked, which are NaN in a softmax.
    assert len(plan.clusters) <= 2 + masked and "fused attention: done" in str(plan)


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("keys", [3, 200])
def test_infinite_values(dtype: torch.dtype, keys: int) -> None:
    """The remainder of a weight in bfloat16 may be negative; times an infinite value it is the other
    infinity."""
    q, k, v = (x.to(dtype) for x in tensors(4, 2, 4, keys, 32))
    v = torch.where(torch.rand(v.shape) < 0.5 / keys, torch.copysign(torch.full_like(v, torch.inf), v), v)
    with torch.no_grad():
        ours, exact = fc.compile(attention, backend="interpret")(q, k, v), attention(*map(wide, (q, k, v)))
    special = ~exact.isfinite()
    assert bool(special.any()) and torch.equal(ours.isfinite(), ~special)
    assert torch.equal(ours[special].nan_to_num(7).double(), exact[special].to(dtype).nan_to_num(7).double())


@pytest.mark.sample(1)
@pytest.mark.parametrize("masked", [False, True])
def test_a_cache_of_any_length(masked: bool) -> None:
    """The second length is one of all that have two chunks: a symbol, and the last one may be a part."""
    fast = fc.compile(attention, backend="interpret")
    for keys in (300, 333, 512, 65, 700, 16):
        q, k, v = tensors(2, 2, 4, keys, 32)
        mask = padding(2, keys) if masked else None
        with torch.no_grad():
            ours, eager = fast(q, k, v, mask), attention(q, k, v, mask)
        exact = attention(*map(wide, (q, k, v)), mask)
        assert not_as_close(ours, eager, exact) is None
    first, other, few = fast.plan
    assert "these are few" in str(few)
    assert "300 keys" in str(first) and "(now 333) keys" in str(other)
    assert not other.leftovers and len(other.clusters) <= 3


def test_keys_that_grow_stay_with_the_library() -> None:
    def grown(q: Tensor, k: Tensor, v: Tensor, new: Tensor) -> Tensor:
        return attention(q, torch.cat((k, new), 2), torch.cat((v, new), 2))

    fast = fc.compile(grown, backend="eager")
    for keys in (300, 301, 302):
        q, k, v = tensors(1, 2, 1, keys, 32)
        fast(q, k, v, k[:, :, :1])
    assert "decode attention: refused: its keys grow from call to call" in str(fast.plan[-1])


def test_quantised_caches_are_read_as_they_are() -> None:
    """int8 keys and values with a scale for each: they become floats within the kernel."""

    def quantised(q: Tensor, k: Tensor, ks: Tensor, v: Tensor, vs: Tensor, mask: Tensor) -> Tensor:
        return attention(q, k.to(q.dtype) * ks, v.to(q.dtype) * vs, mask)

    q, *_ = tensors(2, 2, 4, 256, 64, torch.bfloat16)
    k, v = (torch.randint(-127, 128, (2, 2, 256, 64), dtype=torch.int8) for _ in range(2))
    scales = [torch.rand(2, 2, 256, 1).to(torch.bfloat16) / 50 for _ in range(2)]
    plan = checked(quantised, q, k, scales[0], v, scales[1], padding(2, 256))
    assert len(plan.clusters) <= 2


@pytest.mark.sample(2)
@pytest.mark.parametrize("keys", ["bfloat16", "int8"])
@pytest.mark.parametrize("size", [16, 64])
def test_no_thread_holds_more_columns_than_there_are(size: int, keys: str) -> None:
    """Four threads hold a row of a product's operand: unless its columns reach for them all, it is
    wrong (https://github.com/triton-lang/triton/pull/11691), on the device alone."""

    def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attention(q, k.to(q.dtype), v.to(q.dtype), mask)

    keys_of = {16: 4096, 64: 1024}  # of fewer small ones one tile has all
    with FakeTensorMode(), torch.no_grad():
        q, k, v = tensors(1, 8, 4, keys_of[size], size, torch.bfloat16)
        k, v = (x.to(getattr(torch, keys)) for x in (k, v))
        mask = torch.ones(1, 1, 1, keys_of[size], dtype=torch.bool)
        (plan,) = fc.explain(masked, q, k, v, mask, device="h200").plans
    assert "decode attention: done" in str(plan)
    counts: list[tuple[int, int]] = []
    for program in programs_of(plan, plan.clusters[0], limit=1000):
        for kernel in program.kernels:
            text = compile_for(kernel, "sm_90").asm["ttgir"]
            held = r"tensor<\d+x(\d+)xbf16, #ttg.dot_op<{opIdx = 0, parent = #mma\d*, kWidth = (\d+)}>> \*"
            counts += [(int(columns), int(per_thread)) for columns, per_thread in re.findall(held, text)]
    assert counts and all(columns >= 4 * per_thread for columns, per_thread in counts), counts


def test_pages_are_read_where_they_lie() -> None:
    """Pages of 16 keys, which a table has for each sequence: no kernel gathers them first."""

    def paged(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, mask: Tensor) -> Tensor:
        heads = q.shape[0], keys.shape[1], -1, q.shape[-1]
        k, v = (pages[table].transpose(1, 2).reshape(heads) for pages in (keys, values))
        return attention(q, k, v, mask)

    q, *_ = tensors(2, 2, 4, 256, 64)
    keys, values = torch.randn(2, 64, 2, 16, 64)
    table = torch.randperm(64)[:32].view(2, 16)
    plan = checked(paged, q, keys, values, table, padding(2, 256))
    assert len(plan.clusters) <= 2


def refusal(f: Callable[..., Tensor], *inputs: Tensor) -> str:
    torch._dynamo.reset()
    fast = fc.compile(f, backend="eager")
    torch.testing.assert_close(fast(*inputs), f(*inputs))
    notes = [line for line in str(fast.plan[0]).splitlines() if line.startswith("decode attention")]
    return " ".join(notes)


def test_what_stays_a_call() -> None:
    q, k, v = tensors(1, 2, 1, 64, 16)
    assert "its gradient is wanted" in refusal(attention, q.clone().requires_grad_(), k, v)
    assert "one for each query" in refusal(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, enable_gqa=True),
        *tensors(1, 2, 2, 64, 16), torch.rand(1, 4, 1, 64),
    )  # fmt: skip
    assert "larger than" in refusal(attention, *tensors(1, 1, 1, 64, 512))
    few = tensors(1, 2, 1, 20, 16)
    for x in few[1:]:
        torch._dynamo.mark_dynamic(x, 2)
    assert "only known at run time, and these are few" in refusal(attention, *few)
    many = tensors(1, 2, 1, 64, 16, queries=MOST_QUERIES + 1)
    assert not refusal(attention, *many)
    fast = fc.compile(lambda q, k, v: (q @ k.mT).tanh().softmax(-1) @ v, backend="eager")
    fast(*many)
    assert "tanh of the scores of many queries" in str(fast.plan[0])


def test_numerics_of_eager_stay_with_the_library() -> None:
    fast = fc.compile(attention, backend="eager", numerics="eager")
    fast(*tensors(1, 2, 1, 64, 16))
    assert len(fast.plan[0].leftovers) == 1


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("batch", "keys", "features", "start_us"), [(1, 131072, 128, 0), (1, 131584, 128, 0), (2, 1536, 64, 7)]
)
def test_keys_and_values_are_read_once(
    batch: int, keys: int, features: int, start_us: int, masked: bool
) -> None:
    """Two kernels serve 32 queries of 8 heads, at three quarters of a copy's speed as predicted. start_us: of
    short kernels, for launches and the first loads."""
    with FakeTensorMode(), torch.no_grad():
        q = torch.empty(batch, 32, 1, features, dtype=torch.bfloat16)
        k, v = (torch.empty(batch, 8, keys, features, dtype=torch.bfloat16) for _ in range(2))
        mask = (torch.empty(batch, 1, 1, keys, dtype=torch.bool),) if masked else ()
        plan = fc.explain(attention, q, k, v, *mask, device="h200").plans[0]
    assert not plan.leftovers and len(plan.clusters) <= 2
    ideal = 2 * 2 * batch * 8 * keys * features / 4.28e12 * 1e6
    assert sum(c.cost.us for c in plan.clusters) < ideal / 0.75 + start_us


def test_the_operator() -> None:
    """As the library would compute it, where a graph runs as it is."""
    q, k, v = tensors(2, 3, 1, 50, 16)
    torch.testing.assert_close(attend(q, k, v, None, 0.25, 16, None), attention(q, k, v))
    mask = torch.rand(2, 1, 1, 50) > 0.5
    mask[0] = False
    for capped in (None, 0.1):
        for some_mask in (None, mask, torch.where(mask, 0.5, -torch.inf)):
            arguments = q, k, v, some_mask, 0.25, 16, capped
            torch.testing.assert_close(attend(*arguments), in_chunks(*arguments))
            torch.library.opcheck(attend, arguments)
