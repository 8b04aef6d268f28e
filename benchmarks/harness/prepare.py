"""Ours compiled ahead by several processes, so that the device is not held while one compiles.

Each process takes its share of the cases, runs them once, and leaves kernels in Triton's cache on disk. What
their tuning finds is thrown away: they share the device. Peers are not prepared, since they keep what they
have timed beside what they have compiled.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time

LONGEST = 240  # seconds; what is not compiled by then is compiled when it is measured


def prepare(options: argparse.Namespace) -> None:
    """Runs this command `options.jobs` times over, each with its share."""
    print(f"compiling ahead in {options.jobs} processes", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmarks-tuning-") as home:
        shares = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks", *options.arguments, "--warm-caches", "--share", str(k)],
                env=os.environ | {"FUSION_CACHE_DIR": os.path.join(home, str(k))},
                stdout=subprocess.DEVNULL,
            )
            for k in range(options.jobs)
        ]
        for share in shares:
            try:
                share.wait(max(0.1, start + LONGEST - time.monotonic()))
            except subprocess.TimeoutExpired:
                share.kill()
                share.wait()
    failed = sum(share.returncode != 0 for share in shares)
    print(f"compiled ahead in {time.monotonic() - start:.0f} s; {failed} of them failed", flush=True)
