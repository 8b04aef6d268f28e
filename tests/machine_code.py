"""python -m tests.machine_code FILE: count the machine code of kernels for an H200, or print what changed.

The first run writes the instructions of each sort, the registers and the spilled bytes to FILE, by kernel.
Later runs print the kernels whose counts differ, and those that only one of the runs has. No GPU is needed.
Equal counts are no proof that a kernel is as fast as before: the order of its instructions is not compared.

The kernels are the first candidates of the golden cases and of products of few rows, and optimizers' steps.
With --benchmarks they are those of the cases of `python -m benchmarks kernels`.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import fusion_compiler as fc
from benchmarks.kernels.measure import leaves
from benchmarks.kernels.sizes import ALL_CASES
from fusion_compiler.compiler.runners import emit_cluster
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Kernel
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ir.plan_text import execution_order
from fusion_compiler.optimizer import launch
from fusion_compiler.optimizer.kernel import kernel_of
from fusion_compiler.runtime.target import compile_for
from tests.disassembly import instructions
from tests.golden_cases import DEVICE, MAKERS, programs_of

TARGET = "sm_90"
ROWS = (1, 2, 4, 8, 16)
MORE = 0.02  # share of instructions by which a kernel may differ without a mark


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def gated(x: Tensor, norm: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    x = rms_norm(x, norm)
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def of_columns(x: Tensor, matrix: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    return torch.addmm(bias, F.layer_norm(x, x.shape[-1:]), matrix) + residual


def of_bytes(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, matrix.to(x.dtype)) * scale


def of_nibbles(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
    low, high = (matrix & 15).to(x.dtype) - 8, (matrix >> 4).to(x.dtype) - 8
    rows = len(matrix)
    scaled = torch.stack((low, high), -1).reshape(rows, -1, 128) * scale[:, :, None]
    return F.linear(x, scaled.reshape(rows, -1))


def products() -> Iterator[tuple[str, Callable[..., Tensor], list[Tensor]]]:
    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype)

    for rows in ROWS:
        x = empty(rows, 2048)
        yield f"linear, {rows} rows", F.linear, [x, empty(2048, 2048)]
        yield f"linear of odd sizes, {rows} rows", F.linear, [empty(rows, 2003), empty(2001, 2003)]
        yield f"gated, {rows} rows", gated, [x, empty(2048), empty(8192, 2048), empty(8192, 2048)]
        others = empty(1024, 4096), empty(4096), empty(rows, 4096)
        yield f"of columns, {rows} rows", of_columns, [empty(rows, 1024), *others]
        yield f"of bytes, {rows} rows", of_bytes, [x, empty(2048, 2048, dtype=torch.int8), empty(2048)]
        nibbles = empty(2048, 1024, dtype=torch.uint8)
        yield f"of nibbles, {rows} rows", of_nibbles, [x, nibbles, empty(2048, 16)]


def steps() -> Iterator[tuple[str, Kernel]]:
    """Yield the kernels of optimizers' steps, of a layer in float32 and in bfloat16."""
    for dtype in (torch.float32, torch.bfloat16):
        for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.RAdam):
            layer, emitted = nn.Linear(300, 10).to(dtype), list[Kernel]()

            def kept(*args: Any, emitted: list[Kernel] = emitted) -> Kernel:
                emitted.append(kernel_of(*args))
                return emitted[-1]

            optimizer = kind(layer.parameters(), lr=0.1)
            with patch.object(launch, "kernel_of", kept):
                fused = fc.fuse_optimizer(layer, optimizer, backend="interpret")
                for _ in range(2):  # a parameter's first step is the class's own
                    for parameter in layer.parameters():
                        parameter.grad = torch.randn_like(parameter)
                    optimizer.step()
            assert emitted, fused
            yield from ((f"{kernel.name} in {dtype}", kernel) for kernel in emitted)


