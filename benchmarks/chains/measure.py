"""python -m benchmarks chains: attention in forms that PyTorch has no call for, forward and with gradients.

Each variant (`variants.py`) at one or two of the lengths 1024, 4096 and 16384, in bfloat16: this project's
nests beside torch.compile and, where it can say the variant, FlexAttention. GPU time of a call, peak memory
beyond its inputs, and the largest error beside eager in float32, as a part of the largest value. `--within`
says after how many seconds no row is begun; a row takes half a minute. All contenders compute the same
function: where a model puts tokens before heads behind its attention, FlexAttention's result is copied so.
None records CUDA graphs, which copy a call's inputs: a model's step copies them once, and not for each layer.
"""

from __future__ import annotations

import argparse
import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import fusion_compiler as fc
from benchmarks.chains.variants import VARIANTS, Shape, Variant
from benchmarks.harness.contenders import inductor
from benchmarks.harness.record import Record, begin, reason
from benchmarks.harness.tables import Row, cell_of, figure, geometric_mean, over, table
from benchmarks.harness.timing import budget, device_time

LENGTHS = ((1024, 16384), (4096,), (1024, 4096))  # of the variants in turn
TOKENS, HEADS = 16384, 8
MOST_EXACT = 4096  # the longest rows of which eager has room for scores in float32
WARM = 8  # calls before the time is taken: some of them tune kernels, and record CUDA graphs
PEERS = ("compile", "flex")
PHASES = ("forward", "forward + backward")
Call = Callable[[], list[Tensor]]


