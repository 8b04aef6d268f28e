"""python -m benchmarks models | memory | untuned: whole models, forward, and backward where they train.

Each contender runs in a process of its own, with empty caches. `memory` measures the memory of a step;
`models` also measures times and errors, and `untuned` does so for the rows of `benchmarks/models/untuned.py`.
With `--jobs 8`, eight contenders compile side by side and are measured one by one: the seconds of their
first steps then say nothing.

    python -m benchmarks.models.measure '{"workload": 0, "contender": "ours", ...}'     one, as JSON
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.decoding.decoders import DECODERS
from benchmarks.harness import tables
from benchmarks.harness.accuracy import InFloat64, chance, ratios_to_eager
from benchmarks.harness.contenders import Compile, contenders, eager_ops, recorded_graphs
from benchmarks.harness.processes import my_turn, only
from benchmarks.harness.record import Cell, Record, begin, fill
from benchmarks.harness.tables import Bar, Column, Row, cell_of, figure, geometric_mean, over, timed, value
from benchmarks.harness.timing import device_time, energy_of, host_time, synchronize, wall_time
from benchmarks.models.nets import NETS
from benchmarks.models.untuned import UNTUNED
from benchmarks.models.workloads import WORKLOADS, Batch, Built, Decoder, gradient_for, result_of, step

SETS = {"models": (*WORKLOADS, *NETS), "decode": DECODERS, "untuned": UNTUNED}
SETS["memory"] = SETS["models"]
ALL = (*WORKLOADS, *NETS, *DECODERS, *UNTUNED)
A_RUN = 64  # tokens in a row, as generated: nobody waits between them
Results = dict[str, Tensor]  # what one forward (and backward) computed: result, loss, gradients, by name
FEW_STEPS = 12  # after which a step's memory is what all that follow take: CUDA graphs are tried in them


def results_of(model: nn.Module, called: Any, batch: Batch, train: bool, gradient: Tensor | None) -> Results:
    """Runs `called` (model, or what it was compiled to) without dropout; gradients are those in `model`."""
    model.eval()
    output = step(called, batch, train, gradient)
    tensors = {"result": result_of(output).detach()}
    if train and gradient is None:
        tensors["loss"] = output.loss.detach()
    tensors |= {f"d {n}": p.grad.detach() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return tensors


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
    missing = truth.keys() ^ ours.keys()
    if missing:
        return {"missing": sorted(missing)}
    ratios = ratios_to_eager(ours, eager, truth)
    worst = max(ratios, key=lambda name: ratios[name])
    return {
        "error_to_eager": geometric_mean(ratios.values()),
        "worst_error_to_eager": ratios[worst],
        "worst_tensor": worst,
        "beyond_chance": [name for name in ratios if ratios[name] > chance(truth[name])],
        "tensors_compared": len(ratios),
    }


@dataclass(frozen=True)
class Task:
    """One measurement: a workload by its number, who runs it, and how. memory: that alone."""

    workload: int
    contender: str
    device: str
    quick: bool
    backend: str
    repetitions: int
    check: bool
    memory: bool

    def make(self, **other: Any) -> Built:
        return ALL[self.workload].make(self.device, self.quick, **other)


def measure(task: Task) -> dict[str, Any]:
    """One cell: seconds of the first step, memory, device time by kind, step time, energy, errors."""
    compile_ = contenders(True, task.backend, with_graphs=True)[task.contender]
    cell = step_of(task, compile_)
    if task.check and not task.memory:
        release(torch.device(task.device))
        cell |= errors(task, compile_)
    return cell


def step_of(task: Task, compile_: Compile) -> dict[str, Any]:
    workload, device = ALL[task.workload], torch.device(task.device)
    model, batch = task.make()
    gradient = gradient_for(model, batch) if workload.train else None
    called = compile_(model)

    room = model.length - model.context if isinstance(model, Decoder) else 0
    calls = itertools.count(1)

    def one_step() -> None:
        if isinstance(model, Decoder) and next(calls) % room == 0:
            model.rewind()
        step(called, batch, workload.train, gradient)
        if workload.train:
            model.zero_grad(set_to_none=True)

    def few_steps() -> None:
        for _ in range(FEW_STEPS):
            one_step()

    start = time.perf_counter()
    first = peak_of(one_step, device)
    cell: dict[str, Any] = {"first_step_s": time.perf_counter() - start}
    early = max(first, peak_of(few_steps, device))
    my_turn()
    cell |= memory_of(one_step, device)
    if "peak_gb" in cell:
        cell |= {"first_peak_gb": first / 1e9, "run_peak_gb": max(early / 1e9, cell["peak_gb"])}
    if not task.memory:
        run = A_RUN if isinstance(model, Decoder) else 1
        cell |= times_of(one_step, device, task.repetitions, run)
    if isinstance(model, Decoder):
        cell["token_bytes"] = model.token_bytes()
    return cell | {"eager_ops": eager_ops(called), "recorded": recorded_graphs(called)}


def peak_of(call: Callable[[], None], device: torch.device) -> int:
    """Return the bytes that are allocated at the peak of a call; 0 without a GPU.

    What CUDA graphs allocate while they are captured counts, what they keep from earlier captures does not.
    """
    if device.type != "cuda":
        call()
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    call()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def memory_of(one_step: Callable[[], None], device: torch.device) -> dict[str, float]:
    """Return the GB at the peak of a step and between steps, with what CUDA graphs keep; {} without a GPU.

    reserved_gb: what the process takes of the device at the peak, with what its allocator cannot use.
    """
    if device.type != "cuda":
        return {}
    torch.cuda.empty_cache()
    peak, between = peak_of(one_step, device), torch.cuda.memory_allocated(device)
    kept = of_recordings(device)
    return {
        "peak_gb": (peak + kept) / 1e9,
        "between_gb": (between + kept) / 1e9,
        "recordings_gb": kept / 1e9,
        "reserved_gb": torch.cuda.max_memory_reserved(device) / 1e9,
    }


def of_recordings(device: torch.device) -> int:
    """Bytes that the pools of CUDA graphs hold, for nobody else, beyond what counts as allocated: replays
    allocate nothing."""
    index = device.index or 0
    segments = (s for s in torch.cuda.memory_snapshot() if s["device"] == index)
    pools = [s for s in segments if tuple(s["segment_pool_id"]) != (0, 0)]
    return sum(s["total_size"] - s["allocated_size"] for s in pools)


def times_of(
    one_step: Callable[[], None], device: torch.device, repetitions: int, calls: int
) -> dict[str, Any]:
    joules = energy_of(one_step, device)  # in a second of steps, after which the host is warm
    # A process that has been profiled launches each kernel slower from then on: the clock comes before.
    times: dict[str, Any] = {
        "step_ms": wall_time(one_step, device, repetitions, calls) * 1e3,
        "host_ms": host_time(one_step, device, calls=1) * 1e3,
    }
    measured = device_time(one_step, device, repetitions)
    times |= {
        "gpu_ms": measured.seconds * 1e3,
        "kernels": measured.kernels,
        "by_kind_ms": {kind: seconds * 1e3 for kind, seconds in measured.by_kind.items()},
        "top_kernels_ms": {n[:120]: s * 1e3 for n, s in list(measured.names.items())[:12]},
    }
    return times if joules is None else times | {"joules": joules}


def errors(task: Task, compile_: Compile) -> dict[str, Any]:
    """Compare with eager, and with the same in the workload's exact dtype, under one gradient and weights."""
    workload, device = ALL[task.workload], torch.device(task.device)
    model, batch = task.make()
    weights: Mapping[str, Tensor] = model.state_dict()
    gradient = gradient_for(model, batch) if workload.train else None
    model, batch = task.make()
    eager = results_of(model, model, batch, workload.train, gradient)
    dtype = torch.float64 if task.quick else workload.exact
    model, _ = task.make(dtype=dtype, weights=weights)
    wide = None if gradient is None else gradient.to(dtype)
    with InFloat64() if dtype is torch.float64 else nullcontext():
        exact = results_of(model, model, cast(batch, dtype), workload.train, wide)
    del model, weights
    release(device)
    model, batch = task.make()
    ours = results_of(model, compile_(model), batch, workload.train, gradient)
    return compare(ours, eager, exact)


