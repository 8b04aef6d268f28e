"""Rewrites above autograd: what they prove is true, what they change keeps its value, and why they refuse."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import fx
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.capture.capture import Capture
from fusion_compiler.ir.decision import Decision
from fusion_compiler.ir.graph_pass import Level
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.ops.views import is_view
from fusion_compiler.passes.rewrites.attention_mask import simplify_masks
from fusion_compiler.passes.rewrites.contiguous import make_activations_contiguous
from fusion_compiler.passes.rewrites.grouped_query import GROUPED_QUERIES
from fusion_compiler.passes.rewrites.predicate import Bounds, Every, Formula, Le0, every, negation, some
from fusion_compiler.passes.rewrites.vocabulary import PADDED_FEATURES
from fusion_compiler.pipeline import passes_at
from tests import models

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default


def traced(function: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    """The pre-autograd ATen graph of `function`, on fake tensors like `args`."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(a) if a.device.type == "cpu" else a for a in args]
        return make_fx(function, pre_dispatch=True)(*fakes)


def on_cuda(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """Fake CUDA tensors: none of what is traced with them runs."""
    with FakeTensorMode():
        return [torch.empty(s, dtype=dtype, device="cuda") for s in shapes]


def traced_on_cuda(function: Callable[..., Any], *fakes: torch.Tensor) -> fx.GraphModule:
    with torch._guards.detect_fake_mode(fakes):
        return make_fx(function, pre_dispatch=True)(*fakes)


def targets(gm: fx.GraphModule) -> list[Any]:
    return [n.target for n in gm.graph.nodes if n.op == "call_function"]


# Predicates


def _random_formula(rng: random.Random, bounds: Bounds, depth: int) -> tuple[Formula, Callable[..., bool]]:
    i, j = bounds.sizes
    if depth == 0:
        a, b, c = rng.randint(-2, 2), rng.randint(-2, 2), rng.randint(-4, 4)
        return bounds.le0(a * i + b * j + c), lambda x, y: a * x + b * y + c <= 0
    kind = rng.choice(["every", "some", "not"])
    one, f = _random_formula(rng, bounds, depth - 1)
    if kind == "not":
        return negation(one), lambda x, y: not f(x, y)
    two, g = _random_formula(rng, bounds, depth - 1)
    if kind == "every":
        return every(one, two), lambda x, y: f(x, y) and g(x, y)
    return some(one, two), lambda x, y: f(x, y) or g(x, y)


def _holds(formula: Formula, at: dict[sympy.Symbol, int]) -> bool:
    if isinstance(formula, bool):
        return formula
    if isinstance(formula, Le0):
        return bool(formula.expr.subs(at) <= 0)
    combine = all if isinstance(formula, Every) else any
    return combine(_holds(p, at) for p in formula.parts)


@pytest.mark.parametrize("seed", range(40))
def test_simplified_predicates_hold_where_the_originals_do(seed: int) -> None:
    rng = random.Random(seed)
    i, j = sympy.symbols("i j", integer=True)
    bounds = Bounds({i: sympy.Integer(4), j: sympy.Integer(3)})
    formula, truth = _random_formula(rng, bounds, depth=3)
    for x, y in itertools.product(range(4), range(3)):
        assert _holds(formula, {i: x, j: y}) == truth(x, y)


def test_bounds_with_symbolic_sizes() -> None:
    i, j, s = sympy.symbols("i j s", integer=True)
    bounds = Bounds({i: s, j: s})
    assert bounds.le0(-i) is True
    assert bounds.le0(i - s + 1) is True
    assert bounds.le0(i + 1) is False
    assert bounds.le0(j - i) == Le0(j - i)
    assert bounds.le0(i - s) is True
    assert bounds.le0(i - 1000) == Le0(i - 1000)  # some size is larger


# Masks

ROWS = 12


def _additive(n: int, low: float) -> torch.Tensor:
    return torch.triu(torch.full((n, n), low), diagonal=1)


MASKS: dict[str, tuple[Callable[[int], torch.Tensor], str]] = {
    "comparison": (lambda n: torch.arange(n)[None, :] <= torch.arange(n)[:, None], "causal"),
    "comparison reversed": (lambda n: torch.arange(n)[:, None] >= torch.arange(n)[None, :], "causal"),
    "strict, shifted": (lambda n: torch.arange(n)[None, :] < torch.arange(n)[:, None] + 1, "causal"),
    "negated": (lambda n: ~(torch.arange(n)[None, :] > torch.arange(n)[:, None]), "causal"),
    "tril": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(), "causal"),
    "tril of a wider one": (lambda n: torch.ones(64, 64, dtype=torch.bool).tril()[:n, :n], "causal"),
    "triu of zeros inverted": (
        lambda n: torch.ones(n, n, dtype=torch.bool).triu(1).logical_not()[None, None],
        "causal",
    ),
    "literals": (
        lambda n: torch.where(
            torch.arange(n)[None] <= torch.arange(n)[:, None], torch.tensor(0.0), torch.tensor(-torch.inf)
        ),
        "causal",
    ),
    "additive -inf": (lambda n: _additive(n, float("-inf")), "causal"),
    "additive lowest": (lambda n: _additive(n, torch.finfo(torch.float32).min), "causal"),
    "where": (
        lambda n: torch.where(torch.arange(n)[None, :] <= torch.arange(n)[:, None], 0.0, -torch.inf),
        "causal",
    ),
    "window that holds everything": (
        lambda n: (
            (torch.arange(n)[None, :] <= torch.arange(n)[:, None])
            & (torch.arange(n)[:, None] - torch.arange(n)[None, :] < ROWS)
        ),
        "causal",
    ),
    "ones": (lambda n: torch.ones(n, n, dtype=torch.bool), "all true"),
    "indices are not negative": (
        lambda n: (torch.arange(n)[None, :] + torch.arange(n)[:, None]) >= 0,
        "all true",
    ),
    "zeros": (lambda n: torch.zeros(1, 1, n, n), "all true"),
    "one row for all": (lambda n: torch.arange(n)[None, :] < n, "all true"),
    "window": (
        lambda n: (
            (torch.arange(n)[None, :] <= torch.arange(n)[:, None])
            & (torch.arange(n)[:, None] - torch.arange(n)[None, :] < 5)
        ),
        "neither",
    ),
    "one diagonal more": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(1), "neither"),
    "one diagonal less": (lambda n: torch.ones(n, n, dtype=torch.bool).tril(-1), "neither"),
    "transposed": (lambda n: torch.ones(n, n, dtype=torch.bool).tril().t(), "neither"),
    "every second": (lambda n: torch.arange(n)[None, :] % 2 == 0, "neither"),
    "finite": (lambda n: _additive(n, -10.0), "finite"),
    "filled in place": (lambda n: torch.ones(n, n, dtype=torch.bool).tril_(), "in place"),
    "through a view": (
        lambda n: (m := torch.ones(n, n, dtype=torch.bool), m[0, 1:].fill_(False), m)[-1],
        "in place",
    ),
    "random": (lambda n: torch.rand(n, n) > -1, "depends on aten.rand"),
    "uninitialised": (lambda n: torch.empty(n, n) == 0, "depends on aten.empty"),
    "data": (lambda n: torch.ones(n, n, dtype=torch.bool), "depends on data"),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    make, verdict = MASKS[name]
    q, k, v = (torch.randn(2, 3, ROWS, 8, dtype=torch.float64) for _ in range(3))

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        mask = data if name == "data" else make(ROWS)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask.to(q.dtype) if mask.is_floating_point() else mask
        )

    args = (q, k, v, make(ROWS))
    gm = traced(attention, *args)
    before = gm.print_readable(print_output=False)
    new, notes = simplify_masks(gm)
    assert gm.print_readable(print_output=False) == before
    (note,) = notes
    assert verdict in note.reason
    assert note.is_done == (verdict in ("causal", "all true"))
    call = new.graph.find_nodes(op="call_function", target=SDPA)[0]
    if note.is_done:
        assert len(targets(new)) == 1, "the mask is still built"
        assert call.args[5] == (verdict == "causal")
        torch.testing.assert_close(new(*args), attention(*args), rtol=1e-12, atol=1e-12)
    else:
        assert new is gm


