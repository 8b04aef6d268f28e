"""python -m benchmarks overhead: host microseconds of one call of a compiled one-kernel function.

Sizes are small, so that the device is done before the host has launched the next call; what
counts is guards, argument handling, allocation and the launch. Beside them stands what autograd alone takes
for a step that computes nothing.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness.contenders import Compile, contenders
from benchmarks.harness.record import Record, begin, reason
from benchmarks.harness.tables import Column, figure, lines_of, means, table, value
from benchmarks.harness.timing import budget, host_time
from benchmarks.kernels.bars import ratio
from benchmarks.kernels.case import PHASES, Case, as_tuple
from benchmarks.kernels.clusters import CASES
from benchmarks.kernels.measure import leaves

NAMES = ("RMSNorm written out", "SwiGLU", "softmax", "residual add + RMSNorm, 2 outputs")


def per_call(call: Callable[[], object], device: torch.device) -> float:
    """Microseconds of the host, after a few calls that compile and fill caches."""
    for _ in range(20):
        call()
    return host_time(call, device) * 1e6


def microseconds(case: Case, compile_: Compile, train: bool, device: torch.device) -> float:
    """Per call: forward where no gradients are recorded, or forward and backward."""
    inputs = leaves(case.inputs(device, quick=True), case.differentiate if train else ())
    called = compile_(case.fn)
    wrt = [inputs[n] for n in case.differentiate]
    arguments = tuple(inputs.values())
    with torch.set_grad_enabled(train):
        gradients = [torch.ones_like(o) for o in as_tuple(called(*arguments))]

        def both() -> object:
            return torch.autograd.grad(as_tuple(called(*arguments)), wrt, gradients)

        return per_call(both if train else lambda: called(*arguments), device)


PARAMETERS = 16  # of the step that computes nothing: those of an encoder layer


class Nothing(torch.autograd.Function):
    """Passes the first parameter on, and the gradient to all."""

    @staticmethod
    def forward(ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        del ctx
        return parameters[0].detach().clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        del ctx
        return gradients * PARAMETERS


def nothing(device: torch.device) -> float:
    """Microseconds of forward, backward and the removal of gradients around no computation."""
    parameters = [torch.randn(4, device=device, requires_grad=True) for _ in range(PARAMETERS)]
    gradient = torch.ones(4, device=device)

    def step() -> None:
        result: Any = Nothing.apply(*parameters)
        result.backward(gradient)
        for parameter in parameters:
            parameter.grad = None

    return per_call(step, device)


def main(options: argparse.Namespace) -> Record:
    device, record = torch.device(options.device), begin("overhead", options)
    compilers = contenders(options.autotune, options.backend, options.only)
    for case, phase in itertools.product((c for c in CASES if c.name in NAMES), PHASES):
        if not re.search(options.filter, f"{case.name}, {phase}"):
            continue
        cells = record.row({"case": case.name, "phase": phase})["cells"]
        for name, compile_ in compilers.items():
            torch._dynamo.reset()
            try:
                with budget(options.budget):
                    cells[name] = {"us": microseconds(case, compile_, phase != PHASES[0], device)}
            except Exception as error:
                cells[name] = {"failed": reason(error)}
                print(f"  {name}: {cells[name]['failed']}")
        record.write()
    name = f"autograd.Function of {PARAMETERS} parameters that computes nothing"
    if "eager" in compilers and re.search(options.filter, name):
        record.row({"case": name, "phase": "step"})["cells"]["eager"] = {"us": nothing(device)}
    columns: list[Column] = [("host us a call", lambda row: ", ".join(row[k] for k in ("case", "phase")))]
    columns += [(n, lambda row, n=n: figure(value(row, n, "us"), ".1f")) for n in compilers]
    summary = means(record.rows, {"compile / ours": functools.partial(ratio, other="compile")})
    return record.finish(summary, table(*lines_of(columns, record.rows)), "geometric mean, {}: {:.2f}x")