def release(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# Rows are held to bars, and shown in a table.

CONTENDERS = ("eager", "compile", "graphs", "autotune", "ours")
PEERS = CONTENDERS[1:-1]  # forms of torch.compile
FASTER = 1.15  # than the best form of torch.compile, by wall time
NET_FASTER = 1.1  # of a row that is a "net", which is held to this and to the memory of others
BESIDE = 1.2  # times what contractions and attention take, by wall time
SHORT_MS = 5.0  # of GPU time: below, the host decides
HOST = 1.1  # times the GPU time, where the host decides
ERROR = 1.0  # of eager's, geometric mean over all results


def ratio(row: Row, other: str, key: str = "gpu_ms") -> float | None:
    """A peer's figure over ours: above 1, ours takes less. "best" is torch.compile's best form by `key`."""
    return over(value(row, PEERS if other == "best" else other, key), value(row, "ours", key))


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Geometric means of the peers' figures over ours, where both were measured."""
    pairs = itertools.product(("gpu_ms", "step_ms", "peak_gb", "joules"), ("eager", "compile", "best"))
    return tables.means(
        rows, {f"{key} vs {other}": functools.partial(ratio, other=other, key=key) for key, other in pairs}
    )


def bars(row: Row) -> Iterator[Bar]:
    ours = cell_of(row, "ours")
    bar = NET_FASTER if row.get("net") else FASTER
    yield from tables.at_least("wall time, x torch.compile", ratio(row, "best", "step_ms"), bar)
    if "by_kind_ms" in ours and "step_ms" in ours and not row.get("net"):
        least = sum(ms for kind, ms in ours["by_kind_ms"].items() if kind != "rest")
        if ours["gpu_ms"] < SHORT_MS:
            yield from tables.at_most("wall time / GPU time", ours["step_ms"] / ours["gpu_ms"], HOST)
        elif least:
            beside = ours["step_ms"] / least
            yield from tables.at_most("wall time / contractions and attention", beside, BESIDE)
    for other in ("eager", "best"):
        yield from tables.at_most(f"peak memory / {other}'s", over(1, ratio(row, other, "peak_gb")), 1)
    most = over(value(row, "ours", "run_peak_gb"), value(row, CONTENDERS[:-1], "run_peak_gb"))
    yield from tables.at_most("peak of all steps, the first one included / the best peer's", most, 1)
    yield from tables.at_most("memory between steps / eager's", over(1, ratio(row, "eager", "between_gb")), 1)
    yield from tables.at_most("error / eager's", ours.get("error_to_eager"), ERROR)


def describe(cell: Mapping[str, Any]) -> str:
    if "failed" in cell:
        return cell["failed"]
    parts: list[str] = []
    if "gpu_ms" in cell:
        kinds = ", ".join(f"{kind} {ms:.2f}" for kind, ms in sorted(cell["by_kind_ms"].items()))
        host = f", host {cell['host_ms']:.2f}" if "host_ms" in cell else ""
        parts.append(f"step {cell['step_ms']:.2f} ms, GPU {cell['gpu_ms']:.2f} ({kinds}){host}")
        parts.append(f"{cell['kernels']} kernels")
    parts.append(f"first {cell['first_step_s']:.1f} s")
    optional = (
        ("peak_gb", "peak {peak_gb:.2f} GB, between steps {between_gb:.2f}"),
        ("reserved_gb", "reserved {reserved_gb:.2f}"),
        (
            "first_peak_gb",
            "first step's peak {first_peak_gb:.2f}, of all steps {run_peak_gb:.2f}, "
            "CUDA graphs keep {recordings_gb:.2f}",
        ),
        ("joules", "{joules:.2f} J"),
        ("error_to_eager", "error/eager {error_to_eager:.2f} (worst {worst_error_to_eager:.2f})"),
        ("missing", "MISSING {missing}"),
    )
    return ", ".join([*parts, *(text.format(**cell) for key, text in optional if cell.get(key) is not None)])


def memory(cell: Mapping[str, Any]) -> str:
    held = f" ({cell['between_gb']:.2f})" if "between_gb" in cell else ""
    return f"{cell['peak_gb']:.2f}{held}" if "peak_gb" in cell else "-"


def early(cell: Mapping[str, Any]) -> str:
    figures = [cell.get(key) for key in ("first_peak_gb", "run_peak_gb")]
    return "-" if None in figures else "{:.2f} ({:.2f})".format(*figures)


# Wall times beside GPU times, peak memory and what is held between
COLUMNS: tuple[Column, ...] = (
    ("workload", lambda row: row["workload"]),
    *((f"{n} ms (GPU)", lambda row, n=n: timed(cell_of(row, n))) for n in CONTENDERS),
    *((f"{n} GB (held)", lambda row, n=n: memory(cell_of(row, n))) for n in CONTENDERS),
    *(
        (f"{n} GB in step 1 (any step)", lambda row, n=n: early(cell_of(row, n)))
        for n in ("eager", "compile", "ours")
    ),
    ("x best compile", lambda row: figure(ratio(row, "best", "step_ms"))),
    ("x eager", lambda row: figure(ratio(row, "eager", "step_ms"))),
    ("joules x compile", lambda row: figure(ratio(row, "compile", "joules"))),
    ("error", lambda row: figure(value(row, "ours", "error_to_eager"))),
)


def missed(rows: Sequence[Row]) -> list[str]:
    """Bars that are not met, a line each."""
    return [f"{row['workload']}: {line}" for row in rows for line in tables.missed(bars(row))]


def show(rows: Sequence[Row]) -> str:
    held = tables.counted(bar for row in rows for bar in bars(row))
    text = tables.table(*tables.lines_of(COLUMNS, rows))
    return "\n".join([text, held, *(f"  not {line}" for line in missed(rows))])


def cells_of(options: argparse.Namespace) -> list[Cell]:
    names = contenders(options.autotune, options.backend, options.only, with_graphs=True)
    decoding, cells = options.benchmark == "decode", list[Cell]()
    for number, workload in enumerate(ALL):
        if not re.search(options.filter, workload.name) or workload not in SETS[options.benchmark]:
            continue
        net = {"workload": workload.name, "net": workload in NETS}
        row = {"case": workload.name, "phase": "token"} if decoding else net
        for name in names:
            task = Task(
                number, name, options.device, options.quick, options.backend, options.repetitions,
                check=not options.no_check, memory=options.benchmark == "memory",
            )  # fmt: skip
            cells.append(Cell(workload.name, name, row, vars(task)))
    return cells


def main(options: argparse.Namespace) -> Record:
    record = begin(options.benchmark, options)
    figure = "peak_gb" if options.benchmark == "memory" else "step_ms"
    fill(record, cells_of(options), figure, "benchmarks.models.measure", options, describe)
    return record.finish(means(record.rows), show(record.rows), "geometric mean, {}: {:.2f}x")


if __name__ == "__main__":
    only(lambda task: measure(Task(**task)))
