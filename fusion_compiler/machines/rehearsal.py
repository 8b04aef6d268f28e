"""Measure a plan's stages on this machine, each by itself, and predict the step from that."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from torch import fx, nn

from fusion_compiler.errors import MachinesError
from fusion_compiler.machines.estimate import timed_passes
from fusion_compiler.machines.plan import PipelinePlan
from fusion_compiler.machines.simulate import simulate
from fusion_compiler.machines.split import stage_modules

Prepare = Callable[[fx.GraphModule], Callable[..., Any]]
P = TypeVar("P", bound=PipelinePlan)


def rehearse(plan: P, args: tuple[Any, ...], kwargs: Mapping[str, Any], prepare: Prepare) -> P:
    """Return the plan with measured times of its stages. args, kwargs: the arguments of one microbatch.
    prepare: return the callable that runs for a stage's module.

    The model's gradients and buffers are afterwards what they were. Raises MachinesError if the model is on
    the meta device.
    """
    if any(p.is_meta for p in plan.graph.parameters()):
        raise MachinesError(detail="a model on the meta device cannot run", todo="give it real parameters")
    stages, values, keywords = [], args, kwargs
    for stage, module in zip(plan.stages, stage_modules(plan), strict=True):
        with unchanged(module):
            call = functools.partial(prepare(module), *values, **keywords)
            forward, backward, results = timed_passes(call, plan.training)
        speed = plan.machines[plan.rank(stage.number)].speed
        stages.append(replace(stage, forward_us=forward / speed, backward_us=backward / speed))
        values, keywords = tuple(t.detach().requires_grad_(t.requires_grad) for t in results), {}
    step = simulate(
        plan.schedule,
        [(s.forward_us, s.backward_us) for s in stages],
        [(e.forward_us, e.backward_us) for e in plan.edges],
        len(plan.machines),
        plan.microbatches,
        plan.training,
    )
    return replace(plan, stages=tuple(stages), events=step.events, step_us=step.us, bubble=step.bubble)


@contextmanager
def unchanged(module: nn.Module) -> Generator[None]:
    """Put gradients and buffers back at the end."""
    gradients = [(p, p.grad) for p in module.parameters()]
    buffers = [(b, b.clone()) for b in module.buffers()]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for buffer, value in buffers:
            buffer.copy_(value)
