"""python -m benchmarks models: whole models, forward, and backward where they train."""

from __future__ import annotations

import argparse
import gc
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.accuracy import chance, ratios_to_eager
from benchmarks.contenders import Compile, contenders, eager_ops
from benchmarks.energy import energy_of
from benchmarks.nets import NETS
from benchmarks.record import Record, environment, figure, geometric_mean, reason, table
from benchmarks.timing import budget, device_time, wall_time
from benchmarks.workloads import WORKLOADS, Batch, Workload, gradient_for, result_of, step


@dataclass(frozen=True)
class Results:
    """What one forward (and backward) computed: outputs, loss, gradients, by name."""

    tensors: dict[str, Tensor]


def results_of(model: nn.Module, called: Any, batch: Batch, train: bool, gradient: Tensor | None) -> Results:
    """Runs `called` (model, or what it was compiled to) without dropout; gradients are those in `model`."""
    model.eval()
    output = step(called, batch, train, gradient)
    tensors = {"result": result_of(output).detach()}
    if train and gradient is None:
        tensors["loss"] = output.loss.detach()
    tensors |= {f"d {n}": p.grad.detach() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Results(tensors)


def cast(batch: Batch, dtype: torch.dtype) -> Batch:
    """The batch's floating tensors in `dtype`, as leaves where they were leaves."""
    return {
        n: t.detach().to(dtype).requires_grad_(t.requires_grad)
        if isinstance(t, Tensor) and t.is_floating_point()
        else t
        for n, t in batch.items()
    }


def compare(ours: Results, eager: Results, truth: Results) -> dict[str, Any]:
    """Our RMS errors over eager's: geometric mean and worst, with the tensor that has it."""
    missing = truth.tensors.keys() ^ ours.tensors.keys()
    if missing:
        return {"missing": sorted(missing)}
    ratios = ratios_to_eager(ours.tensors, eager.tensors, truth.tensors)
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "error_to_eager": geometric_mean(ratios.values()),
        "worst_error_to_eager": ratios[worst],
        "worst_tensor": worst,
        "beyond_chance": [name for name in ratios if ratios[name] > chance(truth.tensors[name])],
        "tensors_compared": len(ratios),
    }


@dataclass(frozen=True)
class Truth:
    """Eager's results and the same in the workload's exact dtype, and the gradient that both were given."""

    gradient: Tensor | None
    eager: Results
    exact: Results


def truth_of(workload: Workload, options: argparse.Namespace) -> Truth:
    model, batch = workload.make(options.device, options.quick)
    weights: Mapping[str, Tensor] = model.state_dict()
    gradient = gradient_for(model, batch) if workload.train else None
    model, batch = workload.make(options.device, options.quick)
    near = results_of(model, model, batch, workload.train, gradient)
    dtype = torch.float64 if options.quick else workload.exact
    exact_model, _ = workload.make(options.device, options.quick, dtype, weights)
    exact = results_of(
        exact_model,
        exact_model,
        cast(batch, dtype),
        workload.train,
        None if gradient is None else gradient.to(dtype),
    )
    return Truth(gradient, near, exact)


def measure(
    workload: Workload, compile_: Compile, truth: Truth | None, options: argparse.Namespace
) -> dict[str, Any]:
    """One cell: compile seconds, errors, device time by kind, step time, memory, energy, eager ops."""
    device = torch.device(options.device)
    torch._dynamo.reset()
    # The truth that errors are measured against also lies on the device: it is not the contender's.
    others = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    model, batch = workload.make(device, options.quick)
    gradient = gradient_for(model, batch) if workload.train else None
    called = compile_(model)

    def one_step() -> None:
        step(called, batch, workload.train, gradient)
        model.zero_grad(set_to_none=True)

    start = time.perf_counter()
    one_step()
    cell: dict[str, Any] = {"first_step_s": time.perf_counter() - start}
    measured = device_time(one_step, device, options.repetitions)
    cell |= {
        "gpu_ms": measured.seconds * 1e3,
        "kernels": measured.kernels,
        "by_kind_ms": {kind: seconds * 1e3 for kind, seconds in measured.by_kind.items()},
        "top_kernels_ms": {n[:120]: s * 1e3 for n, s in list(measured.names.items())[:12]},
    }
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    cell["step_ms"] = wall_time(one_step, device, options.repetitions) * 1e3
    if device.type == "cuda":
        cell["peak_gb"] = (torch.cuda.max_memory_allocated(device) - others) / 1e9
        cell["between_gb"] = (torch.cuda.memory_allocated(device) - others) / 1e9
    if (joules := energy_of(one_step, device)) is not None:
        cell["joules"] = joules
    cell["eager_ops"] = eager_ops(called)
    if truth is not None:
        del model, called
        torch._dynamo.reset()
        model, batch = workload.make(device, options.quick)
        ours = results_of(model, compile_(model), batch, workload.train, truth.gradient)
        cell |= compare(ours, truth.eager, truth.exact)
    return cell


