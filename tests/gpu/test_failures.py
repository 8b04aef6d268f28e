"""Failures of a real device: its driver and its memory. tests/runtime/test_survival.py uses a fake one."""

from __future__ import annotations

import copy
import gc
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fusion_compiler as fc
from fusion_compiler.compiler.runners import Runners
from fusion_compiler.errors import FusionWarning, KernelError
from fusion_compiler.ir.kernel import Kernel, Program
from tests.runtime.test_survival import assert_killing_harms_nothing, assert_right, compiled, softmax

CUDA = torch.device("cuda")

# A transposed tile of 256 KB of float32, which the warps exchange through shared memory.
TILE = """
    far = tl.arange(0, 512)
    near = tl.arange(0, 128)
    tile = tl.load({0} + far[:, None] * 512 + near[None, :])
    tl.store({0} + near[:, None] * 512 + far[None, :], tl.trans(tile))
"""


def enlarged(program: Program) -> Program:
    def large(kernel: Kernel) -> Kernel:
        return replace(kernel, source=kernel.source + TILE.format(kernel.arguments[0].name), num_warps=32)

    return replace(program, kernels=tuple(map(large, program.kernels)))


def enlarge(monkeypatch: pytest.MonkeyPatch, first: int | None, cache: Path) -> None:
    """The first so many schedules of every cluster need more shared memory than there is; None: all.

    cache: a folder of their own, so that no plan of other kernels is found.
    """
    monkeypatch.setenv("FUSION_CACHE_DIR", str(cache))
    emit = Runners.emit

    def emit_large(self: Any, *arguments: Any) -> Any:
        programs = emit(self, *arguments)
        count = len(programs) if first is None else first
        return (*map(enlarged, programs[:count]), *programs[count:])

    monkeypatch.setattr(Runners, "emit", emit_large)


@pytest.mark.parametrize("tune", [True, False])
def test_a_schedule_that_does_not_fit_is_skipped(
    tune: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    enlarge(monkeypatch, 1, tmp_path)
    assert_right(compiled(softmax, strict=True, tune=tune), "cuda")


def test_a_cluster_that_does_not_fit_runs_eager_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    enlarge(monkeypatch, None, tmp_path)
    fast = compiled(softmax)
    with pytest.warns(
        FusionWarning, match=r"(?s)softmax.* runs eager: .*needs \d+ of shared memory"
    ) as caught:
        assert_right(fast, "cuda")
        assert_right(fast, "cuda")
    assert len(caught) == 1
    with pytest.raises(KernelError, match=r"needs \d+ of shared memory"):
        assert_right(compiled(softmax, strict=True), "cuda")


def test_a_compilation_that_was_killed_harms_no_later_one(tmp_path: Path) -> None:
    assert_killing_harms_nothing(tmp_path, "cuda")


@contextmanager
def room(size: int) -> Generator[None]:
    """The allocator has so many bytes more than are in use."""
    gc.collect()  # recordings that nobody has any more keep memory
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(CUDA).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + size) / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.parametrize("tensors", [0.5, 1.5], ids=["no output", "no gradient"])
def test_a_step_that_finds_no_memory_can_be_taken_again(tensors: float) -> None:
    """First while schedules are timed, then while the first is launched: the error is PyTorch's."""
    norm = torch.nn.LayerNorm(4096, device=CUDA)
    twin = copy.deepcopy(norm)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (norm, twin)]
    x = torch.randn(1 << 15, 4096, device=CUDA, requires_grad=True)
    size = x.numel() * x.element_size()

    def step(called: Any, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        x.grad = None
        y = called(x)
        y.backward(y.detach())
        optimizer.step()

    for optimizer in optimizers:  # the moments exist
        step(norm if optimizer is optimizers[0] else twin, optimizer)
    fast = fc.compile(norm, strict=True)
    optimizers[0].zero_grad()
    x.grad = None
    before = copy.deepcopy((optimizers[0].state_dict(), norm.state_dict(), torch.cuda.get_rng_state()))
    with room(int(size * tensors)), pytest.raises(torch.OutOfMemoryError):
        step(fast, optimizers[0])
    after = (optimizers[0].state_dict(), norm.state_dict(), torch.cuda.get_rng_state())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    step(fast, optimizers[0])
    step(twin, optimizers[1])
    torch.testing.assert_close(norm.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)
