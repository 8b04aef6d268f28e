"""python -m benchmarks architectures: every architecture of the installed transformers, tiny, compiled.

Each runs in a process of its own, forward and backward: eager, in float64, and compiled. Outputs and the
gradients of parameters have to be as close to float64 as eager's, within a small multiple. What cannot be
built from its configuration alone, or fed, is listed with what it said.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import logging
import multiprocessing
import re
import resource
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from benchmarks.harness.accuracy import InFloat64, chance, ratios_to_eager
from benchmarks.harness.record import Record, begin, reason
from benchmarks.numerics.tiny_models import Batch, CannotBuildError, architectures, loss_of, tensors_of, tiny
from fusion_compiler import FusionWarning
from fusion_compiler import compile as compile_model
from fusion_compiler.capture.module import plan_of

SAME, DRAWS, OTHER, DIFFERS, FAILS, OUT = "same", "draws", "torch too", "DIFFERS", "FAILS", "left out"
# Times eager's error beyond chance: a tensor in thousands is that much luckier in eager.
WORSE = 2.5
ROUNDINGS = 64  # where eager's error is not known: single numbers, models that have no float64
PATIENCE = 20  # wall clock over processor time, for a machine that others use as well


@dataclass(frozen=True)
class Result:
    """values: of outputs, of which `tensors` are floating; gradients are called "d <parameter>"."""

    tensors: dict[str, Tensor]
    others: dict[str, Tensor]


def step(called: Any, model: nn.Module, batch: Batch, seed: int = 2) -> Result:
    """One forward and backward of `called`, which shares its parameters with `model`."""
    torch.manual_seed(seed)
    model.zero_grad(set_to_none=True)
    output = called(**batch)
    loss_of(output).backward()
    values = {n: t.detach() for n, t in tensors_of(output).items()}
    values |= {f"d {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
    floating = {n: t for n, t in values.items() if t.is_floating_point()}
    return Result(floating, {n: t for n, t in values.items() if n not in floating})


def exact_step(model: nn.Module, batch: Batch) -> Result:
    """The same in float64, in which there is no grouped product of experts."""
    wide: Any = copy.deepcopy(model).double()
    if hasattr(wide, "set_experts_implementation"):
        with contextlib.suppress(ValueError):
            wide.set_experts_implementation("batched_mm")
    torch.set_default_dtype(torch.float64)  # of what a model makes on the way
    try:
        with InFloat64():
            return step(wide, wide, {n: t.double() if t.is_floating_point() else t for n, t in batch.items()})
    finally:
        torch.set_default_dtype(torch.float32)


def compare(ours: Result, eager: Result, truth: Result | None) -> tuple[float, str]:
    """How many times the allowed error the worst tensor has, and what is to say of it.

    A gradient that eager leaves undefined may be zero.
    """
    got, want = ours.tensors | ours.others, eager.tensors | eager.others
    other = [n for n in got if n not in want and not (n.startswith("d ") and not got[n].any())]
    other += [n for n in want if n not in got or not _alike(got[n], want[n])]
    if other:
        return float("inf"), f"{len(other)} results are others: {', '.join(other[:4])}"
    mine, theirs = (_finite(r.tensors, eager.tensors) for r in (ours, eager))
    exact = _finite(truth.tensors, eager.tensors) if truth is not None else theirs
    largest = max((t.abs().max().item() for n, t in exact.items() if n.startswith("d ")), default=0.0)
    largest *= ROUNDINGS if truth is None else 1
    ratios = {n: _roundings(t, theirs[n], exact[n], largest * n.startswith("d ")) for n, t in mine.items()}
    if truth is not None:
        errors = ratios_to_eager(mine, theirs, exact)
        ratios |= {n: r / chance(exact[n]) / WORSE for n, r in errors.items()}
    worst = max(ratios, key=lambda n: ratios[n])
    return ratios[worst], worst


def _alike(a: Tensor, b: Tensor) -> bool:
    """Whether two results have one form, and what has no error is the same."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.isfinite(), b.isfinite()) if b.is_floating_point() else torch.equal(a, b)


def _nowhere(result: Result) -> dict[str, bool]:
    """Return for each tensor, by name, whether an element is infinite or NaN."""
    return {n: not bool(t.isfinite().all()) for n, t in result.tensors.items()}


def _finite(tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n: torch.where(t.isfinite(), tensors[n], 0) for n, t in like.items() if t.numel()}


def _roundings(ours: Tensor, eager: Tensor, truth: Tensor, largest: float) -> float:
    """Our error over eager's, four times, and what rounding is at its own scale and that of the largest
    gradient: the terms of a sum may be that much more than what is left of them."""
    error, other = ((t.double() - truth.double()).abs().max().item() for t in (ours, eager))
    info = torch.finfo(ours.dtype)
    rounded = info.eps * (ROUNDINGS * truth.abs().max().item() + largest)
    return error / (4 * other + rounded + info.tiny)


def examine(name: str, backend: str, device: str = "cpu") -> dict[str, Any]:
    """The row of one architecture. What differs has to with other numbers as well: where all gradients hang
    on one number, as on the loss of two classes, eager's luck in rounding that one is theirs."""
    rows = (_examined(name, backend, device, seed) for seed in range(2))
    first = next(rows)
    return next(rows) if first["status"] == DIFFERS else first


