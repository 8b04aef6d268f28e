"""A benchmark case: a user's code, its inputs, the bytes that an ideal kernel moves, and its bar."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Outputs = tuple[Tensor, ...]
Make = Callable[..., dict[str, Tensor]]
PHASES = ("forward", "forward+backward")

FIRST_TABLE, LONG_ROWS, ODD_NORMS, DROPOUT = "first table", "long rows", "odd norms", "dropout"
FEW_LONG, MANY_SHORT, SUMS = "few long rows", "many short rows", "sums"
TRANSPOSING, CAT, UNFRIENDLY = "transposing", "cat and split", "unfriendly sizes"
BLOCK_SCALED = "block-scaled"
MATRIX_VECTOR = "matrix-vector"

# Fractions of the copy bandwidth to reach, forward and forward + backward.
BARS: Mapping[str, tuple[float, float | None]] = {
    FIRST_TABLE: (0.95, 0.93),
    LONG_ROWS: (0.88, 0.90),
    ODD_NORMS: (0.85, 0.80),
    DROPOUT: (0.92, 0.92),
    FEW_LONG: (0.85, 0.80),
    MANY_SHORT: (0.85, 0.80),
    SUMS: (0.88, None),
    TRANSPOSING: (0.85, 0.85),
    CAT: (0.85, 0.85),
    BLOCK_SCALED: (0.90, None),
    MATRIX_VECTOR: (0.80, None),
}
# Times faster than a peer, as geometric means over all cases.
RATIOS: Mapping[str, tuple[float, float]] = {"compile": (1.6, 1.5), "autotune": (1.4, 1.25)}
# An unfriendly size is not below the one where its friendly neighbour is above the other.
NO_CLIFF, FRIENDLY = 0.80, 0.95


@dataclass(frozen=True)
class Case:
    """One cluster.

    fn: the user's code; its parameters are the tensors by name. A parameter p is a dropout rate.
    make: sizes -> those tensors, unit-scale float32; they are cast to the case's dtype.
    sizes, quick: the sizes that count, and small ones for trying the harness.
    differentiate: which inputs get gradients; none where only the forward is of interest.
    backward_reads: inputs or outputs ("out0") that the backward needs besides the outputs' gradients.
    unwritten: inputs whose gradient is another's, or an output's: nothing is written for it.
    liger: the same by Liger's kernels, given its functional module.
    family, bar: where it belongs, and the row of BARS that it is held to (by default its family's).
    neighbour: the case of a friendly size that this one is compared with.
    wide, state: inputs that stay float32; those that the code writes, whose values are compared too.
    """

    name: str
    fn: Callable[..., Tensor | Outputs]
    make: Make
    sizes: Mapping[str, int]
    quick: Mapping[str, int]
    differentiate: tuple[str, ...] = ()
    backward_reads: tuple[str, ...] = ()
    unwritten: tuple[str, ...] = ()
    liger: Callable[..., Callable[..., object]] | None = None
    family: str = FIRST_TABLE
    bar: str | None = None
    neighbour: str | None = None
    dtype: torch.dtype = torch.bfloat16
    wide: tuple[str, ...] = ()
    state: tuple[str, ...] = ()

    @property
    def phases(self) -> tuple[str, ...]:
        return PHASES if self.differentiate else PHASES[:1]

    def bar_of(self, phase: str) -> float | None:
        """The fraction to reach; None where there is none, or where only the neighbour tells."""
        bars = BARS.get(self.bar or self.family)
        return bars[PHASES.index(phase)] if bars and self.neighbour is None else None

    @property
    def random(self) -> bool:
        return "p" in inspect.signature(self.fn).parameters

    def without_randomness(self) -> Callable[..., Tensor | Outputs]:
        """The same code with dropout off, whose values can be compared."""
        if not self.random:
            return self.fn
        fn = self.fn

        def certain(*tensors: Tensor) -> Tensor | Outputs:
            return fn(*tensors, p=0.0)

        return certain

    def inputs(
        self, device: torch.device | str, quick: bool = False, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Fresh random inputs; floating ones in `dtype` (the case's own), layout as `make` gives it."""
        with torch.device(device):
            drawn = self.make(**(self.quick if quick else self.sizes))
        to = dtype or self.dtype
        return {
            n: copy_of(t, to) if t.is_floating_point() and n not in self.wide else t for n, t in drawn.items()
        }

    def forward_bytes(self, inputs: Mapping[str, Tensor], outputs: Outputs) -> int:
        """Every input read once, every output and state written once."""
        written = sum(t.nbytes for t in outputs) + sum(inputs[n].nbytes for n in self.state)
        return sum(t.nbytes for t in inputs.values()) + written

    def backward_bytes(self, inputs: Mapping[str, Tensor], outputs: Outputs) -> int:
        """Outputs' gradients and what the backward needs read once, input gradients written once."""
        named = dict(inputs) | {f"out{i}": t for i, t in enumerate(outputs)}
        read = sum(t.nbytes for t in outputs) + sum(named[n].nbytes for n in self.backward_reads)
        return read + sum(inputs[n].nbytes for n in self.differentiate if n not in self.unwritten)


def tensors(**axes: str) -> Make:
    """Return a `make` for random tensors with the axes that their texts name: x="rows columns"."""

    def make(**sizes: int) -> dict[str, Tensor]:
        return {name: torch.randn([sizes[axis] for axis in text.split()]) for name, text in axes.items()}

    return make


def as_tuple(result: object) -> Outputs:
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)  # type: ignore[return-value]


def copy_of(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A copy in memory of its own with the same strides and the same offset into its storage."""
    dtype = dtype or tensor.dtype
    offset = tensor.storage_offset()
    if not offset or tensor.is_meta:
        return tensor.detach().to(dtype, copy=True)
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    storage = torch.empty(offset + extent, dtype=dtype, device=tensor.device)
    return storage.as_strided(tensor.shape, tensor.stride(), offset).copy_(tensor.detach())
