"""Runs the kernel of a formula over many parameters: their places in tables, and one launch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusion_compiler.errors import FusionError, KernelError, MissingTritonError
from fusion_compiler.ir.kernel import Kernel
from fusion_compiler.ir.random import philox
from fusion_compiler.optimizer.formula import Formula
from fusion_compiler.optimizer.kernel import BLOCK, kernel_of
from fusion_compiler.runtime.binding import Entry, Gpu
from fusion_compiler.runtime.launch import find_gpu
from fusion_compiler.runtime.target import argument_type, build_of

Backend = Literal["triton", "interpret", "eager"]
MOST_PLACES = 64  # tables of addresses that are kept: gradients come back to the same few


@dataclass(frozen=True)
class Rows:
    """The tensors of some parameters, of which no two begin at one address.

    columns: for each tensor of the formula's structure that of all parameters. places: the addresses of the
    first column, of the second, ... elements: how many each parameter has.
    """

    columns: Sequence[Sequence[Tensor]]
    places: tuple[int, ...]
    elements: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def _blocks(elements: tuple[int, ...], device: torch.device) -> Tensor:
    """Rows (parameter, block), int32, of all blocks of parameters with so many elements."""
    counts = torch.tensor([-(-count // BLOCK) for count in elements])
    parameter = torch.arange(len(elements)).repeat_interleave(counts)
    begins = (counts.cumsum(0) - counts).repeat_interleave(counts)
    block = torch.arange(len(parameter)) - begins
    return torch.stack([parameter, block], 1).to(torch.int32).to(device)


class MultiTensor:
    """A formula for tensors of some dtypes on one device: `run(items, numbers)` updates them all in one
    launch.

    kernel: None where nothing is launched. stochastic: parameters in bfloat16 are rounded at random. Raises
    Refused or KernelError where there is no kernel.
    """

    def __init__(
        self,
        formula: Formula,
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
        backend: Backend,
        name: str,
        aligned: bool = True,
        stochastic: bool = False,
        gpus: Callable[[torch.device | None], Gpu] = find_gpu,
    ) -> None:
        self.formula, self.dtypes, self.device, self.backend = formula, dtypes, device, backend
        self.kernel: Kernel | None = None
        self.stochastic = (
            stochastic and dtypes[0] is torch.bfloat16 and formula.structure.dtype is torch.float32
        )
        self._gpus = gpus
        self._places: dict[tuple[int, ...], Tensor] = {}
        self._entry: Entry | None = None
        self._gpu: Gpu | None = None
        if backend == "eager":
            return
        self.kernel = kernel_of(formula, dtypes, name, aligned, self.stochastic)
        if backend == "triton":
            self._gpu = self._found(gpus)
            self._entry = self._loaded(self._gpu, self.kernel)

    def __str__(self) -> str:
        pairs = zip(self.formula.structure.tensors, self.dtypes, strict=True)
        held = ", ".join(f"{name} {str(dtype).removeprefix('torch.')}" for name, dtype in pairs)
        where = "" if not self.formula.guards else f"; where {' and '.join(self.formula.guards)}"
        return f"{'ATen' if self.kernel is None else self.kernel.name} on {self.device}: {held}{where}"

    def _found(self, gpus: Callable[[torch.device | None], Gpu]) -> Gpu:
        try:
            return gpus(self.device)
        except FusionError:
            raise
        except Exception as error:
            raise KernelError(kernel="optimizer", action="launch", detail=error) from error

    @staticmethod
    def _loaded(gpu: Gpu, kernel: Kernel) -> Entry:
        try:
            return gpu.load(build_of(kernel, gpu.target))
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"
            raise KernelError(kernel=kernel.name, action="compile", detail=detail) from error

    @torch.no_grad()
    def run(self, rows: Rows, numbers: tuple[float, ...], seed: int = 0) -> None:
        """One update of all rows.

        numbers: what the formula makes of the step's floats and counters. seed: the key of random numbers.
        """
        if self.backend == "eager":
            self._by_aten(rows, numbers, seed)
            return
        if not rows.elements:
            return
        places, blocks = self._table(rows), _blocks(rows.elements, self.device)
        scalars = (*numbers, seed) if self.stochastic else numbers
        if self.backend == "interpret":
            self._interpret(places, blocks, scalars)
        else:
            self._launch(places, blocks, scalars)
        # Autograd has to know of what was saved for a backward pass and is no more.
        increment_version([tensor for i in self.formula.updated for tensor in rows.columns[i]])

    def _table(self, rows: Rows) -> Tensor:
        key = (*rows.places, *rows.elements)
        found = self._places.pop(key, None)
        if found is None:
            table = torch.tensor(key, dtype=torch.int64).view(-1, len(rows.elements)).t().contiguous()
            # Memory that is not pinned is copied before the call returns, and the host waits for nothing.
            found = table.to(self.device, non_blocking=True)
        self._places[key] = found  # the last used comes last
        if len(self._places) > MOST_PLACES:
            del self._places[next(iter(self._places))]
        return found

    def _launch(self, places: Tensor, blocks: Tensor, scalars: tuple[float, ...]) -> None:
        gpu, entry = self._gpu, self._entry
        assert gpu is not None and entry is not None
        with gpu.active():
            stream = gpu.current_stream(gpu.index)
            fixed = (entry.function, entry.packed, None, None, None)
            entry.run(len(blocks), 1, 1, stream, *fixed, places.data_ptr(), blocks.data_ptr(), *scalars)

    def _interpret(self, places: Tensor, blocks: Tensor, scalars: tuple[float, ...]) -> None:
        try:
            from fusion_compiler.runtime.interpreter import run_source
        except ImportError as error:
            raise MissingTritonError(detail=error) from error
        assert self.kernel is not None
        types = [argument_type(argument) for argument in self.kernel.arguments]
        values = [places.data_ptr(), blocks.data_ptr(), *scalars]
        run_source(self.kernel.source, self.kernel.name, types, values, (len(blocks),))

    def _by_aten(self, rows: Rows, numbers: tuple[float, ...], seed: int) -> None:
        dtype = self.formula.structure.dtype
        for i, tensors in enumerate(zip(*rows.columns, strict=True)):
            new = self.formula.body(*(tensor.to(dtype) for tensor in tensors), *numbers)
            for position, value in zip(self.formula.updated, new, strict=True):
                rounded = _stochastic(value, seed, i) if self.stochastic and position == 0 else value
                tensors[position].copy_(rounded)


def _stochastic(value: Tensor, seed: int, parameter: int) -> Tensor:
    """`codegen.math.stochastic` of a float32 tensor, with the words that a kernel takes for it."""
    counter = torch.arange(-(-value.numel() // 4), device=value.device)
    words = torch.stack(philox(torch.tensor([seed], device=value.device), counter, parameter), -1)
    places = torch.empty_strided(value.shape, value.stride(), dtype=torch.int64, device=value.device)
    as_it_lies = places.as_strided((value.numel(),), (1,))
    as_it_lies.copy_(words.flatten()[: value.numel()])
    bits = value.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    bits = (bits + (places & 0xFFFF)) & 0xFFFF0000
    bits = torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32)
    return torch.where(value.isfinite(), bits.view(torch.float32), value)
