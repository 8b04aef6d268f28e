"""Measurements in processes of their own: nothing of another's is in their memory, caches or settings."""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
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
    """What `python -m module <task as JSON>` prints as its last line, JSON, for each task, in order.

    {"failed": why} where there is nothing. Caches are empty, or in the folder that a task has as "caches",
    which the module is not given. So many jobs get ready side by side (`my_turn`), and measure one after the
    other while the rest wait. seconds: of one task, without waiting for its turn. one_cache: what one has
    compiled the others find, where seconds of compilation are not measured. within: seconds from now, after
    which none is begun: the last tasks then have no result.
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
    """Called in such a process when it is ready: waits until no other one works."""
    print(READY, flush=True)
    sys.stdin.readline()


def only(measure: Callable[[dict[str, Any]], Any]) -> None:
    """The main function of such a process. It ends at once: the next one waits for that."""
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
    os._exit(0)


class _Process:
    """One measurement; its caches are empty at first, or those of a folder that is given."""

    def __init__(self, module: str, task: Task, seconds: float, home: str | None) -> None:
        self._home = tempfile.TemporaryDirectory(prefix="benchmarks-", ignore_cleanup_errors=True)
        given = dict(task)
        folder = Path(given.pop("caches", None) or home or self._home.name)
        caches = {name: str(folder / name.lower()) for name in CACHES}
        self._stderr = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115  it lives as long as this
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, json.dumps(given)],
            cwd=ROOT, env=os.environ | caches | BYTECODE, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        self._seconds = self._left = seconds
        self._last = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def prepare(self) -> None:
        """Waits until it is ready, or has ended."""
        self._wait(READY)

    def measure(self) -> Result:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
            self._wait("")
        late = self._process.poll() is None
        if late:
            self._process.kill()
        failed = self._process.wait() != 0
        self._reader.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._stderr.seek(0)
        said = self._stderr.read().strip().splitlines()
        self._stderr.close()
        self._home.cleanup()
        if late:
            return {"failed": f"over {self._seconds:.0f} s"}
        if failed:
            return {"failed": said[-1][:160] if said else f"exit status {self._process.returncode}"}
        return json.loads(self._last)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip():
                self._lines.put(line.strip())
        self._process.wait()
        self._lines.put("")  # it has ended

    def _wait(self, line: str) -> None:
        """Reads until such a line or its end, for at most the seconds that it has left."""
        start = time.monotonic()
        said = None
        with contextlib.suppress(queue.Empty):
            while said not in (line, ""):
                said = self._lines.get(timeout=max(start + self._left - time.monotonic(), 0))
                self._last = said or self._last
        self._left -= time.monotonic() - start
