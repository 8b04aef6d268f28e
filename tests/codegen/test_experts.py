"""Grouped products of few rows as clusters: values against float64, what is read, and what stays a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import fusion_compiler as fc
from fusion_compiler.ir.dag import FEW_ROWS
from fusion_compiler.ir.dims import numel
from fusion_compiler.ir.layout import is_view
from fusion_compiler.ops.own.experts import expert_mm
from fusion_compiler.passes.fuse import candidates
from fusion_compiler.passes.rewrites import row_ranges
from tests.exactness import not_as_close

DTYPES = (torch.float32, torch.bfloat16)


pytestmark = pytest.mark.usefixtures("small_matrices")


def experts_of(offsets: Tensor, rows: int) -> Tensor:
    """int64 [rows]; of a row that no expert has, the last one."""
    return (offsets <= torch.arange(rows)[:, None]).sum(1).clamp(0, len(offsets) - 1)


def in_rows(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """x: [S, k], w: [E, n, k], as linear layers have it; offsets: int32 [E]."""
    return in_columns(x, w.mT, offsets)


def in_columns(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    """w: [E, k, n]. Nothing but bfloat16 can be traced by PyTorch."""
    if x.dtype is torch.bfloat16:
        return F.grouped_mm(x, w, offs=offsets)
    return expert_mm(x, w, experts_of(offsets, len(x)))


def exact(f: Callable[..., Tensor], x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    chosen = w.double()[experts_of(offsets, len(x))]
    return (x.double()[:, None] @ (chosen.mT if f is in_rows else chosen))[:, 0]


def tensors(rows: int, experts: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x and w, whose rows begin at multiples of 16 bytes, as PyTorch's grouped product wants them."""
    width = -(-k // 8) * 8
    x = torch.randn(rows, width, dtype=dtype)[:, :k]
    return x, torch.randn(experts, n, width, dtype=dtype)[..., :k]


def offsets_of(experts: int, *chosen: int) -> Tensor:
    """int32 [experts], from which expert each row is of."""
    counts = torch.bincount(torch.tensor(chosen, dtype=torch.int64), minlength=experts)
    return counts.cumsum(0).int()


def planned(f: Callable[..., Tensor], *inputs: Tensor, strict: bool = True) -> tuple[Tensor, fc.FusionPlan]:
    torch._dynamo.reset()  # sizes of other cases are no symbols here
    fast = fc.compile(f, backend="interpret", strict=strict)
    with torch.no_grad():
        ours = fast(*inputs)
    (plan,) = fast.plan
    return ours, plan


def checked(f: Callable[..., Tensor], x: Tensor, w: Tensor, offsets: Tensor) -> fc.FusionPlan:
    """The plan of `f`: no call is left, and it is as close to float64 as eager is."""
    ours, plan = planned(f, x, w, offsets)
    eager = f(x, w, offsets)
    assert ours.stride() == eager.stride()
    assert not_as_close(ours, eager, exact(f, x, w, offsets)) is None
    assert not plan.leftovers, str(plan)
    assert x.dtype is not torch.bfloat16 or "expert products: done" in str(plan)
    return plan


def some(experts: int, rows: int) -> Tensor:
    return offsets_of(experts, *torch.randint(experts, (rows,)).tolist())


SIZES = [(1, 8, 64, 48), (2, 8, 160, 96), (3, 4, 72, 40), (8, 3, 32, 24), (16, 16, 32, 16), (5, 1, 64, 8)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [*SIZES, (2, 5, 33, 7), (3, 3, 257, 1), (2, 4, 3, 19)], ids=str)
def test_values(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    checked(in_rows, *tensors(*sizes, dtype), some(sizes[1], sizes[0]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_matrices_in_the_other_order(sizes: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    rows, experts, k, n = sizes
    x, w = torch.randn(rows, k, dtype=dtype), torch.randn(experts, k, n, dtype=dtype)
    checked(in_columns, x, w, some(experts, rows))


@pytest.mark.parametrize("chosen", [(0, 0, 0), (4, 4, 4), (2, 2, 2), (0, 2, 4), (1, 1, 3)], ids=str)
def test_whose_rows_they_are(chosen: tuple[int, ...]) -> None:
    """All of one expert's, of the first and the last; some experts have none."""
    checked(in_rows, *tensors(3, 5, 40, 24, torch.bfloat16), offsets_of(5, *chosen))


@pytest.mark.parametrize("chosen", [(), (0,), (3, 3)], ids=str)
def test_offsets_that_end_before_the_rows(chosen: tuple[int, ...]) -> None:
    """Rows that no expert has get the last one's product: eager's are not initialised."""
    x, w = tensors(4, 5, 40, 24, torch.bfloat16)
    ours, plan = planned(in_rows, x, w, offsets_of(5, *chosen))
    assert "expert products: done" in str(plan)
    expected = exact(in_rows, x, w, offsets_of(5, *chosen))
    torch.testing.assert_close(ours.double(), expected, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_call_itself_is_the_same(dtype: torch.dtype) -> None:
    """Products that are not worth a cluster run as PyTorch's grouped product."""
    x, w = tensors(6, 5, 40, 24, dtype)
    expert = torch.tensor([3, 0, 2, 4, 3, 0])
    expected = torch.stack([x[r] @ w[e].T for r, e in enumerate(expert)])
    torch.testing.assert_close(expert_mm(x, w.mT, expert), expected)


# -- what is planned ------------------------------------------------------------------------------------


def mixture(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """As transformers has it: the two best experts of each row of x [tokens, h]; up: [E, 2 i, h], gates and
    what they gate, down: [E, h, i]."""
    weights, chosen = F.linear(x, router).float().softmax(-1).topk(2, -1)
    weights = (weights / weights.sum(-1, keepdim=True)).flatten()
    ids, order = chosen.flatten().sort()
    counts = torch.histc(ids.float() if x.device.type == "cpu" else ids.int(), len(up), 0, len(up) - 1)
    offsets = counts.cumsum(0, dtype=torch.int32)
    gate, value = in_rows(x[order // 2], up, offsets).chunk(2, -1)
    down_rows = in_rows(F.silu(gate) * value, down, offsets) * weights[order][:, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=x.device)
    return down_rows[back].unflatten(0, (-1, 2)).sum(1).to(x.dtype)


def mixtral(tokens: int, device: str = "cuda") -> list[Tensor]:
    shapes = [(tokens, 4096), (8, 4096), (8, 28672, 4096), (8, 4096, 14336)]
    return [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]


@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_a_mixture_of_mixtral(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both products are clusters that read no more matrices than there are rows or experts, and nothing of
    their size is made."""
    monkeypatch.undo()
    with FakeTensorMode(), torch.no_grad():
        tensors = mixtral(tokens)
        (plan,) = fc.explain(mixture, *tensors, device="h200").plans
    left = " ".join(left.subject for left in plan.leftovers)
    assert "expert" not in left and "grouped" not in left, str(plan)
    matrices = min(8, 2 * tokens) * 3 * 14336 * 4096 * 2
    products = [c for c in plan.clusters if any("expert_mm" in op for op in c.ops)]
    moved = sum(c.cost.bytes_read + c.cost.bytes_written for c in products)
    assert len(products) == 2 and matrices < moved < 1.01 * matrices
    assert 1e6 * matrices / 4.28e12 < sum(c.cost.us for c in products) < 1.15e6 * matrices / 4.28e12
    ops = [op for op in map(plan.dag.op, plan.dag.order) if op.args and op.inputs]
    largest = max(numel(m.shape) for op in ops for m in op.outputs if not is_view(op))
    assert largest == 2 * tokens * 28672, "no matrix is gathered"


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_the_values_of_a_mixture(tokens: int) -> None:
    shapes = (tokens, 64), (8, 64), (8, 80, 64), (8, 64, 40)
    inputs = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    ours, plan = planned(mixture, *inputs, strict=False)  # the best two are found by PyTorch
    assert "expert products: done x2" in str(plan)
    left = " ".join(left.subject for left in plan.leftovers)
    assert "expert" not in left and "grouped" not in left, str(plan)
    assert not_as_close(ours, mixture(*inputs), exact_mixture(*inputs)) is None


@pytest.mark.sample(1, group="long")
def test_an_unknown_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan for each range of rows: of few their experts are clusters, and no row is sorted."""
    monkeypatch.setattr(row_ranges, "LEAST", 0)
    shapes = (8, 64), (8, 80, 64), (8, 64, 40)
    weights = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    fast = fc.compile(mixture, backend="interpret")
    for tokens in (3, 2, 4, 7, 5, 8, 11, 20, 3):
        x = torch.randn(tokens, 64, dtype=torch.bfloat16)
        torch._dynamo.mark_dynamic(x, 0)
        with torch.no_grad():
            ours, eager = fast(x, *weights), mixture(x, *weights)
        assert not_as_close(ours, eager, exact_mixture(x, *weights)) is None, tokens
    few, more, *others = fast.plan
    for plan in (few, more):
        assert "rows are not sorted" in plan.notes["expert products"]
        assert {left.target for left in plan.leftovers} == {"aten.topk.default"}, str(plan)
    assert len(others) == 2, "of 18 and more rows of experts"
    assert all("expert products" not in plan.notes for plan in others)


def exact_mixture(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """float64, with the experts and their weights that the mixture finds."""
    weights, chosen = F.linear(x, router).float().softmax(-1).topk(2, -1)
    weights = weights.double() / weights.double().sum(-1, keepdim=True)
    x, up, down = x.double(), up.double(), down.double()
    gate, value = (up[chosen] @ x[:, None, :, None])[..., 0].chunk(2, -1)
    each = (down[chosen] @ (F.silu(gate) * value)[..., None])[..., 0]
    return (each * weights[..., None]).sum(1)


def with_missing_experts(x: Tensor, router: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """As transformers has it where other devices have some of the experts, with writes in place."""
    best, chosen = F.linear(x, router).float().softmax(-1).topk(2, -1)
    held = len(up) - 2
    weights, chosen = best.flatten(), chosen.flatten()
    ids, order = torch.sort(chosen)
    rows = x[order // 2]
    counts = torch.histc(ids.float(), held, 0, held - 1)
    offsets = counts.cumsum(0, dtype=torch.int32)
    missing = (ids >= held).unsqueeze(-1)
    ids.clamp_(max=held - 1)
    rows.masked_fill_(missing, 0.0)
    gate, value = in_rows(rows, up[:held], offsets).masked_fill(missing, 0.0).chunk(2, -1)
    down_rows = in_rows(F.silu(gate) * value, down[:held], offsets).masked_fill(missing, 0.0)
    down_rows = (down_rows + ids[:, None]) * weights[order].unsqueeze(-1)
    down_rows.add_(1)
    best.mul_(0)  # what was looked up stays
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order))
    return down_rows[back].unflatten(0, (-1, 2)).sum(1)


def route(x: Tensor, router: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """weights, ids, order, offsets"""
    weights, chosen = F.linear(x, router).float().softmax(-1).topk(2, -1)
    ids, order = chosen.flatten().sort()
    return weights.flatten(), ids, order, torch.histc(ids.float(), 8, 0, 7).cumsum(0, dtype=torch.int32)


def returned(x: Tensor, router: Tensor, up: Tensor) -> Tensor:
    _, _, order, offsets = route(x, router)
    return in_rows(x[order // 2], up, offsets)


def other_weights(x: Tensor, router: Tensor, up: Tensor) -> Tensor:
    weights, _, order, offsets = route(x, router)
    return (in_rows(x[order // 2], up, offsets) * weights[:, None])[order.argsort()]


def summed(x: Tensor, router: Tensor, up: Tensor) -> Tensor:
    _, _, order, offsets = route(x, router)
    return in_rows(x[order // 2].cumsum(0), up, offsets)


def first_row(x: Tensor, router: Tensor, up: Tensor) -> Tensor:
    _, _, order, offsets = route(x, router)
    return in_rows(x[order // 2], up, offsets)[0]


def moved_ids(x: Tensor, router: Tensor, up: Tensor) -> Tensor:
    _, ids, order, offsets = route(x, router)
    rows = in_rows(x[order // 2], up, offsets)
    ids.add_(1)
    return rows


def moved_order(x: Tensor, router: Tensor, up: Tensor) -> Tensor:
    _, _, order, offsets = route(x, router)
    order.remainder_(2)
    return in_rows(x[order], up, offsets)


def other_ids(x: Tensor, router: Tensor, up: Tensor) -> Tensor:
    """Some expert numbers may be negative; such rows do not count."""
    ids, order = (F.linear(x, router).argmax(-1) - 1).sort()
    offsets = torch.histc(ids.float(), 8, 0, 7).cumsum(0, dtype=torch.int32)
    rows = in_rows(x[order], up, offsets)
    return torch.where(torch.arange(len(x))[:, None] < offsets[-1], rows, 0)


def test_missing_experts_and_writes_in_place() -> None:
    shapes = (3, 64), (8, 64), (8, 80, 64), (8, 64, 40)
    inputs = [torch.randn(shape, dtype=torch.bfloat16) / 4 for shape in shapes]
    ours, plan = planned(with_missing_experts, *inputs, strict=False)
    assert "rows are not sorted" in " ".join(str(plan).split())
    torch.testing.assert_close(ours, with_missing_experts(*inputs), rtol=2**-6, atol=2**-6)


ORDERED = {
    returned: "output depends on the order of rows",
    other_weights: "depends on the order of rows",
    summed: "cumsum_1 depends on the order of rows",
    first_row: "select depends on the order of rows",
    moved_ids: "add_ writes into the sorted rows",
    moved_order: "remainder_ writes into the sorted rows",
    other_ids: "its experts are not the best ones of a list",
}


@pytest.mark.parametrize("f", ORDERED, ids=lambda f: f.__name__)
def test_rows_whose_order_shows_stay_sorted(f: Callable[..., Tensor]) -> None:
    inputs = [torch.randn(shape, dtype=torch.bfloat16) for shape in ((3, 64), (8, 64), (8, 40, 64))]
    ours, plan = planned(f, *inputs, strict=False)
    notes = " ".join(str(plan).split())
    assert "rows are sorted, as " in notes and ORDERED[f] in notes, notes
    torch.testing.assert_close(ours, f(*inputs), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("backend", ["eager", "interpret"])
def test_many_rows_stay_a_call(backend: str) -> None:
    x, w = tensors(FEW_ROWS + 1, 4, 32, 24, torch.bfloat16)
    fast = fc.compile(in_rows, backend=backend, strict=True, device="h200")
    with torch.no_grad():
        fast(x, w, some(4, FEW_ROWS + 1))
    (plan,) = fast.plan
    assert [(left.target, left.reason) for left in plan.leftovers] == [
        ("aten._grouped_mm.default", "library call")
    ]
    assert "expert products" not in plan.notes


def test_what_is_not_worth_a_cluster_is_one_library_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is gathered for it either."""
    monkeypatch.setattr(candidates, "LIBRARY_MARGIN", 0)
    x, w = tensors(3, 4, 32, 24, torch.bfloat16)
    ours, plan = planned(in_rows, x, w, offsets_of(4, 0, 2, 2))
    assert [left.target for left in plan.leftovers] == ["fusion_compiler.expert_mm.default"]
    assert not [op for op in plan.dag.order if "index" in op]
    torch.testing.assert_close(ours, in_rows(x, w, offsets_of(4, 0, 2, 2)))


def test_a_gradient_is_the_librarys() -> None:
    x, w = tensors(3, 4, 32, 24, torch.bfloat16)
    w.requires_grad_()
    fast = fc.compile(in_rows, backend="interpret", strict=True)
    fast(x, w, offsets_of(4, 0, 2, 2)).square().sum().backward()
    assert "expert products: refused: its gradient is wanted" in str(fast.plan[0])
    ours, w.grad = w.grad, None
    in_rows(x, w, offsets_of(4, 0, 2, 2)).square().sum().backward()
    torch.testing.assert_close(ours, w.grad)


def test_numerics_of_eager_stay_with_the_library() -> None:
    x, w = tensors(3, 4, 32, 24, torch.bfloat16)
    fast = fc.compile(in_rows, backend="interpret", numerics="eager")
    with torch.no_grad():
        fast(x, w, offsets_of(4, 0, 2, 2))
    assert [left.target for left in fast.plan[0].leftovers] == ["aten._grouped_mm.default"]


def test_sums_over_the_rows_of_each_expert_are_refused() -> None:
    """As gradients of matrices are: [k, S] times [S, n]."""
    x, y = torch.randn(2, 8, 16, dtype=torch.bfloat16)
    offsets = torch.tensor([3, 8], dtype=torch.int32)
    _, plan = planned(lambda x, y, offsets: F.grouped_mm(x.t(), y, offs=offsets), x, y, offsets)
    assert "expert products: refused: its rows are not those of one matrix each" in str(plan)
    assert [left.target for left in plan.leftovers] == ["aten._grouped_mm.default"]


# -- a model --------------------------------------------------------------------------------------------


def tiny_mixtral(experts: str) -> Any:
    torch.manual_seed(3)
    config = transformers.MixtralConfig(
        vocab_size=96, hidden_size=64, intermediate_size=112, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, experts_implementation=experts,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4 if p.dim() > 1 else 1)  # so that tokens and experts differ
    return model


@pytest.mark.sample(1, group="long")
def test_mixtral_decodes_as_eager_does() -> None:
    """Tokens are those of eager, logits as close to float64 as eager's; of its products none is a call."""
    model = tiny_mixtral("grouped_mm").bfloat16()
    wide = tiny_mixtral("batched_mm").double()
    wide.load_state_dict(model.state_dict())
    prompt = torch.randint(3, 96, (1, 5))
    options: dict[str, Any] = {"do_sample": False, "cache_implementation": "static", "pad_token_id": 0}
    options |= {"min_new_tokens": 4, "max_new_tokens": 4, "output_logits": True}
    options |= {"return_dict_in_generate": True}
    fast = fc.compile(model, backend="interpret", device="h200")
    ours, eager, truth = (m.generate(prompt, **options) for m in (fast, model, wide))
    assert torch.equal(ours.sequences, eager.sequences)
    for our, their, exact in zip(ours.logits, eager.logits, truth.logits, strict=True):
        assert not_as_close(our, their, exact) is None
    step = fast.plan[-1]
    assert "expert products: done x4" in str(step)
    assert not [left for left in step.leftovers if left.rule == "library call"], str(step)


def qwen3_moe(experts: str) -> Any:
    """Eight experts of sixteen for each token, whose shares are normed."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=64, moe_intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=16, num_experts_per_tok=8, norm_topk_prob=True,
        experts_implementation=experts,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def gpt_oss(experts: str) -> Any:
    """Matrices in the other order, biases of the experts, gates beside what they gate."""
    config = transformers.GptOssConfig(
        vocab_size=96, hidden_size=64, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=8, num_experts_per_tok=4,
        layer_types=["full_attention"], experts_implementation=experts,
    )  # fmt: skip
    return transformers.GptOssForCausalLM(config)


@pytest.mark.sample(1, group="long")
@pytest.mark.parametrize("make", [qwen3_moe, gpt_oss], ids=lambda f: f.__name__)
def test_a_token_of_other_models(make: Callable[[str], Any]) -> None:
    model, wide = make("grouped_mm").eval().bfloat16(), make("batched_mm").eval()
    wide.load_state_dict(model.state_dict())
    token = torch.randint(3, 96, (1, 1))
    fast = fc.compile(model, backend="interpret", device="h200")
    with torch.no_grad():
        ours, eager, truth = (m(token, use_cache=False).logits for m in (fast, model, wide.double()))
    assert not_as_close(ours, eager, truth) is None
    (plan,) = fast.plan
    notes = " ".join(str(plan).split())
    assert "expert products: done x2" in notes and "rows are not sorted" in notes
    left = " ".join(left.subject for left in plan.leftovers)
    assert "expert" not in left and "sort" not in left, str(plan)
