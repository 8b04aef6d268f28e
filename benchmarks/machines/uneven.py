"""Four models whose layers are not equal: `UNEVEN` maps a name to a function of a size, which returns the
model and the arguments of one microbatch. "small" trains on a few cores, "middle" on a host's CPU, and
"large" on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Example = tuple[nn.Module, tuple[Tensor, ...]]


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool) -> Tensor:
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Layer(nn.Module):
    """A transformer layer, with attention to a memory if `crossed`, and `mlp` behind it."""

    def __init__(
        self, width: int, heads: int, causal: bool, crossed: bool = False, mlp: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.crossed = heads, causal, crossed
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        if crossed:
            self.query, self.keys = nn.Linear(width, width), nn.Linear(width, 2 * width)
            self.back = nn.Linear(width, width)
        self.mlp = mlp or Mlp(width)

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(attend(q, k, v, self.heads, self.causal))
        if self.crossed:
            k, v = self.keys(memory).chunk(2, -1)
            x = x + self.back(attend(self.query(x), k, v, self.heads, False))
        return self.mlp(x)


class EncoderDecoder(nn.Module):
    """A translator of long texts into short ones."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        heads = width // 64
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encoder = nn.ModuleList(Layer(width, heads, False) for _ in range(layers))
        self.decoder = nn.ModuleList(Layer(width, heads, True, crossed=True) for _ in range(layers))
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, y = self.source(source), self.target(target)
        for layer in self.encoder:
            memory = layer(memory)
        for layer in self.decoder:
            y = layer(y, memory)
        return self.head(y)


class Convolutions(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, out, 3, padding=1), nn.Conv2d(out, out, 3, padding=1)
        self.norm = nn.GroupNorm(8, out)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.second(F.silu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """Four levels down and up, with skip connections that cross most cuts."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        widths = [channels * n for n in (1, 2, 3, 4)]
        self.down = nn.ModuleList(Convolutions(a, b) for a, b in zip([3, *widths], widths, strict=False))
        self.up = nn.ModuleList(
            Convolutions(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.last = nn.Conv2d(channels, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level in self.down:
            x = level(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = skips.pop()
        for level in self.up:
            x = level(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], 1))
        return self.last(x)


class TiedHead(nn.Module):
    """A decoder with a large vocabulary, whose head reads the embedding's weight."""

    def __init__(self, width: int, layers: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.layers = nn.ModuleList(Layer(width, width // 64, True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        nn.init.normal_(self.words.weight, std=width**-0.5)  # logits of unit variance

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        for layer in self.layers:
            y = layer(y)
        return self.head(self.norm(y))


class Experts(nn.Module):
    """A mixture in which each expert takes the tokens with the best scores, a fixed number of them."""

    def __init__(self, width: int, experts: int, each: int) -> None:
        super().__init__()
        self.each, self.router = each, nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 4 * width) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, 4 * width, width) * width**-0.5 / 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        share, chosen = self.router(tokens).softmax(-1).t().topk(self.each)
        results = F.gelu(tokens[chosen] @ self.up) @ self.down * share[..., None]
        return x + torch.zeros_like(tokens).index_add(0, chosen.flatten(), results.flatten(0, 1)).view_as(x)


class Mixture(nn.Module):
    """A decoder whose first half is dense and whose second half has experts."""

    def __init__(self, width: int, layers: int, experts: int, each: int, words: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        mlps = [None if i < layers // 2 else Experts(width, experts, each) for i in range(layers)]
        self.layers = nn.ModuleList(Layer(width, width // 64, True, mlp=mlp) for mlp in mlps)
        self.head = nn.Linear(width, words)

    def forward(self, x: Tensor) -> Tensor:
        y = self.words(x)
        for layer in self.layers:
            y = layer(y)
        return self.head(y)


def tokens(words: int, *shape: int) -> Tensor:
    return torch.randint(0, words, shape)


def encoder_decoder(size: str) -> Example:
    width, layers, words, rows, source, target = {
        "small": (128, 4, 500, 2, 256, 32),
        "middle": (384, 6, 8000, 2, 256, 32),
        "large": (1024, 12, 32000, 4, 2048, 256),
    }[size]
    model = EncoderDecoder(width, layers, words)
    return model, (tokens(words, rows, source), tokens(words, rows, target))


def u_net(size: str) -> Example:
    channels, rows, edge = {"small": (16, 2, 64), "middle": (48, 2, 128), "large": (128, 8, 256)}[size]
    return UNet(channels), (torch.rand(rows, 3, edge, edge),)


def tied_head(size: str) -> Example:
    width, layers, words, rows, length = {
        "small": (128, 8, 8000, 2, 64),
        "middle": (384, 12, 24000, 2, 128),
        "large": (1024, 24, 256000, 4, 1024),
    }[size]
    return TiedHead(width, layers, words), (tokens(words, rows, length),)


def mixture(size: str) -> Example:
    width, layers, experts, each, words, rows, length = {
        "small": (128, 8, 8, 32, 500, 2, 64),
        "middle": (320, 12, 8, 128, 4000, 2, 128),
        "large": (1024, 24, 16, 1024, 32000, 4, 1024),
    }[size]
    return Mixture(width, layers, experts, each, words), (tokens(words, rows, length),)


class Trained(nn.Module):
    """A model that returns its loss, so that a plan knows what the loss takes: for a large vocabulary, much.

    The model's result is compared with its last argument: an image with the image itself, and the logits of a
    token with the next one.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Tensor) -> Tensor:
        y, last = self.model(*args), args[-1]
        if last.is_floating_point():
            return F.mse_loss(y, last)
        return F.cross_entropy(y.flatten(0, 1), last.roll(-1, 1).flatten())


UNEVEN: Mapping[str, Callable[[str], Example]] = {
    "encoder-decoder": encoder_decoder,
    "U-Net": u_net,
    "tied head": tied_head,
    "mixture of experts": mixture,
}