def cases(options: argparse.Namespace) -> Iterator[tuple[Variant, Shape]]:
    for position, variant in enumerate(VARIANTS):
        for length in (64,) if options.quick else LENGTHS[position % len(LENGTHS)]:
            shape = Shape(
                max(1, TOKENS // length), HEADS, length, dtype=torch.bfloat16, device=options.device
            )
            if options.quick:
                shape = replace(shape, batch=1, heads=4, width=8, values=8)
            sizes = {} if options.quick and "width" in dict(variant.sizes) else dict(variant.sizes)
            yield variant, replace(shape, **sizes)


def has_tokens_first(variant: Variant) -> bool:
    """True if a variant's result has the tokens before the heads, as a model's next layer reads it."""
    shape = Shape(1, 2, 8, 16, 16)
    return variant.code(*shape.inputs(), *variant.more(shape)).shape[1] == shape.length


def flexible(variant: Variant, more: Sequence[Tensor]) -> Callable[..., Tensor]:
    """Return FlexAttention of a variant; its mask is built before, and not timed."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    assert variant.flex is not None
    score, mask = variant.flex(*more)
    turned = has_tokens_first(variant)

    def attend(q: Tensor, k: Tensor, v: Tensor, *_: Tensor, blocks: Any = None) -> Tensor:
        scale = 1.0 if "T5" in variant.name else None
        grouped = q.shape[1] != k.shape[1]
        result: Any = flex_attention(q, k, v, score, blocks, scale, enable_gqa=grouped)
        return result.transpose(1, 2).contiguous() if turned else result

    compiled = torch.compile(attend, dynamic=False)

    def call(q: Tensor, k: Tensor, *others: Tensor) -> Tensor:
        if "blocks" not in blocks:
            sizes = (q.shape[0], None, q.shape[2], k.shape[2])
            blocks["blocks"] = None if mask is None else create_block_mask(mask, *sizes, device=q.device)
        return compiled(q, k, *others, **blocks)

    blocks: dict[str, Any] = {}
    return call


def calls_of(code: Callable[..., Tensor], inputs: Sequence[Tensor], phase: str) -> Call:
    """Return a call of a compiled function, forward alone or with the gradients of all trained inputs."""
    trained = [x for x in inputs if x.requires_grad]

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [code(*inputs)]

    def both() -> list[Tensor]:
        result = code(*inputs)
        return [result, *torch.autograd.grad(result, trained, result.detach())]

    return forward if phase == PHASES[0] else both


def error_of(results: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Return the largest error of the results, each as a part of its largest exact value. In some variants
    heads and features are one dimension."""
    parts = list[float]()
    for one, other in zip(results, exact, strict=True):
        value = one.detach().reshape(other.shape).float()
        parts.append(float((value - other).abs().max() / other.abs().max()))
    return max(parts)


def measured(call: Call, exact: Sequence[Tensor] | None, options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    began = time.perf_counter()
    results = call()
    cell: dict[str, Any] = {"first_s": time.perf_counter() - began}
    if exact is not None:
        cell["error"] = error_of(results, exact)
    del results
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        cell["peak_mb"] = (torch.cuda.max_memory_allocated(device) - before) / 1e6
    timed = device_time(call, device, options.repetitions, warmup=WARM)
    return cell | {"ms": 1e3 * timed.seconds, "kernels": timed.kernels}


def compiled_by(
    name: str, variant: Variant, more: Sequence[Tensor], backend: Any
) -> Callable[..., Tensor] | None:
    """Return a variant as a contender computes it; None if FlexAttention cannot say it."""
    if name == "flex":
        return None if variant.flex is None else flexible(variant, more)
    if name == "compile":
        return inductor(variant.code)
    return fc.compile(variant.code, backend=backend, cudagraphs=False)


def fill_row(row: dict[str, Any], variant: Variant, shape: Shape, options: argparse.Namespace) -> None:
    """Measure all contenders of a row."""
    more = list(variant.more(shape))
    inputs = [*shape.inputs(), *more]
    exact = None
    if shape.length <= MOST_EXACT and "dropout" not in variant.name:
        wide = [
            x.detach().float().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs
        ]
        exact = calls_of(variant.code, wide, row["phase"])()
    for name in (*PEERS, "ours"):
        if not re.search(options.only, name) or "ms" in row["cells"].get(name, {}):
            continue
        torch._dynamo.reset()
        try:
            with budget(options.budget):
                code = compiled_by(name, variant, more, options.backend)
                if code is not None:
                    row["cells"][name] = measured(calls_of(code, inputs, row["phase"]), exact, options)
        except Exception as error:
            row["cells"][name] = {"failed": reason(error)}


def best_peer(row: Row) -> float | None:
    """Return the milliseconds of the faster peer."""
    times = [cell_of(row, name).get("ms") for name in PEERS]
    return min((t for t in times if t is not None), default=None)


def ratio(row: Row) -> float | None:
    return over(best_peer(row), cell_of(row, "ours").get("ms"))


def show(rows: Sequence[Row]) -> str:
    """Return a table: milliseconds, and how many times faster ours is than the faster peer."""
    lines: list[list[str]] = []
    for row in rows:
        cells = [cell_of(row, name) for name in (*PEERS, "ours")]
        times = ["failed" if "failed" in c else figure(c.get("ms"), ".3f") for c in cells]
        peaks, errors = (
            [figure(c.get(key), form) for c in cells[::2]]
            for key, form in (("peak_mb", ".0f"), ("error", ".1e"))
        )
        name = f"{row['variant']}, {row['length']}, {row['phase']}"
        lines.append([name, *times, figure(ratio(row)), " / ".join(peaks), " / ".join(errors)])
    head = ["variant, length, phase", "compile ms", "flex ms", "ours ms", "times faster", "MB", "error"]
    return table(head, lines)


def main(options: argparse.Namespace) -> Record:
    record, began = begin("chains", options), time.perf_counter()
    for variant, shape in cases(options):
        for phase in PHASES:
            if not re.search(options.filter, f"{variant.name}, {phase}"):
                continue
            if time.perf_counter() - began > options.within:
                break
            row = record.row({"variant": variant.name, "length": shape.length, "phase": phase})
            fill_row(row, variant, shape, options)
            record.write()
            print(show([row]).splitlines()[-1], flush=True)
    faster = functools.partial(filter, None)
    by_phase = {p: [ratio(r) for r in record.rows if r["phase"] == p] for p in PHASES}
    summary = {f"times faster, {p}": geometric_mean(rates) for p, rates in by_phase.items() if any(rates)}
    summary |= {f"least, {p}": min(faster(rates)) for p, rates in by_phase.items() if any(rates)}
    return record.finish(summary, show(record.rows))
