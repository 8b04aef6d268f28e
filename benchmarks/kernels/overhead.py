"""python -m benchmarks overhead: host microseconds of one call of a compiled one-kernel function.

Sizes are small, so that the device is done before the host has launched the next call; what
counts is guards, argument handling, allocation and the launch. Beside them stands what autograd alone takes
for a step that computes nothing.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

import torch

from benchmarks.harness.contenders import contenders
from benchmarks.harness.record import Record, environment, figure, geometric_mean, reason, table
from benchmarks.harness.timing import budget, host_time
from benchmarks.kernels.case import Case, as_tuple
from benchmarks.kernels.clusters import CASES
from benchmarks.kernels.measure import leaves

NAMES = ("RMSNorm written out", "SwiGLU", "softmax", "residual add + RMSNorm, 2 outputs")


def microseconds(case: Case, compile_: Any, train: bool, device: torch.device) -> float:
    """Per call: forward where no gradients are recorded, or forward and backward."""
    inputs = leaves(case.inputs(device, quick=True), case.differentiate if train else ())
    called = compile_(case.fn)
    wrt = [inputs[n] for n in case.differentiate]
    given = tuple(inputs.values())

    def forward() -> object:
        return called(*given)

    def both() -> object:
        return torch.autograd.grad(as_tuple(called(*given)), wrt, gradients)

    with torch.set_grad_enabled(train):
        gradients = [torch.ones_like(o) for o in as_tuple(called(*given))]
        for _ in range(20):
            both() if train else forward()
        return host_time(both if train else forward, device) * 1e6


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

    for _ in range(20):
        step()
    return host_time(step, device) * 1e6


def main(options: argparse.Namespace) -> Record:
    device = torch.device(options.device)
    record = Record("overhead", environment(device), options.json)
    lines: list[list[str]] = []
    names = list(contenders(options.autotune, options.backend, options.only))
    for case in (c for c in CASES if c.name in NAMES):
        for phase in ("forward", "forward+backward"):
            if not re.search(options.filter, f"{case.name}, {phase}"):
                continue
            row: dict[str, Any] = {"case": case.name, "phase": phase, "cells": {}}
            for name, compile_ in contenders(options.autotune, options.backend, options.only).items():
                torch._dynamo.reset()
                try:
                    with budget(options.budget):
                        row["cells"][name] = {"us": microseconds(case, compile_, phase != "forward", device)}
                except Exception as error:
                    row["cells"][name] = {"failed": reason(error)}
                    print(f"  {name}: {row['cells'][name]['failed']}")
            record.add(row)
            lines.append(
                [f"{case.name}, {phase}", *(figure(row["cells"][n].get("us"), ".1f") for n in names)]
            )
    name = f"autograd.Function of {PARAMETERS} parameters that computes nothing"
    if "eager" in names and re.search(options.filter, name):
        record.add({"case": name, "phase": "step", "cells": {"eager": {"us": (us := nothing(device))}}})
        lines.append([name, *(figure(us if n == "eager" else None, ".1f") for n in names)])
    print(table(["host us a call", *names], lines))
    found = [
        r["cells"]["compile"]["us"] / r["cells"]["ours"]["us"]
        for r in record.rows
        if all("us" in r["cells"].get(n, {}) for n in ("compile", "ours"))
    ]
    if found:
        record.summary["compile / ours"] = geometric_mean(found)
        print(f"geometric mean, compile / ours: {record.summary['compile / ours']:.2f}x")
    record.write()
    return record
