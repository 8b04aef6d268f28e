"""python -m benchmarks products: matrix products with many rows, alone and in one kernel with what follows.

Alone they are measured beside cuBLAS. The others are 24 shapes of models, by five contenders: "library" is
cuBLAS and our kernel of the rest, "fused" one kernel of both, "chosen" what products="measured" takes of
these two, "compile" torch.compile, and "autotune" torch.compile with max-autotune. Contenders of
torch.compile come last, and none is begun after --within seconds (450 if it is not given).
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fusion_compiler as fc
from benchmarks.harness.accuracy import InFloat64
from benchmarks.harness.contenders import Compile, autotune, eager_ops, inductor
from benchmarks.harness.record import Record, begin, reason
from benchmarks.harness.tables import (
    Bar,
    Row,
    at_least,
    at_most,
    cell_of,
    figure,
    geometric_mean,
    lines_of,
    over,
    table,
    value,
    verdicts,
)  # fmt: skip
from benchmarks.harness.timing import budget, copies_for, device_time
from fusion_compiler.compiler.runners import Runners, Target
from fusion_compiler.errors import WarnOnce
from fusion_compiler.ir.dag import build
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ops.decompositions.table import decomposition_table
from fusion_compiler.options import Options
from fusion_compiler.passes.fuse.candidates import Candidates
from fusion_compiler.passes.fuse.cluster import cluster_of
from fusion_compiler.runtime.debug import Debug, DebugSettings
from fusion_compiler.runtime.stages import Stages
from fusion_compiler.support.store import Store

aten = torch.ops.aten
WITHIN = 450.0  # seconds
LOST = 1.02  # times the library's time that the chosen way may take: timing noise
MOST_ERROR = 1.1  # times eager's error
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """A case is a function of matrices in bfloat16.

    shapes: of its arguments; those of one dimension are vectors. bar: the most that one kernel may take of
    the time of the library's product and our kernel, or None.
    """

    name: str
    fn: Callable[..., Any]
    shapes: tuple[Shape, ...]
    bar: float | None = None

    def inputs(self, device: str, quick: bool) -> list[Tensor]:
        """Return random arguments; quick: with a small part of each dimension."""
        small = {n: max(24, n // 256) for shape in self.shapes for n in shape}
        shapes = [tuple(small[n] if quick else n for n in shape) for shape in self.shapes]
        tensors = [torch.randn(shape, device=device) for shape in shapes]
        scaled = (t / t.shape[-1] ** 0.5 if i == 1 else t for i, t in enumerate(tensors))
        return [t.to(torch.bfloat16) for t in scaled]


def product(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w)


def projections(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.linear(x, w, bias)


def gelu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, bias))


def tanh_gelu(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, bias), approximate="tanh")


def gelu_in_training(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    before = F.linear(x, w, bias)
    return before, F.gelu(before)


def gelu_gradient(dy: Tensor, w: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    dx = aten.gelu_backward.default(dy @ w, before)
    return dx, dx.float().sum(0)


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def swiglu_in_training(x: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    a, b = F.linear(x, gate), F.linear(x, up)
    return a, b, F.silu(a) * b


def residual(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(x, w)


def biased_residual(x: Tensor, w: Tensor, bias: Tensor, r: Tensor) -> Tensor:
    return r + F.linear(x, w, bias)


def _up(name: str, fn: Callable[..., Any], rows: int, k: int, n: int, bar: float | None = None) -> Case:
    return Case(name, fn, ((rows, k), (n, k), (n,)), bar)


def _gate(name: str, fn: Callable[..., Any], rows: int, k: int, n: int, bar: float | None = None) -> Case:
    return Case(name, fn, ((rows, k), (n, k), (n, k)), bar)


ALONE = (
    Case("4096 x 4096 x 4096", product, ((4096, 4096), (4096, 4096)), 0.92),
    Case("8192 x 1024 x 4096", product, ((8192, 1024), (4096, 1024)), 0.92),
)
VIT = (12608, 768)
# Rows are tokens: sequences x their length.
FUSED = (
    _up("bias + GELU, BERT-large, 32 x 512", gelu, 16384, 1024, 4096, 0.9),
    _up("bias + GELU, BERT-large, 16 x 512", gelu, 8192, 1024, 4096, 0.9),
    _up("bias + GELU, BERT-large, 8 x 128", gelu, 1024, 1024, 4096),
    _up("bias + GELU, BERT-base, 32 x 512", gelu, 16384, 768, 3072, 0.9),
    _up("bias + GELU, ViT-B/16, 64 x 197", gelu, 12608, 768, 3072, 0.9),
    _up("bias + GELU, ViT-L/16, 32 x 197", gelu, 6304, 1024, 4096, 0.9),
    _up("bias + GELU, Whisper-small, 8 x 1500", gelu, 12000, 768, 3072, 0.9),
    _up("bias + GELU, Whisper-medium, 4 x 1500", gelu, 6000, 1024, 4096, 0.9),
    _up("bias + tanh GELU, GPT-2 medium, 8 x 1024", tanh_gelu, 8192, 1024, 4096),
    _up("bias + GELU and its operand, BERT-large", gelu_in_training, 16384, 1024, 4096),
    Case("GELU gradient, BERT-large", gelu_gradient, ((16384, 1024), (1024, 4096), (16384, 4096))),
    Case("GELU gradient, ViT-B/16", gelu_gradient, ((12608, 768), (768, 3072), (12608, 3072))),
    _gate("SwiGLU, Llama-2-7B, 2048 tokens", swiglu, 2048, 4096, 11008, 0.9),
    _gate("SwiGLU, Llama-2-7B, 8192 tokens", swiglu, 8192, 4096, 11008, 0.9),
    _gate("SwiGLU, Llama-3-8B, 2048 tokens", swiglu, 2048, 4096, 14336, 0.9),
    _gate("SwiGLU, Llama-3-8B, 8192 tokens", swiglu, 8192, 4096, 14336, 0.9),
    _gate("SwiGLU, Llama-3.2-1B, 8192 tokens", swiglu, 8192, 2048, 8192, 0.9),
    _gate("SwiGLU and its operands, Llama-3-8B", swiglu_in_training, 4096, 4096, 14336),
    Case("down + residual, Llama-2-7B", residual, ((8192, 11008), (4096, 11008), (8192, 4096))),
    Case("down + residual, Llama-3-8B", residual, ((8192, 14336), (4096, 14336), (8192, 4096))),
    Case("down + bias + residual, ViT-B/16", biased_residual, ((12608, 3072), (768, 3072), (768,), VIT)),
    Case("out + residual, Llama-3-8B", residual, ((8192, 4096), (4096, 4096), (8192, 4096))),
    _up("QKV + bias, BERT-large", projections, 16384, 1024, 3072),
    _up("QKV + bias, ViT-B/16", projections, 12608, 768, 2304),
)  # fmt: skip


def ours(backend: str, **options: Any) -> Compile:
    return lambda fn: fc.compile(fn, backend=backend, cudagraphs=False, **options)


def alone(fn: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Return a function that computes a product by a kernel of ours, whichever way would be chosen."""

    @functools.cache
    def runner(shapes: tuple[Shape, ...], kind: str) -> tuple[Any, list[int]]:
        with FakeTensorMode():
            fakes = [torch.empty(shape, dtype=torch.bfloat16) for shape in shapes]
            dag = build(make_fx(fn, decomposition_table())(*fakes))
        device = device_spec(torch.device(kind))
        pool = Candidates(dag, device, {}, rounded=False)
        (name,) = (left.subject for left in pool.leftovers)
        cluster = cluster_of("product", (name,), None, [pool.candidate((name,))], pool)
        warned, store = WarnOnce(strict=True), Store()
        debug = Debug(DebugSettings.of(os.environ), warned)
        target = Target(kind, device, "triton" if kind == "cuda" else backend.replace("auto", "eager"))
        runners = Runners(Options.of(strict=True), store, Stages(), debug, warned)
        of_plan, _ = runners.of_plan(FusionPlan("products", dag, (cluster,), device.name), target)
        return of_plan["product"], [dag.inputs.index(name) for name in cluster.inputs]

    def call(*tensors: Tensor) -> Tensor:
        run, places = runner(tuple(tuple(t.shape) for t in tensors), tensors[0].device.type)
        (result,) = run(*(tensors[i] for i in places))
        return result

    return call


