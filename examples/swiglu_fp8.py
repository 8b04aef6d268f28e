"""Use a Triton kernel of your own: SwiGLU and its quantization to eight bits, with one scale for each row.

    python -m examples.swiglu_fp8

The pattern is the PyTorch code, and the kernel is called in its place. `verify=True` compares the two. On a
machine without a GPU, the same kernel runs in an interpreter.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

import fusion_compiler as fc
from examples.helpers import TYPES, launch, relative_error

LARGEST = 448.0  # of float8_e4m3fn


def swiglu_fp8(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return float8_e4m3fn [tokens, features] and float32 scales [tokens, 1] of two [tokens, features]."""
    h = F.silu(gate.float()) * up.float()
    scale = h.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
    return (h / scale).to(torch.float8_e4m3fn), scale


@triton.jit
def swiglu_fp8_kernel(gate_ptr, up_ptr, values_ptr, scales_ptr, columns, COLUMNS: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """Each program reads one row once, and knows its largest value before it writes the row."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < columns
    gate = tl.load(gate_ptr + row * columns + column, inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * columns + column, inside, other=0.0).to(tl.float32)
    h = gate / (1.0 + tl.exp(-gate)) * up
    scale = tl.maximum(tl.max(tl.abs(h), 0), 1e-12) / 448.0
    tl.store(scales_ptr + row, scale)
    tl.store(values_ptr + row * columns + column, (h / scale).to(tl.float8e4nv), inside)


def run_swiglu_fp8(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Launch the kernel with the arguments of the pattern, and return what the pattern returns."""
    gate, up = gate.contiguous(), up.contiguous()
    rows, columns = gate.shape
    values = torch.empty_like(gate, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, 1, device=gate.device)
    block = triton.next_power_of_2(columns)
    launch(swiglu_fp8_kernel, rows, gate, up, values, scales, columns, COLUMNS=block)
    return values, scales


example = torch.ones(6, 10)
PATTERN = fc.user_kernel(
    swiglu_fp8, run_swiglu_fp8, example, example,
    where=lambda gate, up: gate.dtype == up.dtype and gate.dtype in TYPES and gate.shape[-1] <= 16384,
)  # fmt: skip


class FeedForward(nn.Module):
    """A feed-forward layer whose activation is quantized, as a product of eight bits would read it."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(features, hidden, bias=False), nn.Linear(features, hidden, bias=False)
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.gate(x).float()) * self.up(x).float()
        scale = h.abs().amax(-1, keepdim=True).clamp_min(1e-12) / LARGEST
        quantized = (h / scale).to(torch.float8_e4m3fn)
        return self.down((quantized.float() * scale).to(x.dtype))


@torch.no_grad()
def main() -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = FeedForward(64, 200).to(device)
    backend = "auto" if device == "cuda" else "interpret"
    fast = fc.compile(model, patterns=(PATTERN, *fc.DEFAULT_PATTERNS), backend=backend, verify=True)
    x = torch.randn(16, 64, device=device)
    y = fast(x)
    print(PATTERN)
    print(f"\nplan: swiglu_fp8: {fast.plan[0].notes['swiglu_fp8']}")
    print(f"\n{fast.verification}")
    double = model.double()
    exact = double.down(F.silu(double.gate(x.double())) * double.up(x.double()))
    model.float()
    print(f"\nrelative error against float64 without quantization: ours {relative_error(y, exact):.1e}, "
          f"eager {relative_error(model(x), exact):.1e}")  # fmt: skip


if __name__ == "__main__":
    main()
