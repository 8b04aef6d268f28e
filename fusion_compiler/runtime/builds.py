"""Compile the text of Triton kernels to machine code: one, or many at once.

The module imports neither torch nor the rest of the package: it is also the program that the
compile server runs (see `compile_builds`), which then starts in a tenth of a second.

Processes are used because Triton holds the interpreter lock through the front end, MLIR and LLVM, about three
quarters of the time; only ptxas overlaps between threads, so that any number of them gains a third at most.
16 row-softmax kernels for sm_90, Triton 3.7.1, two idle cores: 1.71 s one after the other, 1.57 s in two
threads, 1.69 s in four. Processes scale with the cores but start in half a second: 20 kernels on two busy
cores took 2.3 s here and 1.8 to 2.7 s in a server of two. What a process compiles reaches the others through
Triton's own cache on disk, from where loading costs 1.6 ms a kernel.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import importlib
import linecache
import os
import pickle
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

# Triton's language modules are process-wide, and its interpreter works by replacing what is in
# them: nothing may be compiled in one thread while another interprets.
TRITON_LOCK = threading.RLock()
_hashing, _hashed = threading.Lock(), threading.Event()

# Whatever Triton's defaults and environment variables say: indices are checked (`math.check_index`), and
# integers wrap around as in eager.
OPTIONS = {"debug": True, "sanitize_overflow": False}

DEPENDENT_LAUNCH = 90  # the first compute capability that has it, times ten

# What a server takes to start and what a kernel takes to compile: it is used where it gains.
SERVER_SECONDS = 0.5
KERNEL_SECONDS = 0.1
NICE = 5  # of its workers
SWITCH_SECONDS = 1e-4  # from thread to thread, while one hashes Triton
# A server that nobody asks gives its memory back.
IDLE_SECONDS = 120.0


@dataclass(frozen=True)
class Build:
    """A build is one kernel to compile for one target.

    source: text of a module that defines `name` under @triton.jit.
    signature: (parameter, Triton type) in order, such as ("x_ptr", "*bf16") or ("n", "i64").
    divisible: positions of the parameters that are multiples of 16 (bytes, for a pointer).
    target: backend ("cuda", "hip"), architecture (90, "gfx942") and threads in a warp.
    registers: the most that a thread may take; "cuda" only.
    fp_fusion: products and sums may become one instruction.
    cooperative: all programs of a launch must be on the device at the same time.
    dependent: programs start while the kernel before them ends, where the target has that; they wait for it.
    """

    source: str
    name: str
    signature: tuple[tuple[str, str], ...]
    divisible: tuple[int, ...]
    target: tuple[str, int | str, int]
    num_warps: int = 4
    num_stages: int = 1
    registers: int | None = None
    fp_fusion: bool = True
    cooperative: bool = False
    dependent: bool = False


@functools.lru_cache(maxsize=4096)
def load_kernel(source: str, name: str) -> JITFunction[Any]:
    """Return the @triton.jit function `name` of the module `source`.

    Its lines are registered with linecache: tracebacks show them, and Triton, which reads a
    kernel through `inspect`, finds them. Raises what executing the module raises.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:12]
    file = f"<fusion_compiler {name} {digest}>"
    # No modification time: linecache then keeps the entry although no such file exists.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    module: dict[str, Any] = {"__name__": f"fusion_compiler.kernels.{name}_{digest}"}
    exec(compile(source, file, "exec"), module)
    return module[name]


def _target(build: Build) -> GPUTarget:
    from triton.backends.compiler import GPUTarget

    return GPUTarget(*build.target)


def _arguments(build: Build) -> dict[str, Any]:
    """Return the arguments of triton.compile for `build`."""
    from triton.compiler import ASTSource

    attrs = {(i,): [["tt.divisibility", 16]] for i in build.divisible}
    source = ASTSource(load_kernel(build.source, build.name), dict(build.signature), {}, attrs)
    options: dict[str, Any] = {
        **OPTIONS,
        "num_warps": build.num_warps,
        "num_stages": build.num_stages,
        "enable_fp_fusion": build.fp_fusion,
    }
    if build.registers is not None and build.target[0] == "cuda":
        options["maxnreg"] = build.registers
    if build.cooperative:
        options["launch_cooperative_grid"] = True
    backend, architecture, _ = build.target
    if build.dependent and backend == "cuda" and int(architecture) >= DEPENDENT_LAUNCH:
        options["launch_pdl"] = True
    return {"src": source, "target": _target(build), "options": options}


