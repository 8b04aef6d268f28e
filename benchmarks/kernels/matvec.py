"""Products of few rows, as decoding has them: a matrix is read once for all tokens in flight.

The matrices of Llama-1B's and Llama-8B's layers (outputs x inputs), alone and with what stands around them in
a model. Those that a device reads in less than a launch takes have no bar, and neither have sixteen rows,
where the arithmetic of the products counts as well.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.case import MATRIX_VECTOR, Case, Make

ROWS = (1, 2, 4, 8, 16)
MATRICES = {
    "1B q": (2048, 2048), "1B k": (512, 2048), "1B gate": (8192, 2048), "1B down": (2048, 8192),
    "1B head": (128256, 2048), "8B q": (4096, 4096), "8B k": (1024, 4096), "8B gate": (14336, 4096),
    "8B down": (4096, 14336), "8B head": (128256, 4096),
}  # fmt: skip
QUICK = {"rows": 2, "n": 24, "k": 40}
LEAST = 1 << 24  # elements of matrices that a bar is set for
NO_BAR = "none"


def swiglu_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def norm_swiglu_linear(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return swiglu_linear(F.rms_norm(x, (x.shape[-1],), norm, 1e-5), gate, up)


def norm_turned_linear(x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, F.layer_norm(x, x.shape[-1:], norm), weight)


def inputs(*names: str) -> Make:
    """Return a `make` for a product's inputs: `turned` is a matrix [k, n], as GPT-2 has them, in which
    neighbours in memory belong to different results."""

    def make(rows: int, n: int, k: int) -> dict[str, Tensor]:
        every: dict[str, Callable[[], Tensor]] = {
            "x": lambda: torch.randn(rows, k),
            "norm": lambda: torch.rand(k) + 0.5,
            "turned": lambda: torch.randn(k, n) * k**-0.5,
            "bias": lambda: torch.randn(n),
            "residual": lambda: torch.randn(rows, n),
            "int8": lambda: torch.randint(-127, 128, (n, k), dtype=torch.int8),
            "scale": lambda: torch.rand(n, 1) * k**-0.5 / 64,
        }
        return {name: every.get(name, lambda: torch.randn(n, k) * k**-0.5)() for name in names}

    return make


KINDS: tuple[tuple[str, Callable[..., Tensor], Make, tuple[str, ...]], ...] = (
    ("", lambda x, weight: F.linear(x, weight), inputs("x", "weight"), tuple(MATRICES)),
    (
        " + residual", lambda x, weight, residual: residual + F.linear(x, weight),
        inputs("x", "weight", "residual"), ("1B q", "1B down", "8B down"),
    ),
    (" SwiGLU", swiglu_linear, inputs("x", "gate", "up"), ("1B gate", "8B gate")),
    (" norm + SwiGLU", norm_swiglu_linear, inputs("x", "norm", "gate", "up"), ("1B gate", "8B gate")),
    (
        " turned", lambda x, weight, bias: torch.addmm(bias, x, weight), inputs("x", "turned", "bias"),
        ("1B q", "1B gate", "1B down", "8B q"),
    ),
    (
        " norm + turned", norm_turned_linear, inputs("x", "norm", "turned", "bias"),
        ("1B q", "1B gate", "8B q"),
    ),
    (
        " int8", lambda x, weight, scale: F.linear(x, weight.to(x.dtype) * scale),
        inputs("x", "int8", "scale"), ("1B gate", "1B down", "8B gate", "8B down"),
    ),
)  # fmt: skip


def case_of(kind: str, fn: Callable[..., Tensor], make: Make, matrix: str, rows: int) -> Case:
    n, k = MATRICES[matrix]
    has_bar = n * k >= LEAST and rows < ROWS[-1]
    name, sizes = f"{matrix}{kind}, {rows} of {k} to {n}", {"rows": rows, "n": n, "k": k}
    return Case(name, fn, make, sizes, QUICK, family=MATRIX_VECTOR, bar=None if has_bar else NO_BAR)


MATVEC_CASES: tuple[Case, ...] = tuple(
    case_of(kind, fn, make, matrix, rows)
    for kind, fn, make, matrices in KINDS
    for matrix in matrices
    for rows in ROWS
)
