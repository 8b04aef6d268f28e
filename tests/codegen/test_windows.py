"""Kernels of depthwise convolutions and pooling with what is around them in Triton's interpreter."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion_compiler.codegen.emit import emit
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Buffer, Program
from fusion_compiler.ir.loops import Load
from fusion_compiler.passes.fuse.legality import first_refusal
from fusion_compiler.passes.lower.lower import lower
from fusion_compiler.passes.lower.simplify import simplify
from fusion_compiler.runtime.launch import interpret
from fusion_compiler.schedule.analysis import Analysis
from tests.convolutions import Depthwise, depthwise_cases
from tests.passes import test_pooling
from tests.passes.test_windows import AFTER, BEFORE, PASSES, Recorder, around, graph, ops_of, outputs
from tests.pooling import POOLINGS, pooling_cases

H200 = device_spec("h200")


def programs_of(function: Any, *args: Tensor) -> tuple[tuple[Program, ...], dict[str, Tensor]]:
    """Return the programs of a function as one cluster, and the values of its ops in float64."""
    built = graph(function, *args)
    recorder = Recorder(built)
    recorder.run(*(arg.double() if arg.is_floating_point() else arg for arg in args))
    loops = simplify(lower(built, ops_of(built), outputs(built)))
    if first_refusal(Analysis(loops), H200):
        return (), {}
    names = {node.buffer for node in loops.nodes if isinstance(node, Load)}
    names |= {store.buffer for store in loops.stores}
    metas = {name: built.op(name).outputs[0] for name in names}
    buffers = {name: Buffer(name, m.shape, m.stride, m.dtype) for name, m in metas.items()}
    return emit((loops,), "windows", "", buffers, H200), recorder.values


def check(function: Any, *args: Tensor, case: object) -> None:
    """Compare kernels of a function, all of its ops as one cluster, with it in float64."""
    programs, values = programs_of(function, *args)
    for program in random.sample(programs, min(2, len(programs))):
        inputs = [values[b.name] for b in program.inputs]
        arguments = [x.to(b.dtype).contiguous() for x, b in zip(inputs, program.inputs, strict=True)]
        laid = [
            torch.empty_strided(b.shape, b.stride, dtype=b.dtype).copy_(x)  # type: ignore[arg-type]
            for x, b in zip(arguments, program.inputs, strict=True)
        ]
        results = interpret(program, laid, [])
        for result, buffer in zip(results, program.outputs, strict=True):
            truth = values[buffer.name].double()
            finite = truth[truth.isfinite()]
            scale = 1 + finite.abs().amax().item() if finite.numel() else 1
            torch.testing.assert_close(
                result.double(), truth, rtol=1e-4, atol=1e-5 * scale, equal_nan=True,
                msg=f"{case}: {program.schedule}",
            )  # fmt: skip


@pytest.mark.sample(16)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", PASSES)
def test_kernels_give_what_a_library_computes(name: str, before: str, after: str) -> None:
    for case in depthwise_cases(4):
        check(around(case, name, before, after), *case.tensors(torch.float32), case=case)


@pytest.mark.sample(16)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", POOLINGS)
def test_kernels_of_pooling_give_what_a_library_computes(name: str, before: str, after: str) -> None:
    for case in pooling_cases(4):
        check(test_pooling.around(case, name, before, after), *case.tensors(torch.float32), case=case)


@pytest.mark.parametrize("name", [*PASSES, *POOLINGS])
def test_most_cases_have_kernels(name: str) -> None:
    """The tests above compare nothing where a nest is refused."""
    if name in PASSES:
        every = [(around(case, name), case.tensors(torch.float32)) for case in depthwise_cases(24)]
    else:
        every = [(test_pooling.around(c, name), c.tensors(torch.float32)) for c in pooling_cases(24)]
    assert sum(bool(programs_of(function, *tensors)[0]) for function, tensors in every) >= 12


def test_a_nest_whose_neighbours_are_taps_runs_without_windows() -> None:
    small = Depthwise(1, 2, (8,), (3,), (2,), (1,), (1,), (False,) * 3, seed=random.randrange(1 << 30))
    function, tensors = around(small, "kernel gradient"), small.tensors(torch.float32)
    built = graph(function, *tensors)
    assert Analysis(simplify(lower(built, ops_of(built), outputs(built)))).windows is None
    assert programs_of(function, *tensors)[0]
    check(function, *tensors, case=small)


@pytest.mark.parametrize("name", ["maximum", "place"])
@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 1.0], ids=str)
def test_kernels_take_the_maximum_that_eager_takes(name: str, value: float) -> None:
    for case in pooling_cases(3):
        x, gradient = case.tensors(torch.float32)
        for share in (0.3, 1.0):
            check(
                test_pooling.around(case, name),
                x.masked_fill(torch.rand_like(x) < share, value), gradient, case=case,
            )  # fmt: skip