def test_causal_needs_as_many_keys_as_queries() -> None:
    def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(9)[None, :] <= torch.arange(5)[:, None]
        return F.scaled_dot_product_attention(q, k, k, attn_mask=mask)

    gm = traced(attention, torch.randn(1, 1, 5, 8), torch.randn(1, 1, 9, 8))
    new, (note,) = simplify_masks(gm)
    assert new is gm and "differ in length" in note.reason


def test_a_mask_that_is_used_elsewhere_stays() -> None:
    def attention(q: torch.Tensor) -> Any:
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask), mask

    q = torch.randn(1, 1, 5, 8)
    new, (note,) = simplify_masks(traced(attention, q))
    assert note.is_done
    torch.testing.assert_close(new(q), attention(q))


def _notes_of(name: str, *, dynamic: bool | None = None, **extra: torch.Tensor) -> list[Decision]:
    """The notes of one forward pass of a model, whose result is checked against eager."""
    model, batch = models.small(name, dropout=False)
    batch |= extra
    notes: list[Decision] = []

    def keep(gm: fx.GraphModule, inputs: Any, info: Any) -> Any:
        notes.extend(info.rewrites)
        return make_boxed_func(gm.forward)

    rewrites = passes_at(Level.ABOVE_AUTOGRAD)
    backend = Capture(keep, rewrites=rewrites, decompositions=decomposition_table).backend
    with torch.no_grad():
        got = torch.compile(model, backend=backend, dynamic=dynamic)(**batch)
        want = model(**batch)
    torch.testing.assert_close(got.logits, want.logits, rtol=1e-4, atol=1e-5)
    return [n for n in notes if n.rule == "attention mask"]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("name", "dynamic"),
    [(name, None) for name in ("gpt2", "whisper", "mistral", "bert", "vit", "t5")] + [("llama", True)],
)
def test_masks_of_models(name: str, dynamic: bool | None) -> None:
    notes = _notes_of(name, dynamic=dynamic)
    reasons = {n.reason for n in notes}
    if name in ("bert", "vit"):  # transformers leaves the mask out itself where torch lets it
        assert reasons <= {"all true, proved from its indices"}
    elif name == "mistral":
        assert reasons == {"the mask is neither all true nor causal: (-i2 + i3 <= 0 and i2 - i3 - 7 <= 0)"}
    elif name == "t5":
        # A learned bias by position, and additive zeros in the attention to the encoder.
        assert [n.reason.split(" (")[0] for n in notes[2:]] == 2 * [
            "the mask depends on data",
            "all true, evaluated",
        ]
    else:
        assert reasons == {"causal, proved from its indices"}
        assert len(notes) == 2


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_mask_of_ones_that_is_data_stays(name: str) -> None:
    notes = _notes_of(name, attention_mask=torch.ones(2, 19, dtype=torch.int64))
    assert notes and not any(n.is_done for n in notes)


