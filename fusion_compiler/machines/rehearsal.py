"""Measure a plan's stages on this machine, each by itself, and predict the step from that."""

from __future__ import annotations

import statistics
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fusion_compiler.errors import MachinesError
from fusion_compiler.machines.estimate import REPETITIONS
from fusion_compiler.machines.plan import PipelinePlan
from fusion_compiler.machines.simulate import simulate
from fusion_compiler.machines.split import stage_modules

P = TypeVar("P", bound=PipelinePlan)


def rehearse(plan: P, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> P:
    """Return the plan with measured times of its stages. args, kwargs: those of one microbatch.

    The model's gradients and buffers are afterwards what they were. Raises MachinesError if the model is on
    the meta device.
    """
    if any(p.is_meta for p in plan.graph.parameters()):
        raise MachinesError(detail="a model on the meta device cannot run", todo="give it real parameters")
    stages, values, keywords = [], args, kwargs
    for stage, module in zip(plan.stages, stage_modules(plan), strict=True):
        with unchanged(module):
            forward, backward, results = run(module, values, keywords, plan.training)
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


def run(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool
) -> tuple[float, float, list[Tensor]]:
    """Return the median times of a module's forward and backward pass, and its results."""
    forward, backward, results = [], [], []
    for _ in range(REPETITIONS + 1):
        start = now()
        with torch.set_grad_enabled(training):
            results = [t for t in pytree.tree_leaves(module(*args, **kwargs)) if isinstance(t, Tensor)]
        end = now()
        forward.append(end - start)
        roots = [t for t in results if t.requires_grad]
        gradients = [torch.randn_like(t) for t in roots]
        start = now()
        if roots:
            torch.autograd.backward(roots, gradients)
        backward.append(now() - start)
    return statistics.median(forward[1:]), statistics.median(backward[1:]), results


def now() -> float:
    """Return microseconds, after all that a GPU has been given to do."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1e6 * time.perf_counter()
