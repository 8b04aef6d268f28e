"""Programs that wait for each other, while something else has the device: they are on it together or not yet.

Each case has a process of its own with a time limit: what goes wrong here does not end, or ends the context.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

import fusion_compiler as fc
from fusion_compiler.runtime.cuda import gpu_of
from tests import ROOT

TURNS = 1000
CODE = "import sys; from tests.gpu import test_cooperative as here; getattr(here, sys.argv[1])(*sys.argv[2:])"


@triton.jit
def occupy(done_ptr, nanoseconds):  # type: ignore[no-untyped-def]
    """Holds its place for so long."""
    now = globaltimer()
    end = now + nanoseconds
    while now < end:
        now = globaltimer()
    tl.store(done_ptr + tl.program_id(0), 1)


class Filler:
    """Launches that take every thread of the device, on a stream that comes first."""

    def __init__(self) -> None:
        _, highest = torch.cuda.Stream.priority_range()
        self.stream = torch.cuda.Stream(priority=highest)
        self.programs = 2 * torch.cuda.get_device_properties(0).multi_processor_count
        self.done = torch.zeros(self.programs, dtype=torch.int32, device="cuda")

    def __call__(self, microseconds: int) -> None:
        with torch.cuda.stream(self.stream):
            occupy[(self.programs,)](self.done, microseconds * 1000, num_warps=32)


def layer_norm(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.layer_norm(x, (x.shape[-1],), w, b)


def softmax(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


# Rows x columns. The gradients of the first are made by groups of programs that walk the rows together, those
# of the last by 128 programs that need a multiprocessor each; the second has more programs than are held.
CASES: dict[str, tuple[Callable[..., Tensor], int, int]] = {
    "norm": (layer_norm, 256, 65536),
    "softmax": (softmax, 2048, 65536),
    "few rows": (softmax, 8, 1 << 20),
    "widest norm": (layer_norm, 16, 1 << 20),
}


def step_of(name: str) -> Callable[[], tuple[Tensor, ...]]:
    """A step of a case, forward and backward, on fixed inputs."""
    function, rows, columns = CASES[name]
    torch.manual_seed(0)
    sizes = ((rows, columns), (columns,), (columns,))[: function.__code__.co_argcount]
    inputs = [torch.randn(*size, device="cuda", dtype=torch.bfloat16).requires_grad_() for size in sizes]
    gradient = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    fast = fc.compile(function, strict=True, dynamic=False, tune=False)

    def step() -> tuple[Tensor, ...]:
        output = fast(*inputs)
        return (output, *torch.autograd.grad(output, inputs, gradient))

    step()
    torch.cuda.synchronize()
    assert any(build.cooperative for build in gpu_of(0)._loaded), "nothing waits here"
    return step


def differ(ours: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> Tensor:
    """Bit for bit, as results do not depend on which program came first."""
    pairs = zip(ours, expected, strict=True)
    return torch.stack([(a.view(torch.int16) != b.view(torch.int16)).any() for a, b in pairs]).any()


def beside_a_full_device(name: str) -> None:
    step, fill, stream = step_of(name), Filler(), torch.cuda.Stream()
    expected, wrong = step(), torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for turn in range(TURNS):
        fill(10 + turn % 7 * 5)  # before, and while they wait
        with torch.cuda.stream(stream):
            wrong += differ(step(), expected)
        fill(10 + turn % 5 * 10)
        if turn % 20 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    print(f"{int(wrong)} of {TURNS} differ")


def on_streams_of_their_own(*names: str) -> None:
    """Launches beside each other, each of which may have taken only some of the places that it needs."""
    streams = [torch.cuda.Stream() for _ in names]
    steps = [step_of(name) for name in names]
    expected, wrong = [step() for step in steps], torch.zeros((), dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    for turn in range(TURNS // 5):
        for stream, step, right in zip(streams, steps, expected, strict=True):
            with torch.cuda.stream(stream):
                wrong += differ(step(), right)
        if turn % 20 == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    print(f"{int(wrong)} of {TURNS // 5} differ")


def in_a_graph(name: str) -> None:
    fill, stream = Filler(), torch.cuda.Stream()
    with torch.cuda.stream(stream):  # autograd returns to the stream on which a leaf was made
        step = step_of(name)
        expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    wrong = 0
    for turn in range(50):
        fill(10 + turn % 7 * 5)
        with torch.cuda.stream(stream):
            graph.replay()
        fill(30)
        torch.cuda.synchronize()
        wrong += int(differ(results, expected))
    print(f"{wrong} of 50 differ")


def without_one_that_is_waited_for() -> None:
    from fusion_compiler.codegen import math as fm
    from fusion_compiler.runtime.launch import Runner
    from tests.codegen.test_exchange import exchange, numbers

    fm.PATIENCE = tl.constexpr(1 << 12)  # looks
    both = exchange(2)
    half = replace(both, kernels=tuple(replace(k, grid=(1,)) for k in both.kernels))

    def never(*_: Any) -> Any:
        raise AssertionError("the fallback was called")

    Runner((half,), never, name="half", strict=True)(numbers(2, "cuda"))
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"ended: {error}")


def run(*arguments: str, cache: Path | None = None, processes: int = 1) -> str:
    """Return the output of a function of this file in another process, or in several at once; each must
    end."""
    environment = os.environ | ({"TRITON_CACHE_DIR": str(cache)} if cache else {})
    command = [sys.executable, "-W", "ignore", "-c", CODE, *arguments]
    root = ROOT

    def one(_: int) -> str:
        done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=240)
        return done.stdout or done.stderr

    with ThreadPoolExecutor(processes) as pool:
        return "".join(sorted(set(pool.map(one, range(processes)))))


@pytest.mark.parametrize("name", CASES)
def test_beside_a_kernel_that_fills_the_device(name: str) -> None:
    assert run("beside_a_full_device", name) == f"0 of {TURNS} differ\n"


@pytest.mark.parametrize("names", [["widest norm"] * 3, ["softmax"] * 4, [*CASES]], ids=" ".join)
def test_several_at_once(names: list[str]) -> None:
    assert run("on_streams_of_their_own", *names) == f"0 of {TURNS // 5} differ\n"


@pytest.mark.parametrize("names", [["norm", "widest norm"], ["norm", "softmax"]], ids=" ".join)
def test_several_at_once_in_several_processes(names: list[str]) -> None:
    """The processes take turns, each of which ends in the middle of a launch."""
    assert run("on_streams_of_their_own", *names, processes=3) == f"0 of {TURNS // 5} differ\n"


@pytest.mark.parametrize("name", ["norm", "softmax"])
def test_in_a_cuda_graph(name: str) -> None:
    assert run("in_a_graph", name) == "0 of 50 differ\n"


def test_a_program_that_does_not_run_is_an_error_and_no_hang(tmp_path: Path) -> None:
    assert run("without_one_that_is_waited_for", cache=tmp_path).startswith("ended: ")
