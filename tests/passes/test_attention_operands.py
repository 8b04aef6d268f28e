"""Attention reads its operands in place and scales its scores, where that is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fusion_compiler as fc
from fusion_compiler.passes.rewrites.attention_operands import (
    CONTIGUOUS_OPERANDS,
    OPERANDS_IN_PLACE,
    SCALED_SCORES,
)
from tests.passes.test_rewrites import on_cuda, targets, traced, traced_on_cuda

aten = torch.ops.aten
SDPA = aten.scaled_dot_product_attention.default
COPY = aten.contiguous.default


class Speech(nn.Module):
    """Attention as speech encoders write it: a scaled query, all operands made contiguous."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.heads, self.factor = heads, 0.3

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x) * self.factor)
        attended = F.scaled_dot_product_attention(q, self.split(self.k(x)), self.split(self.v(x)), scale=1.0)
        return self.out(attended.transpose(1, 2).contiguous().reshape(x.shape))


@pytest.mark.parametrize("numerics", ["default", "eager"])
def test_a_speech_encoder_is_as_right_as_eager(numerics: str) -> None:
    model = Speech().double()
    options: dict[str, Any] = {} if numerics == "default" else {"numerics": numerics}
    fast = fc.compile(model, backend="eager", device="h200", **options)
    x = torch.randn(3, 7, 32, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(3, 7, 32, dtype=torch.float64)
    leaves = [x, *model.parameters()]
    truth = torch.autograd.grad(model(x), leaves, grad)
    result = fast(x)
    torch.testing.assert_close(result, model(x))
    torch.testing.assert_close(torch.autograd.grad(result, leaves, grad), truth)
    notes = fast.plan[0].notes
    assert "query read where it is" in notes["attention operands in place"]
    assert ("scaled scores" in notes) == (numerics == "default")
    copies = [op for c in fast.plan[0].clusters for op in c.ops if op.startswith("clone")]
    assert not copies, copies


def test_what_is_query_and_key_at_once_has_its_factor_twice() -> None:
    def attention(x: Tensor, v: Tensor) -> Tensor:
        both = x * 0.25
        return F.scaled_dot_product_attention(both, both, v)

    def by_a_view(x: Tensor, v: Tensor) -> Tensor:
        both = (x / 3).transpose(1, 2)
        return F.scaled_dot_product_attention(both, both, v.transpose(1, 2))

    for function in (attention, by_a_view):
        new, notes = applied(SCALED_SCORES.apply, function, *torch.randn(2, 2, 4, 7, 8, dtype=torch.float64))
        assert [note.is_done for note in notes] == [True, True]
        assert not any(target in (aten.mul.Tensor, aten.div.Tensor) for target in targets(new))
        x, v = torch.randn(2, 2, 4, 7, 8, dtype=torch.float64)
        fast = fc.compile(function, strict=True, backend="eager", device="h200")
        torch.testing.assert_close(fast(x, v), function(x, v))


def split(x: Tensor) -> Tensor:
    return x.view(2, 7, 4, 8).transpose(1, 2)


Q, K, V = ((2, 7, 32),) * 3


def applied(rule: Callable[[fx.GraphModule], Any], function: Callable[..., Any], *args: Tensor) -> Any:
    """(the graph after a rule, its notes); on the CPU both graphs give the same numbers."""
    gm = (traced if args[0].device.type == "cpu" else traced_on_cuda)(function, *args)
    new, notes = rule(gm)
    if args[0].device.type == "cpu":
        again = [a.clone() for a in args]
        torch.testing.assert_close(new(*args), function(*again))
    return new, notes


def inputs() -> list[Tensor]:
    return [torch.randn(s, dtype=torch.float64) for s in (Q, K, V)]


def test_copies_before_a_call_and_behind_it() -> None:
    def called(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        operands = (split(x).contiguous() for x in (q, k, v))
        return F.scaled_dot_product_attention(*operands).transpose(1, 2).contiguous().view(2, 7, 32) + 1

    new, notes = applied(OPERANDS_IN_PLACE.apply, called, *inputs())
    assert [n.is_done for n in notes] == [True] * 3
    assert targets(new).count(COPY) == 1
    copy = new.graph.find_nodes(op="call_function", target=COPY)[0]
    assert copy.all_input_nodes[0].meta["val"].is_contiguous(), "nothing is left to copy"


def test_one_copy_that_is_query_key_and_value() -> None:
    def called(x: Tensor) -> Tensor:
        y = split(x).contiguous()
        return F.scaled_dot_product_attention(y, y, y) * 2 + 0 * x.sum()

    gm = traced(called, inputs()[0])
    (call,) = gm.graph.find_nodes(op="call_function", target=SDPA)
    _, (note,) = applied(OPERANDS_IN_PLACE.apply, lambda x: called(x).sum(-1), inputs()[0])
    assert note.is_done and note.reason.startswith("query, key, value read") and call.all_input_nodes


def shown(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(split(q).contiguous(), split(k), split(v))


def viewed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return shown(q, k, v).view(8, 7, 8).sum(0)


def strided(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.as_strided(shown(q, k, v), (2, 2), (7, 1)).sum(0)


def columns(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.view(2, 4, 8, 7).transpose(2, 3).contiguous()
    return F.scaled_dot_product_attention(q, split(k), split(v)).sum(-1)


def spread(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q[:, :, :8].unsqueeze(1).expand(2, 4, 7, 8).contiguous()
    return F.scaled_dot_product_attention(q, split(k), split(v)).sum(-1)


def written(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = split(q + 1)
    copy = q.contiguous()
    q.mul_(2)
    return F.scaled_dot_product_attention(copy, split(k), split(v)).sum(-1) + q.sum(-1)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (shown, "shows its strides"),
        (viewed, "Cannot view"),
        (strided, "depends on strides"),
        (columns, "rows are not contiguous"),
        (spread, "spread over several heads"),
        (written, "written in place"),
    ],
)
def test_copies_that_stay(function: Callable[..., Tensor], reason: str) -> None:
    gm = traced(function, *inputs())
    before = [str(n.meta.get("val")) for n in gm.graph.nodes]
    new, (note,) = applied(OPERANDS_IN_PLACE.apply, function, *inputs())
    assert new.code == gm.code and not note.is_done and reason in note.reason, note
    assert [str(n.meta.get("val")) for n in new.graph.nodes] == before


def test_a_copy_that_another_reads_stays() -> None:
    def called(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kept = split(k).contiguous()
        return F.scaled_dot_product_attention(split(q), kept, split(v)).sum(-1), kept

    gm = traced(called, *inputs())
    assert OPERANDS_IN_PLACE.apply(gm) == (gm, ())


def test_rows_that_no_kernel_loads_whole_are_copied_on_a_gpu() -> None:
    def called(x: Tensor) -> Tensor:
        q, k, v = x.split(20, -1)
        q, k, v = (t.unflatten(-1, (1, 20)).transpose(1, 2).clone() for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).sum(-1)

    _, notes = applied(OPERANDS_IN_PLACE.apply, called, *on_cuda((2, 7, 60)))
    assert [n.is_done for n in notes] == [False] * 3 and "multiples of 16 bytes" in notes[0].reason
    wider = on_cuda((2, 7, 192))
    _, notes = applied(
        OPERANDS_IN_PLACE.apply,
        lambda x: F.scaled_dot_product_attention(
            *(t.unflatten(-1, (4, 16)).transpose(1, 2).clone() for t in x.split(64, -1))
        ).sum(-1),
        *wider,
    )
    assert [n.is_done for n in notes] == [True] * 3


SCALED: dict[str, tuple[Callable[..., Tensor], float]] = {
    "query": (lambda q, k, v: F.scaled_dot_product_attention(split(q * 0.7), split(k), split(v)), 0.7),
    "key": (lambda q, k, v: F.scaled_dot_product_attention(split(q), split(k / 4), split(v)), 0.25),
    "both": (lambda q, k, v: F.scaled_dot_product_attention(split(q) * 0.5, split(k * 3), split(v)), 1.5),
    "scale": (
        lambda q, k, v: F.scaled_dot_product_attention(split(q) * 3, split(k), split(v), scale=0.2),
        0.6,
    ),
    "number": (
        lambda q, k, v: F.scaled_dot_product_attention(
            split(q) * torch.tensor(0.7, dtype=q.dtype), split(k), split(v)
        ),
        0.7,
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_numbers_go_into_the_scale(name: str) -> None:
    function, factor = SCALED[name]
    new, notes = applied(SCALED_SCORES.apply, function, *inputs())
    assert notes and all(n.is_done for n in notes)
    (call,) = new.graph.find_nodes(op="call_function", target=SDPA)
    scale = 1.0 if name == "scale" else 8**-0.5
    assert call.kwargs["scale"] == pytest.approx(factor * scale)
    assert not {aten.mul.Tensor, aten.div.Tensor} & set(targets(new))


def negative(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(split(q * -1.0), split(k), split(v))


def vector(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(split(q * k[0, 0]), split(k), split(v))


def read_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scaled = split(q * 0.5)
    return F.scaled_dot_product_attention(scaled, split(k), split(v)) + scaled


def widened(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    integers = (q * 10).to(torch.int64)
    return F.scaled_dot_product_attention(split(integers * 0.5).to(q.dtype), split(k), split(v))


def infinite(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(split(q * float("inf")), split(k), split(v))


def zero(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(split(q * 0.0), split(k), split(v))


@pytest.mark.parametrize("function", [negative, vector, read_twice, widened, infinite, zero])
def test_what_is_no_scale_stays(function: Callable[..., Tensor]) -> None:
    gm = traced(function, *inputs())
    assert SCALED_SCORES.apply(gm) == (gm, ())


def biased(q: Tensor, k: Tensor, v: Tensor, table: Tensor) -> Tensor:
    """Attention with a bias for each pair of positions from an embedding, as T5 has it, in two layers."""
    bias = table.permute(2, 0, 1).unsqueeze(0)
    mask = bias.expand(len(q), -1, -1, -1)
    q, k, v = (split(x) for x in (q, k, v))
    first = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    return F.scaled_dot_product_attention(first, k, v, attn_mask=mask, scale=1.0).sum(-1)


def test_a_bias_of_crossed_rows_is_copied_once_and_spread() -> None:
    new, notes = applied(CONTIGUOUS_OPERANDS.apply, biased, *on_cuda(Q, K, V, (7, 7, 4)))
    assert [note.is_done for note in notes] == [True, True]
    assert targets(new).count(COPY) == 1
    first, second = new.graph.find_nodes(op="call_function", target=SDPA)
    mask = first.args[3]
    assert second.args[3] is mask and mask.target is aten.expand.default
    assert mask.meta["val"].stride() == (0, 49, 7, 1) and mask.meta["val"].shape == (2, 4, 7, 7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_crossed_values_are_copied(dtype: torch.dtype) -> None:
    def called(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        crossed = v.view(2, 4, 8, 7).transpose(2, 3)
        return F.scaled_dot_product_attention(split(q), split(k), crossed).sum(-1)

    fakes = [fake.to(dtype) for fake in on_cuda(Q, K, V)]
    new, (note,) = applied(CONTIGUOUS_OPERANDS.apply, called, *fakes)
    assert note.is_done and "value copied" in note.reason and COPY in targets(new)


def test_what_has_no_kernel_anyway_is_not_copied() -> None:
    for fakes in ([*inputs(), torch.randn(7, 7, 4, dtype=torch.float64)], on_cuda(Q, K, V, (7, 7, 4))):
        wide = fakes[0].device.type == "cuda"
        gm = (traced_on_cuda if wide else traced)(biased, *(f.double() for f in fakes))
        assert CONTIGUOUS_OPERANDS.apply(gm) == (gm, ())
