"""Loads through tensor descriptors on the device: values, other threads, CUDA graphs, and other addresses."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fusion_compiler.codegen import assemble
from fusion_compiler.ir.kernel import Program
from fusion_compiler.runtime.launch import Runner, interpret
from fusion_compiler.schedule.placement import Placement
from tests.codegen import test_descriptors as on_host
from tests.codegen.test_descriptors import ROWS_OF_FOUR, of_convolution, random_inputs
from tests.codegen.test_placed import convolution

GEOMETRIES = [(3, 1, 1, 1), (5, 1, 2, 1), (3, 1, 2, 2), (2, 1, 0, 1), (7, 1, 3, 1)]

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="needs sm_90"
)


def runner_of(*programs: Program) -> Runner:
    return Runner(programs, lambda *_: (), name="boxed", strict=True, tune=False)


def launched(program: Program, inputs: Sequence[Tensor], _: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(result.cpu() for result in runner_of(program)(*(x.cuda() for x in inputs)))


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests of the interpreter launch their kernels."""
    monkeypatch.setattr(on_host, "interpret", launched)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_convolutions(geometry: tuple[int, ...]) -> None:
    on_host.test_a_convolution_and_its_filters_gradient_load_boxes(geometry)


@pytest.mark.usefixtures("on_device")
@pytest.mark.parametrize("seed", range(100, 130))
def test_parts_of_tensors(seed: int) -> None:
    on_host.test_boxes_of_a_part_of_a_tensor_have_nothing_of_what_lies_around(seed)


@pytest.mark.usefixtures("on_device")
def test_strides_and_windows_without_a_condition() -> None:
    for in_lanes in (True, False):
        on_host.test_positions_with_strides_load_boxes(in_lanes)
    for reduced in ("rs", "yt"):
        on_host.test_windows_without_a_condition_share_a_dimension(reduced)


def test_threads_graphs_and_other_addresses() -> None:
    geometry = (3, 1, 1, 1)
    loops, buffers = convolution(2, 10, 40, geometry), of_convolution(2, 10, 40, geometry)
    boxed = Placement.parse(ROWS_OF_FOUR)
    plain = replace(boxed, directives=boxed.directives[:-1])
    programs = [assemble.build(assemble.Nests((loops,), buffers), (p,), "boxed", "") for p in (boxed, plain)]
    runner, inputs = runner_of(*programs), list[Tensor]()
    results: list[Tensor] = []

    def drawn() -> list[Tensor]:
        tensors = random_inputs(buffers)
        return [tensors[b.name] for b in programs[0].inputs]

    def check(ours: Tensor, inputs: list[Tensor]) -> None:
        (truth,) = interpret(programs[1], inputs)
        torch.testing.assert_close(ours.cpu(), truth, rtol=1e-5, atol=1e-5)

    host = drawn()
    inputs = [x.cuda() for x in host]
    thread = threading.Thread(target=lambda: results.extend(runner(*inputs)))
    thread.start()
    thread.join()
    results.extend(runner(*inputs))
    shifted = [torch.empty(x.numel() + 1, device="cuda")[1:].view(x.shape).copy_(x) for x in inputs]
    results.extend(runner(*shifted))
    assert len(results) == 3
    for result in results:
        check(result, host)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (result,) = runner(*inputs)
    for _ in range(20):
        host = drawn()
        for x, value in zip(inputs, host, strict=True):
            x.copy_(value)
        graph.replay()
        check(result, host)
