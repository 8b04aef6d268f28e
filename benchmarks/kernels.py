"""python -m benchmarks kernels: every memory-bound cluster, forward and forward + backward."""

from __future__ import annotations

import argparse
import contextlib
import gc
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.accuracy import error_of, worst_ratio
from benchmarks.clusters import CASES, Case, as_tuple
from benchmarks.contenders import Compile, contenders, liger_functional
from benchmarks.record import Record, environment, figure, geometric_mean, reason, table
from benchmarks.timing import budget, copy_bandwidth, device_time

PHASES = ("forward", "forward+backward")


@dataclass(frozen=True)
class Truth:
    """A case's inputs, its outputs and gradients in float64, and eager's own."""

    inputs: dict[str, Tensor]
    gradients: tuple[Tensor, ...]  # of the outputs, given
    exact: tuple[Tensor, ...]
    eager: tuple[Tensor, ...]


def run(
    fn: Callable[..., object], inputs: dict[str, Tensor], wrt: Sequence[str], gradients: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Outputs, and where `wrt` names inputs, their gradients."""
    if not wrt:
        with torch.no_grad():
            return as_tuple(fn(*inputs.values()))
    outputs = as_tuple(fn(*inputs.values()))
    found = torch.autograd.grad(outputs, [inputs[n] for n in wrt], gradients)
    return (*(o.detach() for o in outputs), *found)


def leaves(
    inputs: dict[str, Tensor], wrt: Sequence[str], dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Copies (some contenders write into their inputs), with their layout, as autograd leaves."""
    copies: dict[str, Tensor] = {}
    for name, tensor in inputs.items():
        to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        copies[name] = tensor.detach().to(to, copy=True).requires_grad_(name in wrt)
    return copies


def truth_of(case: Case, inputs: dict[str, Tensor], wrt: Sequence[str]) -> Truth:
    fn = case.without_randomness()
    with torch.no_grad():
        shapes = as_tuple(fn(*inputs.values()))
    gradients = tuple(torch.randn_like(o) if o.dim() else torch.ones_like(o) for o in shapes)
    exact = run(fn, leaves(inputs, wrt, torch.float64), wrt, [g.double() for g in gradients])
    return Truth(inputs, gradients, exact, run(fn, leaves(inputs, wrt), wrt, gradients))


def entrants(case: Case, compilers: dict[str, Compile]) -> dict[str, tuple[Compile, Callable[..., object]]]:
    """Contender -> (how it compiles, what it compiles)."""
    found: dict[str, tuple[Compile, Callable[..., object]]] = {n: (c, case.fn) for n, c in compilers.items()}
    if case.liger is not None:
        with contextlib.suppress(ImportError, AttributeError):  # not installed, or a version without it
            found["liger"] = (lambda fn: fn, case.liger(liger_functional()))
    return found


def measure(
    case: Case,
    compile_: Compile,
    fn: Callable[..., object],
    truth: Truth,
    wrt: Sequence[str],
    repetitions: int,
) -> dict[str, Any]:
    """One cell: errors on the first call, then the device time of many."""
    checked = case.without_randomness() if fn is case.fn else fn
    torch._dynamo.reset()
    results = run(compile_(checked), leaves(truth.inputs, wrt), wrt, truth.gradients)
    cell: dict[str, Any] = {
        "error_to_eager": worst_ratio(results, truth.eager, truth.exact),
        "largest_error": max(error_of(r, t).largest for r, t in zip(results, truth.exact, strict=True)),
    }
    del results
    torch._dynamo.reset()
    timed, inputs = compile_(fn), leaves(truth.inputs, wrt)
    device = truth.gradients[0].device
    measured = device_time(lambda: run(timed, inputs, wrt, truth.gradients), device, repetitions)
    if hasattr(timed, "plan"):
        cell["predicted_us"] = sum(cluster.cost.us for plan in timed.plan for cluster in plan.clusters)
    return cell | {
        "us": measured.seconds * 1e6,
        "kernels": measured.kernels,
        "names": list(measured.names)[:6],
    }


def row_of(case: Case, phase: str, options: argparse.Namespace, bandwidth: float) -> dict[str, Any]:
    """All contenders on one case and phase; a failure is the cell's reason."""
    wrt = case.differentiate if phase == PHASES[1] else ()
    inputs = case.inputs(options.device, options.quick)
    row: dict[str, Any] = {"case": case.name, "phase": phase, "cells": {}}
    truth = truth_of(case, inputs, wrt)
    outputs = truth.exact[: len(truth.gradients)]
    narrow = tuple(o.to(g.dtype) for o, g in zip(outputs, truth.gradients, strict=True))
    row["bytes"] = case.forward_bytes(inputs, narrow) + (case.backward_bytes(inputs, narrow) if wrt else 0)
    for name, (compile_, fn) in entrants(
        case, contenders(options.autotune, options.backend, options.only)
    ).items():
        try:
            with budget(options.budget):
                cell = measure(case, compile_, fn, truth, wrt, options.repetitions)
            cell["fraction"] = row["bytes"] / (cell["us"] / 1e6) / bandwidth
        except Exception as error:
            cell = {"failed": reason(error)}
        row["cells"][name] = cell
    return row


def ratio(row: dict[str, Any], other: str) -> float | None:
    """Time of `other` / our time: above 1, ours is faster."""
    ours, theirs = row["cells"].get("ours", {}), row["cells"].get(other, {})
    return theirs["us"] / ours["us"] if "us" in ours and "us" in theirs else None


def show(rows: list[dict[str, Any]]) -> str:
    names = sorted(
        {n for r in rows for n in r["cells"]}, key=["eager", "compile", "autotune", "liger", "ours"].index
    )
    lines: list[list[str]] = []
    for row in rows:
        line = [f"{row['case']}, {'fwd' if row['phase'] == PHASES[0] else 'fwd+bwd'}"]
        for name in names:
            cell = row["cells"].get(name, {})
            line.append(
                f"{cell['us']:.0f} us {cell['fraction']:.2f} /{cell['kernels']}"
                if "us" in cell
                else "failed" if cell else "-"
            )  # fmt: skip
        ours = row["cells"].get("ours", {})
        line += [
            figure(ratio(row, "eager")),
            figure(ratio(row, "compile")),
            figure(ours.get("error_to_eager")),
        ]
        lines.append(line)
    return table(["cluster (time, fraction / kernels)", *names, "x eager", "x compile", "error/eager"], lines)


def report(row: dict[str, Any]) -> None:
    """One line as soon as a row is done, and the reasons of what failed."""
    done = {n: f"{c['us']:.0f}" for n, c in row["cells"].items() if "us" in c}
    print(f"{row['case']}, {row['phase']} [us]:", " ".join(f"{n} {us}" for n, us in done.items()), flush=True)
    for name, cell in {"all": row, **row["cells"]}.items():
        if "failed" in cell:
            print(f"  {name}: {cell['failed']}", flush=True)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's: 1 where both are in the same order, -1 where in opposite orders; ties by position."""
    ranks = [{i: rank for rank, i in enumerate(sorted(range(len(v)), key=v.__getitem__))} for v in (a, b)]
    n = len(a)
    return 1 - 6 * sum((ranks[0][i] - ranks[1][i]) ** 2 for i in range(n)) / (n * (n * n - 1))


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means of how many times faster ours is, per peer and phase; how good predictions are."""
    means: dict[str, Any] = {}
    for phase in PHASES:
        of_phase = [r for r in rows if r["phase"] == phase]
        for other in ("eager", "compile", "autotune", "liger"):
            found = [v for r in of_phase if (v := ratio(r, other)) is not None]
            if found:
                means[f"{phase} vs {other}"] = geometric_mean(found)
    predicted = [c for r in rows if "predicted_us" in (c := r["cells"].get("ours", {}))]
    if len(predicted) > 2:
        means["prediction: mean error"] = sum(abs(c["predicted_us"] / c["us"] - 1) for c in predicted) / len(
            predicted
        )
        means["prediction: rank correlation"] = rank_correlation(
            [c["predicted_us"] for c in predicted], [c["us"] for c in predicted]
        )
    return means


def main(options: argparse.Namespace) -> Record:
    device = torch.device(options.device)
    bandwidth = copy_bandwidth(device, 1 << 24 if options.quick else 1 << 30)
    record = Record("kernels", environment(device) | {"copy_bandwidth": bandwidth}, options.json)
    print(f"copy {bandwidth / 1e12:.2f} TB/s; fraction = ideal bytes / time / copy bandwidth")
    for case in CASES:
        for phase in PHASES:
            if not re.search(options.filter, f"{case.name}, {phase}"):
                continue
            try:
                row = row_of(case, phase, options, bandwidth)
            except Exception as error:
                row = {"case": case.name, "phase": phase, "cells": {}, "failed": reason(error)}
            record.add(row)
            report(row)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
    record.summary = summarize(record.rows)
    record.write()
    print("\n" + show([r for r in record.rows if r["cells"]]))
    for name, mean in record.summary.items():
        print(f"{name}: {mean:.2f}")
    return record
