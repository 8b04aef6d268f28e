"""Compile a transformer block, and show its plan, one of its kernels, its errors and the bytes saved.

    python -m examples.demo

It runs on a GPU if there is one, and in Triton's interpreter otherwise.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.ir.plan import FusionPlan


class RMSNorm(nn.Module):
    """RMSNorm written out, as models have it. The compiler does not know it by its name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
        return self.weight * normal.to(x.dtype)


class Block(nn.Module):
    """A pre-norm transformer block: causal attention, then SwiGLU, on [batch, length, width]."""

    def __init__(self, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.gate, self.up = nn.Linear(width, inner), nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        normal = self.norm2(x)
        return x + self.down(F.silu(self.gate(normal)) * self.up(normal))


def forward_and_backward(
    called: nn.Module, block: nn.Module, x: Tensor, gradient: Tensor
) -> dict[str, Tensor]:
    """Return the block's output and the gradients of its input and parameters, by name."""
    x = x.detach().requires_grad_()
    block.zero_grad(set_to_none=True)
    y = called(x)
    y.backward(gradient)
    return {"output": y.detach(), "d input": x.grad} | {f"d {n}": p.grad for n, p in block.named_parameters()}


def errors(results: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Return the RMS error of each result, relative to the RMS of its float64 value."""
    return {
        name: ((results[name].double() - truth).square().mean() / truth.square().mean()).sqrt().item()
        for name, truth in exact.items()
    }


def kernel_of_largest_cluster(forward: FusionPlan, dump: Path) -> str:
    """Return the source of the cluster that saves most time, from the files that FUSION_DUMP wrote.

    If a cluster is the same as an earlier one, it has no file of its own.
    """
    clusters = sorted(forward.clusters, key=lambda cluster: cluster.cost.us - cluster.eager_us)
    files = (dump / forward.name / "kernels" / f"{cluster.name}.py" for cluster in clusters)
    return next(file for file in files if file.exists()).read_text()


def main() -> None:
    torch.manual_seed(0)
    gpu = torch.cuda.is_available()
    if gpu:
        device, dtype = "cuda", torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
        width, heads, inner, batch, length = 2048, 32, 8192, 4, 1024
        where = f"on {torch.cuda.get_device_name()}"
    else:
        device, dtype = "cpu", torch.float32
        width, heads, inner, batch, length = 64, 4, 256, 2, 16
        where = "in Triton's interpreter, as no GPU was found; planned as for an H200"
    print(f"a transformer block of width {width}, {batch} x {length} tokens, {dtype}, {where}\n")
    block = Block(width, heads, inner).to(device, dtype)
    x, gradient = (torch.randn(batch, length, width, device=device, dtype=dtype) for _ in range(2))

    with tempfile.TemporaryDirectory() as dump, patch.dict(os.environ, FUSION_DUMP=dump):
        fast = fc.compile(block, backend="auto" if gpu else "interpret")
        start = time.perf_counter()
        ours = forward_and_backward(fast, block, x, gradient)
        if gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        print(f"{fast.plan}\n\none kernel of it:\n")
        print(kernel_of_largest_cluster(next(iter(fast.plan)), Path(dump)))

    eager = forward_and_backward(block, block, x, gradient)
    wide = Block(width, heads, inner).to(device, torch.float64)
    wide.load_state_dict(block.state_dict())
    exact = forward_and_backward(wide, wide, x.double(), gradient.double())
    our, their = errors(ours, exact), errors(eager, exact)
    print(f"{'relative error against float64':36}{'compiled':>10}{'eager':>10}")
    for name in exact:
        print(f"{name:36}{our[name]:10.1e}{their[name]:10.1e}")
    totals = [plan.json()["totals"] for plan in fast.plan]
    before, after = (sum(t[key] for t in totals) for key in ("bytes_before", "bytes_after"))
    print(f"\ncompiled and run, forward and backward, in {seconds:.1f} s")
    print(f"bytes moved by the fused ops: {before:,} -> {after:,} ({before / after:.1f} times fewer)")


if __name__ == "__main__":
    main()
