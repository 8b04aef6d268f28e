"""From the text of a Triton kernel to machine code: loading, compiling, compiling many at once.

The module imports neither torch nor the rest of the package: it is also the program that the
compile server runs (see `compile_builds`), which then starts in a tenth of a second.

Why processes: Triton holds the interpreter lock through the front end, MLIR and LLVM, about three
quarters of the time; only ptxas overlaps between threads, so that any number of them gains a third
at most. 16 row-softmax kernels for sm_90, Triton 3.7.1, two idle cores: 1.71 s one after the other,
1.57 s in two threads, 1.69 s in four. Processes scale with the cores but start in half a second: 20
kernels on two busy cores took 2.3 s here and 1.8 to 2.7 s in a server of two. What a process compiles
reaches the others through Triton's own cache on disk, from where loading costs 1.6 ms a kernel.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import linecache
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompiledKernel
    from triton.runtime.jit import JITFunction

# Triton's language modules are process-wide, and its interpreter works by replacing what is in
# them: nothing may be compiled in one thread while another interprets.
TRITON_LOCK = threading.RLock()

# What a server takes to start and what a kernel takes to compile: it is used where it gains.
SERVER_SECONDS = 0.5
KERNEL_SECONDS = 0.1


@dataclass(frozen=True)
class Build:
    """One kernel to compile for one target.

    source: text of a module that defines `name` under @triton.jit.
    signature: (parameter, Triton type) in order, such as ("x_ptr", "*bf16") or ("n", "i64").
    divisible: positions of the parameters that are multiples of 16 (bytes, for a pointer).
    target: backend ("cuda", "hip"), architecture (90, "gfx942") and threads in a warp.
    """

    source: str
    name: str
    signature: tuple[tuple[str, str], ...]
    divisible: tuple[int, ...]
    target: tuple[str, int | str, int]
    num_warps: int = 4
    num_stages: int = 1


@functools.lru_cache(maxsize=4096)
def load_kernel(source: str, name: str) -> JITFunction[Any]:
    """The @triton.jit function `name` of the module `source`.

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
    """What triton.compile takes for `build`."""
    from triton.compiler import ASTSource

    attrs = {(i,): [["tt.divisibility", 16]] for i in build.divisible}
    source = ASTSource(load_kernel(build.source, build.name), dict(build.signature), {}, attrs)
    options = {"num_warps": build.num_warps, "num_stages": build.num_stages}
    return {"src": source, "target": _target(build), "options": options}


def cache_entry(build: Build) -> Path:
    """The folder of `build` in Triton's cache on disk, by the key that triton.compile uses."""
    from triton import knobs
    from triton.compiler.compiler import get_cache_key, make_backend
    from triton.runtime.cache import get_cache_manager

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


def _cache_env_vars() -> dict[str, str]:
    from triton._C.libtriton import get_cache_invalidating_env_vars

    return get_cache_invalidating_env_vars()


def is_cached(build: Build) -> bool:
    """Whether Triton's cache on disk has `build`, whole or damaged."""
    try:
        return (cache_entry(build) / f"__grp__{build.name[:150]}.json").exists()
    except Exception:  # asked only to save time: whatever is wrong shows when it is compiled
        return False


def compile_build(build: Build) -> CompiledKernel:
    """Compiles `build`, or takes it from Triton's cache on disk when it is there and whole.

    Triton writes each file of an entry under another name and moves it, so a killed process
    leaves no half file; but it believes whatever it finds. A damaged entry (a truncated file, a
    flipped bit) is noticed by the checksum beside it or by failing to load, removed, and
    compiled again. Raises what Triton raises when the kernel itself does not compile.
    """
    import triton

    with TRITON_LOCK:
        known = is_cached(build)
        try:
            kernel = triton.compile(**_arguments(build))
            if not known or _is_whole(kernel):
                _seal(kernel)
                return kernel
        except Exception as error:
            # Another process that found the same entry damaged may have removed its folder while
            # this one wrote there.
            if not known and not isinstance(error, OSError):
                raise
        shutil.rmtree(cache_entry(build), ignore_errors=True)
        kernel = triton.compile(**_arguments(build))
        _seal(kernel)
        return kernel


