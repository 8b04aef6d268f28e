"""Writes in place, generation and draws on the device: values, memory, recorded graphs, no waits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.runtime.cuda_graphs import FORMS
from tests.capture.test_generation import generated, llama
from tests.capture.test_in_place import a_part_of_itself, at_places, rotated
from tests.passes.test_sampling import drawn, written_out

CUDA = torch.device("cuda")


@contextmanager
def no_waits() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("numel", [1, 1000, 1 << 16, 5_000_001])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_reads_each_element_before_it_is_written(numel: int, dtype: torch.dtype) -> None:
    def update(c: Tensor, x: Tensor) -> Tensor:
        c.mul_(0.5).add_(x)
        return x * 2

    fast = fc.compile(update, strict=True)
    ours, x = torch.randn(numel, device=CUDA, dtype=dtype), torch.randn(numel, device=CUDA, dtype=dtype)
    theirs = ours.clone()
    for _ in range(5):
        fast(ours, x)
        theirs.copy_((theirs.float() * 0.5).to(dtype) + x)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("size", [(8, 64, 7, 7), (64, 256, 28, 28), (2, 8, 300, 300)])
def test_statistics_of_batch_norms(size: tuple[int, ...]) -> None:
    """Also where programs share a channel, and are tuned."""
    model = nn.Sequential(nn.BatchNorm2d(size[1]), nn.ReLU(), nn.BatchNorm2d(size[1])).to(CUDA)
    eager = copy.deepcopy(model).double()
    fast = fc.compile(model, strict=True)
    for _ in range(4):
        x = torch.randn(size, device=CUDA) + 1
        fast(x).square().mean().backward()
        eager(x.double()).square().mean().backward()
    for (name, a), b in zip(model.named_buffers(), eager.buffers(), strict=True):
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-5, atol=1e-6, msg=name)
    assert not any(left.target == "aten.copy_.default" for plan in fast.plan for left in plan.leftovers)


def test_a_cache_of_a_gigabyte_takes_no_more_memory() -> None:
    c = torch.randn(8, 16, 16384, 128, device=CUDA)
    tensors = [torch.randn(8, 16, 1, 128, device=CUDA), torch.randn(8, 16, 1, 64, device=CUDA)]
    at, q = torch.tensor([16000], device=CUDA), torch.randn(8, 16, 1, 128, device=CUDA)
    fast = fc.compile(rotated, strict=True)
    fast(c, *tensors, at, q)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, kept = torch.cuda.memory_allocated(), c[:, :, :16000].clone()
    before += kept.nbytes
    torch.cuda.reset_peak_memory_stats()
    fast(c, *tensors, at, q)
    assert torch.cuda.max_memory_allocated() - before < c.nbytes / 16
    assert torch.equal(c[:, :, :16000], kept)
    want = c.clone()
    torch.testing.assert_close(fast(c, *tensors, at, q), rotated(want, *tensors, at, q), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(c, want)


def test_writes_into_the_whole_of_a_cache() -> None:
    for function, more in (
        (at_places, [torch.randn(2, 3, 2, 16), torch.tensor([5, -7])]),
        (a_part_of_itself, []),
    ):
        fast = fc.compile(function, strict=True)
        for _ in range(3):
            ours, *others = (t.to(CUDA) for t in (torch.randn(2, 3, 8, 16), *more))
            theirs = ours.clone()
            torch.testing.assert_close(fast(ours, *others), function(theirs, *others))
            torch.testing.assert_close(ours, theirs)


# A cache is begun on the host, with prompts of each length anew.
@pytest.mark.filterwarnings(r"ignore:graph\d.inference is not recorded as a CUDA graph. arg\d+_1 is on cpu")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_generation_with_a_static_cache(mode: str | None) -> None:
    model = llama().to(CUDA)
    options: dict[str, Any] = {} if mode is None else {"mode": mode}
    fast = fc.compile(model, **options)
    for length, count in ((9, 32), (9, 200), (5, 32)):
        prompt = torch.randint(3, 120, (2, length), device=CUDA)
        want = generated(model, prompt, count, "static", disable_compile=True)  # else by Inductor
        assert torch.equal(generated(fast, prompt, count, "static"), want)
    assert len(fast.plan) <= 4
    decided = [plan.decision("CUDA graph").reason for plan in fast.plan]
    assert any(FORMS in note for note in decided), decided


def test_the_host_waits_for_no_draw() -> None:
    def sampled(logits: Tensor, tokens: Tensor) -> Tensor:
        return drawn(written_out(logits, tokens))

    fast = fc.compile(sampled, strict=False, fullgraph=True)
    logits = torch.randn(4, 128_256, device=CUDA) * 3
    tokens = torch.randint(0, 128_256, (4, 20), device=CUDA)
    for _ in range(3):
        fast(logits, tokens)
    torch.cuda.synchronize()
    with no_waits():
        token = fast(logits, tokens)
    assert (written_out(logits, tokens).gather(1, token) > -torch.inf).all()


def test_tokens_are_drawn_as_often_as_they_are_probable() -> None:
    p = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.04, 0.01, 0.0, 0.0], device=CUDA)
    logits = (p.log() * 0.7).expand(1 << 20, -1).contiguous()
    fast = fc.compile(drawn, strict=True)
    often = torch.bincount(fast(logits).flatten(), minlength=8).double() / (1 << 20)
    assert ((often - p.double()).abs() <= 5 * (p.double() / (1 << 20)).sqrt()).all()
    flat = fast(torch.zeros(1 << 12, 32_000, device=CUDA))
    assert abs(flat.double().mean() / 15_999.5 - 1) < 5 * 0.577 / (1 << 6)
