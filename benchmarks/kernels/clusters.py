"""The memory-bound clusters that peers were first measured on, and the code that users write for them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import DROPOUT, LONG_ROWS, ODD_NORMS, Case, Outputs

EPS = 1e-6


# The code that users write.


def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias, approximate="tanh")


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, EPS)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))  # float32, and float64 for the truth
    normal = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)
    return weight * normal.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
    total = x + residual
    return rms_norm(total, weight), total


def bias_dropout_residual_norm(
    x: Tensor, bias: Tensor, residual: Tensor, weight: Tensor, shift: Tensor, p: float = 0.1
) -> Tensor:
    return F.layer_norm(F.dropout(x + bias, p) + residual, weight.shape, weight, shift, EPS)


def scale_mask_softmax(scores: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores * 0.125 + mask, -1)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Outputs:
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def chain(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x) * torch.sigmoid(x) - y
    return x


def group_norm_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(F.group_norm(x, 32, weight, bias, EPS))


# Their inputs.


def rows_and(*vectors: str, tensors: tuple[str, ...] = ("x",)) -> Callable[..., dict[str, Tensor]]:
    """Tensors of [rows, columns] and vectors of [columns]."""

    def make(rows: int, columns: int) -> dict[str, Tensor]:
        return {n: torch.randn(rows, columns) for n in tensors} | {n: torch.randn(columns) for n in vectors}

    return make


def make_scores(batch: int, heads: int, length: int) -> dict[str, Tensor]:
    """Scores of every position to every other, and an additive mask that ends each sequence."""
    ends = torch.randint(length // 2, length + 1, (batch, 1, 1, 1))
    hidden = torch.arange(length) >= ends
    return {
        "scores": torch.randn(batch, heads, length, length),
        "mask": torch.zeros(batch, 1, 1, length).masked_fill(hidden, torch.finfo(torch.bfloat16).min),
    }


def make_logits(rows: int, columns: int) -> dict[str, Tensor]:
    return {"logits": torch.randn(rows, columns), "target": torch.randint(columns, (rows,))}


def make_rope(batch: int, length: int, heads: int, kv_heads: int, width: int) -> dict[str, Tensor]:
    """Q and K as a projection leaves them: heads inside, seen from outside by a transpose."""
    frequency = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angle = (torch.arange(length)[:, None] * frequency).repeat(1, 2)[None, None]
    return {
        "q": torch.randn(batch, length, heads, width).transpose(1, 2),
        "k": torch.randn(batch, length, kv_heads, width).transpose(1, 2),
        "cos": angle.cos(),
        "sin": angle.sin(),
    }


def make_image(batch: int, channels: int, side: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(batch, channels, side, side),
        "weight": torch.randn(channels),
        "bias": torch.randn(channels),
    }


SMALL = {"rows": 16, "columns": 256}

CASES: tuple[Case, ...] = (
    Case(
        "bias + GELU(tanh)", bias_gelu, rows_and("bias"),
        {"rows": 65536, "columns": 4096}, SMALL, ("x", "bias"), ("x", "bias"),
    ),
    Case(
        "SwiGLU", swiglu, rows_and(tensors=("gate", "up")),
        {"rows": 16384, "columns": 8192}, SMALL, ("gate", "up"), ("gate", "up"),
        liger=lambda liger: liger.liger_swiglu,
    ),
    Case(
        "LayerNorm", layer_norm, rows_and("weight", "bias"),
        {"rows": 65536, "columns": 4096}, SMALL, ("x", "weight", "bias"), ("x", "weight"),
        liger=lambda liger: lambda x, w, b: liger.liger_layer_norm(x, w, b, EPS),
    ),
    Case(
        "RMSNorm written out", rms_norm, rows_and("weight"),
        {"rows": 65536, "columns": 4096}, SMALL, ("x", "weight"), ("x", "weight"),
        liger=lambda liger: lambda x, w: liger.liger_rms_norm(x, w, EPS),
    ),
    Case(
        "residual add + RMSNorm, 2 outputs", add_rms_norm, rows_and("weight", tensors=("x", "residual")),
        {"rows": 65536, "columns": 4096}, SMALL, ("x", "residual", "weight"), ("out1", "weight"),
        unwritten=("residual",),
        liger=lambda liger: lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, EPS),
    ),
    Case(
        "bias + dropout + residual + LayerNorm", bias_dropout_residual_norm,
        rows_and("bias", "weight", "shift", tensors=("x", "residual")),
        {"rows": 131072, "columns": 1024}, SMALL,
        ("x", "bias", "residual", "weight", "shift"), ("x", "residual", "bias", "weight"), bar=DROPOUT,
    ),
    Case(
        "scale + mask + softmax", scale_mask_softmax, make_scores,
        {"batch": 16, "heads": 16, "length": 1024}, {"batch": 2, "heads": 2, "length": 64},
        ("scores",), ("out0",),
    ),
    Case(
        "softmax", softmax, rows_and(),
        {"rows": 4096, "columns": 32768}, SMALL, ("x",), ("out0",),
        liger=lambda liger: liger.liger_softmax, bar=LONG_ROWS,
    ),
    Case(
        "cross-entropy", cross_entropy, make_logits,
        {"rows": 4096, "columns": 128256}, {"rows": 16, "columns": 1000}, ("logits",), ("logits", "target"),
        liger=lambda liger: liger.liger_cross_entropy, bar=LONG_ROWS,
    ),
    Case(
        "RoPE on Q and K", rope, make_rope,
        {"batch": 4, "length": 2048, "heads": 32, "kv_heads": 8, "width": 64},
        {"batch": 2, "length": 16, "heads": 4, "kv_heads": 2, "width": 16},
        ("q", "k"), ("cos", "sin"),
        liger=lambda liger: lambda q, k, cos, sin: liger.liger_rope(q, k, cos[0], sin[0]),
    ),
    Case(
        "4 x (tanh, sigmoid, mul, sub)", chain, rows_and(tensors=("x", "y")),
        {"rows": 16384, "columns": 8192}, SMALL, ("x", "y"), ("x", "y"),
    ),
    Case(
        "GroupNorm + SiLU", group_norm_silu, make_image,
        {"batch": 32, "channels": 320, "side": 64}, {"batch": 2, "channels": 64, "side": 8},
        ("x", "weight", "bias"), ("x", "weight", "bias"), bar=ODD_NORMS,
    ),
)  # fmt: skip