def _checksum(kernel: CompiledKernel) -> tuple[Path, str]:
    """The file that holds the checksum of a cache entry, and what it should hold."""
    files = {name: Path(path) for name, path in kernel.metadata_group.items()}
    metadata = next(path for name, path in files.items() if name.endswith(".json"))
    digest = hashlib.sha256(metadata.read_bytes())
    code = kernel.kernel
    digest.update(code if isinstance(code, bytes) else code.encode())
    return metadata.with_suffix(".sha256"), digest.hexdigest()


def _is_whole(kernel: CompiledKernel) -> bool:
    """False when the entry's checksum exists and differs. Without one there is nothing to compare."""
    file, digest = _checksum(kernel)
    return not file.exists() or file.read_text(errors="replace") == digest


def _seal(kernel: CompiledKernel) -> None:
    file, digest = _checksum(kernel)
    if file.exists():
        return
    with contextlib.suppress(OSError):  # unsealed is as good as Triton leaves it
        handle, temporary = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(handle, "w") as stream:
            stream.write(digest)
        os.replace(temporary, file)


def forget(build: Build) -> None:
    """Removes `build` from Triton's cache on disk."""
    shutil.rmtree(cache_entry(build), ignore_errors=True)


def compile_builds(builds: Iterable[Build], workers: int | None = None) -> dict[Build, str]:
    """Brings every build into Triton's cache on disk, several at a time.

    Equal builds and those that the cache has cost nothing. workers: processes; by default one a
    core, at most 16. Returns the reason for each build that did not compile; a build without a
    reason is ready for `compile_build`.
    """
    missing = [build for build in dict.fromkeys(builds) if not is_cached(build)]
    workers = min(workers or min(os.cpu_count() or 1, 16), len(missing))
    gain = len(missing) * KERNEL_SECONDS * (1 - 1 / max(workers, 1)) - SERVER_SECONDS
    if gain > 0 and sys.executable:
        served = _compile_served(missing, workers)
    else:
        served = ((build, _attempt(build)) for build in missing)
    return {build: reason for build, reason in served if reason is not None}


def _attempt(build: Build) -> str | None:
    """Compiles, and says what went wrong."""
    try:
        compile_build(build)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _compile_served(builds: Sequence[Build], workers: int) -> Iterator[tuple[Build, str | None]]:
    """Compiles in a server of `workers` processes; what the server fails to answer, here.

    The server is a fresh interpreter that runs this file and forks its workers. It is not
    multiprocessing's: that one imports the user's main module again, and forking this process
    would copy a CUDA context and locks held by other threads.
    """
    from triton import knobs

    # Kernels import the package, which may lie where only this process looks for modules.
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    environment = os.environ | {"TRITON_CACHE_DIR": knobs.cache.dir, "PYTHONPATH": paths}
    command = [sys.executable, "-P", __file__, str(workers)]
    answered: set[int] = set()
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as server:
        assert server.stdin is not None and server.stdout is not None
        with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
            pickle.dump([_fields(build) for build in builds], server.stdin)
            server.stdin.close()
            while len(answered) < len(builds):
                index, reason = pickle.load(server.stdout)
                answered.add(index)
                yield builds[index], reason
    for index, build in enumerate(builds):
        if index not in answered:
            yield build, _attempt(build)


def _fields(build: Build) -> tuple[Any, ...]:
    # The server knows this class as __main__.Build: plain tuples travel between the two names.
    return (
        build.source, build.name, build.signature, build.divisible, build.target, build.num_warps,
        build.num_stages,
    )  # fmt: skip


def _numbered_attempt(job: tuple[int, tuple[Any, ...]]) -> tuple[int, str | None]:
    index, fields = job
    return index, _attempt(Build(*fields))


def serve(workers: int, requests: IO[bytes], replies: IO[bytes]) -> None:
    """The compile server: one pickled list of builds in, a pickled (index, reason) out for each."""
    import multiprocessing

    from triton.runtime import cache

    # What the workers inherit: the functions that kernels import (the package itself does not import
    # torch), and Triton's hash of itself, 0.3 s.
    importlib.import_module("fusion_compiler.codegen.math")
    cache.triton_key()
    jobs = list(enumerate(pickle.load(requests)))
    with multiprocessing.get_context("fork").Pool(workers) as processes:
        for answer in processes.imap_unordered(_numbered_attempt, jobs):
            pickle.dump(answer, replies)
            replies.flush()


def main() -> None:
    # What a compiler prints must not end up among the replies.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(int(sys.argv[1]), sys.stdin.buffer, replies)


if __name__ == "__main__":
    main()