def test_padding_still_counts() -> None:
    mask = torch.ones(2, 19, dtype=torch.int64)
    mask[0, 15:] = 0
    assert not any(n.is_done for n in _notes_of("bert", attention_mask=mask))


# Grouped queries


def _repeat_kv(x: torch.Tensor, n: int) -> torch.Tensor:
    b, h, s, d = x.shape
    return x.unsqueeze(2).expand(b, h, n, s, d).reshape(b, h * n, s, d)


@pytest.mark.parametrize("repeat", [_repeat_kv, lambda x, n: x.repeat_interleave(n, dim=1)])
def test_grouped_queries(repeat: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, repeat(k, 3), repeat(v, 3), is_causal=True, scale=0.3)

    shapes = (2, 6, 16, 8), (2, 2, 16, 8), (2, 2, 16, 8)
    new, (note,) = GROUPED_QUERIES.apply(traced_on_cuda(attention, *on_cuda(*shapes)))
    assert note.is_done and targets(new) == [SDPA]
    args = [torch.randn(s, dtype=torch.float64) for s in shapes]
    torch.testing.assert_close(new(*args), attention(*args), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("mask", [(1, 16), (2, 1, 1, 16)], ids=str)
def test_one_query_of_each_head_is_one_of_several_of_its_key(mask: tuple[int, ...]) -> None:
    def attention(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, v, allowed = tensors
        return F.scaled_dot_product_attention(q, _repeat_kv(k, 3), _repeat_kv(v, 3), attn_mask=allowed)

    shapes = (2, 6, 1, 8), (2, 2, 16, 8), (2, 2, 16, 8), mask
    new, (note,) = GROUPED_QUERIES.apply(traced_on_cuda(attention, *on_cuda(*shapes)))
    assert note.is_done
    assert [t for t in targets(new) if not is_view(t)] == [SDPA]
    for kind in (torch.bool, torch.float64):
        args = [torch.randn(s, dtype=torch.float64) for s in shapes]
        args[3] = args[3] > -1 if kind is torch.bool else args[3]
        torch.testing.assert_close(new(*args), attention(*args), rtol=1e-12, atol=1e-12)


def test_a_mask_that_tells_heads_apart_keeps_them_repeated() -> None:
    def attention(*tensors: torch.Tensor) -> torch.Tensor:
        q, k, allowed = tensors
        return F.scaled_dot_product_attention(q, _repeat_kv(k, 3), _repeat_kv(k, 3), attn_mask=allowed)

    gm = traced_on_cuda(attention, *on_cuda((2, 6, 1, 8), (2, 2, 16, 8), (1, 6, 1, 16)))
    new, (note,) = GROUPED_QUERIES.apply(gm)
    assert new is gm and "a mask" in note.reason


def test_grouped_queries_are_refused() -> None:
    def reason(function: Callable[..., Any], *fakes: torch.Tensor) -> str:
        gm = traced_on_cuda(function, *fakes)
        new, (note,) = GROUPED_QUERIES.apply(gm)
        assert new is gm and not note.is_done
        return note.reason

    def masked(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        repeated = _repeat_kv(k, 3)
        return F.scaled_dot_product_attention(q, repeated, repeated, attn_mask=mask)

    def attention(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return masked(q, k, None)

    shapes = (2, 6, 16, 8), (2, 2, 16, 8)
    assert "no flash kernel for torch.float32" in reason(attention, *on_cuda(*shapes, dtype=torch.float32))
    assert "a mask" in reason(masked, *on_cuda(*shapes, (16, 16)))
    big = (2, 6, 16, 320), (2, 2, 16, 320)
    assert "heads of 320" in reason(attention, *on_cuda(*big))

    def other_order(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        tiled = k.unsqueeze(1).expand(2, 3, 2, 16, 8).reshape(2, 6, 16, 8)
        return F.scaled_dot_product_attention(q, tiled, tiled)

    assert GROUPED_QUERIES.apply(traced_on_cuda(other_order, *on_cuda(*shapes)))[1] == ()


# Aligned features


@pytest.mark.parametrize("bias", [False, True])
def test_vocabularies_are_aligned(bias: bool) -> None:
    shapes = ((2, 160, 32), (5001, 32), (5001,))[: 3 if bias else 2]
    new, (note,) = PADDED_FEATURES.apply(traced_on_cuda(F.linear, *on_cuda(*shapes)))
    assert note.reason == "5001 output features padded to 5056"
    product = new.graph.find_nodes(op="call_function", target=aten.linear.default)[0]
    assert tuple(product.meta["val"].shape) == (2, 160, 5056)
    args = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    twins = [a.detach().clone().requires_grad_() for a in args]
    got, want = new(*args), F.linear(*twins)
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    upstream = torch.randn_like(want)
    got.backward(upstream)
    want.backward(upstream)
    for a, b in zip(args, twins, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "features", "dtype", "reason"),
    [
        (512, 5001, torch.float32, "no gain is known for torch.float32"),
        (4, 5001, torch.bfloat16, "4 rows do not pay"),
        (512, 5008, torch.bfloat16, None),
        (512, 1001, torch.bfloat16, None),
    ],
)
def test_what_is_not_padded(rows: int, features: int, dtype: torch.dtype, reason: str | None) -> None:
    gm = traced_on_cuda(F.linear, *on_cuda((rows, 32), (features, 32), dtype=dtype))
    new, notes = PADDED_FEATURES.apply(gm)
    assert new is gm
    assert [reason] == [n.reason[: len(reason)] for n in notes] if reason else notes == ()


# Row order


def test_rows_are_ordered_where_no_result_shows_it() -> None:
    """A transposed stream is stored by rows; what the caller gets keeps eager's strides."""
    x, w = torch.randn(2, 5, 3).transpose(1, 2), torch.randn(4, 5)

    def strides(function: Callable[..., Any]) -> bool:
        new, notes = make_activations_contiguous(traced(function, x, w))
        want, got = function(x, w), new(x, w)
        for ours, eager in zip(got, want, strict=True):
            assert ours.stride() == eager.stride()
            torch.testing.assert_close(ours, eager)
        return bool(notes)

    assert strides(lambda x, w: (F.linear(torch.relu(x), w),))
    assert strides(lambda x, w: (F.layer_norm(x * 2, (5,)),))
    assert strides(lambda x, w: (torch.matmul(x * 2, w.t()),))  # folded, and so copied
    assert not strides(lambda x, w: (torch.bmm(x * 2, w.t().expand(2, 5, 4)),))
    assert not strides(lambda x, w: (x + 1,))
    assert not strides(lambda x, w: (F.linear(y := x + 1, w), y * 2, y.chunk(2, 1)[0]))
    assert not strides(lambda x, w: ((x * 2).movedim(-1, 1),))  # in row order itself, and a view
