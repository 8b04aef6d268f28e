"""Nets whose attention has a bias of its own: Swin, an Evoformer block, T5. Written as users write them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from benchmarks.models.workloads import Built, labelled, t5_model


class WindowAttention(nn.Module):
    """Swin's (Liu et al. 2021): [windows, length, c], a learned bias by relative position, a mask of shifts.

    mask: [windows of an image, length, length], or None.
    """

    index: Tensor

    def __init__(self, channels: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (channels // heads) ** -0.5
        self.table = nn.Parameter(0.02 * torch.randn((2 * window - 1) ** 2, heads))
        self.qkv, self.proj = nn.Linear(channels, 3 * channels), nn.Linear(channels, channels)
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = (at[:, :, None] - at[:, None, :]).permute(1, 2, 0) + window - 1
        index = apart[..., 0] * (2 * window - 1) + apart[..., 1]
        self.register_buffer("index", index, persistent=False)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        scores = scores + self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).unsqueeze(0)
        if mask is not None:
            windows = mask.shape[0]
            scores = scores.view(b // windows, windows, self.heads, n, n) + mask.unsqueeze(1).unsqueeze(0)
            scores = scores.view(-1, self.heads, n, n)
        x = (scores.softmax(-1) @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj(x)


class SwinBlock(nn.Module):
    """[n, side, side, c] -> the same; windows moved by `shift`."""

    mask: Tensor | None

    def __init__(self, channels: int, heads: int, side: int, window: int, shift: int) -> None:
        super().__init__()
        self.window, self.shift = window, shift
        self.norm1, self.norm2 = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.attention = WindowAttention(channels, heads, window)
        self.mlp = nn.Sequential(
            nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )
        self.register_buffer("mask", self._mask(side) if shift else None, persistent=False)

    def _mask(self, side: int) -> Tensor:
        region = torch.zeros(1, side, side, 1)
        cuts = (slice(0, -self.window), slice(-self.window, -self.shift), slice(-self.shift, None))
        for i, (rows, cols) in enumerate((r, c) for r in cuts for c in cuts):
            region[:, rows, cols] = i
        of = self._windows(region).squeeze(-1)
        apart = of[:, None, :] - of[:, :, None]
        return apart.masked_fill(apart != 0, -100.0)

    def _windows(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        x = x.view(n, h // self.window, self.window, w // self.window, self.window, c)
        return x.transpose(2, 3).reshape(-1, self.window**2, c)

    def forward(self, x: Tensor) -> Tensor:
        n, h, w, c = x.shape
        y = self.norm1(x)
        if self.shift:
            y = torch.roll(y, (-self.shift, -self.shift), (1, 2))
        y = self.attention(self._windows(y), self.mask)
        y = y.view(n, h // self.window, w // self.window, self.window, self.window, c)
        y = y.transpose(2, 3).reshape(n, h, w, c)
        if self.shift:
            y = torch.roll(y, (self.shift, self.shift), (1, 2))
        x = x + y
        return x + self.mlp(self.norm2(x))


class Swin(nn.Module):
    """Blocks of one stage, every second one with moved windows."""

    def __init__(self, channels: int, heads: int, side: int, window: int, layers: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(SwinBlock(channels, heads, side, window, (i % 2) * (window // 2)) for i in range(layers))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class GatedAttention(nn.Module):
    """AlphaFold 2's (Jumper et al. 2021, algorithm 7): x [b, rows, n, c], bias [b, 1, heads, n, n]."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(channels, channels, bias=False) for _ in range(3))
        self.gate, self.out = nn.Linear(channels, channels), nn.Linear(channels, channels)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(2, 3) for p in (self.q, self.k, self.v))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias
        y = (scores.softmax(-1) @ v).transpose(2, 3)
        return self.out(torch.sigmoid(self.gate(x)) * y.flatten(3))


