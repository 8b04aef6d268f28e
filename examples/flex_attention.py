"""Replace attention that is written out, with a bias and a causal mask, by PyTorch's FlexAttention.

    python -m examples.flex_attention

On a GPU, FlexAttention is one kernel that never stores the scores. On a CPU, it runs unfused, and only
forward. The gradient is that of the pattern's code, which the backward pass computes again, so that training
works on both.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

import fusion_compiler as fc
from examples.helpers import relative_error


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Attend, as the pattern that FlexAttention replaces.

    q, k, v: [batch, heads, length, features]. bias: [heads, length, length]. hidden: [length, length].
    """
    scores = torch.matmul(q, k.transpose(-2, -1)) * scale + bias
    return torch.matmul(torch.softmax(scores.masked_fill(hidden, -math.inf), -1), v)


@functools.cache
def flex(device: str) -> Callable[..., Any]:
    return torch.compile(flex_attention) if device == "cuda" else flex_attention


def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """Call FlexAttention with the arguments of the pattern."""

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(hidden[i, j], -math.inf, s + bias[h, i, j])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # on a CPU: that it is not compiled
        return flex(q.device.type)(q, k, v, score_mod=score, scale=scale)


heads, square = torch.ones(2, 3, 5, 8), torch.ones(5, 5)
PATTERN = fc.user_kernel(
    attention, run, heads, heads, heads, torch.ones(3, 5, 5), square.bool(), 0.25,
    where=lambda q, k, v, bias, hidden, scale: q.dtype == k.dtype == v.dtype,
)  # fmt: skip


class Attention(nn.Module):
    """Self-attention with a learned bias for each pair of positions."""

    def __init__(self, features: int, heads: int, length: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.bias = nn.Parameter(torch.randn(heads, length, length))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, features = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        hidden = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = torch.matmul(q, k.transpose(-2, -1)) * (q.shape[-1] ** -0.5) + self.bias
        mixed = torch.matmul(torch.softmax(scores.masked_fill(hidden, -math.inf), -1), v)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, features))


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Attention(64, 4, 32).to(device)
    backend = "auto" if device == "cuda" else "interpret"
    fast = fc.compile(model, patterns=(PATTERN, *fc.DEFAULT_PATTERNS), backend=backend, verify=True)
    x = torch.randn(2, 32, 64, device=device)
    y = fast(x)
    y.square().mean().backward()
    assert model.bias.grad is not None
    gradient = model.bias.grad
    model.zero_grad()
    exact = model.double()(x.double())
    exact.square().mean().backward()
    print(f"plan: attention: {fast.plan[0].notes['attention']}")
    print(f"\n{fast.verification}")
    print("\nrelative error against float64")
    print(f"  output {relative_error(y, exact):.1e}")
    print(f"  d bias {relative_error(gradient, model.bias.grad):.1e}")


if __name__ == "__main__":
    main()
