"""Attention in forms that PyTorch has no call for, written as models write it and as FlexAttention says it.

A variant is called with query, key and value [batch, heads, length, width] and tensors of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CAP, WINDOW, DROP = 20.0, 256, 0.1
BUCKETS, FARTHEST = 32, 128  # of T5's relative positions
Make = Callable[["Shape"], Sequence[Tensor]]


@dataclass(frozen=True)
class Shape:
    """The sizes of an attention. width: of queries and keys; values: of values."""

    batch: int
    heads: int
    length: int
    width: int = 64
    values: int = 64
    key_heads: int = 0
    dtype: torch.dtype = torch.float32
    device: str = "cpu"

    def normal(self, *sizes: int, trained: bool = True) -> Tensor:
        return torch.randn(sizes, dtype=self.dtype, device=self.device).requires_grad_(trained)

    def inputs(self) -> list[Tensor]:
        """Return fresh random queries, keys and values."""
        keys = self.key_heads or self.heads
        sizes = ((self.heads, self.width), (keys, self.width), (keys, self.values))
        return [self.normal(self.batch, heads, self.length, width) for heads, width in sizes]


def _nothing(shape: Shape) -> Sequence[Tensor]:
    return ()


@dataclass(frozen=True)
class Variant:
    """A form of attention.

    code: of query, key, value and the tensors that `more` makes. sizes: fields of Shape that it needs.
    flex: called with the tensors of `more`; returns the arguments `score_mod` and `mask` of FlexAttention, or
    None where that cannot say the variant.
    """

    name: str
    code: Callable[..., Tensor]
    more: Make = _nothing
    flex: Callable[..., tuple[Any, Any]] | None = None
    sizes: tuple[tuple[str, int], ...] = ()


def _positions(scores: Tensor) -> tuple[Tensor, Tensor]:
    rows, keys = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
    return rows[:, None], keys[None, :]


def _causal(scores: Tensor) -> Tensor:
    i, j = _positions(scores)
    return scores.masked_fill(j > i, -math.inf)


def added(shown: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores."""
    narrow = dtype if dtype.itemsize < 8 else torch.float32
    return torch.where(shown, 0.0, torch.finfo(narrow).min).to(dtype)


def _products(q: Tensor, k: Tensor) -> Tensor:
    return torch.matmul(q, k.transpose(-1, -2)) * q.shape[-1] ** -0.5


def _weights(scores: Tensor, like: Tensor) -> Tensor:
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(like.dtype)


def _capped(scores: Tensor) -> Tensor:
    return torch.tanh(scores / CAP) * CAP


def soft_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.matmul(_weights(_causal(_capped(_products(q, k))), q), v).transpose(1, 2).contiguous()


def gemma2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute soft-capped scores of a window, with a mask of the dtype's lowest number that is added."""
    scores = _capped(_products(q, k))
    i, j = _positions(scores)
    mask = added((j <= i) & (j > i - WINDOW), q.dtype)
    return torch.matmul(_weights(scores + mask[None, None], q), v).transpose(1, 2).contiguous()


def slopes(shape: Shape) -> Sequence[Tensor]:
    powers = torch.arange(1, shape.heads + 1, device=shape.device)
    return ((2.0 ** (-8.0 * powers / shape.heads)).to(shape.dtype),)


def bloom(q: Tensor, k: Tensor, v: Tensor, slope: Tensor) -> Tensor:
    """Compute ALiBi by baddbmm, with heads beside the batch."""
    b, h, n, d = q.shape
    alibi = (slope[None, :, None] * torch.arange(n, device=q.device)).to(q.dtype)
    alibi = alibi.expand(b, h, n).reshape(b * h, 1, n)
    queries, keys, values = q.reshape(b * h, n, d), k.reshape(b * h, n, d), v.reshape(b * h, n, -1)
    scores = alibi.baddbmm(queries, keys.transpose(-1, -2), beta=1.0, alpha=d**-0.5).view(b, h, n, n)
    i, j = _positions(scores)
    scores = scores + added(j <= i, q.dtype)
    weights = _weights(scores, q).view(b * h, n, n)
    return torch.bmm(weights, values).view(b, h, n, -1).transpose(1, 2).reshape(b, n, -1)


def table(shape: Shape) -> Sequence[Tensor]:
    return (shape.normal(BUCKETS, shape.heads),)


def buckets(i: Tensor, j: Tensor) -> Tensor:
    """Return T5's bucket of each relative position, in both directions."""
    half, apart = BUCKETS // 2, (j - i).abs()
    exact = half // 2
    far = torch.log(apart.float().clamp(1) / exact) / math.log(FARTHEST / exact) * (half - exact)
    far = (exact + far.long()).clamp(max=half - 1)
    return torch.where(j > i, half, 0) + torch.where(apart < exact, apart, far)


def t5(q: Tensor, k: Tensor, v: Tensor, biases: Tensor) -> Tensor:
    """Add a bias that is learned for each bucket of relative positions; scores are not scaled."""
    scores = torch.matmul(q, k.transpose(3, 2))
    bias = F.embedding(buckets(*_positions(scores)), biases).permute(2, 0, 1).unsqueeze(0)
    scores = scores + bias
    weights = F.softmax(scores.float(), dim=-1).type_as(scores)
    return torch.matmul(weights, v)


def sinks(shape: Shape) -> Sequence[Tensor]:
    return (shape.normal(shape.heads),)


def gpt_oss(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """Compute attention to the keys and to one learned score a head, which has no value."""
    scores = _causal(_products(q, k))
    column = sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], -1)
    scores = torch.cat([scores, column], dim=-1)
    scores = scores - scores.max(dim=-1, keepdim=True).values
    return (
        torch.matmul(F.softmax(scores, dim=-1, dtype=scores.dtype)[..., :-1], v).transpose(1, 2).contiguous()
    )