def _prepare_keys() -> None:
    """Compute once what is part of every kernel's key, in 0.3 s in which other threads run.

    Triton hashes itself a megabyte at a time. Beside a thread that is busy in Python, each megabyte would
    wait for the interpreter's whole switch interval: 2 s in all, and a caller of a key waits for the rest.

    The functions that kernels call get their keys one after another: Triton counts a global constant of
    theirs in a kernel's key where they had one before, else not: another process would not find the kernel.
    """
    if _hashed.is_set():
        return
    with _hashing, contextlib.suppress(ImportError):
        from triton.runtime.cache import triton_key

        before = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_SECONDS)
        try:
            triton_key()
        finally:
            sys.setswitchinterval(before)
        for function in vars(importlib.import_module("fusion_compiler.codegen.math")).values():
            getattr(function, "cache_key", None)
        _hashed.set()


def cache_entry(build: Build) -> Path:
    """Return the folder of `build` in Triton's cache on disk, by the key that triton.compile uses."""
    from triton import knobs
    from triton.compiler.compiler import get_cache_key, make_backend
    from triton.runtime.cache import get_cache_manager

    _prepare_keys()
    wanted = _arguments(build)
    backend = make_backend(wanted["target"])
    options = backend.parse_options(wanted["options"])
    env_vars = _cache_env_vars()
    key = get_cache_key(wanted["src"], backend, options, env_vars=env_vars)
    hook = getattr(knobs.runtime, "add_stages_inspection_hook", None)
    if hook is not None:
        key += hook()[0]
    manager: Any = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return Path(manager.cache_dir)


def is_entry(folder: Path) -> bool:
    """True if a folder has a hash as its name, as in Triton's cache, and is no link to another folder."""
    return re.fullmatch(r"[A-Z2-7]{52}", folder.name) is not None and not folder.is_symlink()


def _cache_env_vars() -> dict[str, str]:
    from triton._C.libtriton import get_cache_invalidating_env_vars

    return get_cache_invalidating_env_vars()


def is_cached(build: Build) -> bool:
    """True if Triton's cache on disk has `build`, whole or damaged."""
    try:
        return (cache_entry(build) / f"__grp__{build.name[:150]}.json").exists()
    except Exception:  # asked only to save time: whatever is wrong shows when it is compiled
        return False


def compile_build(build: Build) -> CompiledKernel:
    """Compile `build`, or take it from Triton's cache on disk when it is there and whole, and return it.

    Triton writes each file of an entry under another name and moves it, so a killed process
    leaves no half file; but it believes whatever it finds. A damaged entry (a truncated file, a
    flipped bit, no checksum) is noticed by the checksum beside it, or by failing to load, and is
    removed, and compiled again. Raises what Triton raises when the kernel itself does not compile.
    """
    import triton

    with TRITON_LOCK:
        cached = is_cached(build)
        if cached and not _is_whole(_seal_of(build)):
            forget(build)
            cached = False
        try:
            kernel = triton.compile(**_arguments(build))
        except Exception as error:
            # Another process that found the same entry damaged may have removed its folder while
            # this one wrote there.
            if not cached and not isinstance(error, OSError):
                raise
            forget(build)
            cached = False
            kernel = triton.compile(**_arguments(build))
        if not cached:
            _seal(_seal_of(build))
        return kernel


def _seal_of(build: Build) -> Path:
    """Return the file with the checksum of an entry of Triton's cache."""
    return cache_entry(build) / f"{build.name[:150]}.sha256"