def _examined(name: str, backend: str, device: str, seed: int) -> dict[str, Any]:
    row: dict[str, Any] = {"architecture": name, "task": architectures()[name].task, "backend": backend}
    try:
        model, batch = tiny(name, seed)
    except CannotBuildError as error:
        return row | {"status": OUT, "reason": str(error)}
    model, batch = model.to(device), {n: t.to(device) for n, t in batch.items()}
    row |= {"class": type(model).__name__, "parameters": sum(p.numel() for p in model.parameters())}
    try:
        eager = step(model, model, batch)
        draws = _differ(eager, step(model, model, batch, seed=3))
    except Exception as error:  # LeViT keeps tensors of one step for the next
        return row | {"status": OUT, "reason": f"a second step in eager: {reason(error)}"}
    truth: Result | None = None
    try:
        truth = exact_step(model, batch)
        if _nowhere(truth) != _nowhere(eager):  # masks of the least float32 number are infinite otherwise
            truth, row["no float64"] = None, "other results, or not finite where these are"
    except Exception as error:
        row["no float64"] = reason(error)
    try:
        start = time.process_time()
        ours, more = compiled_step(model, batch, backend)
        row |= more | {"seconds": round(time.process_time() - start, 1)}
    except Exception as error:
        return row | {"status": other(model, batch), "reason": reason(error)}
    if draws:
        return row | {"status": DRAWS}
    worst, said = compare(ours, eager, truth)
    return row | {"status": SAME if worst <= 1 else DIFFERS, "worst": round(worst, 3), "reason": said}


def _differ(a: Result, b: Result) -> bool:
    return any(not torch.equal(t.nan_to_num(), b.tensors[n].nan_to_num()) for n, t in a.tensors.items())


def compiled_step(model: nn.Module, batch: Batch, backend: str) -> tuple[Result, dict[str, Any]]:
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        fast: Any = compile_model(model, backend=backend)
        result = step(fast, model, batch)
    plans = plan_of(fast)
    said = [str(w.message) for w in warned if issubclass(w.category, FusionWarning)]
    lines = [text.splitlines()[0] for text in said if "its clusters run as ATen ops" not in text]
    count = {"graphs": len(plans), "kernels": sum(len(p.clusters) for p in plans)}
    return result, count | ({"warnings": lines} if lines else {})


def other(model: nn.Module, batch: Batch) -> str:
    """Return the meaning of a failure of ours: whether TorchDynamo and AOTAutograd alone fail as well."""
    torch._dynamo.reset()
    try:
        step(torch.compile(model, backend="aot_eager"), model, batch)
    except Exception:
        return OTHER
    return FAILS


# -- a process for each -----------------------------------------------------------------------------------


def rows_of(
    names: Sequence[str], options: argparse.Namespace, examine: Callable[..., dict[str, Any]] = examine
) -> Iterator[dict[str, Any]]:
    """Yield the rows as they are ready; what takes more processor time than the budget fails."""
    # Children of a process that has everything imported, and no threads and no GPU.
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])

    def row_of(name: str) -> dict[str, Any]:
        row = {"architecture": name, "backend": options.backend, "status": FAILS}
        try:
            with ProcessPoolExecutor(1, context, limit, (options.budget,)) as process:
                return process.submit(examine, name, options.backend, options.device).result()
        except BrokenProcessPool:
            return row | {"reason": f"took more than {options.budget:.0f} s, or crashed"}
        except Exception as error:
            return row | {"reason": reason(error)}

    threads = ThreadPoolExecutor(max(options.jobs, 1))
    try:
        for row in as_completed([threads.submit(row_of, name) for name in names]):
            yield row.result()
    finally:
        threads.shutdown(cancel_futures=True)


def limit(budget: float) -> None:
    """Prepare a process for one architecture: the kernel ends it after its seconds."""
    used = int(time.process_time())
    resource.setrlimit(resource.RLIMIT_CPU, (used + int(budget), used + int(budget) + 5))
    signal.alarm(max(int(PATIENCE * budget), 1))
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    torch._logging.set_logs(dynamo=logging.ERROR, inductor=logging.ERROR)
    warnings.simplefilter("ignore")


# -- the command ------------------------------------------------------------------------------------------


def describe(row: Mapping[str, Any]) -> str:
    text = f"{row['architecture']:<32} {row['status']:<10}"
    if "kernels" in row:
        text += f"{row['graphs']:>3} graphs {row['kernels']:>4} kernels {row['seconds']:>6.1f} s"
    if "worst" in row:
        text += f"  {row['worst']:.2f} of the allowed error"
    if row["status"] != SAME and row.get("reason"):
        text += f"  {row['reason']}"
    return text + "".join(f"\n    {line}" for line in row.get("warnings", ()))


def totals(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counted = Counter(row["status"] for row in rows)
    return {status: counted[status] for status in (SAME, DRAWS, DIFFERS, FAILS, OTHER, OUT)}


def main(options: argparse.Namespace) -> Record:
    record = begin("architectures", options)
    names = [name for name in architectures() if re.search(options.filter, name)]
    if options.resume:
        chosen = {*names}
        again = [r for r in record.rows if r["status"] in (DIFFERS, FAILS) and r["architecture"] in chosen]
        record.rows = [r for r in record.rows if r not in again]
        done = {r["architecture"] for r in record.rows}
        names = [name for name in names if name not in done]
    for row in rows_of(names, options):
        print(describe(row), flush=True)
        record.add(row)
    record.summary = totals(record.rows)
    record.write()
    print("\n" + ", ".join(f"{number} {status}" for status, number in record.summary.items()))
    if record.summary[DIFFERS] or record.summary[FAILS]:
        raise SystemExit(1)
    return record
