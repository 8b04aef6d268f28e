"""A GPU that computes on the CPU, in Triton's interpreter.

`FakeGpu` takes raw addresses and a grid as the driver does, so what is launched is checked by what
it computes; where `compiles` is set, every kernel is compiled for sm_90 first.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from triton.runtime.errors import OutOfResources

from fusion_compiler.compiler import compiler
from fusion_compiler.compiler.compiler import Compiler
from fusion_compiler.runtime.binding import Entry, Varying
from fusion_compiler.runtime.builds import Build, compile_build
from fusion_compiler.runtime.interpreter import run_source
from fusion_compiler.runtime.launch import Runner


@dataclass
class FakeGpu:
    """CPU memory, one stream; `us` gives the times of candidates in the order of their timing."""

    index: int = -1  # what get_device() says of a CPU tensor
    alone: bool = False
    name: str = "fake"
    target: tuple[str, int | str, int] = ("cuda", 90, 32)
    us: tuple[float, ...] = ()
    compiles: bool = False
    capturing: bool = False
    stream: int = 7
    refused: tuple[str, ...] = ()
    out_of_memory: bool = False
    loaded: list[Build] = field(default_factory=list[Build])
    launched: list[tuple[str, tuple[int, ...], int]] = field(default_factory=list[Any])
    timed: int = 0
    turn: threading.Lock = field(default_factory=threading.Lock)
    followed: list[int] = field(default_factory=list[int])
    fill: float | None = None

    def current_device(self) -> int:
        return self.index

    def current_stream(self, index: int, /) -> int:
        assert index == self.index
        return self.stream

    def empty(self, shape: Any, stride: Any, dtype: torch.dtype, /) -> torch.Tensor:
        tensor = torch.empty_strided(shape, stride, dtype=dtype)
        return tensor.fill_(3)  # nobody may rely on fresh memory

    def follow(self, stream: int, /) -> None:
        assert self.turn.locked()
        self.followed.append(stream)

    def is_capturing(self) -> bool:
        return self.capturing

    def active(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def load(self, build: Build) -> Entry:
        if self.compiles:
            compile_build(build)
        if build.name in self.refused or str(build.num_warps) in self.refused:
            raise OutOfResources(300_000, 232_448, "shared memory")
        self.loaded.append(build)
        types = [kind for _, kind in build.signature]

        def run(*args: Any, as_name: str = build.name) -> None:
            grid, stream, (function, packed, *hooks), arguments = args[:3], args[3], args[4:9], args[9:]
            assert (function, packed, hooks) == ("function", "packed", [None, None, None])
            for position in build.divisible:
                assert arguments[position] % 16 == 0, build.signature[position]
            self.launched.append((as_name, grid, stream))
            run_source(build.source, build.name, types, arguments, grid)

        behind = functools.partial(run, as_name=f"{build.name}_behind")
        entry = Entry(run, "function", "packed")
        return replace(entry, behind=replace(entry, run=behind)) if build.dependent else entry

    def room(self) -> int:
        return 0

    def times(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        if self.out_of_memory:
            raise torch.OutOfMemoryError("no memory")
        self.timed += 1
        for call in calls:
            call()
        return list(self.us[: len(calls)])


class IdleGpu(FakeGpu):
    """Launches do nothing: what a call costs is the host's part of it."""

    def __init__(self) -> None:
        super().__init__(alone=True)
        self.empty = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]

    def load(self, build: Build) -> Entry:
        return Entry(
            _nothing,
            None,
            None,
            None,
            (_nothing, tuple(Varying(str(i)) for i in range(len(build.signature)))),
        )


def _nothing(*_: object) -> None:
    pass


def use(gpu: FakeGpu, patch: pytest.MonkeyPatch) -> None:
    """Compile for CPU tensors from now on as for a device, and run on `gpu`."""
    patch.setattr(Compiler, "backend_for", lambda self, kind: "triton")  # pyright: ignore[reportUnknownLambdaType]
    patch.setitem(Runner.__init__.__kwdefaults__ or {}, "gpus", lambda device: gpu)  # pyright: ignore[reportUnknownLambdaType]
    patch.setattr(compiler, "compile_all", lambda *_: False)  # pyright: ignore[reportUnknownLambdaType]