def checksum(seal: Path) -> str:
    """Return the checksum that an entry's file should hold: of all files of the kernel beside it."""
    digest, names = hashlib.sha256(), (f"{seal.stem}.", f"__grp__{seal.stem}.")
    for file in sorted(seal.parent.iterdir()):
        if file.name.startswith(names) and file != seal and file.is_file():
            digest.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()


def _is_whole(seal: Path) -> bool:
    """True if an entry has the checksum that it should hold. A driver may crash on a truncated one."""
    try:
        return seal.read_text(errors="replace") == checksum(seal)
    except OSError:  # it has none, or another process is removing it
        return False


def _seal(seal: Path) -> None:
    with contextlib.suppress(OSError):  # an entry without one is compiled again
        digest = checksum(seal)
        handle, temporary = tempfile.mkstemp(dir=seal.parent)
        with os.fdopen(handle, "w") as stream:
            stream.write(digest)
        os.replace(temporary, seal)


def forget(build: Build) -> None:
    """Remove `build` from Triton's cache on disk."""
    shutil.rmtree(cache_entry(build), ignore_errors=True)


def compile_builds(
    builds: Iterable[Build],
    workers: int | None = None,
    report: Callable[[int, int], None] | None = None,
) -> dict[Build, str]:
    """Bring every build into Triton's cache on disk, several at a time.

    Equal builds and those that the cache has cost nothing. workers: processes; by default one a core, at most
    16. report: called with how many are done, and of how many, each time that one is. Returns the reason for
    each build that did not compile; a build without a reason is ready for `compile_build`.
    """
    missing = [build for build in dict.fromkeys(builds) if not is_cached(build)]
    workers = workers or _cores()
    at_once = min(workers, len(missing))
    gain = len(missing) * KERNEL_SECONDS * (1 - 1 / max(at_once, 1)) - SERVER_SECONDS
    if missing and sys.executable and (gain > 0 or _server.is_ready(workers)):
        served = _compile_served(missing, workers)
    else:
        served = ((build, _attempt(build)) for build in missing)
    reasons: dict[Build, str] = {}
    for done, (build, reason) in enumerate(served, 1):
        if reason is not None:
            reasons[build] = reason
        if report is not None:
            report(done, len(missing))
    return reasons


def _cores() -> int:
    return min(len(os.sched_getaffinity(0)), 16)


def prepare() -> None:
    """Start the compile server, which is ready half a second later, and compute meanwhile what keys consist
    of."""
    threading.Thread(target=_prepare_keys, daemon=True).start()
    if _cores() > 1 and sys.executable and _server.lock.acquire(blocking=False):  # nobody uses it already
        try:
            with contextlib.suppress(OSError, ImportError):
                _server.running(_cores())
        finally:
            _server.lock.release()


def _attempt(build: Build, launched: bool = False) -> str | None:
    """Compile a build, and return what went wrong, or None. launched: True to compile its launcher, too."""
    try:
        kernel = compile_build(build)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    if launched:
        compile_launcher(kernel)
    return None


def compile_launcher(kernel: CompiledKernel) -> None:
    """Bring the launcher for kernels of this signature into Triton's cache.

    Triton compiles C for each signature when a kernel is loaded (0.1 to 0.3 s), up to 3.6. An error is
    ignored here, because loading raises it again.
    """
    with contextlib.suppress(Exception):
        driver = importlib.import_module("triton.backends.nvidia.driver")
        if kernel.metadata.target.backend == "cuda" and hasattr(driver, "make_launcher"):
            driver.CudaLauncher(kernel.src, kernel.metadata)


def _compile_served(builds: Sequence[Build], workers: int) -> Iterator[tuple[Build, str | None]]:
    """Compile in a server of `workers` processes, and here what the server fails to answer; yield builds and
    reasons."""
    answered: set[int] = set()
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError), _server.lock:
        server = _server.running(workers)
        try:
            launched = {tuple(kind for _, kind in build.signature): build for build in builds}.values()
            # The server knows this class as __main__.Build: plain tuples travel between the two names.
            server.ask([(astuple(build), build in launched) for build in builds])
            while len(answered) < len(builds):
                index, reason = server.answer()
                answered.add(index)
                yield builds[index], reason
        finally:
            if len(answered) < len(builds):  # it died, or nobody wants the rest
                _server.stop()
    for index, build in enumerate(builds):
        if index not in answered and not _server.ended:
            yield build, _attempt(build)


