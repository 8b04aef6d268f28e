"""Sizes that are not friendly, each beside its friendly neighbour; and every width of the sweep."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.kernels.block_scaled import BLOCK_SCALED_CASES
from benchmarks.kernels.case import FIRST_TABLE, LONG_ROWS, UNFRIENDLY, Case, Make
from benchmarks.kernels.clusters import (
    BIAS_GELU,
    CASES,
    CROSS_ENTROPY,
    FAMILIES,
    LAYER_NORM,
    RMS_ROWS,
    SOFTMAX,
    rows_of,
    variant,
)
from benchmarks.kernels.matvec import MATVEC_CASES

# The neighbour is the friendly width that is nearest by ratio.
FRIENDLY_WIDTHS = (1024, 4096, 8192, 65536)
UNFRIENDLY_WIDTHS: Mapping[int, int] = {1000: 1024, 3072: 4096, 5120: 4096, 11008: 8192, 50257: 65536}
SWEEP_WIDTHS = tuple(round(256 * 2 ** (step / 2)) for step in range(21))
SWEEP_ELEMENTS = 1 << 26


def shifted(make: Make) -> Make:
    """Tensors that begin one element after their memory does."""

    def shifted_inputs(**sizes: int) -> dict[str, Tensor]:
        tensors = make(**sizes)
        return {n: torch.cat((t.new_zeros(1), t.flatten()))[1:].view(t.shape) for n, t in tensors.items()}

    return shifted_inputs


def unfriendly(kind: Case) -> Iterator[Case]:
    """The friendly widths, held to the bar of rows of their length, and what lies beside them."""

    def at(label: str, sizes: dict[str, int], **changes: Any) -> Case:
        quick = {"rows": min(sizes["rows"], 6), "columns": max(13, sizes["columns"] // 64)}
        return variant(kind, f"{kind.name}, {label}", UNFRIENDLY, sizes, quick=quick, **changes)

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
    """Each kind of row at each width; every tensor has about the same number of elements."""
    return tuple(
        variant(
            kind, f"{kind.name}, {columns} wide", kind.name, rows_of(columns, SWEEP_ELEMENTS),
            quick={"rows": 3, "columns": max(7, columns // 256)},
        )
        for kind in (SOFTMAX, LAYER_NORM, RMS_ROWS, CROSS_ENTROPY)
        for columns in SWEEP_WIDTHS
    )  # fmt: skip


UNFRIENDLY_CASES = (
    case for kind in (replace(BIAS_GELU, name="bias + GELU"), RMS_ROWS, SOFTMAX) for case in unfriendly(kind)
)
# The first of each name: rows of 65536 are long rows, and somebody's friendly neighbour.
_BY_NAME: dict[str, Case] = {}
for _case in (*CASES, *FAMILIES, *BLOCK_SCALED_CASES, *MATVEC_CASES, *UNFRIENDLY_CASES):
    _BY_NAME.setdefault(_case.name, _case)
ALL_CASES = tuple(_BY_NAME.values())
