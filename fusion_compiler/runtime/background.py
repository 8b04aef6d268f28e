"""Compile kernels while other work goes on: a forward graph's while its backward is planned."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence

from fusion_compiler.runtime.builds import Build, compile_builds, is_cached
from fusion_compiler.runtime.progress import Progress


class BackgroundBuilds:
    """The thread of this object brings `builds` into Triton's cache on disk.

    progress: shows how many are done while someone waits. The thread ends with the process, which kernels
    that nobody called should not hold up; a process that is forked meanwhile waits for nothing.
    """

    def __init__(self, builds: Sequence[Build], progress: Progress) -> None:
        missing = [build for build in dict.fromkeys(builds) if not is_cached(build)]
        self._progress = progress
        self._awaited = False
        self.is_needed = bool(missing)  # whether there is anything to compile
        name = "fusion_compiler kernels"
        self._thread = threading.Thread(target=self._compile, args=(missing,), name=name, daemon=True)
        if self.is_needed:
            self._thread.start()

    def _compile(self, builds: Sequence[Build]) -> None:
        with contextlib.suppress(Exception):  # loading the kernel raises the error again
            compile_builds(builds, report=self._report)

    def _report(self, done: int, of: int) -> None:
        if self._awaited:
            self._progress.kernels(done, of)

    def wait(self) -> None:
        if self._thread.is_alive():
            self._awaited = True
            with self._progress:
                self._thread.join()
