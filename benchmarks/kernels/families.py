"""The families of clusters beside the first table: rows of every length, sums, layouts, dropout."""

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
from benchmarks.kernels.clusters import (
    CROSS_ENTROPY,
    DROPOUT_NORM,
    EPS,
    GROUP_NORM,
    IMAGE,
    IMAGE_NAMES,
    LAYER_NORM,
    RMS_NORM,
    ROW,
    SMALL,
    SOFTMAX,
    angles,
)

ELEMENTS = 1 << 27  # of one tensor: 256 MB in bfloat16, four times an H200's L2
BLOCK = tensors(x="first middle last")
PAIR = tensors(x=ROW, y=ROW)


def variant(case: Case, name: str, family: str, sizes: Mapping[str, int], **changes: Any) -> Case:
    """Return a case of the first table at other sizes, in another family, held to the bar of that."""
    fields = {"name": name, "family": family, "sizes": sizes, "bar": None, "liger": None}
    return replace(case, **(fields | changes))


# The code that users write, where it has more than one line.


def batch_norm(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, bias, training=True, eps=EPS)


def batch_statistics(x: Tensor, mean: Tensor, variance: Tensor) -> Outputs:
    """Those of the batch, which also move the running ones."""
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


# Their inputs.


def make_batch(batch: int, channels: int, side: int) -> dict[str, Tensor]:
    """An image batch and running statistics; batch norm's own order of arguments."""
    image = IMAGE(batch=batch, channels=channels, side=side)
    running = {"mean": torch.randn(channels), "variance": torch.rand(channels)}
    return {"x": image.pop("x"), **running, **image}


def make_statistics(**sizes: int) -> dict[str, Tensor]:
    made = make_batch(**sizes)
    return {n: made[n] for n in ("x", "mean", "variance")}


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

QUICK_IMAGE = {"batch": 2, "channels": 64, "side": 8}
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
