"""Sizes that are not friendly, each beside its friendly neighbour; and every width of the sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from benchmarks.kernels.block_scaled import BLOCK_SCALED_CASES
from benchmarks.kernels.case import FIRST_TABLE, LONG_ROWS, UNFRIENDLY, Case
from benchmarks.kernels.clusters import (
    CASES,
    bias_gelu,
    cross_entropy,
    layer_norm,
    make_logits,
    rms_norm,
    rows_and,
    softmax,
)
from benchmarks.kernels.families import FAMILIES, rows_of
from benchmarks.kernels.matvec import MATVEC_CASES

Make = Callable[..., dict[str, Tensor]]

# The neighbour is the friendly width that is nearest by ratio.
FRIENDLY_WIDTHS = (1024, 4096, 8192, 65536)
UNFRIENDLY_WIDTHS: Mapping[int, int] = {1000: 1024, 3072: 4096, 5120: 4096, 11008: 8192, 50257: 65536}

KINDS: tuple[Case, ...] = (
    Case("bias + GELU", bias_gelu, rows_and("bias"), {}, {}, ("x", "bias"), ("x", "bias")),
    Case("RMSNorm", rms_norm, rows_and("weight"), {}, {}, ("x", "weight"), ("x", "weight")),
    Case("softmax", softmax, rows_and(), {}, {}, ("x",), ("out0",)),
)
SWEPT: tuple[Case, ...] = (
    Case("softmax", softmax, rows_and(), {}, {}, ("x",), ("out0",)),
    Case(
        "LayerNorm", layer_norm, rows_and("weight", "bias"), {}, {}, ("x", "weight", "bias"), ("x", "weight")
    ),
    Case("RMSNorm", rms_norm, rows_and("weight"), {}, {}, ("x", "weight"), ("x", "weight")),
    Case("cross-entropy", cross_entropy, make_logits, {}, {}, ("logits",), ("logits", "target")),
)
SWEEP_WIDTHS = tuple(round(256 * 2 ** (step / 2)) for step in range(21))
SWEEP_ELEMENTS = 1 << 26


def shifted(make: Make) -> Make:
    """Tensors that begin one element after their memory does."""

    def made(**sizes: int) -> dict[str, Tensor]:
        tensors = make(**sizes)
        return {n: torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape) for n, t in tensors.items()}

    return made


def unfriendly(kind: Case) -> Iterator[Case]:
    """The friendly widths, held to the bar of rows of their length, and what lies beside them."""

    def at(label: str, sizes: dict[str, int], **changes: object) -> Case:
        quick = {"rows": min(sizes["rows"], 6), "columns": max(13, sizes["columns"] // 64)}
        named = replace(kind, name=f"{kind.name}, {label}", family=UNFRIENDLY, sizes=sizes, quick=quick)
        return replace(named, **changes)  # pyright: ignore[reportArgumentType]

    rowwise = kind.name != "bias + GELU"
    for columns in FRIENDLY_WIDTHS:
        bar = LONG_ROWS if rowwise and columns > 16384 else FIRST_TABLE
        yield at(f"{columns} wide", rows_of(columns), bar=bar)
    for columns, beside in UNFRIENDLY_WIDTHS.items():
        yield at(f"{columns} wide", rows_of(columns), neighbour=f"{kind.name}, {beside} wide")
    friendly = f"{kind.name}, 4096 wide"
    for rows in (1, 3):
        yield at(f"{rows} x 4096", {"rows": rows, "columns": 4096}, neighbour=friendly)
    yield at("131072 x 3072", {"rows": 131072, "columns": 3072}, neighbour=friendly)
    yield at("4096 wide, offset by one", rows_of(4096), make=shifted(kind.make), neighbour=friendly)
    for dtype in (torch.float16, torch.float32):
        label = f"4096 wide, {str(dtype).removeprefix('torch.')}"
        yield at(label, rows_of(4096), dtype=dtype, neighbour=friendly)


def sweep() -> tuple[Case, ...]:
    """Each of SWEPT at each width; every tensor has about the same number of elements."""
    return tuple(
        replace(
            kind,
            name=f"{kind.name}, {columns} wide",
            family=kind.name,
            sizes=rows_of(columns, SWEEP_ELEMENTS),
            quick={"rows": 3, "columns": max(7, columns // 256)},
        )
        for kind in SWEPT
        for columns in SWEEP_WIDTHS
    )


UNFRIENDLY_CASES: tuple[Case, ...] = tuple(case for kind in KINDS for case in unfriendly(kind))


def once(*cases: Case) -> tuple[Case, ...]:
    """The first of each name: rows of 65536 are long rows, and somebody's friendly neighbour."""
    found: dict[str, Case] = {}
    for case in cases:
        found.setdefault(case.name, case)
    return tuple(found.values())


ALL_CASES = once(*CASES, *FAMILIES, *BLOCK_SCALED_CASES, *MATVEC_CASES, *UNFRIENDLY_CASES)
