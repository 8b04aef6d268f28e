"""Measure in processes of their own: nothing of another's is in their memory, caches or settings."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FUSION_CACHE_DIR")
BYTECODE = {"PYTHONDONTWRITEBYTECODE": ""}  # is kept, as that of an installed package
READY = "ready to measure"
Result = dict[str, Any]
Task = Mapping[str, Any]


def in_turn(
    module: str,
    tasks: Sequence[Mapping[str, Any]],
    seconds: float,
    jobs: int = 1,
    *,
    one_cache: bool = False,
    within: float = math.inf,
) -> Iterator[Result]:
    """Yield what `python -m module <task as JSON>` prints as its last line, JSON, for each task, in order.

    A task that gives no result yields {"failed": why}. Caches are empty, or in the folder that a task has as
    "caches", which the module is not given. So many jobs get ready side by side (`my_turn`), and measure one
    after the other. seconds: of one task, without waiting for its turn. one_cache: processes share what they
    compile. within: seconds from now, after which no task is begun: the last tasks then have no result.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmarks-", ignore_cleanup_errors=True) as shared:
        home = shared if one_cache else None
        for start in range(0, len(tasks), jobs):
            if time.monotonic() - begin > within:
                return
            begun = [_Process(module, task, seconds, home) for task in tasks[start : start + jobs]]
            for process in begun:
                process.prepare()
            for process in begun:
                yield process.measure()


def my_turn() -> None:
    """Wait, in such a process that is ready, until no other one works."""
    print(READY, flush=True)
    sys.stdin.readline()


def only(measure: Callable[[dict[str, Any]], Any]) -> None:
    """Be the main function of such a process, and end it at once: the next one waits for that."""
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)


class _Process:
    """Measure one task in a process of its own, which is killed when its seconds are over."""

    def __init__(self, module: str, task: Task, seconds: float, home: str | None) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="benchmarks-", ignore_cleanup_errors=True)
        arguments = dict(task)
        folder = Path(arguments.pop("caches", None) or home or self._home.name)
        caches = {name: str(folder / name.lower()) for name in CACHES}
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  it lives as long as this
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(arguments)],
            cwd=ROOT, env=os.environ | caches | BYTECODE, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
        )  # fmt: skip
        self._seconds = self._left = seconds
        self._late, self._last = False, ""

    def prepare(self) -> None:
        """Wait until the process is ready, or has ended."""
        self._read(READY)

    def measure(self) -> Result:
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._last == READY:
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            self._read("")
        failed = self._process.wait() != 0
        self._process.stdin.close()
        self._process.stdout.close()
        self._stderr.seek(0)
        said = self._stderr.read().strip().splitlines()
        self._stderr.close()
        self._home.cleanup()
        if self._late:
            return {"failed": f"over {self._seconds:.0f} s"}
        if failed:
            return {"failed": said[-1][:160] if said else f"exit status {self._process.returncode}"}
        return json.loads(self._last)

    def _read(self, last: str) -> None:
        """Read lines until this one or the end, for at most the seconds that are left."""
        assert self._process.stdout is not None
        start = time.monotonic()
        timer = threading.Timer(max(self._left, 0), self._kill)
        timer.start()
        for line in filter(None, map(str.strip, self._process.stdout)):
            self._last = line
            if line == last:
                break
        timer.cancel()
        self._left -= time.monotonic() - start

    def _kill(self) -> None:
        self._late = True
        self._process.kill()


LONGEST = 240  # seconds of compiling ahead; what is not compiled by then is compiled when it is measured


def compile_ahead(arguments: Sequence[str], jobs: int) -> None:
    """Run a command `jobs` times over, each with its share, so that Triton's cache on disk has the kernels.

    The device is then not held while a kernel compiles. What the processes tune is thrown away: they share
    the device. Peers are not compiled ahead: they keep their timings beside what they have compiled.
    """
    print(f"compiling ahead in {jobs} processes", flush=True)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="benchmarks-tuning-") as home:
        shares = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks", *arguments, "--warm-caches", "--share", str(k)],
                env=os.environ | {"FUSION_CACHE_DIR": os.path.join(home, str(k))},
                stdout=subprocess.DEVNULL,
            )
            for k in range(jobs)
        ]
        for share in shares:
            try:
                share.wait(max(0.1, start + LONGEST - time.monotonic()))
            except subprocess.TimeoutExpired:
                share.kill()
                share.wait()
    failed = sum(share.returncode != 0 for share in shares)
    print(f"compiled ahead in {time.monotonic() - start:.0f} s; {failed} of them failed", flush=True)
