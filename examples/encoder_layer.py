"""Train the BERT-large encoder layer of "Data Movement Is All You Need" (Ivanov et al., 2021), written out.

Each bias, dropout, residual and normalization is an operator of its own, and attention is two batched
products around a softmax, so that whatever is fused was found by the compiler. The authors of the paper
wrote thirteen kernels for this layer by hand.

    python -m examples.encoder_layer            # small, on the CPU or the GPU
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc


class Projection(nn.Module):
    """A product without its bias, which the caller adds: in the paper it belongs to the next kernel."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / math.sqrt(inputs))
        self.bias = nn.Parameter(0.02 * torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


class EncoderLayer(nn.Module):
    """A post-norm encoder layer on [batch, length, hidden], with ReLU and dropout at four places."""

    def __init__(
        self, hidden: int = 1024, heads: int = 16, intermediate: int = 4096, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.query, self.key, self.value = (Projection(hidden, hidden) for _ in range(3))
        self.output = Projection(hidden, hidden)
        self.up = Projection(hidden, intermediate)
        self.down = Projection(intermediate, hidden)
        self.norm1 = nn.LayerNorm(hidden, eps=1e-12)
        self.norm2 = nn.LayerNorm(hidden, eps=1e-12)

    def split_heads(self, x: Tensor) -> Tensor:
        """Return [batch, heads, length, hidden / heads] of [batch, length, hidden]."""
        batch, length, hidden = x.shape
        return x.view(batch, length, self.heads, hidden // self.heads).transpose(1, 2)

    def attention(self, x: Tensor) -> Tensor:
        """Attend from each position to each other, without the bias of the output."""
        q = self.split_heads(self.query(x) + self.query.bias)
        k = self.split_heads(self.key(x) + self.key.bias)
        v = self.split_heads(self.value(x) + self.value.bias)
        scores = (q @ k.transpose(-1, -2)) * (1 / math.sqrt(q.shape[-1]))
        weights = F.dropout(torch.softmax(scores, -1), self.dropout, self.training)
        return self.output((weights @ v).transpose(1, 2).reshape(x.shape))

    def forward(self, x: Tensor) -> Tensor:
        attended = F.dropout(self.attention(x) + self.output.bias, self.dropout, self.training)
        x = self.norm1(x + attended)
        inner = F.dropout(F.relu(self.up(x) + self.up.bias), self.dropout, self.training)
        outer = F.dropout(self.down(inner) + self.down.bias, self.dropout, self.training)
        return self.norm2(x + outer)


def example() -> tuple[nn.Module, tuple[Tensor]]:
    """Return the paper's sizes: `fusion-compiler explain examples/encoder_layer.py:example`, or `profile`."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return EncoderLayer().half().to(device), (torch.randn(8, 512, 1024, dtype=torch.half, device=device),)


def main(hidden: int = 64, heads: int = 4, intermediate: int = 256, batch: int = 2, length: int = 32) -> None:
    """Compile the layer, train one step and print what was fused."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layer = EncoderLayer(hidden, heads, intermediate).to(device)
    fast = fc.compile(layer, backend="auto" if device == "cuda" else "interpret")
    x = torch.randn(batch, length, hidden, device=device, requires_grad=True)
    y = fast(x)
    y.backward(torch.randn_like(y))
    print(fast.plan)
    print(f"gradient of the input: {x.grad.norm().item():.4f}")


if __name__ == "__main__":
    main()
