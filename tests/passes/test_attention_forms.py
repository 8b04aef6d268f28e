"""Attention that is written out: found in any form, called as one, equal in values and gradients."""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

import fusion_compiler as fc
from benchmarks.harness.accuracy import InFloat64
from examples.encoder_layer import EncoderLayer
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.passes.rewrites.attention_mask import simplify_masks
from fusion_compiler.passes.rewrites.equality import check_equal
from fusion_compiler.passes.rewrites.grouped_query import GROUPED_QUERIES
from fusion_compiler.passes.rewrites.written_attention import FUSED_ATTENTION, RULE
from fusion_compiler.patterns import Rewrite
from tests import models
from tests.exactness import not_as_close, rounding_noise, wide
from tests.passes.test_rewrites import SDPA, on_cuda, targets, traced, traced_on_cuda

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

aten = torch.ops.aten
Code = Callable[..., Any]
BATCH, HEADS, ROWS, KEYS, SIZE = 2, 4, 5, 7, 8
WRITTEN_OUT = {
    aten.matmul.default, aten.bmm.default, aten.baddbmm.default, aten.einsum.default, aten.softmax.int,
    aten.exp.default, aten.dropout.default,
}  # fmt: skip


# -- ten attentions, each written in another way -------------------------------------------------------


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]), -1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[batch, length, heads, size], a name for every axis."""
    p = torch.einsum("bqhd,bkhd->bhqk", q * 0.3, k).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", p, v).flatten(2)


def folded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Heads beside the batch in one dimension, and unfolded for the mask; softmax in float32."""
    b, h, n, d = q.shape
    q, k, v = (x.reshape(b * h, -1, d) for x in (q, k, v))
    scores = torch.bmm(q, k.transpose(1, 2)).view(b, h, n, -1) * 0.3 + bias
    p = F.softmax(scores.view(b * h, n, -1), -1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(p, v).view(b, h, n, d).transpose(1, 2).reshape(b, n, h * d)


def added_product(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    b, h, n, _ = q.shape
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    scores = torch.baddbmm(bias.expand(b, h, n, -1).flatten(0, 1), q, k.mT, beta=2.0, alpha=0.25)
    return torch.bmm(scores.softmax(-1), v).unflatten(0, (b, h))


def keys_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores as [keys, rows], and v on the left."""
    return v.transpose(-1, -2) @ F.softmax(k @ q.transpose(-1, -2) * 0.3, -2)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    future = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
    return F.softmax((q @ k.mT * 0.3).masked_fill(future, -math.inf), -1) @ v


def chosen_then_scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The lowest number where a window ends."""
    distance = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    scores = q @ k.mT
    seen = (distance >= 0) & (distance < 3)
    scores = torch.where(seen, scores, torch.full_like(scores, torch.finfo(q.dtype).min))
    return torch.softmax(scores * 0.3, -1) @ v


def padded(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Keys that are data are hidden by a large number; one sequence is hidden whole."""
    return F.softmax((q @ k.mT * 0.3).masked_fill(padding[:, None, None] == 0, -1e9), -1) @ v


def biased_and_padded(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, padding: Tensor) -> Tensor:
    scores = q @ k.mT
    scores *= 0.3
    scores += bias
    return F.dropout(scores.masked_fill(padding[:, None, None] == 0, -math.inf).softmax(-1), 0.1, False) @ v


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax too."""
    scores = torch.matmul(q, k.mT).div(3.0)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two heads of queries for each of keys."""
    b, h, n, d = q.shape
    q = q.view(b, h // 2, 2, n, d)
    p = torch.einsum("bhgqd,bhkd->bhgqk", q * 0.3, k).softmax(-1)
    return torch.einsum("bhgqk,bhkd->bhgqd", p, v).flatten(1, 2)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    b, h, n, d = k.shape
    k, v = (x.unsqueeze(2).expand(b, h, 2, n, d).reshape(b, 2 * h, n, d) for x in (k, v))
    return torch.matmul((torch.matmul(q, k.transpose(2, 3)) * 0.3).softmax(-1), v).transpose(1, 2)


def windows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
    """[windows, heads, ...] scores, unfolded for a mask of each window."""
    scores = (0.3 * q) @ k.transpose(-2, -1) + bias
    w = mask.shape[0]
    scores = scores.view(-1, w, *scores.shape[1:]) + mask[None, :, None]
    return scores.view(-1, *scores.shape[2:]).softmax(-1) @ v


HEAD, MEMORY = (BATCH, HEADS, ROWS, SIZE), (BATCH, HEADS, KEYS, SIZE)
QKV, SQUARE = (HEAD, MEMORY, MEMORY), (HEAD, HEAD, HEAD)
PADDING = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [1, 0, 0, 0, 0, 0, 0]])
NOTHING = torch.tensor([[1, 1, 0, 1, 0, 1, 1], [0] * KEYS])
BIAS = (1, HEADS, ROWS, KEYS)
# name: (code, shapes or integer tensors, what the note says)
FORMS: dict[str, tuple[Code, tuple[Any, ...], str]] = {
    "plain": (plain, QKV, "no mask"),
    "einsum": (einsum, ((BATCH, ROWS, HEADS, SIZE), *[(BATCH, KEYS, HEADS, SIZE)] * 2), "no mask"),
    "folded": (folded, (*QKV, BIAS), "an additive mask"),
    "added product": (added_product, (*QKV, BIAS), "an additive mask"),
    "keys first": (keys_first, QKV, "no mask"),
    "causal": (causal, SQUARE, "a bool mask"),
    "chosen, then scaled": (chosen_then_scaled, SQUARE, "a bool mask"),
    "padded": (padded, (*QKV, PADDING), "a bool mask"),
    "hidden whole": (padded, (*QKV, NOTHING), "a bool mask"),
    "biased and padded": (biased_and_padded, (*QKV, BIAS, PADDING), "an additive mask"),
    "by hand": (by_hand, QKV, "no mask"),
    "grouped": (grouped, (HEAD, *[(BATCH, HEADS // 2, KEYS, SIZE)] * 2), "no mask"),
    "repeated": (repeated, (HEAD, *[(BATCH, HEADS // 2, KEYS, SIZE)] * 2), "no mask"),
    "windows": (windows, (*SQUARE, (HEADS, ROWS, ROWS), (2, ROWS, ROWS)), "an additive mask"),
}


def tensors(shapes: tuple[Any, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    return tuple(g if isinstance(g, Tensor) else torch.randn(g, dtype=dtype) for g in shapes)


def rewritten(code: Code, *args: Tensor) -> tuple[Any, str]:
    """The graph of `code` after the rewrite, and the reason of its only note."""
    gm = traced(code, *args)
    before = gm.print_readable(print_output=False)
    new, (note,) = FUSED_ATTENTION.apply(gm)
    assert gm.print_readable(print_output=False) == before
    assert note.rule == RULE and note.is_done is (new is not gm), note
    return new, note.reason


def assert_equal_like_a_rewrite(code: Code, args: tuple[Tensor, ...], domain: Any = (-8.0, 8.0)) -> None:
    """Run the check that a user's rewrites pass: numbers of every kind, in float64 and in their dtype."""
    graphs: dict[tuple[torch.Size, ...], Any] = {}
    for factor in (1, 3):
        sized = [a.new_zeros([s if s == 1 else s * factor for s in a.shape]) for a in args]
        graphs[tuple(a.shape for a in sized)] = FUSED_ATTENTION.apply(traced(code, *sized))[0]

    def after(*inputs: Tensor) -> Any:
        return graphs[tuple(g.shape for g in inputs)](*inputs)

    check_equal(Rewrite("attention", code, args, after=after, domain=domain))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_forms(name: str, dtype: torch.dtype) -> None:
    code, shapes, mask = FORMS[name]
    args = tensors(shapes, dtype)
    new, reason = rewritten(code, *args)
    assert mask in reason
    assert targets(new).count(SDPA) == 1 and not WRITTEN_OUT & set(targets(new))
    assert_equal_like_a_rewrite(code, args)


@pytest.mark.parametrize("seed", range(30))
def test_axes_in_any_order(seed: int) -> None:
    """einsum with the dimensions of every tensor shuffled, and some of keys and values left out."""
    rng = random.Random(seed)
    sizes = {"b": 2, "h": 3, "q": 5, "k": 7, "d": 8, "e": 6 if seed % 3 else 8}

    def shuffled(letters: str) -> str:
        return "".join(rng.sample(letters, len(letters)))

    shared = rng.choice(["bh", "bh", "bh", "b", "h"])
    q, k, v = shuffled("bhqd"), shuffled(shared + "kd"), shuffled("bhke" if seed % 2 else shared + "ke")
    scores, result = shuffled("bhqk"), shuffled("bhqe")
    args = tensors(tuple(tuple(sizes[x] for x in letters) for letters in (q, k, v)), torch.float64)

    def attention(one: Tensor, two: Tensor, three: Tensor) -> Tensor:
        products = [(q, one), (k, two)] if seed % 4 < 2 else [(k, two), (q, one)]
        s = torch.einsum(f"{products[0][0]},{products[1][0]}->{scores}", products[0][1], products[1][1])
        return torch.einsum(f"{scores},{v}->{result}", (s * 0.3).softmax(scores.index("k")), three)

    new, reason = rewritten(attention, *args)
    if sizes["e"] != sizes["d"]:
        assert reason == "no fused kernel for heads of 8 and 6 on cpu" and SDPA not in targets(new)
        return
    assert targets(new).count(SDPA) == 1 and not WRITTEN_OUT & set(targets(new))
    assert_same(new, attention, args)


def assert_same(new: Code, code: Code, args: tuple[Tensor, ...], tolerance: float = 1e-10) -> None:
    """Values and gradients, and the strides that a caller sees."""
    outputs: list[tuple[Tensor, ...]] = []
    torch.manual_seed(1)
    upstream: Tensor | None = None
    for function in (new, code):
        leaves = [a.detach().clone().requires_grad_(a.is_floating_point()) for a in args]
        result = function(*leaves)
        upstream = torch.randn_like(result) if upstream is None else upstream
        result.backward(upstream)
        outputs.append((result.detach(), *(a.grad for a in leaves if a.grad is not None)))
    for got, want in zip(*outputs, strict=True):
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert outputs[0][0].stride() == outputs[1][0].stride()


# -- rows that see nothing -----------------------------------------------------------------------------


@pytest.mark.parametrize("value", [-math.inf, -1e9])
@pytest.mark.parametrize("form", ["filled", "chosen"])
def test_rows_that_see_nothing_are_what_eager_makes_of_them(form: str, value: float) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        scores = q @ k.mT * 0.3
        hidden = ~seen
        scores = scores.masked_fill(hidden, value) if form == "filled" else torch.where(seen, scores, value)
        return scores.softmax(-1) @ v

    seen = torch.rand(BATCH, 1, ROWS, KEYS) > 0.5
    seen[0, 0, 1], seen[1, 0] = False, True
    args = (*tensors(QKV, torch.float64), seen)
    new, _ = rewritten(attention, *args)
    if math.isfinite(value):
        return assert_same(new, attention, args)
    got, want = new(*args), attention(*args)
    assert want[0, :, 1].isnan().all() and not want[1].isnan().any()
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, equal_nan=True)
    grown = [a.requires_grad_() for a in args[:3]]
    ours, theirs = (
        torch.autograd.grad(f(*grown, seen)[1].sum(), grown, allow_unused=True) for f in (new, attention)
    )
    for a, b in zip(ours, theirs, strict=True):  # of the sequence that has no such row
        torch.testing.assert_close(a[1], b[1], rtol=1e-10, atol=1e-10)
    return None


@pytest.mark.parametrize("value", [-math.inf, -1e9])
def test_a_bias_may_hide_what_a_mask_shows(value: float) -> None:
    """Then a number that fills the rest counts, and a row in which the mask hides nothing is NaN."""

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
        return (q @ k.mT * 0.3 + bias).masked_fill(~seen, value).softmax(-1) @ v

    seen = torch.rand(BATCH, 1, ROWS, KEYS) > 0.5
    seen[0, 0, 1], seen[:, :, 2], bias = False, True, torch.randn(BIAS, dtype=torch.float64)
    bias[0, 0, 2], bias[0, 1, 3] = -math.inf, -math.inf
    args = (*tensors(QKV, torch.float64), bias, seen)
    new, _ = rewritten(attention, *args)
    got, want = new(*args), attention(*args)
    assert want[:, 0, 2].isnan().all() and want[:, 1, 3].isnan().any() == math.isinf(value)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("low", [-math.inf, torch.finfo(torch.float32).min, -10000.0])
def test_additive_masks_stay_as_they_are(low: float) -> None:
    """A row of finite numbers alone is a softmax of what is added to."""

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return (q @ k.mT * 0.3 + mask).softmax(-1) @ v

    mask = torch.zeros(BATCH, 1, 1, KEYS).masked_fill(
        torch.tensor([[[[True] * KEYS]], [[[False] * KEYS]]]), low
    )
    args = (*tensors(QKV), mask)
    new, _ = rewritten(attention, *args)
    torch.testing.assert_close(new(*args), attention(*args), rtol=1e-5, atol=1e-5, equal_nan=True)
    assert new(*args)[0].isnan().all() == math.isinf(low)


@pytest.mark.parametrize("offset", [0, 1, -1])
def test_only_masks_that_may_hide_a_row_cost_anything(offset: int) -> None:
    """Below the diagonal, the first row sees nothing."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen = torch.ones(ROWS, ROWS, dtype=torch.bool).tril(offset)
        return (q @ k.mT).masked_fill(~seen, -math.inf).softmax(-1) @ v

    args = tensors(SQUARE, torch.float64)
    new, _ = rewritten(attention, *args)
    assert (aten.any.dim in targets(new)) == (offset < 0)
    assert new(*args)[:, :, 0].isnan().all() == (offset < 0)
    torch.testing.assert_close(new(*args), attention(*args), rtol=1e-10, atol=1e-10, equal_nan=True)
    assert simplify_masks(new)[1][0].is_done == (offset == 0)


# -- what is left alone --------------------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.3


def _shown_weights(q: Tensor, k: Tensor, v: Tensor) -> Any:
    p = _scores(q, k).softmax(-1)
    return p @ v, p


def _shown_scores(q: Tensor, k: Tensor, v: Tensor) -> Any:
    scores = _scores(q, k)
    return scores.softmax(-1) @ v, scores.amax()


def _changed_value(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    v = v.clone()
    p = _scores(q, k.contiguous()).softmax(-1)
    v[0] = 0
    return p @ v + v.sum()


def _changed_key(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k = k.clone()
    kept = k.clone()
    k.mul_(2.0)
    return _scores(q, kept).softmax(-1) @ v + k.sum()


def _changed_scores(q: Tensor, k: Tensor, v: Tensor) -> Any:
    scores = _scores(q, k)
    part = scores[0]
    scores.mul_(2.0)
    return scores.softmax(-1) @ v, part


def _two_fills(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    one, two = torch.ones(ROWS, KEYS).triu(1).bool(), torch.ones(ROWS, KEYS).tril(-2).bool()
    return _scores(q, k).masked_fill(one, -1e9).masked_fill(two, -math.inf).softmax(-1) @ v


SEEN = torch.ones(ROWS, KEYS).triu(1).bool()
REFUSED: dict[str, tuple[Code, str]] = {
    "another function": (lambda q, k, v: _scores(q, k).sigmoid().softmax(-1) @ v, "sigmoid of the scores"),
    "capped after a bias": (
        lambda q, k, v: (torch.tanh(_scores(q, k) + v[..., :1].mT) * 5).softmax(-1) @ v, "tanh of masked",
    ),
    "weights returned": (_shown_weights, "output also reads the probabilities"),
    "scores returned": (_shown_scores, "amax also reads the scores"),
    "a head's mask": (lambda q, k, v: (_scores(q, k).softmax(-1) * v[:, :, :1, :1]) @ v, "mul of the prob"),
    "a learned scale": (lambda q, k, v: (q @ k.mT * v[:, :, :1, :1]).softmax(-1) @ v, "by a tensor"),
    "a negative scale": (lambda q, k, v: (q @ k.mT * -0.5).softmax(-1) @ v, "multiplied by -0.5"),
    "another axis": (lambda q, k, v: _scores(q, k).softmax(-2) @ v, "sums over another dimension than"),
    "a small number": (lambda q, k, v: _scores(q, k).masked_fill(SEEN, -50.0).softmax(-1) @ v, "are -50"),
    "a positive number": (lambda q, k, v: _scores(q, k).masked_fill(SEEN, 50.0).softmax(-1) @ v, "with 50"),
    "two fills": (_two_fills, "different numbers"),
    "a bias on filled scores": (
        lambda q, k, v: (_scores(q, k).masked_fill(SEEN, -1e9) + v[..., :1].mT).softmax(-1) @ v, "a mask has",
    ),
    "a number added": (lambda q, k, v: (_scores(q, k) + 1).softmax(-1) @ v, "a number is added"),
    "dropout on a CPU": (lambda q, k, v: F.dropout(_scores(q, k).softmax(-1), 0.5) @ v, "dropout on a CPU"),
    "values changed between": (_changed_value, "is changed in place"),
    "a view of changed scores": (_changed_scores, "also reads the scores"),
    "float64 scores": (
        lambda q, k, v: _scores(q.double(), k.double()).softmax(-1).float() @ v, "the scores are float64",
    ),
    "a float32 mask": (
        lambda q, k, v: (_scores(q.half(), k.half()) + v[..., :1].mT).softmax(-1).half() @ v.half(),
        "a mask of torch.float32 beside torch.float16",
    ),
    "float32 queries": (
        lambda q, k, v: _scores(q, k).softmax(-1).half() @ v.half(), "products of torch.float32 and of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_left_alone(name: str) -> None:
    code, why = REFUSED[name]
    args = tensors(QKV)
    gm = traced(code, *args)
    new, (note,) = FUSED_ATTENTION.apply(gm)
    assert new is gm and not note.is_done and why in note.reason, note


def test_a_copy_keeps_what_was_changed_later() -> None:
    args = tensors(QKV, torch.float64)
    new, reason = rewritten(_changed_key, *args)
    assert "one call" in reason or "changed in place" in reason
    torch.testing.assert_close(new(*args), _changed_key(*args), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "code",
    [
        lambda q, k, v: q.softmax(-1) @ k.mT,
        lambda q, k, v: F.linear(q, k[0, 0]).softmax(-1),
        lambda q, k, v: (q @ k.mT).softmax(-1).sum(-1),
        lambda q, k, v: (q @ k.mT).softmax(-1).topk(2).values,
    ],
)
def test_what_is_no_attention_has_no_note(code: Code) -> None:
    gm = traced(code, *tensors(QKV))
    assert FUSED_ATTENTION.apply(gm) == (gm, ())


# -- on CUDA -------------------------------------------------------------------------------------------


def _on_cuda(code: Code, *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> tuple[Any, str]:
    new, (note,) = FUSED_ATTENTION.apply(traced_on_cuda(code, *on_cuda(*shapes, dtype=dtype)))
    return new, note.reason


def _biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (_scores(q, k) + bias).softmax(-1) @ v


@pytest.mark.parametrize(
    ("size", "dtype", "with_bias", "why"),
    [
        (64, torch.bfloat16, True, None),
        (64, torch.float32, True, None),
        (60, torch.bfloat16, False, None),
        (60, torch.bfloat16, True, "heads of 60 and 60 with a mask"),
        (60, torch.float32, True, None),
        (62, torch.float32, False, "in torch.float32"),
        (320, torch.bfloat16, False, "heads of 320"),
        (64, torch.float64, False, "torch.float64 on cuda"),
    ],
)
def test_calls_without_a_fused_kernel(
    size: int, dtype: torch.dtype, with_bias: bool, why: str | None
) -> None:
    head = (2, 4, 16, size)
    shapes = (head, head, head, (4, 16, 16)) if with_bias else (head, head, head)
    new, reason = _on_cuda(_biased if with_bias else plain, *shapes, dtype=dtype)
    assert why in reason if why else SDPA in targets(new)


def test_repeated_heads_are_grouped_where_there_is_no_mask() -> None:
    heads = [(2, 4, 16, 64), (2, 2, 16, 64), (2, 2, 16, 64)]
    for code in (repeated, grouped):
        new, _ = _on_cuda(code, *heads)
        new, (note,) = GROUPED_QUERIES.apply(new)
        assert note.is_done, note
        args = tensors(tuple(heads), torch.float64)
        torch.testing.assert_close(new(*args), code(*args), rtol=1e-10, atol=1e-10)


def test_dropout_keeps_its_distribution() -> None:
    """Each of 4000 samples is one draw: of the results, mean and standard deviation are those of eager."""
    samples, p = 4000, 0.25

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout(_scores(q, k).softmax(-1), p) @ v

    shapes = ((samples, 1, 3, 8), (samples, 1, 6, 8), (samples, 1, 6, 8))
    new, reason = _on_cuda(attention, *shapes, dtype=torch.float32)
    assert reason == "one call, no mask, dropout 0.25" and aten.dropout.default not in targets(new)
    torch.manual_seed(0)
    args = [torch.randn(1, *s[1:]).expand(s) for s in shapes]
    ours, theirs = new(*args), attention(*args)
    exact = _scores(args[0], args[1])[:1].softmax(-1)
    mean = (exact @ args[2][:1])[0]
    spread = ((exact**2 @ args[2][:1] ** 2) * p / (1 - p)).sqrt()[0]
    for drawn in (ours, theirs):
        assert ((drawn.mean(0) - mean).abs() < 5 * spread / math.sqrt(samples)).all()
        assert (drawn.std(0) / spread - 1).abs().max() < 0.1


# -- models --------------------------------------------------------------------------------------------


def _swin() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.SwinConfig(
        image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, drop_path_rate=0.0, num_labels=5,
    )  # fmt: skip
    pixels = torch.randn(2, 3, 32, 32)
    return transformers.SwinForImageClassification(config), {
        "pixel_values": pixels,
        "labels": torch.tensor([1, 2]),
    }


def _encoder_layer() -> tuple[nn.Module, dict[str, Tensor]]:
    return EncoderLayer(64, 4, 112, dropout=0.0), {"x": torch.randn(2, 19, 64)}


def _model(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Attention written out, in train mode without dropout."""
    if name == "encoder layer":
        return _encoder_layer()
    model, batch = _swin() if name == "swin" else models.small(name, dropout=False)
    model.set_attn_implementation("eager")  # pyright: ignore[reportCallIssue]
    if name in ("bert", "gpt2"):
        batch["attention_mask"] = torch.ones(2, 19, dtype=torch.int64)
        batch["attention_mask"][0, 15:] = 0
    return model.train(), batch


def _step(model: Any, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """The loss, and the gradients of all parameters where they are recorded."""
    result = model(**batch)
    loss = result.square().mean() if isinstance(result, Tensor) else result.loss
    if not torch.is_grad_enabled():
        return [loss.detach()]
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    return [
        loss.detach(),
        *(torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)),
    ]


def _calls(plan: FusionPlan) -> list[str]:
    return [str(plan.dag.op(name).target) for name in plan.dag.order]


# A bias that is learned has no fused kernel on CPUs where its gradient is wanted.
MODELS = {"gpt2": (2, True), "bert": (2, True), "llama": (2, True), "t5": (6, False), "swin": (4, False),
          "encoder layer": (1, True)}  # fmt: skip


@pytest.mark.sample(4)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, train: bool) -> None:
    count, in_training = MODELS[name]
    torch.manual_seed(0)
    model, batch = _model(name)
    exact = copy.deepcopy(model).double()
    fast = fc.compile(model, backend="eager")
    with torch.set_grad_enabled(train):
        ours, eager = _step(fast, batch), _step(model, batch)
        with InFloat64():
            truth = _step(exact, wide(batch))
    for one, other, true in zip(ours, eager, truth, strict=True):
        assert not (why := not_as_close(one, other, true, rounding_noise([one], truth))), why
    forward = fast.plan[0]
    assert f"done{f' x{count}' if count > 1 else ''}: one call" in forward.notes[RULE]
    calls = _calls(forward)
    if not train or in_training:
        assert sum("scaled_dot_product" in c for c in calls) == count and not any(
            "bmm" in c for c in calls
        ), calls


def test_eager_numerics_keep_it_as_it_is_written() -> None:
    """Scores of 16 bits are rounded there."""
    layer, batch = _encoder_layer()
    fast = fc.compile(layer, backend="eager", numerics="eager")
    fast(**batch)
    assert RULE not in fast.plan[0].notes
    assert sum("bmm" in call for call in _calls(fast.plan[0])) == 2


@pytest.mark.parametrize("code", [plain, folded, causal, padded])
def test_sizes_that_are_symbols(code: Code) -> None:
    fast = fc.compile(code, backend="eager")
    for batch, rows in ((2, 5), (6, 9), (3, 11)):
        head = (batch, HEADS, rows, SIZE)
        extra = {folded: (1, HEADS, rows, rows), padded: torch.randint(0, 2, (batch, rows))}
        args = tensors((head, head, head, *([extra[code]] if code in extra else [])))
        torch.testing.assert_close(fast(*args), code(*args), rtol=1e-5, atol=1e-5)
    assert len(fast.plan) == 2 and all("one call" in plan.notes[RULE] for plan in fast.plan)


def test_autocast() -> None:
    """Products of 16 bits between float32 tensors, a softmax of float32."""
    q, k, v = (x.requires_grad_() for x in tensors(QKV))

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return plain(q, k, v)

    fast = fc.compile(attention, backend="eager")
    ours, eager, truth = fast(q, k, v), attention(q, k, v), plain(*(x.double() for x in (q, k, v)))
    assert "one call" in fast.plan[0].notes[RULE]
    upstream = torch.randn_like(truth)
    results = [(o, *torch.autograd.grad(o, (q, k, v), upstream.to(o.dtype))) for o in (ours, eager, truth)]
    for one, other, true in zip(*results, strict=True):
        assert not (why := not_as_close(one, other, true)), why


def test_every_attention_has_a_note() -> None:
    def twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return plain(q, plain(q, k, v), _scores(q, q).sigmoid().softmax(-1) @ q)

    gm = traced(twice, *tensors(SQUARE))
    new, notes = FUSED_ATTENTION.apply(gm)
    assert [n.is_done for n in notes] == [True, False, True]
    assert targets(new).count(SDPA) == 2
    args = tensors(SQUARE, torch.float64)
    assert_same(new, twice, args)


def test_forms_are_distinct() -> None:
    """Ten at least, and no two of one graph."""
    graphs = [str(traced(code, *tensors(shapes)).graph) for code, shapes, _ in FORMS.values()]
    distinct = {g for g, _ in itertools.groupby(sorted(graphs))}
    assert len(distinct) >= 10
