"""Describe what codegen hands to the runtime: kernel sources, their arguments, their scratch memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

import sympy
import torch

from fusion_compiler.ir.dims import Dim


class Role(StrEnum):
    INPUT = "input"
    OUTPUT = "output"
    SCRATCH = "scratch"
    SIZE = "size"  # an integer that is only known when the kernel is launched
    NUMBER = "number"  # likewise a float


@dataclass(frozen=True)
class Argument:
    """An argument is one parameter of a kernel, in the order of its signature.

    position: among the program's inputs, outputs, scratch buffers, numbers or sizes, behind which are the
        derived ones.
    dtype: of the buffer or the number; int64 for sizes.
    aligned: the pointer (or size) is a multiple of 16 (bytes); the launcher checks it for
        tensors that it did not allocate and takes a build that does not rely on it when it is not.
    """

    name: str
    role: Role
    position: int
    dtype: torch.dtype
    aligned: bool = True

    @property
    def launch_name(self) -> str:
        """Return the name of the caller's value in the launch function: "p0", "p1", ... (inputs), "n0", ...
        (sizes), or "" for nothing."""
        letter = {Role.INPUT: "p", Role.SIZE: "n"}.get(self.role)
        return f"{letter}{self.position}" if letter else ""


@dataclass(frozen=True)
class Kernel:
    """A kernel is one Triton kernel.

    source: text of a complete Python module that defines `name` under @triton.jit; all
        sizes known at compile time are literals in it, so it has no constexpr parameters.
    grid: up to three extents; integers, or expressions over the program's sizes.
    together: so many neighbouring programs wait for each other (`math.receive`) and run at the same time. The
        launch is cooperative where the device holds all of its programs at once.
    registers: the most that a thread may take, where the compiler takes more than leave room for others.
    fp_fusion: a product and the sum that takes it up may become one instruction, which rounds once.
    dependent: it waits for the kernel before it itself (`math.wait_for_kernels`), and is launched meanwhile.
    """

    name: str
    source: str
    arguments: tuple[Argument, ...]
    grid: tuple[Dim, ...]
    num_warps: int = 4
    num_stages: int = 1
    together: int = 1
    registers: int | None = None
    fp_fusion: bool = True
    dependent: bool = False


@dataclass(frozen=True)
class Buffer:
    """A buffer is a tensor that a program reads, writes or needs as scratch: shape and strides in elements.

    reuses: for an output, the name of the input into which it is written, whose memory it has.
    """

    name: str
    shape: tuple[Dim, ...]
    stride: tuple[Dim, ...]
    dtype: torch.dtype
    zeroed: bool = False  # scratch only: zero before the first launch; kernels leave it zero
    reuses: str | None = None


@dataclass(frozen=True)
class Program:
    """A program computes one cluster: kernels launched in order, over shared scratch.

    sizes: the symbols that become integer arguments, in order. derived: further ones, with the expressions of
        those that the launcher computes for them.
    schedule: how it was scheduled, for people ("rows: 4 rows x 1024, 4 warps").
    word: bytes; 0, or it reads words of so many, also those that its inputs end within. Where an input is not
        aligned to them, such a word may cross a page, and another candidate has to run.
    early: its kernel loads turns of a loop before it waits for the kernels in front of it.
    """

    kernels: tuple[Kernel, ...]
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    scratch: tuple[Buffer, ...] = ()
    sizes: tuple[sympy.Symbol, ...] = ()
    derived: tuple[tuple[sympy.Symbol, sympy.Expr], ...] = ()
    schedule: str = ""
    word: int = 0
    early: bool = False

    def overwritten_input(self, output: Buffer) -> int | None:
        """Return the position of the input whose memory an output has, or None for an output that is
        allocated."""
        return next((i for i, b in enumerate(self.inputs) if b.name == output.reuses), None)

    @property
    def updated(self) -> frozenset[int]:
        """Return the positions of the inputs that kernels read and write: a second launch gives something
        else."""
        inputs = {a for kernel in self.kernels for a in kernel.arguments if a.role is Role.INPUT}
        names = Counter(position for position, _ in {(a.position, a.name) for a in inputs})
        return frozenset(position for position, count in names.items() if count > 1)

    @property
    def symbols(self) -> tuple[sympy.Symbol, ...]:
        """Return the symbols of all sizes, in the order of the arguments."""
        return (*self.sizes, *(symbol for symbol, _ in self.derived))

    @property
    def alignment(self) -> int:
        """Return the alignment in bytes that the addresses of inputs need; otherwise the launcher takes
        another build."""
        return max(16, self.word)