def release(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def row_of(workload: Workload, options: argparse.Namespace, record: Record) -> dict[str, Any]:
    row: dict[str, Any] = {"workload": workload.name, "cells": {}}
    record.add(row)
    truth: Truth | None = None
    if not options.no_check:
        try:
            truth = truth_of(workload, options)
        except Exception as error:
            row["truth_failed"] = reason(error)
        release(torch.device(options.device))
    for name, compile_ in contenders(options.autotune, options.backend, options.only).items():
        try:
            with budget(options.budget):
                row["cells"][name] = measure(workload, compile_, truth, options)
        except Exception as error:
            row["cells"][name] = {"failed": reason(error)}
        release(torch.device(options.device))
        print(f"  {name}: {describe(row['cells'][name])}", flush=True)
        record.write()
    return row


def describe(cell: dict[str, Any]) -> str:
    if "failed" in cell:
        return cell["failed"]
    kinds = ", ".join(f"{kind} {ms:.2f}" for kind, ms in sorted(cell["by_kind_ms"].items()))
    text = f"{cell['gpu_ms']:.2f} ms GPU ({kinds}), {cell['kernels']} kernels, step {cell['step_ms']:.2f} ms"
    text += f", first {cell['first_step_s']:.1f} s"
    if "peak_gb" in cell:
        text += f", peak {cell['peak_gb']:.2f} GB, between steps {cell['between_gb']:.2f}"
    if "joules" in cell:
        text += f", {cell['joules']:.2f} J"
    if "error_to_eager" in cell:
        text += f", error/eager {cell['error_to_eager']:.2f} (worst {cell['worst_error_to_eager']:.2f})"
    if cell.get("missing"):
        text += f", MISSING {cell['missing'][:4]}"
    return text


def ratio(row: dict[str, Any], other: str, key: str = "gpu_ms") -> float | None:
    ours, theirs = row["cells"].get("ours", {}), row["cells"].get(other, {})
    return theirs[key] / ours[key] if key in ours and key in theirs else None


def show(rows: list[dict[str, Any]]) -> str:
    names = sorted({n for r in rows for n in r["cells"]}, key=["eager", "compile", "autotune", "ours"].index)
    lines: list[list[str]] = []
    for row in rows:
        cells = [row["cells"].get(n, {}) for n in names]
        ours = row["cells"].get("ours", {})
        lines.append(
            [
                row["workload"],
                *[figure(c.get("gpu_ms")) if "failed" not in c else "failed" for c in cells],
                figure(ratio(row, "eager")),
                figure(ratio(row, "compile")),
                figure(ratio(row, "eager", "step_ms")),
                figure(ours.get("peak_gb")),
                figure(ratio(row, "compile", "joules")),
                figure(ours.get("first_step_s"), ".1f"),
                figure(ours.get("error_to_eager")),
            ]
        )
    header = [
        *(f"{n} ms" for n in names),
        "x eager",
        "x compile",
        "step x eager",
        "peak GB",
        "joules x compile",
        "first s",
        "error/eager",
    ]
    return table(["workload (GPU time)", *header], lines)


def main(options: argparse.Namespace) -> Record:
    record = Record("models", environment(torch.device(options.device)), options.json)
    for workload in (*WORKLOADS, *NETS):
        if re.search(options.filter, workload.name):
            print(workload.name, flush=True)
            row_of(workload, options, record)
    for key in ("gpu_ms", "step_ms"):
        for other in ("eager", "compile"):
            found = [v for r in record.rows if (v := ratio(r, other, key)) is not None]
            if found:
                record.summary[f"{key} vs {other}"] = geometric_mean(found)
    record.write()
    print("\n" + show(record.rows))
    for name, mean in record.summary.items():
        print(f"geometric mean, {name}: {mean:.2f}x")
    return record
