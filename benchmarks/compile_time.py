"""python -m benchmarks compile-time: seconds until the first step is done, cold and warm.

Each measurement is a process of its own: cold with empty caches on disk, warm with those that the
cold one left. Imports, the model's construction and an eager step before it do not count.

    python -m benchmarks.compile_time <workload> <contender> <device> [quick]     one measurement
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import contenders
from benchmarks.record import ROOT, Record, environment, figure, geometric_mean, table
from benchmarks.timing import synchronize
from benchmarks.workloads import WORKLOADS, Workload, gradient_for, step

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSION_CACHE_DIR")


def first_step_seconds(workload: Workload, contender: str, device: torch.device, quick: bool) -> float:
    """Seconds of compiling and running the first step, less those of an eager step."""
    model, batch = workload.make(device, quick)
    gradient = gradient_for(model, batch) if workload.train else None
    seconds: list[float] = []
    for called in (model, contenders(with_autotune=True)[contender](model)):
        synchronize(device)
        start = time.perf_counter()
        step(called, batch, workload.train, gradient)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
        model.zero_grad(set_to_none=True)
    # The first eager step also loads libraries, so it is repeated.
    start = time.perf_counter()
    step(model, batch, workload.train, gradient)
    synchronize(device)
    return seconds[1] - (time.perf_counter() - start)


def in_a_process(number: int, contender: str, options: argparse.Namespace, home: str) -> float | str:
    """Seconds, or why there are none."""
    command = [sys.executable, "-m", "benchmarks.compile_time", str(number), contender, options.device]
    environ = os.environ | {name: str(Path(home) / name.lower()) for name in CACHES}
    try:
        done = subprocess.run(
            command + ["quick"] * options.quick, cwd=ROOT, env=environ, capture_output=True, text=True,
            timeout=options.budget,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"over {options.budget:.0f} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1][:160] if lines else f"exit status {done.returncode}"
    return float(json.loads(done.stdout.strip().splitlines()[-1]))


def show(rows: list[dict[str, Any]]) -> str:
    names = [*dict.fromkeys(n for r in rows for n in r["cells"])]

    def cell(row: dict[str, Any], name: str, kind: str) -> str:
        value = row["cells"].get(name, {}).get(kind)
        return value if isinstance(value, str) else figure(value, ".1f")

    return table(
        ["workload (seconds)", *(f"{n} {kind}" for n in names for kind in ("cold", "warm"))],
        [[r["workload"], *(cell(r, n, kind)[:24] for n in names for kind in ("cold", "warm"))] for r in rows],
    )


def main(options: argparse.Namespace) -> Record:
    record = Record("compile-time", environment(torch.device(options.device)), options.json)
    names = [n for n in contenders(options.autotune, only=options.only) if n != "eager"]
    for number, workload in enumerate(WORKLOADS):
        if not re.search(options.filter, workload.name):
            continue
        row: dict[str, Any] = {"workload": workload.name, "cells": {}}
        for name in names:
            with tempfile.TemporaryDirectory(prefix="compile-time-") as home:
                row["cells"][name] = {
                    kind: in_a_process(number, name, options, home) for kind in ("cold", "warm")
                }
        record.add(row)
        print(show([row]), flush=True)
    for kind in ("cold", "warm"):
        pairs = [[r["cells"].get(n, {}).get(kind) for n in ("compile", "ours")] for r in record.rows]
        found = [a / b for a, b in pairs if isinstance(a, float) and isinstance(b, float)]
        if found:
            record.summary[f"{kind}: compile / ours"] = geometric_mean(found)
    record.write()
    print("\n" + show(record.rows))
    return record


if __name__ == "__main__":
    chosen = WORKLOADS[int(sys.argv[1])]
    print(
        json.dumps(
            first_step_seconds(chosen, sys.argv[2], torch.device(sys.argv[3]), "quick" in sys.argv[4:])
        )
    )
