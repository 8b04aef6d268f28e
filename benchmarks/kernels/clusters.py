"""The memory-bound clusters that peers were first measured on, and the code that users write for them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import DROPOUT, LONG_ROWS, ODD_NORMS, Case, Outputs, tensors

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

ROW = "rows columns"


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


def angles(length: int, width: int) -> Tensor:
    """Angles [length, width / 2] of rotary position embeddings."""
    return torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)


def make_rope(batch: int, length: int, heads: int, kv_heads: int, width: int) -> dict[str, Tensor]:
    """Q and K as a projection leaves them: heads inside, seen from outside by a transpose."""
    angle = angles(length, width).repeat(1, 2)[None, None]
    q, k = (torch.randn(batch, length, n, width).transpose(1, 2) for n in (heads, kv_heads))
    return {"q": q, "k": k, "cos": angle.cos(), "sin": angle.sin()}


SMALL = {"rows": 16, "columns": 256}
IMAGE = tensors(x="batch channels side side", weight="channels", bias="channels")
IMAGE_NAMES = ("x", "weight", "bias")
BIAS_GELU = Case(
    "bias + GELU(tanh)", bias_gelu, tensors(x=ROW, bias="columns"), {"rows": 65536, "columns": 4096}, SMALL,
    ("x", "bias"), ("x", "bias"),
)  # fmt: skip
LAYER_NORM = Case(
    "LayerNorm", layer_norm, tensors(x=ROW, weight="columns", bias="columns"),
    {"rows": 65536, "columns": 4096}, SMALL, ("x", "weight", "bias"), ("x", "weight"),
    liger=lambda liger: lambda x, w, b: liger.liger_layer_norm(x, w, b, EPS),
)  # fmt: skip
RMS_NORM = Case(
    "RMSNorm written out", rms_norm, tensors(x=ROW, weight="columns"), {"rows": 65536, "columns": 4096},
    SMALL, ("x", "weight"), ("x", "weight"),
    liger=lambda liger: lambda x, w: liger.liger_rms_norm(x, w, EPS),
)  # fmt: skip
DROPOUT_NORM = Case(
    "bias + dropout + residual + LayerNorm", bias_dropout_residual_norm,
    tensors(x=ROW, bias="columns", residual=ROW, weight="columns", shift="columns"),
    {"rows": 131072, "columns": 1024}, SMALL,
    ("x", "bias", "residual", "weight", "shift"), ("x", "residual", "bias", "weight"), bar=DROPOUT,
)  # fmt: skip
SOFTMAX = Case(
    "softmax", softmax, tensors(x=ROW), {"rows": 4096, "columns": 32768}, SMALL, ("x",), ("out0",),
    liger=lambda liger: liger.liger_softmax, bar=LONG_ROWS,
)  # fmt: skip
CROSS_ENTROPY = Case(
    "cross-entropy", cross_entropy, make_logits, {"rows": 4096, "columns": 128256},
    {"rows": 16, "columns": 1000}, ("logits",), ("logits", "target"),
    liger=lambda liger: liger.liger_cross_entropy, bar=LONG_ROWS,
)  # fmt: skip
GROUP_NORM = Case(
    "GroupNorm + SiLU", group_norm_silu, IMAGE, {"batch": 32, "channels": 320, "side": 64},
    {"batch": 2, "channels": 64, "side": 8}, IMAGE_NAMES, IMAGE_NAMES, bar=ODD_NORMS,
)  # fmt: skip

CASES: tuple[Case, ...] = (
    BIAS_GELU,
    Case(
        "SwiGLU", swiglu, tensors(gate=ROW, up=ROW), {"rows": 16384, "columns": 8192}, SMALL,
        ("gate", "up"), ("gate", "up"), liger=lambda liger: liger.liger_swiglu,
    ),
    LAYER_NORM,
    RMS_NORM,
    Case(
        "residual add + RMSNorm, 2 outputs", add_rms_norm, tensors(x=ROW, residual=ROW, weight="columns"),
        {"rows": 65536, "columns": 4096}, SMALL, ("x", "residual", "weight"), ("out1", "weight"),
        unwritten=("residual",),
        liger=lambda liger: lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, EPS),
    ),
    DROPOUT_NORM,
    Case(
        "scale + mask + softmax", scale_mask_softmax, make_scores,
        {"batch": 16, "heads": 16, "length": 1024}, {"batch": 2, "heads": 2, "length": 64},
        ("scores",), ("out0",),
    ),
    SOFTMAX,
    CROSS_ENTROPY,
    Case(
        "RoPE on Q and K", rope, make_rope,
        {"batch": 4, "length": 2048, "heads": 32, "kv_heads": 8, "width": 64},
        {"batch": 2, "length": 16, "heads": 4, "kv_heads": 2, "width": 16},
        ("q", "k"), ("cos", "sin"),
        liger=lambda liger: lambda q, k, cos, sin: liger.liger_rope(q, k, cos[0], sin[0]),
    ),
    Case(
        "4 x (tanh, sigmoid, mul, sub)", chain, tensors(x=ROW, y=ROW), {"rows": 16384, "columns": 8192},
        SMALL, ("x", "y"), ("x", "y"),
    ),
    GROUP_NORM,
)  # fmt: skip
