"""Runs the kernel of a formula over many parameters: their places in tables, and one launch."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from fusion_compiler.errors import FusionError, KernelError, MissingTritonError
from fusion_compiler.ir.kernel import Kernel
from fusion_compiler.optimizer.formula import Formula
from fusion_compiler.optimizer.kernel import BLOCK, kernel_of
from fusion_compiler.runtime.binding import Entry, Gpu
from fusion_compiler.runtime.launch import find_gpu
from fusion_compiler.runtime.target import argument_type, build_of

Backend = Literal["triton", "interpret", "eager"]
MOST_PLACES = 64  # tables of addresses that are kept: gradients come back to the same few


@dataclass(frozen=True)
class Item:
    """One parameter's tensors, in the order of the formula's structure; its elements."""

    tensors: tuple[Tensor, ...]
    elements: int

    @cached_property
    def places(self) -> tuple[int, ...]:
        return (*(tensor.data_ptr() for tensor in self.tensors), self.elements)

    @property
    def aligned(self) -> bool:
        """Whether every tensor begins at a multiple of 16 bytes."""
        return not functools.reduce(operator.or_, self.places[:-1]) & 15


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

    kernel: None where nothing is launched. Raises Refused or KernelError where there is no kernel.
    """

    def __init__(
        self,
        formula: Formula,
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
        backend: Backend,
        name: str,
        aligned: bool = True,
        gpus: Callable[[torch.device | None], Gpu] = find_gpu,
    ) -> None:
        self.formula, self.dtypes, self.device, self.backend = formula, dtypes, device, backend
        self.kernel: Kernel | None = None
        self._gpus = gpus
        self._places: dict[tuple[tuple[int, ...], ...], Tensor] = {}
        self._entry: Entry | None = None
        self._gpu: Gpu | None = None
        if backend == "eager":
            return
        self.kernel = kernel_of(formula, dtypes, name, aligned)
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

    def run(self, items: Sequence[Item], numbers: tuple[float, ...]) -> None:
        """One update of all items. numbers: what the formula makes of the step's floats and counters.

        Parameters that begin at one address are one after the other, each in a launch that follows the last.
        """
        if self.backend == "eager":
            self._by_aten(items, numbers)
            return
        items = [item for item in items if item.elements]
        if not items:
            return
        first = list({item.places[0]: item for item in reversed(items)}.values())[::-1]
        if len(first) < len(items):
            chosen = set(map(id, first))
            self.run(first, numbers)
            self.run([item for item in items if id(item) not in chosen], numbers)
            return
        places = self._table(tuple(item.places for item in items))
        blocks = _blocks(tuple(item.elements for item in items), self.device)
        if self.backend == "interpret":
            self._interpret(items, places, blocks, numbers)
        else:
            self._launch(places, blocks, numbers)
        for item in items:  # autograd has to know of what was saved for a backward pass and is no more
            increment_version([item.tensors[i] for i in self.formula.updated])

    def _table(self, rows: tuple[tuple[int, ...], ...]) -> Tensor:
        found = self._places.pop(rows, None)
        if found is None:
            found = torch.tensor(rows, dtype=torch.int64).to(self.device)
        self._places[rows] = found  # the last used comes last
        if len(self._places) > MOST_PLACES:
            del self._places[next(iter(self._places))]
        return found

    def _launch(self, places: Tensor, blocks: Tensor, numbers: tuple[float, ...]) -> None:
        gpu, entry = self._gpu, self._entry
        assert gpu is not None and entry is not None
        with gpu.active():
            stream = gpu.current_stream(gpu.index)
            fixed = (entry.function, entry.packed, None, None, None)
            entry.run(len(blocks), 1, 1, stream, *fixed, places.data_ptr(), blocks.data_ptr(), *numbers)

    def _interpret(
        self, items: Sequence[Item], places: Tensor, blocks: Tensor, numbers: tuple[float, ...]
    ) -> None:
        try:
            from fusion_compiler.runtime.interpreter import run_source
        except ImportError as error:
            raise MissingTritonError(detail=error) from error
        assert self.kernel is not None
        types = [argument_type(argument) for argument in self.kernel.arguments]
        values = [places.data_ptr(), blocks.data_ptr(), *numbers]
        run_source(self.kernel.source, self.kernel.name, types, values, (len(blocks),))

    def _by_aten(self, items: Sequence[Item], numbers: tuple[float, ...]) -> None:
        dtype = self.formula.structure.dtype
        for item in items:
            new = self.formula.body(*(tensor.to(dtype) for tensor in item.tensors), *numbers)
            for position, value in zip(self.formula.updated, new, strict=True):
                item.tensors[position].copy_(value)
