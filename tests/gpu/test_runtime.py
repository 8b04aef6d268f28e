"""Behaviour that only a device shows: changing sizes, large offsets, CUDA graphs, streams."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters

import fusion_compiler as fc
from benchmarks.harness.accuracy import not_worse
from benchmarks.harness.timing import device_time
from benchmarks.kernels.clusters import rms_norm

CUDA = torch.device("cuda")


def gelu_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.gelu(rms_norm(x, weight), approximate="tanh")


def assert_not_worse(fn: object, fast: object, *inputs: Tensor) -> None:
    exact = fn(*(t.double() for t in inputs))
    assert not (problem := not_worse(fast(*inputs), fn(*inputs), exact)), problem


def test_a_second_size_costs_at_most_one_further_compile() -> None:
    fast = fc.compile(gelu_norm, strict=True)
    weight = torch.randn(1024, device=CUDA, dtype=torch.bfloat16)
    counters.clear()
    for rows in (4096, 512, 4095, 7777, 16384):
        x = torch.randn(rows, 1024, device=CUDA, dtype=torch.bfloat16)
        assert_not_worse(gelu_norm, fast, x, weight)
    assert counters["stats"]["unique_graphs"] <= 2
    one = torch.randn(1, 1024, device=CUDA, dtype=torch.bfloat16)
    assert_not_worse(gelu_norm, fast, one, weight)  # TorchDynamo takes a size of one for a constant


def test_symbolic_sizes_are_at_most_five_percent_slower() -> None:
    x = torch.randn(65536, 4096, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(4096, device=CUDA, dtype=torch.bfloat16)
    static = fc.compile(gelu_norm, dynamic=False)
    symbolic = fc.compile(gelu_norm)
    with torch.no_grad():
        for rows in (4096, 8192, 65536):
            symbolic(x[:rows], weight)
        fixed = device_time(lambda: static(x, weight), CUDA, repetitions=20).seconds
        free = device_time(lambda: symbolic(x, weight), CUDA, repetitions=20).seconds
    assert free <= 1.05 * fixed


@pytest.mark.parametrize("columns", [4096, 4097])
def test_offsets_past_two_to_the_31(columns: int) -> None:
    rows = 2**31 // columns + 3
    weight = torch.randn(columns, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(rows, columns, device=CUDA, dtype=torch.bfloat16)
    assert x.numel() > 2**31
    with torch.no_grad():
        result = fc.compile(gelu_norm, strict=True)(x, weight)
        for part in (slice(0, 64), slice(rows - 64, rows)):
            exact = gelu_norm(x[part].double(), weight.double())
            assert not not_worse(result[part], gelu_norm(x[part], weight), exact)
        # Elsewhere, where an offset that wrapped would have written.
        middle = rows // 2
        exact = gelu_norm(x[middle : middle + 64].double(), weight.double())
        assert not not_worse(result[middle : middle + 64], gelu_norm(x[middle : middle + 64], weight), exact)


def test_capture_in_a_cuda_graph_replays_with_new_values() -> None:
    fast = fc.compile(gelu_norm, strict=True)
    weight = torch.randn(1024, device=CUDA, dtype=torch.bfloat16)
    x = torch.randn(256, 1024, device=CUDA, dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            fast(x, weight)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        captured = fast(x, weight)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        with torch.no_grad():
            assert torch.equal(captured, fast(x, weight))


def test_a_side_stream_is_used_where_it_is_current() -> None:
    fast = fc.compile(gelu_norm, strict=True)
    weight = torch.randn(4096, device=CUDA, dtype=torch.bfloat16)
    x = torch.zeros(16384, 4096, device=CUDA, dtype=torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.no_grad():
        fast(x, weight)
        fresh = torch.randn_like(x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)  # a kernel that did not wait for its stream would read zeros
            x.copy_(fresh)
            result = fast(x, weight)
        side.synchronize()
        assert torch.equal(result, fast(fresh, weight))


@pytest.mark.parametrize("shift", [1, 3, 8])
def test_inputs_that_are_not_aligned(shift: int) -> None:
    storage = torch.randn(1024 * 512 + shift, device=CUDA, dtype=torch.bfloat16)
    weight = torch.randn(512, device=CUDA, dtype=torch.bfloat16)
    fast = fc.compile(gelu_norm, strict=True)
    assert_not_worse(gelu_norm, fast, storage[: 1024 * 512].view(1024, 512), weight)
    assert_not_worse(gelu_norm, fast, storage[shift:].view(1024, 512), weight)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [300, 5000, 70000])
def test_a_maximum_is_nan_where_there_is_one(width: int, dtype: torch.dtype) -> None:
    x = torch.randn(64, width, device=CUDA, dtype=dtype)
    x[3, 7] = x[9, -1] = float("nan")
    x[5] = -float("inf")
    for fn in (lambda x: x.amax(1), lambda x: x.amin(1), lambda x: x - x.amax(1, keepdim=True)):
        assert torch.equal(fc.compile(fn, strict=True)(x).nan_to_num(), fn(x).nan_to_num())
        assert torch.equal(fc.compile(fn, strict=True)(x).isnan(), fn(x).isnan())
