"""Use the three sorts of pattern in one model: a hint, a checked rewrite, and a kernel of your own.

    python -m examples.custom_pattern

On a machine without a GPU, the kernels run in Triton's interpreter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc

rows, row = torch.ones(6, 10), torch.ones(10)  # only ranks and equal sizes matter


# 1. A hint: these operators are tried as one cluster, which gets this name.
def scaled_softplus(x: Tensor, scale: float) -> Tensor:
    return F.softplus(x) * scale


# 2. A rewrite: compile() checks that both functions are equal, gradients too, before it uses it.
def root_of_square(x: Tensor) -> Tensor:
    return torch.sqrt(x * x)


def absolute(x: Tensor) -> Tensor:
    return torch.abs(x)


# 3. A kernel: the second function is called in the place of the first. It may launch anything.
def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x) * F.relu(x)


def run_squared_relu(x: Tensor) -> Tensor:
    return x.clamp_min(0).square()


def squared_relu_gradient(x: Tensor, y: Tensor, dy: Tensor) -> Tensor:
    return 2 * x.clamp_min(0) * dy


PATTERNS = (
    fc.cluster_hint(scaled_softplus, rows, 2.0),
    fc.rewrite(root_of_square, absolute, rows),
    fc.user_kernel(squared_relu, run_squared_relu, rows, backward=squared_relu_gradient),
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        hidden = F.relu(h) * F.relu(h)
        out = self.down(hidden)
        return F.softplus(torch.sqrt(out * out)) * 0.5


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model().to(device)
    fast = fc.compile(
        model, patterns=(*PATTERNS, *fc.DEFAULT_PATTERNS), backend="auto" if device == "cuda" else "interpret"
    )
    x = torch.randn(16, 64, device=device)
    y = fast(x)
    y.sum().backward()
    torch.testing.assert_close(y, model(x), rtol=1e-4, atol=1e-5)
    print(fast.plan)


if __name__ == "__main__":
    main()
