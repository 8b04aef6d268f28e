"""python -m benchmarks kernels|sweep|models|memory|decode|optimizer|architectures|overhead|readme|..."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch

BENCHMARKS = {
    "kernels": "benchmarks.kernels.measure",
    "sweep": "benchmarks.kernels.sweep",
    "depthwise": "benchmarks.kernels.depthwise",
    "descriptors": "benchmarks.kernels.descriptors",
    "schedules": "benchmarks.kernels.schedules",
    "models": "benchmarks.models.measure",
    "memory": "benchmarks.models.measure",
    "untuned": "benchmarks.models.measure",
    "decode": "benchmarks.decoding.decode",
    "optimizer": "benchmarks.optimizer.measure",
    "architectures": "benchmarks.numerics.architectures",
    "channel-order": "benchmarks.kernels.channel_order",
    "compile-time": "benchmarks.compile_time.measure",
    "overhead": "benchmarks.kernels.overhead",
    "readme": "benchmarks.pages.readme",
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--json", type=Path, help="where the results go, row by row")
    parser.add_argument("--filter", default="", help="only rows whose name matches this regular expression")
    parser.add_argument(
        "--family", default="", help="kernels: only families whose name matches this expression"
    )
    parser.add_argument(
        "--resume", action="store_true", help="keep what --json has; ours only of this commit"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the harness")
    parser.add_argument("--autotune", action="store_true", help="also max-autotune (kernels: without graphs)")
    parser.add_argument(
        "--no-check", action="store_true", help="models: leave out the comparison of gradients"
    )
    parser.add_argument("--only", default="", help="only contenders whose name matches this expression")
    parser.add_argument("--backend", default="auto", help="ours: auto, interpret or eager")
    parser.add_argument("--budget", type=float, default=90, help="seconds for one contender in one row")
    parser.add_argument(
        "--within",
        type=float,
        default=math.inf,
        help="models, optimizer: seconds after which no cell is begun",
    )
    parser.add_argument("--limit", type=int, default=40, help="schedules: how many of the grid to begin with")
    parser.add_argument(
        "--from", type=Path, dest="timed", help="schedules: rank those that this file has timed; no GPU"
    )
    parser.add_argument("--repetitions", type=int, default=20, help="timed calls, of which the median counts")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--jobs",
        type=int,
        default=0,
        help="kernels, sweep: processes that compile ours ahead; models, architectures: at once",
    )
    parser.add_argument("--share", type=int, help=argparse.SUPPRESS)  # which of those this one is
    parser.add_argument("--warm-caches", action="store_true", help="use the caches that are there")
    given = sys.argv[1:] if arguments is None else list(arguments)
    options = parser.parse_args(given)
    options.arguments = given  # what the processes that compile ahead are called with
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as home:
        if not options.warm_caches:
            # Compile seconds mean nothing with somebody else's artefacts on disk.
            for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSION_CACHE_DIR"):
                os.environ[variable] = str(Path(home) / variable.lower())
        import_module(BENCHMARKS[options.benchmark]).main(options)


if __name__ == "__main__":
    main()