class PairBiasAttention(nn.Module):
    """Gated attention along a row of x [b, rows, n, c], with a bias from pairs [b, n, n, p]."""

    def __init__(self, channels: int, pair: int, heads: int) -> None:
        super().__init__()
        self.norm, self.norm_pair = nn.LayerNorm(channels), nn.LayerNorm(pair)
        self.bias = nn.Linear(pair, heads, bias=False)
        self.attention = GatedAttention(channels, heads)

    def forward(self, x: Tensor, pair: Tensor) -> Tensor:
        bias = self.bias(self.norm_pair(pair)).permute(0, 3, 1, 2).unsqueeze(1)
        return self.attention(self.norm(x), bias)


class OuterProductMean(nn.Module):
    """x [b, s, n, c] -> [b, n, n, pair], the mean over s of outer products of `inner` features."""

    def __init__(self, channels: int, pair: int, inner: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels)
        self.left, self.right = nn.Linear(channels, inner), nn.Linear(channels, inner)
        self.out = nn.Linear(inner * inner, pair)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        product = torch.einsum("bsic,bsjd->bijcd", self.left(x), self.right(x))
        return self.out(product.flatten(-2)) / x.shape[1]


class TriangleUpdate(nn.Module):
    """Algorithm 11 (outgoing) or 12: pairs [b, n, n, p] -> the same."""

    def __init__(self, pair: int, *, outgoing: bool) -> None:
        super().__init__()
        self.equation = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"
        self.norm, self.norm_out = nn.LayerNorm(pair), nn.LayerNorm(pair)
        self.project, self.gates = nn.Linear(pair, 2 * pair), nn.Linear(pair, 2 * pair)
        self.gate, self.out = nn.Linear(pair, pair), nn.Linear(pair, pair)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        left, right = (torch.sigmoid(self.gates(x)) * self.project(x)).chunk(2, -1)
        product = torch.einsum(self.equation, left, right)
        return torch.sigmoid(self.gate(x)) * self.out(self.norm_out(product))


class Transition(nn.Sequential):
    def __init__(self, channels: int) -> None:
        super().__init__(
            nn.LayerNorm(channels), nn.Linear(channels, 4 * channels), nn.ReLU(),
            nn.Linear(4 * channels, channels),
        )  # fmt: skip


class Evoformer(nn.Module):
    """One block: x [b, s, n, c], pair [b, n, n, p] -> pair."""

    def __init__(self, channels: int, pair: int, heads: int) -> None:
        super().__init__()
        self.rows = PairBiasAttention(channels, pair, heads)
        self.transition, self.transition_pair = Transition(channels), Transition(pair)
        self.outer = OuterProductMean(channels, pair)
        self.outgoing, self.incoming = (TriangleUpdate(pair, outgoing=o) for o in (True, False))
        self.starting = PairBiasAttention(pair, pair, heads // 2)

    def forward(self, x: Tensor, pair: Tensor) -> Tensor:
        x = x + self.rows(x, pair)
        x = x + self.transition(x)
        pair = pair + self.outer(x)
        pair = pair + self.outgoing(pair)
        pair = pair + self.incoming(pair)
        pair = pair + self.starting(pair, pair)
        return pair + self.transition_pair(pair)


def swin(batch: int, side: int, channels: int, heads: int, window: int, layers: int) -> Built:
    x = torch.randn(batch, side, side, channels).requires_grad_()
    return Swin(channels, heads, side, window, layers), {"x": x}


def evoformer(batch: int, sequences: int, length: int, channels: int, pair: int, heads: int) -> Built:
    x = torch.randn(batch, sequences, length, channels).requires_grad_()
    pairs = torch.randn(batch, length, length, pair).requires_grad_()
    return Evoformer(channels, pair, heads), {"x": x, "pair": pairs}


def t5(batch: int, length: int, hidden: int, heads: int, **shape: int) -> Built:
    model = t5_model(
        hidden, heads, use_cache=False, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        feed_forward_proj="gated-gelu", dropout_rate=0.0, **shape,
    )  # fmt: skip
    return labelled(model, batch, length, first=3)
