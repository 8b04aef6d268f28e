"""python -m benchmarks optimizer: updates over a model's list of parameters, and whole training steps.

Updates: GPU time of one `step()`, and what part of it a copy that moves as many bytes would take (parameters
and states read and written once, gradients read once). Steps: wall time of forward, backward and update of a
model that `compile` compiled, and the peak of memory, with one gradient alive at a time where updates are in
the backward pass.
"""

from __future__ import annotations

import argparse
import gc
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import fusion_compiler as fc
from benchmarks.record import Record, environment, figure, reason, table
from benchmarks.timing import Yardstick, budget, device_time, wall_time
from benchmarks.workloads import WORKLOADS, Workload, gradient_for, step

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD momentum": lambda p, **kw: SGD(p, lr=1e-3, momentum=0.9, **kw),
    "Adagrad": lambda p, **kw: Adagrad(p, lr=1e-3, **kw),
    "AdamW": lambda p, **kw: AdamW(p, lr=1e-4, **kw),
}
CONTENDERS = ("for-loop", "foreach", "fused", "ours", "ours, in backward")
FLAGS: dict[str, dict[str, bool]] = {
    "for-loop": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def llama_1b(layers: int = 16, hidden: int = 2048, inner: int = 8192, vocabulary: int = 128256) -> list[Any]:
    """Shapes of the parameters of Llama 3.2 1B."""
    heads = hidden // 4
    layer = [(hidden, hidden), (heads, hidden), (heads, hidden), (hidden, hidden)]
    layer += [(inner, hidden), (inner, hidden), (hidden, inner), (hidden,), (hidden,)]
    return [(vocabulary, hidden), *layer * layers, (hidden,)]


LLAMA = next(w for w in WORKLOADS if w.train and w.name.startswith("Llama"))
STEPS = (
    replace(
        LLAMA,
        name=LLAMA.name.replace("4 x 2048", "1 x 1024"),
        sizes={**LLAMA.sizes, "batch": 1, "length": 1024},
    ),
    *(workload for workload in WORKLOADS if workload.train),
)
QUICK = {"layers": 2, "hidden": 64, "inner": 96, "vocabulary": 200}


def made(name: str, contender: str, model: nn.Module, backend: str) -> Optimizer:
    optimizer = OPTIMIZERS[name](model.parameters(), **FLAGS.get(contender, {}))
    if contender.startswith("ours"):
        when = "backward" if contender.endswith("backward") else "step"
        fc.fuse_optimizer(model, optimizer, when=when, backend=backend, strict=True)  # type: ignore[arg-type]
    return optimizer


def moved(model: nn.Module, optimizer: Optimizer) -> int:
    """Bytes that an update reads and writes at least."""
    total = 0
    for param in model.parameters():
        states = [v for v in optimizer.state[param].values() if isinstance(v, torch.Tensor) and v.dim()]
        total += 3 * param.nbytes + 2 * sum(state.nbytes for state in states)
    return total


def update(
    name: str, contender: str, options: argparse.Namespace, yardstick: Yardstick
) -> dict[str, float | int]:
    device = yardstick.device
    shapes = llama_1b(**QUICK) if options.quick else llama_1b()
    model = nn.ParameterList(
        nn.Parameter(torch.randn(s, device=device, dtype=torch.bfloat16)) for s in shapes
    )
    optimizer = made(name, contender, model, options.backend)
    for param in model.parameters():
        param.grad = torch.randn_like(param)
    spent = device_time(optimizer.step, device, options.repetitions)
    copy = yardstick.seconds(moved(model, optimizer))
    return {"ms": spent.seconds * 1e3, "of copy": copy / spent.seconds, "launches": spent.kernels}


def whole_step(
    workload: Workload, name: str, contender: str, options: argparse.Namespace, device: torch.device
) -> dict[str, float]:
    model, batch = workload.make(device, options.quick)
    gradient = gradient_for(model, batch)
    fast = fc.compile(model, backend=options.backend)
    optimizer = made(name, contender, model, options.backend)

    def call() -> None:
        step(fast, batch, True, gradient)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        call()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds = wall_time(call, device, options.repetitions)
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
    return {"ms": seconds * 1e3, "peak GB": peak / 1e9}


def cells(
    measure: Callable[[str], dict[str, Any]], options: argparse.Namespace, names: tuple[str, ...]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for contender in names:
        if not re.search(options.only, contender):
            continue
        try:
            with budget(options.budget):
                yield contender, measure(contender)
        except Exception as error:
            print(f"  {contender}: {reason(error)}")
            yield contender, {"failed": reason(error)}
        finally:
            torch._dynamo.reset()
            gc.collect()
            if options.device.startswith("cuda"):
                torch.cuda.empty_cache()


def main(options: argparse.Namespace) -> Record:
    device = torch.device(options.device)
    record = Record("optimizer", environment(device), options.json)
    yardstick = Yardstick(device, 1 << 20 if options.quick else 1 << 30)
    lines: list[list[str]] = []

    def measured(case: str, phase: str, found: Iterator[tuple[str, dict[str, Any]]], other: str) -> None:
        row: dict[str, Any] = {"case": case, "phase": phase, "cells": dict(found)}
        record.add(row)
        shown = (row["cells"].get(name, {}) for name in CONTENDERS)
        lines.append(
            [f"{case}, {phase}", *(f"{figure(c.get('ms'))} ({figure(c.get(other))})" for c in shown)]
        )

    for name in OPTIMIZERS:
        if re.search(options.filter, f"Llama-1B parameters, {name}"):
            each = cells(lambda c, n=name: update(n, c, options, yardstick), options, CONTENDERS[:-1])
            measured("Llama-1B parameters", name, each, "of copy")
        for workload in STEPS:
            if re.search(options.filter, f"{workload.name}, {name}"):
                each = cells(
                    lambda c, w=workload, n=name: whole_step(w, n, c, options, device), options, CONTENDERS
                )
                measured(workload.name, name, each, "peak GB")
    print(table(["ms (updates: part of a copy's time; steps: peak GB)", *CONTENDERS], lines))
    return record
