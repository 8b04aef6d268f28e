"""The memory-bound clusters: the code that users write for them, its inputs and sizes, by family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import (
    CAT,
    DROPOUT,
    FEW_LONG,
    LONG_ROWS,
    MANY_SHORT,
    ODD_NORMS,
    SUMS,
    TRANSPOSING,
    Case,
    Outputs,
    tensors,
)

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
QUICK_IMAGE = {"batch": 2, "channels": 64, "side": 8}
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
    QUICK_IMAGE, IMAGE_NAMES, IMAGE_NAMES, bar=ODD_NORMS,
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

# The families of clusters beside the first table: rows of every length, sums, layouts, dropout.

ELEMENTS = 1 << 27  # of one tensor: 256 MB in bfloat16, four times an H200's L2
BLOCK = tensors(x="first middle last")
PAIR = tensors(x=ROW, y=ROW)


def variant(case: Case, name: str, family: str, sizes: Mapping[str, int], **changes: Any) -> Case:
    """Return a case of the first table at other sizes, in another family, held to the bar of that."""
    fields = {"name": name, "family": family, "sizes": sizes, "bar": None, "liger": None}
    return replace(case, **(fields | changes))


def batch_norm(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, bias, training=True, eps=EPS)


def batch_statistics(x: Tensor, mean: Tensor, variance: Tensor) -> Outputs:
    """Return the mean and variance of the batch, and move the running ones towards them."""
    of_batch, around = torch.var_mean(x.to(mean.dtype), (0, 2, 3), correction=0)[::-1]
    mean.lerp_(of_batch, 0.1)
    variance.lerp_(around, 0.1)
    return of_batch, around


def gated_heads(x: Tensor, y: Tensor) -> Tensor:
    """An attention's heads, back in one row for each position, times their gate."""
    return x.transpose(1, 2).reshape(y.shape) * torch.sigmoid(y)


