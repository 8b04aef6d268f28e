"""Run a part of a graph for one chunk of rows after the other, so that what it computes is never whole in
memory.

    loss, dh, dw = chunked(h, w, labels)

calls its body with rows 0 to 2047 of `h` and `labels` and all of `w`, then with rows 2048 to 4095, and so on,
and puts the bodies' results together: side by side where they have the rows, added up where they are sums
over them. Products over the rows are not part of the body: each chunk's is added to those before it in
float32, in the same call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from fusion_compiler.ops.schema import HALVES


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a tensor lie in its dimensions start, ..., stop - 1, in row-major order."""

    start: int
    stop: int

    @property
    def dims(self) -> range:
        return range(self.start, self.stop)

    def of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the sizes of the dimensions that are the rows."""
        return shape[self.start : self.stop]

    def counting(self, count: int, shape: Sequence[int]) -> list[int]:
        """Return a shape with `count` rows, in the last of their dimensions; the others have one element."""
        return [*shape[: self.start], *[1] * (self.stop - self.start - 1), count, *shape[self.stop :]]

    def moved(self, by: int) -> Rows:
        return Rows(self.start + by, self.stop + by)


@dataclass(frozen=True, slots=True)
class Joined:
    """A joined result has the rows: the chunks' side by side. rows: its dimensions of them; shape: its
    shape."""

    source: int
    rows: Rows
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Added:
    """An added result is a sum over the rows: the chunks' added up, and then converted to `dtype`."""

    source: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Multiplied:
    """A multiplied result is the product over the rows of the body's results `left`, of shape (m, rows), and
    `right`, (rows, n)."""

    left: int
    right: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Whole:
    """A result of a body that runs once, as it is."""

    source: int


Result = Joined | Added | Multiplied | Whole  # numbers are positions among the body's results


@dataclass(frozen=True, eq=False)
class Chunked:
    """The loop is called with the inputs, and returns a tuple of tensors, one for each of `results`.

    name: of the product whose rows these are. rows: how many there are. chunk: how many at a time; the last
    has what is left. inputs: for each input where its rows are, None for one that every chunk reads whole.
    bodies: the graph of one chunk, by its number of rows. runs: what runs in place of a body: takes a list.
    saved: bytes of the largest tensor that is never stored. unit: what the rows are, for people; "" for a
    body that runs once and has no rows. peak: bytes that a body uses at once. host_us, gpu_us: predicted
    microseconds to launch all chunks, and to run them.
    """

    name: str
    rows: int
    chunk: int
    inputs: tuple[Rows | None, ...]
    results: tuple[Result, ...]
    bodies: Mapping[int, fx.GraphModule]
    saved: int
    unit: str = "rows"
    runs: Mapping[int, Callable[[list[Any]], Sequence[Tensor]]] = field(
        default_factory=dict[int, Callable[[list[Any]], Sequence[Tensor]]]
    )
    peak: int = 0
    host_us: float = 0.0
    gpu_us: float = 0.0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return the rows of each chunk."""
        return tuple(min(self.chunk, self.rows - first) for first in range(0, self.rows, self.chunk))

    @property
    def __name__(self) -> str:
        return f"chunks_of_{self.name}" if self.unit else self.name

    @property
    def count(self) -> int:
        return math.ceil(self.rows / self.chunk)

    def __str__(self) -> str:
        return f"{self.__name__} ({self.count} x {self.chunk} {self.unit})" if self.unit else self.name

    def beside(self, results: Sequence[tuple[int, torch.dtype]]) -> int:
        """Return the bytes that are in use while it runs, beside its operands and results: a chunk's, and
        sums that are not rounded yet. results: elements and dtype of each."""
        sums = sum(
            elements * wide(dtype).itemsize
            for result, (elements, dtype) in zip(self.results, results, strict=True)
            if not isinstance(result, Joined | Whole) and wide(dtype) != dtype
        )
        return self.peak + sums

    @property
    def size(self) -> str:
        """Return "4 chunks of 2048 rows, 2.10 GB never stored"."""
        return f"{self.count} chunks of {self.chunk} {self.unit}, {self.saved / 1e9:.2f} GB never stored"

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        flat = [
            x if rows is None else flattened(x, rows) for x, rows in zip(inputs, self.inputs, strict=True)
        ]
        totals: list[Any] = [None] * len(self.results)
        for first in range(0, self.rows, self.chunk):
            self._add(totals, flat, first)
        return tuple(_finished(total, result) for total, result in zip(totals, self.results, strict=True))

    def _add(self, totals: list[Any], flat: Sequence[Tensor], first: int) -> None:
        """Run the chunk that begins with row `first`; its tensors are given up before the next one runs."""
        size = min(self.chunk, self.rows - first)
        arguments = [
            x if rows is None else x.narrow(rows.stop - 1, first, size)
            for x, rows in zip(flat, self.inputs, strict=True)
        ]
        run = self.runs.get(size)
        values = run(arguments) if run is not None else self.bodies[size](*arguments)
        for i, result in enumerate(self.results):
            totals[i] = _with_chunk(totals[i], result, values, first, self.rows)


def flattened(x: Tensor, rows: Rows) -> Tensor:
    """Return `x` with all its rows in the last of their dimensions; the others have one element."""
    return x.reshape(rows.counting(math.prod(rows.of(x.shape)), x.shape))


def _with_chunk(total: Any, result: Result, values: Sequence[Tensor], first: int, rows: int) -> Tensor:
    """Return the result so far, with the chunk that begins at row `first` of all `rows`."""
    if isinstance(result, Joined):
        value, dim = values[result.source], result.rows.stop - 1
        if total is None:
            total = value.new_empty(result.rows.counting(rows, value.shape))
        total.narrow(dim, first, value.shape[dim]).copy_(value)
        return total
    if isinstance(result, Whole):
        return values[result.source]
    if isinstance(result, Added):
        value = values[result.source]
        return value.to(wide(value.dtype)) if total is None else total.add_(value)
    return _product(total, values[result.left], values[result.right])


def _product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right + total in the accumulators' dtype; `total` is overwritten."""
    dtype = wide(left.dtype)
    if dtype != left.dtype and left.is_cuda:  # the tensor cores' own accumulators, not rounded to 16 bits
        if total is None:
            return torch.mm(left, right, out_dtype=dtype)
        if isinstance(total, FakeTensor):  # PyTorch 2.11 fails to say what the call below returns
            return total
        return torch.ops.aten.addmm.dtype_out(total, left, right, dtype, out=total)
    left, right = left.to(dtype), right.to(dtype)
    return torch.mm(left, right) if total is None else torch.addmm(total, left, right, out=total)


def _finished(total: Any, result: Result) -> Tensor:
    if isinstance(result, Joined):
        return total.view(result.shape)
    return total if isinstance(result, Whole) else total.to(result.dtype)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums over chunks are kept."""
    return torch.float32 if dtype in HALVES else dtype
