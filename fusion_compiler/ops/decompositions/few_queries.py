"""Compute attention of few queries in chunks of keys (Flash-Decoding, Dao et al., 2023).

    of each chunk    m = max(s),    z = sum(exp(s - m)),    o = sum(exp(s - m) v)
    of all           sum(exp(m - max(m)) o) / sum(exp(m - max(m)) z)

with the scores s of a chunk's keys. The second line is how the law of carried reductions merges parts
(docs/chains.md). What is made of a chunk fits in a tile, so that the first line becomes one kernel; the
second is another. Scores, their exponentials and sums are float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

TINY = 1e-30  # what a sum of exponentials is at least, unless no key is left
LEAST = torch.finfo(torch.float32).min  # of a score of a key that is left
CHUNKS, KEYS = 3, 4  # dimensions of [batch, heads, queries, chunks, keys of a chunk, size]


def in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    chunk: int,
    capped: float | None,
) -> Tensor:
    """Compute `few_queries.attend`. The result for a query whose keys are all masked is zero, as in PyTorch's
    attention."""
    keys = key.shape[2]
    count = (keys + chunk - 1) // chunk
    missing = isinstance(keys, torch.SymInt) or keys % chunk > 0

    def chunks(x: Tensor, dim: int, fill: float) -> Tensor:
        after = [0, 0] * (x.dim() - 1 - dim)
        padded = torch.constant_pad_nd(x, [*after, 0, count * chunk - keys], fill) if missing else x
        return padded.view(*x.shape[:dim], count, chunk, *x.shape[dim + 1 :])

    def matrices(x: Tensor) -> Tensor:
        return chunks(x, 2, 0).unsqueeze(2).float()

    scores = (query[:, :, :, None, None].float() * matrices(key)).sum(-1, keepdim=True)
    scores = (scores if capped is None else (scores * capped).tanh()) * scale
    if mask is None:
        if missing:
            places = torch.arange(count * chunk, device=key.device).view(count, chunk, 1)
            scores = torch.where(places < keys, scores, -math.inf)
    elif mask.dtype is torch.bool:
        scores = torch.where(chunks(mask, 3, False).unsqueeze(-1), scores, -math.inf)
    else:
        scores = scores + chunks(mask, 3, -math.inf).unsqueeze(-1).float()
    masked = mask is not None
    peak = scores.amax(KEYS, keepdim=True)
    weights = (scores - peak).exp()
    if masked:  # all keys of a chunk may be: then the difference is that of two infinities
        weights = torch.where(scores == -math.inf, 0, weights)
    total, part = (x.sum(KEYS, keepdim=True) for x in (weights, weights * matrices(value)))
    if count > 1:
        largest = peak.amax(CHUNKS, keepdim=True)
        shares = (peak - (largest.clamp_min(LEAST) if masked else largest)).exp()
        total, part = ((shares * x).sum(CHUNKS, keepdim=True) for x in (total, part))
    result = part / (total.clamp_min(TINY) if masked else total)  # zeros where no key is left
    return result[:, :, :, 0, 0].to(query.dtype)
