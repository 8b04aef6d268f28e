"""Programs put together at random, compiled, in the interpreter: as close to float64 as eager.

FUSION_RANDOM_DAGS=5000 draws that many, at random; without it the same few are drawn in every run.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.codegen.emit import schedules_of
from tests.dags import NAMES, WIDE, Dag, dags
from tests.exactness import Compiled, Schedules, cramped, not_as_close, rounding_noise, wide

LONG = int(os.environ.get("FUSION_RANDOM_DAGS", "0"))


def profile(examples: int) -> settings:
    return settings(
        max_examples=LONG or examples,
        derandomize=not LONG,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def check(dag: Dag, results: Sequence[Tensor], inputs: list[Tensor]) -> None:
    truth = dag.values(WIDE, *wide(inputs))
    eager = dag.values(NAMES, *inputs)
    for number, ours in zip(dag.outputs, results, strict=True):
        behind = dag.behind(number)
        noise = rounding_noise((eager[i] for i in behind), (truth[i] for i in behind))
        problem = not_as_close(ours, eager[number], truth[number], noise)
        assert problem is None, f"v{number}: {problem}"


def differentiated(
    fn: Callable[..., Sequence[Tensor]], inputs: list[Tensor], cotangents: list[Tensor]
) -> list[Tensor]:
    """The gradient of every input that one of the outputs depends on, zero for the others."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    outputs = list(fn(*leaves))
    pairs = [(o, c.to(o.dtype)) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        return []
    grads = torch.autograd.grad([o for o, _ in pairs], leaves, [c for _, c in pairs], allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]


def check_gradients(dag: Dag, compiled: Compiled) -> None:
    inputs = dag.tensors()
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randint(-4, 5, o.shape, generator=generator) / 2 for o in dag(*inputs)]
    eager = differentiated(dag, inputs, cotangents)
    ours = differentiated(compiled, inputs, cotangents)
    exact = differentiated(
        lambda *x: [dag.values(WIDE, *x)[i] for i in dag.outputs], wide(inputs), cotangents
    )
    values, truths = dag.values(NAMES, *inputs), dag.values(WIDE, *wide(inputs))
    noise = rounding_noise((*values, *eager), (*truths, *exact))
    for number, (our, their, truth) in enumerate(zip(ours, eager, exact, strict=True)):
        problem = not_as_close(our, their, truth, noise)
        assert problem is None, f"gradient of v{number}: {problem}"


@given(dags(differentiable=True))
@profile(30)
def test_gradients(dag: Dag) -> None:
    compiled = Compiled(dag)
    check_gradients(dag, compiled)
    compiled.fall_back()
    check_gradients(dag, compiled)


@given(dags())
@profile(18)
def test_every_schedule(dag: Dag) -> None:
    """All candidates of every cluster, and schedules that cut even small tensors into blocks."""
    inputs = dag.tensors()
    for schedules, schedule in itertools.product((schedules_of, cramped), range(4)):
        compiled = Compiled(dag, schedule, schedules)
        check(dag, compiled(*inputs), inputs)


LARGE = ((2, 17000), (3, 1, 20000), (17000, 2), (1, 33000), (70, 3, 90), (600, 40), (5, 3000))


@given(dags(most_steps=6, shapes=LARGE))
@profile(10)
def test_sizes_of_other_schedules(dag: Dag) -> None:
    """Rows that no tile holds, many short ones, partial sums of many programs."""
    inputs = dag.tensors()
    check(dag, Compiled(dag)(*inputs), inputs)


@given(dags())
@profile(10)
def test_symbolic_sizes(dag: Dag) -> None:
    """The program is compiled for any size and runs at the drawn sizes and, where it has a meaning, at
    others."""
    torch._dynamo.reset()
    fast = fc.compile(dag.function(), backend="interpret", strict=True, dynamic=True)
    fallback = fc.compile(dag.function(), backend="eager", strict=True, dynamic=True)
    for more in (0, 1, 3):
        larger = replace(dag, inputs=tuple((_grown(s, more), d, f) for s, d, f in dag.inputs))
        inputs = larger.tensors()
        try:
            dag(*inputs)
        except (RuntimeError, IndexError):
            continue
        check(dag, fast(*inputs), inputs)
        check(dag, fallback(*inputs), inputs)


def _grown(shape: tuple[int, ...], more: int) -> tuple[int, ...]:
    return tuple(s + more if s > 1 else s for s in shape)


@given(dags())
@profile(80)
def test_values(dag: Dag) -> None:
    inputs = dag.tensors()
    compiled = Compiled(dag)
    check(dag, compiled(*inputs), inputs)
    compiled.fall_back()
    check(dag, compiled(*inputs), inputs)


@pytest.mark.parametrize("schedules", [schedules_of, cramped])
def test_reductions_of_one_element_are_that_element(schedules: Schedules) -> None:
    def fn(x: Tensor) -> Tensor:
        total = x.sum()
        return total.abs().sum() + total + x

    for shape in ((5, 7), (300, 70)):
        x = torch.randn(shape)
        for schedule in range(4):
            ours = Compiled(fn, schedule, schedules)(x)
            torch.testing.assert_close(ours.double(), fn(x.double()), rtol=1e-5, atol=1e-3)
