"""Give launching access to the GPU: streams, allocation, loading machine code, and timing."""

from __future__ import annotations

import contextvars
import copy
import ctypes
import errno
import functools
import os
import shutil
import statistics
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock, Timeout

from fusion_compiler.errors import CacheError, FusionWarning
from fusion_compiler.ir.device import device_spec
from fusion_compiler.runtime.binding import Entry, direct_call
from fusion_compiler.runtime.builds import Build, compile_build, forget, is_entry
from fusion_compiler.runtime.preserved import room_below_peak

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

ROUNDS = 5
# Long enough for the host to queue a round's launches while the GPU waits, at 2 GHz.
WAIT_CYCLES = 400_000
# A candidate slower than the best by this factor in the first round is not timed again.
HOPELESS = 1.5
LONGEST_TURN = 30.0  # seconds that one process times, and others wait
# Of the drivers: how many programs of so many threads and bytes of shared memory a multiprocessor holds.
OCCUPANCY = {
    "cuda": ("libcuda.so.1", "cuOccupancyMaxActiveBlocksPerMultiprocessor"),
    "hip": ("libamdhip64.so", "hipModuleOccupancyMaxActiveBlocksPerMultiprocessor"),
}
# What a folder that looks writable says when it is written to.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def make_cache_writable() -> None:
    """Warn if Triton's cache folder cannot be written, and move it to a temporary one.

    Triton writes each kernel there before it loads it, and cannot do without.
    """
    from triton import knobs

    folder = knobs.cache.dir
    try:
        os.makedirs(folder, exist_ok=True)
        if os.access(folder, os.W_OK | os.X_OK):
            return
        reason = "no permission to write"
    except OSError as error:
        reason = str(error)
    _leave_cache(reason)


def _leave_cache(reason: object) -> None:
    """Make a temporary folder Triton's cache from now on, and warn."""
    from triton import knobs

    folder = knobs.cache.dir
    knobs.cache.dir = tempfile.mkdtemp(prefix="fusion_compiler_")
    text = CacheError(path=folder, detail=f"{reason}; set TRITON_CACHE_DIR too")
    text = f"{text}; until then every process compiles every kernel again"
    warnings.warn(text, FusionWarning, stacklevel=4)


def _compiled(build: Build) -> CompiledKernel:
    """Compile a build, in a temporary folder if Triton's own has no room or turns out to be broken."""
    try:
        return compile_build(build)
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _leave_cache(error)
        return compile_build(build)


