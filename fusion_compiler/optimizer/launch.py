"""The launch of a kernel over many parameters, whose addresses are in tables."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusion_compiler.errors import MissingTritonError
from fusion_compiler.ir.kernel import Kernel
from fusion_compiler.ops.own.random import philox
from fusion_compiler.optimizer.formula import Formula
from fusion_compiler.optimizer.kernel import BLOCK, Variant, kernel_of
from fusion_compiler.runtime.binding import Entry, Gpu
from fusion_compiler.runtime.launch import Backend, gpu_for, loaded
from fusion_compiler.runtime.target import argument_type, build_of

MOST_PLACES = 16  # tables of a batch that are kept: its gradients come back to the same few addresses
Set = tuple[int, tuple[float, ...]]  # the position of a formula, and its numbers


@dataclass(frozen=True)
class Rows:
    """A `Rows` holds the tensors of some parameters, no two of which begin at one address.

    columns: for each tensor of the formulas' structure, the tensors of all parameters. addresses: those of
    the gradients, the second column; the others do not change as long as `places` and `tables` are kept.
    elements: how many each parameter has. sets: the position of each parameter's set of numbers.
    places: addresses of the gradients -> (the formulas of the sets, the table on the device). tables:
    formulas of the sets -> a table on the host, in which only the gradients' addresses are replaced.
    """

    columns: Sequence[Sequence[Tensor]]
    addresses: tuple[int, ...]
    elements: tuple[int, ...]
    sets: tuple[int, ...]
    places: dict[tuple[int, ...], tuple[tuple[int, ...], Tensor]]
    tables: dict[tuple[int, ...], Tensor]


@functools.lru_cache(maxsize=64)
def _blocks(elements: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the rows (parameter, block), int32, of all blocks of parameters with these many elements."""
    counts = torch.tensor([-(-count // BLOCK) for count in elements])
    parameter = torch.arange(len(elements)).repeat_interleave(counts)
    begins = (counts.cumsum(0) - counts).repeat_interleave(counts)
    block = torch.arange(len(parameter)) - begins
    return torch.stack([parameter, block], 1).to(torch.int32).to(device)


class MultiTensor:
    """Apply formulas to tensors of some dtypes on one device: `run(rows, sets)` is one launch for all.

    kernel: None if the backend launches none. Raises Refused or KernelError if no kernel can be built.
    """

    def __init__(
        self,
        formulas: tuple[Formula, ...],
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
        backend: Backend,
        name: str,
        variant: Variant,
        gpus: Callable[[torch.device | None], Gpu],
    ) -> None:
        self.formulas, self.dtypes, self.device, self.backend = formulas, dtypes, device, backend
        self.variant = variant
        self.kernel: Kernel | None = None
        self._dtype = formulas[0].structure.dtype
        self._entry: Entry | None = None
        self._gpu: Gpu | None = None
        if backend == "eager":
            return
        self.kernel = kernel_of(formulas, dtypes, name, variant)
        if backend == "triton":
            self._gpu = gpu_for(gpus, device, "optimizer")
            self._entry = loaded(self._gpu, build_of(self.kernel, self._gpu.target))

    def __str__(self) -> str:
        pairs = zip(self.formulas[0].structure.tensors, self.dtypes, strict=True)
        held = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in pairs)
        ways = " or ".join(" and ".join(formula.guards) for formula in self.formulas if formula.guards)
        name = "ATen" if self.kernel is None else self.kernel.name
        kind = (", clipped" if self.variant.clipped else "") + (", by sets" if self.variant.table else "")
        return f"{name} on {self.device}: {held}{kind}" + (f"; where {ways}" if ways else "")

    @torch.no_grad()
    def run(self, rows: Rows, sets: Sequence[Set], factor: Tensor | None = None, seed: int = 0) -> None:
        """Update all rows once.

        sets: the formula of each set, and the numbers that it computed from the floats and counters. factor:
        that of the gradients if they are clipped. seed: the key of random numbers.
        """
        if factor is not None:
            factor = factor.to(self.device, self._dtype)
        if self.backend == "eager":
            self._by_aten(rows, sets, factor, seed)
            return
        if not rows.elements:
            return
        tables = [self._table(rows, tuple(way for way, _ in sets)), _blocks(rows.elements, self.device)]
        if self.variant.table:
            tables.append(self._numbers(sets))
        if factor is not None:
            tables.append(factor)
        scalars = () if self.variant.table else sets[0][1]
        arguments = (*map(Tensor.data_ptr, tables), *scalars, *((seed,) if self.variant.stochastic else ()))
        (self._interpret if self.backend == "interpret" else self._launch)(len(tables[1]), arguments)
        increment_version(rows.columns[0])  # so that autograd detects writes to tensors saved for backward

    def _table(self, rows: Rows, ways: tuple[int, ...]) -> Tensor:
        placed = rows.places.pop(rows.addresses, None)
        if placed is None or placed[0] != ways:
            if ways not in rows.tables:
                columns = [list(map(Tensor.data_ptr, column)) for column in rows.columns]
                formulas = [ways[which] for which in rows.sets]
                table = torch.tensor([*columns, rows.elements, rows.sets, formulas])
                rows.tables[ways] = table.t().contiguous()
            table = rows.tables[ways].clone()
            table[:, 1] = torch.tensor(rows.addresses)
            # Memory that is not pinned is copied before the call returns, and the host waits for nothing.
            placed = ways, table.to(self.device, non_blocking=True)
        rows.places[rows.addresses] = placed  # the last used comes last
        if len(rows.places) > MOST_PLACES:
            del rows.places[next(iter(rows.places))]
        return placed[1]

    def _numbers(self, sets: Sequence[Set]) -> Tensor:
        most = max(len(formula.meanings) for formula in self.formulas)
        table = [(*numbers, *(0.0,) * (most - len(numbers))) for _, numbers in sets]
        return torch.tensor(table, dtype=self._dtype).to(self.device, non_blocking=True)

    def _launch(self, programs: int, arguments: tuple[float, ...]) -> None:
        gpu, entry = self._gpu, self._entry
        assert gpu is not None and entry is not None
        with gpu.active():
            stream = gpu.current_stream(gpu.index)
            entry.run(programs, 1, 1, stream, entry.function, entry.packed, None, None, None, *arguments)

    def _interpret(self, programs: int, arguments: tuple[float, ...]) -> None:
        try:
            from fusion_compiler.runtime.interpreter import run_source
        except ImportError as error:
            raise MissingTritonError(detail=error) from error
        assert self.kernel is not None
        types = [argument_type(argument) for argument in self.kernel.arguments]
        run_source(self.kernel.source, self.kernel.name, types, list(arguments), (programs,))

    def _by_aten(self, rows: Rows, sets: Sequence[Set], factor: Tensor | None, seed: int) -> None:
        for i, tensors in enumerate(zip(*rows.columns, strict=True)):
            way, numbers = sets[rows.sets[i]]
            wide = [tensor.to(self._dtype) for tensor in tensors]
            if factor is not None:
                wide[1] = wide[1] * factor
            new = self.formulas[way].body(*wide, *numbers)
            for position, value in zip(self.formulas[way].updated, new, strict=True):
                at_random = self.variant.stochastic and position == 0
                tensors[position].copy_(_stochastic(value, seed, i) if at_random else value)


def _stochastic(value: Tensor, seed: int, parameter: int) -> Tensor:
    """Return `codegen.math.stochastic` of a float32 tensor, with the random words that a kernel would use."""
    counter = torch.arange(-(-value.numel() // 4), device=value.device)
    words = torch.stack(philox(torch.tensor([seed], device=value.device), counter, parameter), -1)
    places = torch.empty_strided(value.shape, value.stride(), dtype=torch.int64, device=value.device)
    as_it_lies = places.as_strided((value.numel(),), (1,))
    as_it_lies.copy_(words.flatten()[: value.numel()])
    bits = value.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    bits = (bits + (places & 0xFFFF)) & 0xFFFF0000
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    return torch.where(value.isfinite(), bits.view(torch.float32), value)
