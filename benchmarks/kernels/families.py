"""The families of clusters beside the first table: rows of every length, sums, layouts, dropout."""

from __future__ import annotations

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
)
from benchmarks.kernels.clusters import (
    EPS,
    SMALL,
    bias_dropout_residual_norm,
    cross_entropy,
    group_norm_silu,
    layer_norm,
    make_image,
    make_logits,
    rms_norm,
    rows_and,
    softmax,
)

ELEMENTS = 1 << 27  # of one tensor: 256 MB in bfloat16, four times an H200's L2


# The code that users write.


def log_softmax(x: Tensor) -> Tensor:
    return torch.log_softmax(x, -1)


def row_sum(x: Tensor) -> Tensor:
    return x.sum(-1)


def row_max(x: Tensor) -> Tensor:
    return x.amax(-1)


def instance_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias, eps=EPS)


def batch_norm(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.batch_norm(x, mean, variance, weight, bias, training=True, eps=EPS)


def batch_statistics(x: Tensor, mean: Tensor, variance: Tensor) -> Outputs:
    """Those of the batch, which also move the running ones."""
    of_batch, around = torch.var_mean(x.to(mean.dtype), (0, 2, 3), correction=0)[::-1]
    mean.lerp_(of_batch, 0.1)
    variance.lerp_(around, 0.1)
    return of_batch, around


def dropout_add(x: Tensor, residual: Tensor, p: float = 0.1) -> Tensor:
    return F.dropout(x, p) + residual


def softmax_dropout(scores: Tensor, p: float = 0.1) -> Tensor:
    return F.dropout(torch.softmax(scores, -1), p)


def sum_first(x: Tensor) -> Tensor:
    return x.sum(0)


def sum_middle(x: Tensor) -> Tensor:
    return x.sum(1)


def sum_both_ends(x: Tensor) -> Tensor:
    return x.sum((0, 2))


def sum_everything(x: Tensor) -> Tensor:
    return x.sum()


def add_transposed(a: Tensor, b: Tensor) -> Tensor:
    return a + b.t()


def multiply_transposed(a: Tensor, b: Tensor) -> Tensor:
    return a * b.t()


def gate(x: Tensor, y: Tensor) -> Tensor:
    return F.silu(x) * y


def gated_heads(x: Tensor, y: Tensor) -> Tensor:
    """An attention's heads, back in one row for each position, times their gate."""
    return x.transpose(1, 2).reshape(y.shape) * torch.sigmoid(y)


def cat_activated(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat((F.silu(x), torch.tanh(y)), -1)


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
    running = {"mean": torch.randn(channels), "variance": torch.rand(channels)}
    image = make_image(batch, channels, side)
    return {"x": image.pop("x"), **running, **image}


def make_statistics(batch: int, channels: int, side: int) -> dict[str, Tensor]:
    made = make_batch(batch, channels, side)
    return {n: made[n] for n in ("x", "mean", "variance")}


def make_volume(batch: int, channels: int, side: int) -> dict[str, Tensor]:
    """Weight and bias of every element of a sample."""
    shape = (channels, side, side)
    return {"x": torch.randn(batch, *shape), "weight": torch.randn(shape), "bias": torch.randn(shape)}


def make_block(first: int, middle: int, last: int) -> dict[str, Tensor]:
    return {"x": torch.randn(first, middle, last)}


def make_transposed(rows: int, columns: int) -> dict[str, Tensor]:
    return {"a": torch.randn(rows, columns), "b": torch.randn(columns, rows)}


def make_orders(batch: int, channels: int, side: int) -> dict[str, Tensor]:
    """One image batch with its channels outside, one with them inside."""
    x, y = torch.randn(2, batch, channels, side, side)
    return {"x": x.clone(), "y": y.to(memory_format=torch.channels_last)}


def make_heads(batch: int, heads: int, length: int, width: int) -> dict[str, Tensor]:
    return {
        "x": torch.randn(batch, heads, length, width),
        "y": torch.randn(batch, length, heads * width),
    }


def make_gates(rows: int, columns: int) -> dict[str, Tensor]:
    return {"gates": torch.randn(rows, 4 * columns), "cell": torch.randn(rows, columns)}


def make_pairs(batch: int, heads: int, length: int, width: int) -> dict[str, Tensor]:
    frequency = 10000.0 ** (-torch.arange(0, width, 2) / width)
    angle = torch.arange(length)[:, None] * frequency
    return {"q": torch.randn(batch, heads, length, width), "cos": angle.cos(), "sin": angle.sin()}


def rows_of(columns: int, elements: int = ELEMENTS) -> dict[str, int]:
    return {"rows": elements // columns, "columns": columns}


LONG_WIDTHS = (32768, 65536, 131072, 262144)


def long_rows(columns: int) -> tuple[Case, ...]:
    sizes, quick = rows_of(columns), {"rows": 4, "columns": columns // 128}
    width = f"{columns} wide"
    return (
        Case(
            f"softmax, {width}", softmax, rows_and(), sizes, quick, ("x",), ("out0",),
            liger=lambda liger: liger.liger_softmax, family=LONG_ROWS,
        ),
        Case(
            f"log-softmax, {width}", log_softmax, rows_and(), sizes, quick, ("x",), ("out0",),
            family=LONG_ROWS,
        ),
        Case(
            f"cross-entropy, {width}", cross_entropy, make_logits, sizes, quick,
            ("logits",), ("logits", "target"),
            liger=lambda liger: liger.liger_cross_entropy, family=LONG_ROWS,
        ),
        Case(
            f"LayerNorm, {width}", layer_norm, rows_and("weight", "bias"), sizes, quick,
            ("x", "weight", "bias"), ("x", "weight"),
            liger=lambda liger: lambda x, w, b: liger.liger_layer_norm(x, w, b, EPS), family=LONG_ROWS,
        ),
        Case(
            f"RMSNorm, {width}", rms_norm, rows_and("weight"), sizes, quick, ("x", "weight"), ("x", "weight"),
            liger=lambda liger: lambda x, w: liger.liger_rms_norm(x, w, EPS), family=LONG_ROWS,
        ),
    )  # fmt: skip


def few_long_rows(rows: int) -> tuple[Case, ...]:
    sizes, quick = {"rows": rows, "columns": 1 << 20}, {"rows": rows, "columns": 2048}
    name = f"{rows} row{'s' * (rows > 1)} of 1M"
    return (
        Case(f"softmax, {name}", softmax, rows_and(), sizes, quick, ("x",), ("out0",), family=FEW_LONG),
        Case(
            f"RMSNorm, {name}", rms_norm, rows_and("weight"), sizes, quick, ("x", "weight"), ("x", "weight"),
            family=FEW_LONG,
        ),
        Case(f"sum, {name}", row_sum, rows_and(), sizes, quick, family=FEW_LONG),
        Case(f"max, {name}", row_max, rows_and(), sizes, quick, ("x",), ("x", "out0"), family=FEW_LONG),
    )  # fmt: skip


def many_short_rows(columns: int) -> tuple[Case, ...]:
    sizes, quick = {"rows": 10_000_000, "columns": columns}, {"rows": 500, "columns": columns}
    name = f"10M rows of {columns}"
    return (
        Case(f"softmax, {name}", softmax, rows_and(), sizes, quick, ("x",), ("out0",), family=MANY_SHORT),
        Case(
            f"LayerNorm, {name}", layer_norm, rows_and("weight", "bias"), sizes, quick,
            ("x", "weight", "bias"), ("x", "weight"), family=MANY_SHORT,
        ),
        Case(f"sum, {name}", row_sum, rows_and(), sizes, quick, family=MANY_SHORT),
    )  # fmt: skip


IMAGE, QUICK_IMAGE = ("x", "weight", "bias"), {"batch": 2, "channels": 64, "side": 8}

# (samples, channels, side) of groups in parts, in one tile, and of which little of a tile is filled.
GROUPS = (
    (4, 320, 100), (2, 64, 1024), (1, 128, 512), (2, 512, 256), (32, 320, 64), (32, 320, 14), (16, 320, 40),
    (16, 1280, 12), (64, 640, 12), (16, 640, 24),
)  # fmt: skip


def groups(batch: int, channels: int, side: int) -> Case:
    return Case(
        f"GroupNorm + SiLU, {batch} x {channels} x {side} x {side}", group_norm_silu, make_image,
        {"batch": batch, "channels": channels, "side": side}, QUICK_IMAGE, IMAGE, IMAGE, family=ODD_NORMS,
    )  # fmt: skip


ODD_NORM_CASES: tuple[Case, ...] = (
    *(groups(*sizes) for sizes in GROUPS),
    Case(
        "GroupNorm + SiLU, 256 x 256 x 32 x 32", group_norm_silu, make_image,
        {"batch": 256, "channels": 256, "side": 32}, QUICK_IMAGE, IMAGE, IMAGE, family=ODD_NORMS,
    ),
    Case(
        "GroupNorm + SiLU, 16 x 512 x 128 x 128", group_norm_silu, make_image,
        {"batch": 16, "channels": 512, "side": 128}, QUICK_IMAGE, IMAGE, IMAGE, family=ODD_NORMS,
    ),
    Case(
        "InstanceNorm, 16 x 64 x 256 x 256", instance_norm, make_image,
        {"batch": 16, "channels": 64, "side": 256}, QUICK_IMAGE, IMAGE, ("x", "weight"), family=ODD_NORMS,
    ),
    Case(
        "BatchNorm in training, 128 x 256 x 56 x 56", batch_norm, make_batch,
        {"batch": 128, "channels": 256, "side": 56}, QUICK_IMAGE, IMAGE, ("x", "weight"), family=ODD_NORMS,
        wide=("mean", "variance", "weight", "bias"), state=("mean", "variance"),
    ),
    Case(
        "BatchNorm statistics, 128 x 256 x 56 x 56", batch_statistics, make_statistics,
        {"batch": 128, "channels": 256, "side": 56}, QUICK_IMAGE, family=ODD_NORMS,
        wide=("mean", "variance"), state=("mean", "variance"),
    ),
    Case(
        "LayerNorm over 64 x 32 x 32", layer_norm, make_volume,
        {"batch": 2048, "channels": 64, "side": 32}, {"batch": 3, "channels": 8, "side": 8},
        IMAGE, ("x", "weight"), family=ODD_NORMS,
    ),
)  # fmt: skip

DROPOUT_CASES: tuple[Case, ...] = (
    Case(
        "bias + dropout + residual + LayerNorm, 4096 wide", bias_dropout_residual_norm,
        rows_and("bias", "weight", "shift", tensors=("x", "residual")), rows_of(4096), SMALL,
        ("x", "bias", "residual", "weight", "shift"), ("x", "residual", "bias", "weight"), family=DROPOUT,
    ),
    Case(
        "dropout + add", dropout_add, rows_and(tensors=("x", "residual")), rows_of(4096), SMALL,
        ("x", "residual"), (), unwritten=("residual",), family=DROPOUT,
    ),
    Case(
        "softmax + dropout", softmax_dropout, rows_and(tensors=("scores",)), rows_of(1024), SMALL,
        ("scores",), ("scores",), family=DROPOUT,
    ),
)  # fmt: skip

QUICK_BLOCK = {"first": 6, "middle": 20, "last": 12}

SUM_CASES: tuple[Case, ...] = (
    Case(
        "bias gradient: 64K x 4096 over the first", sum_first, rows_and(),
        {"rows": 65536, "columns": 4096}, SMALL, family=SUMS,
    ),
    Case(
        "64 x 4096 x 1024 over the middle", sum_middle, make_block,
        {"first": 64, "middle": 4096, "last": 1024}, QUICK_BLOCK, family=SUMS,
    ),
    Case(
        "256 x 1024 x 256 over both ends", sum_both_ends, make_block,
        {"first": 256, "middle": 1024, "last": 256}, QUICK_BLOCK, family=SUMS,
    ),
    Case(
        "64K x 4096 over everything", sum_everything, rows_and(),
        {"rows": 65536, "columns": 4096}, SMALL, family=SUMS,
    ),
)  # fmt: skip

QUICK_HEADS = {"batch": 2, "heads": 4, "length": 16, "width": 16}

TRANSPOSING_CASES: tuple[Case, ...] = (
    Case(
        "a + b.t()", add_transposed, make_transposed, {"rows": 16384, "columns": 8192}, SMALL,
        family=TRANSPOSING,
    ),
    Case(
        "a * b.t()", multiply_transposed, make_transposed, {"rows": 16384, "columns": 8192}, SMALL,
        ("a", "b"), ("a", "b"), family=TRANSPOSING,
    ),
    Case(
        "silu(NCHW) * NHWC", gate, make_orders,
        {"batch": 64, "channels": 256, "side": 64}, QUICK_IMAGE, ("x", "y"), ("x", "y"), family=TRANSPOSING,
    ),
    Case(
        "heads to rows, gated", gated_heads, make_heads,
        {"batch": 8, "heads": 32, "length": 4096, "width": 128}, QUICK_HEADS, ("x", "y"), ("x", "y"),
        family=TRANSPOSING,
    ),
)  # fmt: skip

CAT_CASES: tuple[Case, ...] = (
    Case(
        "cat of two activations", cat_activated, rows_and(tensors=("x", "y")),
        {"rows": 16384, "columns": 8192}, SMALL, ("x", "y"), ("x", "y"), family=CAT,
    ),
    Case("chunked SwiGLU", glu, rows_and(), {"rows": 16384, "columns": 16384}, SMALL, ("x",), ("x",),
        family=CAT,
    ),
    Case(
        "LSTM cell, 4 gates", lstm_cell, make_gates, {"rows": 32768, "columns": 1024}, SMALL,
        ("gates", "cell"), ("gates", "cell"), family=CAT,
    ),
    Case(
        "interleaved RoPE", rope_interleaved, make_pairs,
        {"batch": 8, "heads": 32, "length": 4096, "width": 128}, QUICK_HEADS, ("q",), ("cos", "sin"),
        family=CAT,
    ),
)  # fmt: skip

FAMILIES: tuple[Case, ...] = (
    *(case for columns in LONG_WIDTHS for case in long_rows(columns)),
    *ODD_NORM_CASES,
    *DROPOUT_CASES,
    *(case for rows in (1, 4, 16, 64) for case in few_long_rows(rows)),
    *(case for columns in (8, 16, 32, 64) for case in many_short_rows(columns)),
    *SUM_CASES,
    *TRANSPOSING_CASES,
    *CAT_CASES,
)