def contenders(case: Case, options: argparse.Namespace) -> dict[str, tuple[int, Compile]]:
    """Return the contenders of a case by name, each with its turn: those of a lower number come first."""
    backend = options.backend
    single = case.fn in (product, projections)
    fused: Compile = (lambda fn: alone(fn, backend)) if single else ours(backend, products="always")
    library: Compile = (lambda fn: fn) if single else ours(backend, disable=("products",))
    every = {"library": (0, library), "fused": (0, fused)}
    if not single:
        every["chosen"] = 0, ours(backend, products="measured")
    if case not in ALONE:
        every |= {"compile": (1, inductor), "autotune": (2, autotune)}
    return {name: entry for name, entry in every.items() if re.search(options.only, name)}


def results_of(outputs: Any) -> list[Tensor]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def errors_of(outputs: Any, exact: Sequence[Tensor]) -> list[float]:
    """Return the root mean square errors of results."""
    pairs = zip(results_of(outputs), exact, strict=True)
    return [(result.double() - right).square().mean().sqrt().item() for result, right in pairs]


def measured(case: Case, compile_: Compile, options: argparse.Namespace) -> dict[str, Any]:
    """Return the device time of a contender, and its largest error as a multiple of eager's."""
    device = torch.device(options.device)
    torch._dynamo.reset()
    torch.manual_seed(0)
    inputs = case.inputs(options.device, options.quick)
    start, compiled = time.perf_counter(), compile_(case.fn)
    with torch.no_grad():
        with InFloat64():
            exact = results_of(case.fn(*(x.double() for x in inputs)))
        eager = errors_of(case.fn(*inputs), exact)
        mine = errors_of(compiled(*inputs), exact)
        ready = time.perf_counter() - start
        del exact
        copies = copies_for(device, sum(x.nbytes for x in inputs))
        turns = [inputs, *([x.clone() for x in inputs] for _ in range(copies - 1))]
        turn = iter(range(1 << 30))
        took = device_time(lambda: compiled(*turns[next(turn) % copies]), device, options.repetitions)
    cell: dict[str, Any] = {"us": took.seconds * 1e6, "kernels": took.kernels, "ready": ready}
    cell["error"] = max(a / b if b else float(a > 0) for a, b in zip(mine, eager, strict=True))
    if hasattr(compiled, "plan"):
        cell["decisions"] = [str(d) for p in compiled.plan for d in p.decisions if d.rule == "products"]
        cell["calls"] = eager_ops(compiled)
    return cell


