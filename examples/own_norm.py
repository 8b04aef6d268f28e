"""Use a normalization of your own: two Triton kernels, for its result and its gradient, replace PyTorch code.

    python -m examples.own_norm

The normalization divides each row by its mean absolute value. On a machine without a GPU, the kernels run in
an interpreter.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

import fusion_compiler as fc
from examples.helpers import launch, relative_error


def mean_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize [rows, columns] with a weight [columns]. This is the pattern that the kernels replace."""
    return x / (x.abs().mean(-1, keepdim=True) + eps) * weight


@triton.jit
def forward_kernel(x_ptr, weight_ptr, y_ptr, columns, per_million, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, inside, other=0.0)
    size = tl.sum(tl.abs(x), 0) / columns + per_million * 1e-6
    weight = tl.load(weight_ptr + column, inside, other=0.0)
    tl.store(y_ptr + row * columns + column, x / size * weight, inside)


@triton.jit
def backward_kernel(x_ptr, weight_ptr, dy_ptr, dx_ptr, part_ptr, columns, per_million, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Compute the gradient of x, and each row's part of the gradient of the weight."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < columns
    x = tl.load(x_ptr + row * columns + column, inside, other=0.0)
    dy = tl.load(dy_ptr + row * columns + column, inside, other=0.0)
    weight = tl.load(weight_ptr + column, inside, other=0.0)
    size = tl.sum(tl.abs(x), 0) / columns + per_million * 1e-6
    tl.store(part_ptr + row * columns + column, dy * x / size, inside)
    sign = tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0))
    inner = tl.sum(dy * weight * x, 0) / columns
    tl.store(dx_ptr + row * columns + column, (dy * weight - sign * inner / size) / size, inside)


def run(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Launch the forward kernel with the arguments of the pattern."""
    x, y = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    launch(forward_kernel, rows, x, weight, y, columns, round(eps * 1e6), COLUMNS=block)
    return y


def gradient(x: Tensor, weight: Tensor, eps: float, y: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight, from the arguments, the result and its gradient."""
    x, dy = x.contiguous(), dy.contiguous()
    dx, parts = torch.empty_like(x), torch.empty_like(x)
    rows, columns = x.shape
    block = triton.next_power_of_2(columns)
    launch(backward_kernel, rows, x, weight, dy, dx, parts, columns, round(eps * 1e6), COLUMNS=block)
    return dx, parts.sum(0)


def is_supported(x: fc.patterns.MatchedTensor, weight: fc.patterns.MatchedTensor, eps: float) -> bool:
    """True for what the kernels support: float32 rows that one program holds, eps in whole millionths."""
    millionths = eps * 1e6
    return (
        x.dtype == weight.dtype == torch.float32 and x.shape[-1] <= 16384 and millionths == round(millionths)
    )


PATTERN = fc.user_kernel(
    mean_norm, run, torch.ones(6, 10), torch.ones(10), 1e-6, backward=gradient, where=is_supported
)


class Block(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(features) + 0.5)
        self.linear = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return x + h / (h.abs().mean(-1, keepdim=True) + 1e-6) * self.weight


def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Block(48).to(device)
    backend = "auto" if device == "cuda" else "interpret"
    fast = fc.compile(model, patterns=(PATTERN, *fc.DEFAULT_PATTERNS), backend=backend, verify=True)
    x = torch.randn(16, 48, device=device)
    y = fast(x)
    y.square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    exact = model.double()(x.double())
    exact.square().mean().backward()
    print(f"plan: mean_norm: {fast.plan[0].notes['mean_norm']}")
    print(f"\n{fast.verification}")
    print("\nrelative error against float64")
    print(f"  output {relative_error(y, exact):.1e}")
    for name, p in model.named_parameters():
        grad = gradients[name]
        assert grad is not None and p.grad is not None
        print(f"  d {name} {relative_error(grad, p.grad):.1e}")


if __name__ == "__main__":
    main()