class CudaGpu:
    """A CudaGpu is one CUDA or HIP device, by its index. It implements `binding.Gpu`."""

    def __init__(self, index: int) -> None:
        from triton.runtime import driver

        self.index = index
        self.alone = torch.cuda.device_count() == 1
        self.name = torch.cuda.get_device_name(index)
        with torch.cuda.device(index):
            active: Any = driver.active
            target = active.get_current_target()
        self.target: tuple[str, int | str, int] = (target.backend, target.arch, target.warp_size)
        self._loaded: dict[Build, Entry] = {}
        self.turn = threading.Lock()
        self._last_stream: int | None = None  # of programs that wait for each other
        # The plain functions, without torch.cuda's checks on every call: by now CUDA is initialised.
        self.current_device: Callable[[], int] = torch._C._cuda_getDevice
        self.current_stream: Callable[[int], int] = active.get_current_stream
        self.empty = _empty_function()

    def active(self) -> AbstractContextManager[None]:
        return torch.cuda.device(self.index)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def follow(self, stream: int, /) -> None:
        """Make the programs launched on `stream` next wait for those of the last call on another stream.

        Two launches whose programs wait for each other can each hold places that the other needs; if
        processes take turns on a device, cooperative launches can as well. This does nothing in a CUDA graph,
        which has its own order.
        """
        last = self._last_stream
        if stream == last or self.is_capturing():
            return
        self._last_stream = stream
        if last is not None:
            event = torch.cuda.ExternalStream(last, self.index).record_event()
            torch.cuda.ExternalStream(stream, self.index).wait_event(event)

    def load(self, build: Build) -> Entry:
        """Compile `build` if need be, load it, and return its entry. Equal builds are loaded once.

        Code that the driver refuses or that does not load is taken for a damaged cache entry:
        removed and compiled again, once. Raises Triton's OutOfResources when the kernel needs
        more than the device has, and what Triton raises when it does not compile.
        """
        if build not in self._loaded:
            from triton.runtime.errors import OutOfResources

            make_cache_writable()
            with torch.cuda.device(self.index):
                kernel = _compiled(build)
                try:
                    run: Any = kernel.run
                except OutOfResources:
                    raise
                except Exception as error:
                    kernel, run = _reload(build, error)
            entry = _entry(build, kernel, run)
            if build.cooperative:
                resident = self._resident(build, kernel)
                apart = copy.copy(run)
                apart.launch_cooperative_grid = False
                entry = replace(entry, apart=_entry(build, kernel, apart), resident=resident)
            if build.dependent:
                behind = copy.copy(run)
                behind.launch_pdl = False
                entry = replace(entry, behind=_entry(build, kernel, behind))
            self._loaded[build] = entry
        return self._loaded[build]

    def _resident(self, build: Build, kernel: CompiledKernel) -> int | None:
        """Return how many programs of a kernel the device holds at a time, or None if the driver does not
        say."""
        backend, _, warp_size = build.target
        library, function = OCCUPANCY[backend]
        threads, programs = build.num_warps * warp_size, ctypes.c_int()
        try:
            occupancy = getattr(ctypes.CDLL(library), function)
        except (OSError, AttributeError):
            return None
        handle, shared = ctypes.c_void_p(kernel.function), ctypes.c_size_t(kernel.metadata.shared)
        with torch.cuda.device(self.index):
            failed = occupancy(ctypes.byref(programs), handle, ctypes.c_int(threads), shared)
        count = torch.cuda.get_device_properties(self.index).multi_processor_count
        return None if failed else programs.value * count

    def times(self, calls: Sequence[Callable[[], object]]) -> list[float]:
        """Return the median GPU microseconds of each call, in rounds over all, so that clocks drift for all.

        The GPU is held busy while a round's launches are queued: what is timed is its work alone, with
        nothing in the L2, as between two steps of a model. Processes time on one GPU one after the other.
        """
        with torch.cuda.device(self.index), self._alone():
            size = 2 * device_spec(torch.device("cuda", self.index)).l2_bytes
            l2 = torch.empty(size, dtype=torch.uint8, device="cuda")
            samples: list[list[float]] = [[] for _ in calls]
            for call in calls:
                call()
            for round_number in range(ROUNDS):
                best = min((statistics.median(s) for s in samples if s), default=0.0)
                for call, sample in zip(calls, samples, strict=True):
                    if round_number == 0 or sample[0] <= HOPELESS * best:
                        sample.append(elapsed_us(l2.zero_, call))
        return [statistics.median(sample) for sample in samples]

    def room(self) -> int:
        return room_below_peak(self.index)

    @contextmanager
    def _alone(self) -> Generator[None]:
        """Keep other processes from timing on this GPU, unless one takes too long or is another user's, while
        entered."""
        device = torch.cuda.get_device_properties(self.index)
        name = f"fusion-compiler-{getattr(device, 'uuid', self.index)}.lock"
        lock = FileLock(Path(tempfile.gettempdir()) / name, timeout=LONGEST_TURN)
        with suppress(OSError, Timeout):
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


def elapsed_us(before: Callable[[], object], call: Callable[[], object]) -> float:
    """Return the microseconds that the device works for `call`, which the host queues while the device is
    busy. before: queued in front of it."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(WAIT_CYCLES)
    before()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1000


@functools.cache
def gpu_of(index: int) -> CudaGpu:
    """Return the device `index` as one object, because loaded code is shared by all that launch it."""
    return CudaGpu(index)


def _entry(build: Build, kernel: CompiledKernel, run: Any) -> Entry:
    function, packed = kernel.function, kernel.packed_metadata
    if getattr(kernel.metadata, "global_scratch_size", 0):
        run = copy.copy(run)
        run.launch_pdl = False  # it writes there at once, into what may be memory of the kernel before it
        return Entry(functools.partial(_run_with_scratch, run), function, packed, kernel)
    return Entry(run, function, packed, kernel, direct_call(run, function, packed, len(build.signature)))


def _run_with_scratch(run: Callable[..., None], *arguments: Any) -> None:
    """Launch a kernel that needs memory of Triton's allocator, for its tensor descriptors: PyTorch's is
    Triton's during the call."""
    import triton

    def allocate(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cuda")

    def launch() -> None:
        triton.set_allocator(allocate)
        run(*arguments)

    contextvars.copy_context().run(launch)


def _reload(build: Build, error: Exception) -> tuple[CompiledKernel, Any]:
    # A launcher that Triton compiled with a C compiler lies in a folder of its own. Errors of other imports
    # name a file as well, which is nobody's to remove.
    library = getattr(error, "path", None)
    if library is not None and _is_cached(Path(library)):
        shutil.rmtree(Path(library).parent, ignore_errors=True)
    forget(build)
    kernel = compile_build(build)
    return kernel, kernel.run


def _is_cached(file: Path) -> bool:
    """True if a file lies in an entry of Triton's cache."""
    from triton import knobs

    return is_entry(file.parent) and file.parent.parent.resolve() == Path(knobs.cache.dir).resolve()


def _empty_function() -> Callable[[Any, Any, torch.dtype], torch.Tensor]:
    """Return the function that allocates on the current device; torch's own generated code uses the same
    short cut."""
    if torch.version.hip is None:
        from torch._C._dynamo import guards

        fast: Any = guards
        return fast._empty_strided_cuda

    def empty(shape: Any, stride: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")

    return empty
