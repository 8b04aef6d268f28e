"""The work of a compiled call beside its kernels: python -m tests.ir.test_host_cost prints microseconds."""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import fusion_compiler as fc
from benchmarks.kernels.clusters import CASES, Case
from tests.fake_gpu import IdleGpu, use

CPU = torch.device("cpu")


def python_calls(function: Callable[[], object]) -> list[str]:
    """Files and names of the Python functions that `function` calls, in order."""
    seen: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            seen.append(f"{frame.f_code.co_filename} {frame.f_code.co_name}")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return seen


def test_between_dynamo_and_a_kernel_there_are_four_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arguments as a list, a retry when memory runs out, the graph, the launch: none is AOTAutograd's."""
    gpu = IdleGpu()
    use(gpu, monkeypatch)
    fast = fc.compile(lambda x: torch.softmax(x, -1), tune=False, strict=True)
    x = torch.randn(16, 64)
    with torch.no_grad():
        fast(x)
        calls = python_calls(lambda: fast(x))
    ours = [call for call in calls if "/torch/" not in call.replace("\\", "/")]
    names = [call.rpartition(" ")[2] for call in ours]
    assert names == [
        "<lambda>", "__call__", "call", "<lambda>",
        "<lambda>", "call", "forward", "launch", "current_stream", "_nothing",
    ]  # fmt: skip
    assert not [call for call in calls if "record_pregraph" in call or "runtime_wrappers" in call]


def test_settings_of_dynamo_are_put_back() -> None:
    fast = fc.compile(lambda x: x.sin(), backend="eager")
    fast(torch.randn(3))
    assert torch._dynamo.config.record_runtime_overhead is True

    def fails(x: torch.Tensor) -> torch.Tensor:
        return x.sin().reshape(7)

    with pytest.raises(Exception, match="shape"):
        fc.compile(fails, backend="eager", fullgraph=True)(torch.randn(3))
    assert torch._dynamo.config.record_runtime_overhead is True


def test_a_call_while_another_thread_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.compiler, "_is_compiling_flag", True)  # as Dynamo sets it, for all threads
    fast = fc.compile(lambda x: x.sin(), backend="eager")
    fast(torch.randn(3))
    assert torch._dynamo.config.record_runtime_overhead is True
    assert fast.plan is not None


def microseconds(call: Callable[[], object]) -> float:
    for _ in range(20):
        call()
    return min(timeit.repeat(call, number=100, repeat=300)) / 100 * 1e6


def show(case: Case) -> None:
    inputs = case.inputs(CPU, quick=True)
    values: list[Any] = list(inputs.values())
    wanting = [v.clone().requires_grad_(n in case.differentiate) for n, v in inputs.items()]
    fast = fc.compile(case.fn, tune=False, strict=True)
    with torch.no_grad():
        inference = microseconds(lambda: fast(*values))
    training = microseconds(lambda: fast(*wanting))
    print(f"{case.name:40} forward {inference:5.1f}  forward for training {training:5.1f}", flush=True)


def main() -> None:
    with pytest.MonkeyPatch.context() as patch:
        use(IdleGpu(), patch)
        for case in CASES:
            torch._dynamo.reset()
            if not case.random:  # a seed is drawn by PyTorch
                show(case)


if __name__ == "__main__":
    main()