class _Server:
    """The compile server of this process is a fresh interpreter that runs this file and forks its workers.

    Multiprocessing's server would import the user's main module again, and forking this process would copy a
    CUDA context and locks held by other threads. It is started when it is needed, and ends when its input
    does, with this process at the latest, or when it has not been asked for IDLE_SECONDS. `lock` must be held
    while it is used.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.ended = False  # with the process: what is being compiled is not wanted any more
        self._owner = 0
        self._purpose: tuple[int, dict[str, str]] | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def is_ready(self, workers: int) -> bool:
        """True if the server lives, belongs to this process (which may be a fork), and has these workers and
        settings."""
        mine = self._owner == os.getpid() and self._process is not None and self._process.poll() is None
        return mine and self._purpose == (workers, _settings())

    def running(self, workers: int) -> _Server:
        if self.is_ready(workers):
            return self
        self.stop()
        self._owner, self._purpose = os.getpid(), (workers, _settings())
        # Kernels import the package, which may lie where only this process looks for modules.
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(workers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | _settings() | {"PYTHONPATH": paths},
            start_new_session=True,  # Ctrl-C is for this process
        )
        return self

    def ask(self, builds: list[tuple[tuple[Any, ...], bool]]) -> None:
        """Send builds to the server. builds: the fields of each, and whether its launcher is wanted too."""
        assert self._process is not None and self._process.stdin is not None
        pickle.dump(builds, self._process.stdin)
        self._process.stdin.flush()

    def answer(self) -> tuple[int, str | None]:
        assert self._process is not None and self._process.stdout is not None
        return pickle.load(self._process.stdout)

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError, AttributeError):
                pipe.close()  # type: ignore[union-attr]  they are there
        process.wait()

    def end(self) -> None:
        self.ended = True
        self.stop()


_server = _Server()
atexit.register(_server.end)


def _settings() -> dict[str, str]:
    """Return the environment variables that change what Triton compiles and where it leaves it."""
    from triton import knobs

    chosen = {name: value for name, value in os.environ.items() if name.startswith("TRITON")}
    return chosen | _cache_env_vars() | {"TRITON_CACHE_DIR": knobs.cache.dir}


def _numbered_attempt(job: tuple[int, tuple[tuple[Any, ...], bool]]) -> tuple[int, str | None]:
    index, (fields, launched) = job
    return index, _attempt(Build(*fields), launched)


def _begin_worker() -> None:
    """Let a worker end with its server, instead of waiting for jobs for ever, and give way to the process
    that plans."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG, of Linux
        os.nice(NICE)


def serve(workers: int, requests: IO[bytes], replies: IO[bytes]) -> None:
    """Run the compile server: for each pickled list of builds, write a pickled (index, reason) of each."""
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import get_context

    _prepare_keys()  # what the workers inherit, with the functions that kernels import
    pool = ProcessPoolExecutor(workers, mp_context=get_context("fork"), initializer=_begin_worker)
    with pool as processes:
        processes.submit(os.getpid).result()  # forks them all
        # Nothing is left in the buffer: a list comes when the one before it is answered.
        while select.select([requests], [], [], IDLE_SECONDS)[0]:
            try:
                jobs = list(enumerate(pickle.load(requests)))
            except EOFError:
                return
            # A worker that dies (of too little memory, say) breaks the pool: the asker does the rest.
            for answer in as_completed([processes.submit(_numbered_attempt, job) for job in jobs]):
                pickle.dump(answer.result(), replies)
                replies.flush()


def main() -> None:
    # What a compiler prints must not end up among the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        serve(int(sys.argv[1]), sys.stdin.buffer, replies)
    except BrokenPipeError:  # nobody is left to answer
        os._exit(0)


if __name__ == "__main__":
    main()
