"""Compiles a program and says what is wrong with what it does."""

from __future__ import annotations

import random
import signal
import traceback
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import fusion_compiler as fc
from fusion_compiler.codegen import emit
from fusion_compiler.codegen.emit import schedules_of
from fusion_compiler.compiler.runners import Runners
from fusion_compiler.errors import FusionWarning
from fusion_compiler.ir.device import DeviceSpec
from fusion_compiler.ir.kernel import Program as KernelProgram
from fusion_compiler.ir.loops import LoopNest
from fusion_compiler.runtime.target import compile_for
from fusion_compiler.schedule.placement import Placement
from fusion_compiler.schedule.row_tiles import RowTile
from tests.exactness import cramped, misaligned_forms, placements
from tests.random_programs.outcome import Outcome, called, differences, steps
from tests.random_programs.program import Program
from tests.random_programs.rounding import RandomRounding

FEW, MANY = 3, 60  # other roundings of eager: at first, and where those do not explain a difference

Compile = Callable[[Callable[..., Any], bool], Callable[..., Any]]


class OutOfTimeError(BaseException):
    """Not an Exception: nothing on its way up takes it for an error of its own."""


@dataclass(frozen=True)
class Verdict:
    """kind: "right", "does not apply", "wrong", "error", "warning" or "no end"; what: one line."""

    kind: str
    what: str = ""
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.kind not in ("right", "does not apply")

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}" if self.what else self.kind


def compiled(fn: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    return fc.compile(fn, backend="interpret", dynamic=dynamic or None, fullgraph=True)


def aot_eager(fn: Callable[..., Any], dynamic: bool) -> Callable[..., Any]:
    return torch.compile(fn, backend="aot_eager", dynamic=dynamic or None, fullgraph=True)


@contextmanager
def any_schedules(seed: int) -> Generator[None]:
    """Within it, each nest runs under a schedule that is drawn from its own, and from those of tests."""

    def drawn(loops: LoopNest, name: str, device: DeviceSpec) -> tuple[Placement, ...]:
        kinds = (schedules_of, cramped, misaligned_forms)
        forms = dict.fromkeys(s for kind in kinds for s in kind(loops, name, device))
        first = random.Random(f"{seed} {loops}").choice([*forms])
        aligned = [s for s in forms if isinstance(s, RowTile) and not s.misaligned][:1]
        return placements(loops, first, *aligned)

    with patch.object(emit, "schedules_of", drawn):
        yield


@contextmanager
def compiling_for(target: str) -> Generator[None]:
    """Within it, each cluster's first program must also compile for a target ("sm_90"). The interpreter runs
    some kernels that Triton does not compile."""
    emitted = Runners.emit

    def checked(*arguments: Any) -> tuple[KernelProgram, ...]:
        programs = emitted(*arguments)
        for kernel in programs[0].kernels:
            compile_for(kernel, target)
        return programs

    with patch.object(Runners, "emit", checked):
        yield


def judge(program: Program, compile: Compile = compiled, seconds: float = 60) -> Verdict:
    """Compare the compiled program with eager, and return the verdict.

    A program that AOTAutograd alone (the backend "aot_eager") fails or gets wrong does not apply.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what eager warns of is no concern here
        warnings.simplefilter("error", FusionWarning)
        verdict = _verdict(program, compile, seconds)
        if verdict.failed:
            other = _verdict(program, aot_eager, max(seconds, 60))
            if other.failed:
                return Verdict("does not apply", str(other))
    return verdict


def _verdict(program: Program, compile: Compile, seconds: float) -> Verdict:
    torch._dynamo.reset()
    fast = compile(program.function, program.dynamic)
    for run in (*range(program.runs), 0):
        try:
            with within(seconds):
                ours = called(fast, program, run)
        except OutOfTimeError:
            return Verdict("no end", f"after {seconds:.0f} seconds")
        except Exception as error:
            return Verdict(*_told(error), _places(error))
        problems = wrong(ours, program, run)
        if problems:
            return Verdict("wrong", problems[0][0], "\n".join(f"{name}: {text}" for name, text in problems))
    return Verdict("right")


def wrong(ours: Outcome, program: Program, run: int) -> list[tuple[str, str]]:
    """(name, what is wrong) of what a run left behind."""
    eager = called(program.function, program, run)
    truth = called(program.wide_function, program, run, wide=True)
    problems: list[tuple[str, str]] = []
    if ours.strides != eager.strides and ours.strides == faked(program, run):
        eager = replace(eager, strides=ours.strides)
    for number in (FEW, MANY):
        members = [rounded(program, run, seed) for seed in range(number)]
        problems = differences(ours, eager, truth, members)
        if not problems:
            break
    return problems


def rounded(program: Program, run: int, seed: int) -> Outcome:
    """Eager's outcome with other roundings. Attention is a fused kernel's of odd seeds, products and a
    softmax of even ones: that kernel of CPUs gives zeros to a query whose scores are no numbers."""
    if seed % 2:
        try:
            return called(program.fused_function, program, run, mode=RandomRounding(seed))
        except RuntimeError:  # its gradient reads a query into which the program writes
            pass
    with sdpa_kernel(SDPBackend.MATH):
        return called(program.function, program, run, mode=RandomRounding(seed))


def faked(program: Program, run: int) -> tuple[tuple[int, ...], ...]:
    """The strides of the results as PyTorch's own fake tensors have them, where they differ from eager's."""
    with FakeTensorMode() as mode, torch.no_grad():
        arguments = [mode.from_tensor(x.detach()) for x in program.arguments(run)]
        return tuple(steps(x) for x in program.function(*arguments))


def _told(error: Exception) -> tuple[str, str]:
    cause: BaseException = error
    while cause.__cause__ is not None and type(cause).__module__.startswith("torch._dynamo"):
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    kind = "warning" if isinstance(cause, FusionWarning) else "error"
    return kind, f"{type(cause).__name__}: {' '.join(lines[:3])}"


def _places(error: Exception) -> str:
    """Return the lines of the compiler through which an error passed."""
    frames = traceback.extract_tb(error.__traceback__)
    return "\n".join(f"{f.filename}:{f.lineno} {f.line}" for f in frames if "/fusion_compiler/" in f.filename)


@contextmanager
def within(seconds: float) -> Generator[None]:
    """Raises OutOfTimeError in the main thread when the time is over."""

    def over(*_: Any) -> None:
        raise OutOfTimeError

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