def glu(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return F.silu(first) * second


def lstm_cell(gates: Tensor, cell: Tensor) -> Outputs:
    enter, forget, candidate, leave = gates.chunk(4, -1)
    cell = torch.sigmoid(forget) * cell + torch.sigmoid(enter) * torch.tanh(candidate)
    return torch.sigmoid(leave) * torch.tanh(cell), cell


def rope_interleaved(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = q[..., ::2], q[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def make_batch(batch: int, channels: int, side: int) -> dict[str, Tensor]:
    """An image batch and running statistics; batch norm's own order of arguments."""
    image = IMAGE(batch=batch, channels=channels, side=side)
    running = {"mean": torch.randn(channels), "variance": torch.rand(channels)}
    return {"x": image.pop("x"), **running, **image}


def make_statistics(**sizes: int) -> dict[str, Tensor]:
    batch = make_batch(**sizes)
    return {n: batch[n] for n in ("x", "mean", "variance")}


def make_orders(batch: int, channels: int, side: int) -> dict[str, Tensor]:
    """One image batch with its channels outside, one with them inside."""
    x, y = torch.randn(2, batch, channels, side, side)
    return {"x": x.clone(), "y": y.to(memory_format=torch.channels_last)}


def make_heads(batch: int, heads: int, length: int, width: int) -> dict[str, Tensor]:
    return {"x": torch.randn(batch, heads, length, width), "y": torch.randn(batch, length, heads * width)}


def make_gates(rows: int, columns: int) -> dict[str, Tensor]:
    return {"gates": torch.randn(rows, 4 * columns), "cell": torch.randn(rows, columns)}


def make_pairs(batch: int, heads: int, length: int, width: int) -> dict[str, Tensor]:
    angle = angles(length, width)
    return {"q": torch.randn(batch, heads, length, width), "cos": angle.cos(), "sin": angle.sin()}


def rows_of(columns: int, elements: int = ELEMENTS) -> dict[str, int]:
    return {"rows": elements // columns, "columns": columns}


# Rows of every length.

LOG_SOFTMAX = replace(SOFTMAX, name="log-softmax", fn=lambda x: torch.log_softmax(x, -1), liger=None)
RMS_ROWS = replace(RMS_NORM, name="RMSNorm")
ROW_SUM = Case("sum", lambda x: x.sum(-1), tensors(x=ROW), {}, {})
ROW_MAX = Case("max", lambda x: x.amax(-1), tensors(x=ROW), {}, {}, ("x",), ("x", "out0"))

LONG_ROW_CASES = tuple(
    variant(
        kind, f"{kind.name}, {columns} wide", LONG_ROWS, rows_of(columns), liger=kind.liger,
        quick={"rows": 4, "columns": columns // 128},
    )
    for columns in (32768, 65536, 131072, 262144)
    for kind in (SOFTMAX, LOG_SOFTMAX, CROSS_ENTROPY, LAYER_NORM, RMS_ROWS)
)  # fmt: skip
FEW_LONG_CASES = tuple(
    variant(
        kind, f"{kind.name}, {rows} row{'s' * (rows > 1)} of 1M", FEW_LONG,
        {"rows": rows, "columns": 1 << 20}, quick={"rows": rows, "columns": 2048},
    )
    for rows in (1, 4, 16, 64)
    for kind in (SOFTMAX, RMS_ROWS, ROW_SUM, ROW_MAX)
)  # fmt: skip
MANY_SHORT_CASES = tuple(
    variant(
        kind, f"{kind.name}, 10M rows of {columns}", MANY_SHORT, {"rows": 10_000_000, "columns": columns},
        quick={"rows": 500, "columns": columns},
    )
    for columns in (8, 16, 32, 64)
    for kind in (SOFTMAX, LAYER_NORM, ROW_SUM)
)  # fmt: skip

# Norms of images.

# (samples, channels, side) of groups in parts, in one tile, and of which little of a tile is filled.
GROUPS = (
    (4, 320, 100), (2, 64, 1024), (1, 128, 512), (2, 512, 256), (32, 320, 64), (32, 320, 14), (16, 320, 40),
    (16, 1280, 12), (64, 640, 12), (16, 640, 24), (256, 256, 32), (16, 512, 128),
)  # fmt: skip


def image_sizes(batch: int, channels: int, side: int) -> dict[str, int]:
    return {"batch": batch, "channels": channels, "side": side}


ODD_NORM_CASES: tuple[Case, ...] = (
    *(
        variant(
            GROUP_NORM, f"GroupNorm + SiLU, {n} x {c} x {side} x {side}", ODD_NORMS, image_sizes(n, c, side)
        )
        for n, c, side in GROUPS
    ),
    Case(
        "InstanceNorm, 16 x 64 x 256 x 256",
        lambda x, weight, bias: F.instance_norm(x, weight=weight, bias=bias, eps=EPS), IMAGE,
        image_sizes(16, 64, 256), QUICK_IMAGE, IMAGE_NAMES, ("x", "weight"), family=ODD_NORMS,
    ),
    Case(
        "BatchNorm in training, 128 x 256 x 56 x 56", batch_norm, make_batch, image_sizes(128, 256, 56),
        QUICK_IMAGE, IMAGE_NAMES, ("x", "weight"), family=ODD_NORMS,
        wide=("mean", "variance", "weight", "bias"), state=("mean", "variance"),
    ),
    Case(
        "BatchNorm statistics, 128 x 256 x 56 x 56", batch_statistics, make_statistics,
        image_sizes(128, 256, 56), QUICK_IMAGE, family=ODD_NORMS, wide=("mean", "variance"),
        state=("mean", "variance"),
    ),
    variant(
        LAYER_NORM, "LayerNorm over 64 x 32 x 32", ODD_NORMS, image_sizes(2048, 64, 32),
        make=tensors(x="batch channels side side", weight="channels side side", bias="channels side side"),
        quick=image_sizes(3, 8, 8),
    ),
)  # fmt: skip

DROPOUT_CASES: tuple[Case, ...] = (
    variant(DROPOUT_NORM, "bias + dropout + residual + LayerNorm, 4096 wide", DROPOUT, rows_of(4096)),
    Case(
        "dropout + add", lambda x, residual, p=0.1: F.dropout(x, p) + residual, tensors(x=ROW, residual=ROW),
        rows_of(4096), SMALL, ("x", "residual"), (), unwritten=("residual",), family=DROPOUT,
    ),
    Case(
        "softmax + dropout", lambda scores, p=0.1: F.dropout(torch.softmax(scores, -1), p),
        tensors(scores=ROW), rows_of(1024), SMALL, ("scores",), ("scores",), family=DROPOUT,
    ),
)  # fmt: skip

QUICK_BLOCK = {"first": 6, "middle": 20, "last": 12}
SUM_CASES: tuple[Case, ...] = (
    Case(
        "bias gradient: 64K x 4096 over the first", lambda x: x.sum(0), tensors(x=ROW),
        {"rows": 65536, "columns": 4096}, SMALL, family=SUMS,
    ),
    Case(
        "64 x 4096 x 1024 over the middle", lambda x: x.sum(1), BLOCK,
        {"first": 64, "middle": 4096, "last": 1024}, QUICK_BLOCK, family=SUMS,
    ),
    Case(
        "256 x 1024 x 256 over both ends", lambda x: x.sum((0, 2)), BLOCK,
        {"first": 256, "middle": 1024, "last": 256}, QUICK_BLOCK, family=SUMS,
    ),
    Case(
        "64K x 4096 over everything", lambda x: x.sum(), tensors(x=ROW),
        {"rows": 65536, "columns": 4096}, SMALL, family=SUMS,
    ),
)  # fmt: skip

TRANSPOSED = tensors(a=ROW, b="columns rows"), {"rows": 16384, "columns": 8192}, SMALL
QUICK_HEADS = {"batch": 2, "heads": 4, "length": 16, "width": 16}
HEADS = {"batch": 8, "heads": 32, "length": 4096, "width": 128}
TRANSPOSING_CASES: tuple[Case, ...] = (
    Case("a + b.t()", lambda a, b: a + b.t(), *TRANSPOSED, family=TRANSPOSING),
    Case("a * b.t()", lambda a, b: a * b.t(), *TRANSPOSED, ("a", "b"), ("a", "b"), family=TRANSPOSING),
    Case(
        "silu(NCHW) * NHWC", lambda x, y: F.silu(x) * y, make_orders, image_sizes(64, 256, 64), QUICK_IMAGE,
        ("x", "y"), ("x", "y"), family=TRANSPOSING,
    ),
    Case(
        "heads to rows, gated", gated_heads, make_heads, HEADS, QUICK_HEADS, ("x", "y"), ("x", "y"),
        family=TRANSPOSING,
    ),
)  # fmt: skip

CAT_CASES: tuple[Case, ...] = (
    Case(
        "cat of two activations", lambda x, y: torch.cat((F.silu(x), torch.tanh(y)), -1), PAIR,
        {"rows": 16384, "columns": 8192}, SMALL, ("x", "y"), ("x", "y"), family=CAT,
    ),
    Case(
        "chunked SwiGLU", glu, tensors(x=ROW), {"rows": 16384, "columns": 16384}, SMALL, ("x",), ("x",),
        family=CAT,
    ),
    Case(
        "LSTM cell, 4 gates", lstm_cell, make_gates, {"rows": 32768, "columns": 1024}, SMALL,
        ("gates", "cell"), ("gates", "cell"), family=CAT,
    ),
    Case(
        "interleaved RoPE", rope_interleaved, make_pairs, HEADS, QUICK_HEADS, ("q",), ("cos", "sin"),
        family=CAT,
    ),
)  # fmt: skip

FAMILIES: tuple[Case, ...] = (
    *LONG_ROW_CASES, *ODD_NORM_CASES, *DROPOUT_CASES, *FEW_LONG_CASES, *MANY_SHORT_CASES, *SUM_CASES,
    *TRANSPOSING_CASES, *CAT_CASES,
)  # fmt: skip