def second_pair(shape: Shape) -> Sequence[Tensor]:
    q, k, _ = shape.inputs()
    return q, k, shape.normal(shape.heads)


def differential(q: Tensor, k: Tensor, v: Tensor, other_q: Tensor, other_k: Tensor, factor: Tensor) -> Tensor:
    """Compute the difference of two softmaxes, times the values."""
    one, two = (_weights(_causal(_products(*pair)), v) for pair in ((q, k), (other_q, other_k)))
    return torch.matmul(one - factor[:, None, None] * two, v)


def pair(shape: Shape) -> Sequence[Tensor]:
    n = shape.length
    return shape.normal(1, shape.heads, n, n), shape.normal(shape.batch, shape.heads, n, shape.values)


def evoformer(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, gate: Tensor) -> Tensor:
    """Compute attention with a pair bias for all rows of an alignment, and a gate behind it."""
    return torch.matmul(_weights(_products(q, k) + bias, q), v) * torch.sigmoid(gate)


def sigmoid(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = _products(q, k) - math.log(k.shape[-2])
    i, j = _positions(scores)
    return torch.matmul(torch.sigmoid(scores).masked_fill(j > i, 0.0), v)


def documents(shape: Shape) -> Sequence[Tensor]:
    lengths = torch.randint(0, 4, (shape.batch, shape.length), device=shape.device) == 0
    return (lengths.cumsum(-1) // max(1, shape.length // 32),)


def packed(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    """Compute soft-capped scores within documents that are packed into one row."""
    scores = _causal(_capped(_products(q, k)))
    apart = document[:, None, :, None] != document[:, None, None, :]
    return torch.matmul(_weights(scores.masked_fill(apart, -math.inf), q), v)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute soft-capped scores of heads that share keys and values, which are repeated."""
    b, heads, n, _ = k.shape
    times = q.shape[1] // heads
    k, v = (x[:, :, None].expand(b, heads, times, n, -1).reshape(b, heads * times, n, -1) for x in (k, v))
    return soft_capped(q, k, v)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = F.dropout(_weights(_causal(_capped(_products(q, k))), q), DROP, training=True)
    return torch.matmul(weights, v)


def padding(shape: Shape) -> Sequence[Tensor]:
    lengths = torch.randint(1, shape.length + 1, (shape.batch, 1), device=shape.device)
    return (torch.arange(shape.length, device=shape.device) < lengths,)


def padded(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    """Compute soft-capped scores with padding at the right, of which a mask is added."""
    mask = added(shown[:, None, None, :], q.dtype)
    return torch.matmul(_weights(_capped(_products(q, k)) + mask, q), v)


# -- calls with a mask ----------------------------------------------------------------------------------

SDPA = F.scaled_dot_product_attention


def called_with_padding(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
    return SDPA(q, k, v, shown[:, None, None, :])


def called_with_a_window(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i, j = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    return SDPA(q, k, v, (j <= i[:, None]) & (j > i[:, None] - WINDOW))


def called_with_documents(q: Tensor, k: Tensor, v: Tensor, document: Tensor) -> Tensor:
    i, j = (torch.arange(x.shape[2], device=x.device) for x in (q, k))
    same = document[:, None, :, None] == document[:, None, None, :]
    return SDPA(q, k, v, (j <= i[:, None]) & same)


# -- FlexAttention --------------------------------------------------------------------------------------


def _cap_mod(score: Tensor, *at: Tensor) -> Tensor:
    return CAP * torch.tanh(score / CAP)


def _causal_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return j <= i


def _window_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (j <= i) & (j > i - WINDOW)


def _capped_causal() -> tuple[Any, Any]:
    return _cap_mod, _causal_mod


def _alibi(slope: Tensor) -> tuple[Any, Any]:
    return lambda score, b, h, i, j: score + slope[h] * j, _causal_mod


def _bucketed(biases: Tensor) -> tuple[Any, Any]:
    return lambda score, b, h, i, j: score + biases[buckets(i, j), h], None


def _within(document: Tensor) -> tuple[Any, Any]:
    return _cap_mod, lambda b, h, i, j: (j <= i) & (document[b, i] == document[b, j])


def _shown(shown: Tensor) -> tuple[Any, Any]:
    return _cap_mod, lambda b, h, i, j: shown[b, j]


def _uncapped(mods: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    return lambda *more: (None, mods(*more)[1])


VARIANTS = (
    Variant("soft cap, causal", soft_capped, flex=_capped_causal),
    Variant("soft cap, window (Gemma 2)", gemma2, flex=lambda: (_cap_mod, _window_mod)),
    Variant("ALiBi, causal (Bloom)", bloom, slopes, _alibi),
    Variant("bucketed bias with gradient (T5)", t5, table, _bucketed),
    Variant("sinks, causal (gpt-oss)", gpt_oss, sinks),
    Variant("differential, causal", differential, second_pair),
    Variant("pair bias, gate (Evoformer)", evoformer, pair),
    Variant("sigmoid, causal", sigmoid),
    Variant("soft cap, documents", packed, documents, _within),
    Variant("soft cap, grouped keys", grouped, flex=_capped_causal, sizes=(("key_heads", 4),)),
    Variant("soft cap, dropout", dropped),
    Variant("soft cap, padding", padded, padding, _shown),
    Variant(
        "soft cap, wide keys (MLA)", soft_capped, flex=_capped_causal,
        sizes=(("width", 192), ("values", 128)),
    ),
    Variant("call, padding", called_with_padding, padding, _uncapped(_shown)),
    Variant("call, window", called_with_a_window, flex=lambda: (None, _window_mod)),
    Variant("call, documents", called_with_documents, documents, _uncapped(_within)),
)  # fmt: skip
