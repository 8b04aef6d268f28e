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

from benchmarks.kernels.case import MATRIX_VECTOR, Case

ROWS = (1, 2, 4, 8, 16)
MATRICES = {
    "1B q": (2048, 2048), "1B k": (512, 2048), "1B gate": (8192, 2048), "1B down": (2048, 8192),
    "1B head": (128256, 2048), "8B q": (4096, 4096), "8B k": (1024, 4096), "8B gate": (14336, 4096),
    "8B down": (4096, 14336), "8B head": (128256, 4096),
}  # fmt: skip
QUICK = {"rows": 2, "n": 24, "k": 40}
LEAST = 1 << 24  # elements of matrices that a bar is set for
NO_BAR = "none"


def linear(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


def residual_linear(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return residual + F.linear(x, weight)


def swiglu_linear(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def norm_swiglu_linear(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return swiglu_linear(F.rms_norm(x, (x.shape[-1],), norm, 1e-5), gate, up)


def turned_linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A matrix [k, n], as GPT-2 has them: neighbours in memory belong to different results."""
    return torch.addmm(bias, x, weight)


def norm_turned_linear(x: Tensor, norm: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, F.layer_norm(x, x.shape[-1:], norm), weight)


def int8_linear(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, weight.to(x.dtype) * scale)


def make_linear(rows: int, n: int, k: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, k), "weight": torch.randn(n, k) * k**-0.5}


def make_residual(rows: int, n: int, k: int) -> dict[str, Tensor]:
    return make_linear(rows, n, k) | {"residual": torch.randn(rows, n)}


def make_gated(rows: int, n: int, k: int) -> dict[str, Tensor]:
    gate, up = torch.randn(2, n, k) * k**-0.5
    return {"x": torch.randn(rows, k), "gate": gate, "up": up}


def make_normed(rows: int, n: int, k: int) -> dict[str, Tensor]:
    x, *matrices = make_gated(rows, n, k).items()
    return dict([x, ("norm", torch.rand(k) + 0.5), *matrices])


def make_turned(rows: int, n: int, k: int) -> dict[str, Tensor]:
    return {"x": torch.randn(rows, k), "weight": torch.randn(k, n) * k**-0.5, "bias": torch.randn(n)}


def make_norm_turned(rows: int, n: int, k: int) -> dict[str, Tensor]:
    x, *matrix = make_turned(rows, n, k).items()
    return dict([x, ("norm", torch.rand(k) + 0.5), *matrix])


def make_int8(rows: int, n: int, k: int) -> dict[str, Tensor]:
    weight = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    return {"x": torch.randn(rows, k), "weight": weight, "scale": torch.rand(n, 1) * k**-0.5 / 64}


KINDS: tuple[tuple[str, Callable[..., Tensor], Callable[..., dict[str, Tensor]], tuple[str, ...]], ...] = (
    ("", linear, make_linear, tuple(MATRICES)),
    (" + residual", residual_linear, make_residual, ("1B q", "1B down", "8B down")),
    (" SwiGLU", swiglu_linear, make_gated, ("1B gate", "8B gate")),
    (" norm + SwiGLU", norm_swiglu_linear, make_normed, ("1B gate", "8B gate")),
    (" turned", turned_linear, make_turned, ("1B q", "1B gate", "1B down", "8B q")),
    (" norm + turned", norm_turned_linear, make_norm_turned, ("1B q", "1B gate", "8B q")),
    (" int8", int8_linear, make_int8, ("1B gate", "1B down", "8B gate", "8B down")),
)


def case_of(
    kind: str, fn: Callable[..., Tensor], make: Callable[..., dict[str, Tensor]], matrix: str, rows: int
) -> Case:
    n, k = MATRICES[matrix]
    has_bar = n * k >= LEAST and rows < ROWS[-1]
    name = f"{matrix}{kind}, {rows} of {k} to {n}"
    sizes = {"rows": rows, "n": n, "k": k}
    return Case(name, fn, make, sizes, QUICK, family=MATRIX_VECTOR, bar=None if has_bar else NO_BAR)


MATVEC_CASES: tuple[Case, ...] = tuple(
    case_of(kind, fn, make, matrix, rows)
    for kind, fn, make, matrices in KINDS
    for matrix in matrices
    for rows in ROWS
)
