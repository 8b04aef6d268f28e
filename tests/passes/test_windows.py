"""Loop nests of sums over windows, evaluated node by node, against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from fusion_compiler.capture.decompositions import decomposition_table
from fusion_compiler.ir import dag, depthwise, layout
from fusion_compiler.ir.loops import COLS, INNER, LoopNest, Reduce
from fusion_compiler.passes.lower.lower import lower
from fusion_compiler.passes.lower.simplify import simplify
from tests.convolutions import Depthwise, depthwise_cases
from tests.nest_values import stored

Function = Callable[..., Any]


def convolve(case: Depthwise, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return depthwise.depthwise(x, weight, *case.geometry)


def image_gradient(case: Depthwise, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return depthwise.depthwise_input_gradient(gradient, weight, list(x.shape), *case.geometry)


def kernel_gradient(case: Depthwise, x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    return depthwise.depthwise_weight_gradient(gradient, x, list(case.kernel), *case.geometry)


PASSES = {"forward": convolve, "image gradient": image_gradient, "kernel gradient": kernel_gradient}


def halves(t: Tensor) -> Tensor:
    middle = t.shape[-1] // 2
    return torch.cat([t[..., :middle], t[..., middle:] * 2], -1)


def bias(y: Tensor) -> Tensor:
    return torch.arange(y.shape[1]).view([-1 if d == 1 else 1 for d in range(y.ndim)])


# What is done to an operand. Zero does not stay zero: what lies outside of an image must not count.
BEFORE: dict[str, Function] = {
    "nothing": lambda t: t,
    "numbers": lambda t: torch.relu(t * 2 - 1) + 3,
    "an infinity outside": lambda t: 1 / t,
    "two places": lambda t: torch.where(t > 0, t.flip(-1), t.flip(0)),
    "padding": lambda t: F.pad(t[..., 1:], (1, 0), value=2.0),
    "halves": halves,
    "a turned copy": lambda t: t.transpose(1, -1).contiguous().transpose(1, -1) - 1,
    "rows side by side": lambda t: (t.flatten(2) + 1).view(t.shape),
    "a lookup": lambda t: t[(torch.arange(t.shape[0]) + 1) % t.shape[0]],
}
# What is done to a result.
AFTER: dict[str, Function] = {
    "nothing": lambda y: y,
    "bias and activation": lambda y: torch.relu(y + bias(y)),
    "twice": lambda y: y * torch.sigmoid(y),
    "twice at other places": lambda y: y + y.flip(-1) * 2,
    "turned": lambda y: y.transpose(1, -1).contiguous() * 2,
    "every other": lambda y: y[..., ::2] * 3,
    "with its result": lambda y: (y, y * 2),
    "padded": lambda y: F.pad(y, (2, 1)) + 1,
    "beside itself": lambda y: torch.cat([y, y + 1], 1),
    "flat": lambda y: y.flatten() * 2,
    "rolled": lambda y: y + y.roll(1, 0),
}


class Recorder(fx.Interpreter):
    """Runs a graph and keeps each value, as the graph says that it lies in memory."""

    def __init__(self, built: dag.OpDag) -> None:
        super().__init__(built.module, garbage_collect_values=False)
        self.dag = built
        self.values: dict[str, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and n.op != "output":
            (meta,) = self.dag.op(n.name).outputs
            laid = torch.empty_strided(meta.shape, meta.stride, dtype=result.dtype)  # type: ignore[arg-type]
            self.values[n.name] = laid.copy_(result) if laid.stride() != result.stride() else result
        return result


def graph(function: Function, *args: Tensor) -> dag.OpDag:
    return dag.build(make_fx(function, decomposition_table(), tracing_mode="fake")(*args))


def outputs(built: dag.OpDag) -> tuple[str, ...]:
    """The ops whose results the graph returns, or views of them."""
    found: dict[str, None] = {}
    for name in built.outputs:
        while layout.is_view(built.op(name)):
            name = built.op(name).first
        found[name] = None
    return tuple(found)


def ops_of(built: dag.OpDag) -> tuple[str, ...]:
    return tuple(n for n in built.order if n not in built.inputs and not layout.is_view(built.op(n)))


def check(function: Function, *args: Tensor) -> LoopNest:
    """Compare all ops of a function as one nest, as it is lowered and simplified, with it in float64."""
    built = graph(function, *args)
    wide = [arg.double() if arg.is_floating_point() else arg for arg in args]
    recorder = Recorder(built)
    recorder.run(*wide)
    lowered = lower(built, ops_of(built), outputs(built))
    for loops in (lowered, simplify(lowered)):
        got = stored(loops, recorder.values, {name: recorder.values[name] for name in outputs(built)})
        for name, value in got.items():
            torch.testing.assert_close(value, recorder.values[name], rtol=1e-9, atol=1e-9)
    check_axes(loops)
    return loops


def check_axes(loops: LoopNest) -> None:
    """Inner axes come last and are what reductions run over; all others are columns."""
    groups = [axis.group for axis in loops.axes]
    assert groups == sorted(groups, key=lambda group: group == INNER)
    inner = {k for k, group in enumerate(groups) if group == INNER}
    assert inner == frozenset[int]().union(*(n.axes for n in loops.nodes if isinstance(n, Reduce)))
    assert not inner or set(groups) <= {COLS, INNER}


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_alone_is_what_a_library_computes(name: str) -> None:
    for case in depthwise_cases(60):
        check(functools.partial(PASSES[name], case), *case.tensors(torch.float32))


@pytest.mark.sample(12)
@pytest.mark.parametrize("after", AFTER)
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("name", PASSES)
def test_what_is_around_a_pass_is_in_its_nest(name: str, before: str, after: str) -> None:
    for case in depthwise_cases(6):

        def run(*operands: Tensor, case: Depthwise = case) -> Any:
            return AFTER[after](PASSES[name](case, *map(BEFORE[before], operands)))

        check(run, *case.tensors(torch.float32))