def turns_of(cases: Sequence[Case], options: argparse.Namespace) -> Iterator[tuple[Case, str, Compile]]:
    """Yield what is measured, in order: all of one turn before the next."""
    every = [(turn, case, name, c) for case in cases for name, (turn, c) in contenders(case, options).items()]
    yield from ((case, name, c) for _, case, name, c in sorted(every, key=lambda each: each[0]))


def ratio(row: Row, name: str) -> float | None:
    return over(value(row, name, "us"), value(row, "library", "us"))


def best_peer(row: Row) -> float | None:
    return value(row, ("compile", "autotune"), "us")


def bars(rows: Sequence[Row]) -> Iterator[Bar]:
    by_name = {row["case"]: row for row in rows}
    for case in (c for c in ALONE if c.name in by_name):
        share = over(1.0, ratio(by_name[case.name], "fused"))
        yield from at_least(f"{case.name}: share of cuBLAS", share, case.bar or 0.0)
    ratios: dict[str, float] = {}
    for case in (c for c in FUSED if c.name in by_name):
        fused = ratio(by_name[case.name], "fused")
        if fused is not None:
            ratios[case.name] = fused
        if case.bar is not None:
            yield from at_most(f"{case.name}: fused / library", fused, case.bar)
        yield from at_most(f"{case.name}: chosen / library", ratio(by_name[case.name], "chosen"), LOST)
    if ratios:
        yield from at_least("share of the shapes won", sum(r < 1 for r in ratios.values()) / len(ratios), 0.5)
    for row in rows:
        for name in ("fused", "chosen"):
            error = cell_of(row, name).get("error")
            yield from at_most(f"{row['case']}: error of {name} / eager's", error, MOST_ERROR)


def show(rows: Sequence[Row]) -> str:
    def column(name: str) -> tuple[str, Callable[[Row], str]]:
        return name, lambda row: "failed" if "failed" in cell_of(row, name) else us(row, name)

    def us(row: Row, name: str) -> str:
        return figure(value(row, name, "us"), ".1f")

    names = ("library", "fused", "chosen", "compile", "autotune")
    columns = [("us", lambda row: str(row["case"])), *map(column, names)]
    columns += [("fused / library", lambda row: figure(ratio(row, "fused")))]
    columns += [("fused / best peer", lambda row: figure(over(value(row, "fused", "us"), best_peer(row))))]
    columns += [("error / eager's", lambda row: figure(cell_of(row, "fused").get("error")))]
    return table(*lines_of(columns, rows))


def main(options: argparse.Namespace) -> Record:
    record = begin("products", options)
    chosen = [case for case in (*ALONE, *FUSED) if re.search(options.filter, case.name)]
    rows = [record.row({"case": case.name, "phase": "products"}, shapes=case.shapes) for case in chosen]
    limit = options.within if math.isfinite(options.within) else WITHIN
    deadline = time.perf_counter() + limit
    for case, name, compile_ in turns_of(chosen, options):
        cells = record.row({"case": case.name, "phase": "products"})["cells"]
        if options.resume and record.keeps(cells.get(name, {}), name, "us"):
            continue
        if time.perf_counter() > deadline:
            print(f"not measured: {case.name}, {name}", flush=True)
            continue
        try:
            with budget(options.budget):
                cells[name] = measured(case, compile_, options)
        except Exception as error:
            cells[name] = {"failed": reason(error)}
        cells[name]["commit"] = record.environment["commit"]
        record.write()
        said = cells[name].get("failed") or f"{cells[name]['us']:.1f} us"
        print(f"{case.name}, {name}: {said}", flush=True)
    summary = _summary(rows)
    return record.finish(summary, f"{show(rows)}\n\n{verdicts(bars(rows))}")


def _summary(rows: Sequence[Row]) -> Mapping[str, float]:
    fused = [row for row in rows if row["case"] in {case.name for case in FUSED}]
    means = {name: geometric_mean(ratio(row, name) for row in fused) for name in ("fused", "chosen")}
    return {f"{name} / library": mean for name, mean in means.items() if mean is not None}