def first_candidates(case: str, plans: Iterable[FusionPlan]) -> Iterator[tuple[str, Kernel]]:
    """Yield the kernels of each cluster's first candidate with a name."""
    device = device_spec(DEVICE)
    for plan in plans:
        for cluster in execution_order(plan):
            program, *_ = emit_cluster(canonical(cluster, plan.dag), cluster, plan.dag, device)
            yield from ((f"{case}: {kernel.name}", kernel) for kernel in program.kernels)


def kernels() -> Iterator[tuple[str, Kernel]]:
    """Yield the case and name of each kernel, and the kernel."""
    yield from steps()
    for case in MAKERS:
        for program in programs_of(case):
            yield from ((f"{case}: {kernel.name}", kernel) for kernel in program.kernels)
    for case, fn, inputs in products():
        with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            plans = fc.explain(fn, *map(mode.from_tensor, inputs), device=DEVICE).plans
        yield from first_candidates(case, plans)


def benchmarked() -> Iterator[tuple[str, Kernel]]:
    """Yield the kernels of each benchmark case, forward and backward, as `kernels` does."""
    for case in ALL_CASES:
        torch._dynamo.reset()
        with FakeTensorMode(allow_non_fake_inputs=True), torch.set_grad_enabled(bool(case.differentiate)):
            inputs = leaves(case.inputs("cpu"), case.differentiate)
            plans = fc.explain(case.fn, *inputs.values(), device=DEVICE).plans
        yield from first_candidates(case.name, plans)


def summary(kernel: Kernel) -> dict[str, Any]:
    binary = compile_for(kernel, TARGET)
    sorts = Counter(name.partition(".")[0] for name in instructions(kernel, TARGET))
    counts = dict(sorted(sorts.items()))
    return {"registers": binary.registers, "spills": binary.spills, "instructions": counts}


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return what changed of a kernel, with a mark if it has more instructions by a share of MORE, or spills
    more."""
    counts = [sum(each["instructions"].values()) for each in (before, now)]
    mark = "! " if counts[1] > (1 + MORE) * counts[0] or now["spills"] > before["spills"] else "  "
    sorts = {*before["instructions"], *now["instructions"]}
    pairs = {s: [each["instructions"].get(s, 0) for each in (before, now)] for s in sorted(sorts)}
    changed = ", ".join(f"{s} {a} to {b}" for s, (a, b) in pairs.items() if a != b)
    registers = f"registers {before['registers']} to {now['registers']}"
    return f"{mark}{counts[0]} to {counts[1]} instructions, {registers}: {changed}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--filter", default="", help="cases and kernels that match this regular expression")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--benchmarks", action="store_true", help="the kernels of `benchmarks kernels`")
    options = parser.parse_args()
    named: dict[str, Kernel] = {}
    for name, kernel in benchmarked() if options.benchmarks else kernels():
        if re.search(options.filter, name):
            number = sum(other.partition(" #")[0] == name for other in named)
            named[f"{name} #{number}" if number else name] = kernel
    with ProcessPoolExecutor(options.jobs) as pool:
        now = dict(zip(named, pool.map(summary, named.values()), strict=True))
    if not options.file.exists():
        options.file.write_text(json.dumps(now, indent=1))
        print(f"{len(now)} kernels")
        return 0
    every = json.loads(options.file.read_text())
    before = {name: each for name, each in every.items() if re.search(options.filter, name)}
    both = [name for name in before if name in now]
    others = {name: difference(before[name], now[name]) for name in both if before[name] != now[name]}
    for name, text in others.items():
        print(f"{name}\n  {text}")
    unpaired = sorted(before.keys() ^ now.keys())
    for name in unpaired:
        print(f"{name}\n  ! only {'before' if name in before else 'now'}")
    print(f"{len(now)} kernels, {len(both) - len(others)} of {len(both)} as before")
    return bool(unpaired) or any(text.startswith("!") for text in others.values())


if __name__ == "__main__":
    raise SystemExit(main())
