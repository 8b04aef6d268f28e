"""Run a benchmark: python -m benchmarks kernels --filter softmax --json FILE.

CONTRIBUTING.md says what each of them measures, and so does the module that `BENCHMARKS` names for it.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.processes import CACHES

BENCHMARKS = {
    "kernels": "kernels.measure",
    "sweep": "kernels.sweep",
    "depthwise": "kernels.depthwise",
    "descriptors": "kernels.descriptors",
    "products": "kernels.products",
    "schedules": "kernels.schedules",
    "overhead": "kernels.overhead",
    "channel-order": "kernels.channel_order",
    "chains": "chains.measure",
    "models": "models.measure",
    "memory": "models.measure",
    "untuned": "models.measure",
    "fsdp": "models.fsdp",
    "decode": "decoding.decode",
    "generation": "decoding.generation",
    "row-ranges": "decoding.row_ranges",
    "optimizer": "optimizer.measure",
    "compile-time": "compile_time.measure",
    "machines": "machines.cuts",
    "links": "machines.links",
    "uneven": "machines.steps",
    "architectures": "numerics.architectures",
    "readme": "pages.readme",
}


def module_of(benchmark: str) -> Any:
    return import_module(f"benchmarks.{BENCHMARKS[benchmark]}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    words = sys.argv[1:] if arguments is None else list(arguments)
    named = next((name for name in words if name in BENCHMARKS), None)
    about = module_of(named).__doc__ if named and {"-h", "--help"} & {*words} else __doc__
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks", description=about, formatter_class=formatter)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    add = parser.add_argument
    add("--json", type=Path, help="where the results go, row by row")
    add("--filter", default="", help="only rows whose name matches this regular expression")
    add("--family", default="", help="kernels: only families whose name matches this expression")
    add("--only", default="", help="only contenders whose name matches this expression")
    add("--resume", action="store_true", help="keep what --json has; ours only of this commit")
    add("--quick", action="store_true", help="tiny sizes, to try the harness")
    add("--autotune", action="store_true", help="also max-autotune (kernels: without graphs)")
    add("--no-check", action="store_true", help="models: leave out the comparison of gradients")
    add("--backend", default="auto", help="ours: auto, interpret or eager; uneven: gloo or nccl")
    add("--budget", type=float, default=90, help="seconds for one contender in one row")
    add(
        "--within", type=float, default=math.inf,
        help="models, optimizer, chains, uneven: seconds after which no cell is begun",
    )  # fmt: skip
    add("--limit", type=int, default=40, help="schedules: how many of the grid to begin with")
    add("--from", type=Path, dest="timed", help="schedules: rank those that this file has timed; no GPU")
    add("--repetitions", type=int, default=20, help="timed calls, of which the median counts")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add(
        "--jobs", type=int, default=0,
        help="kernels, sweep: processes that compile ours ahead; models, architectures: at once",
    )  # fmt: skip
    sizes = ("tiny", "small", "middle", "large")
    add("--size", choices=sizes, default="middle", help="fsdp, uneven: the model's shape")
    add("--processes", type=int, default=0, help="uneven: processes, each a machine; 0 for 4, or each GPU")
    add("--threads", type=int, default=0, help="uneven: of each process on a CPU; 0 for its share but one")
    add("--share", type=int, help=argparse.SUPPRESS)  # which of those this one is
    add("--warm-caches", action="store_true", help="use the caches that are there")
    options = parser.parse_args(words)
    options.arguments = words  # what the processes that compile ahead are called with
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as home:
        if not options.warm_caches:
            # Compile seconds mean nothing with somebody else's artefacts on disk.
            for variable in CACHES:
                os.environ[variable] = str(Path(home) / variable.lower())
        module_of(options.benchmark).main(options)


if __name__ == "__main__":
    main()
