"""How time is measured, the same way for every contender.

GPU time is the time in which a kernel runs, as the profiler's tracer records it: it holds no gaps, no
launch cost and no host time, so that a chain of many kernels and a single one compare by the work
that the device does. Where kernels overlap, the time counts once: a kernel that is launched while the
one before still runs waits for it on the device, and that wait is no work.
Host time and step time are measured with a clock around synchronised calls.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import math
import re
import signal
import statistics
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

CONTRACTION = re.compile(
    r"gemm|cutlass|nvjet|cublas|splitk|xmma|gemv|convolve|conv2d|conv_depthwise|dgrad|wgrad|fprop",
    re.IGNORECASE,
)
ATTENTION = re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)


class OverBudgetError(Exception):
    """A contender took longer than its row allows."""


@dataclass(frozen=True)
class GpuTime:
    """Seconds of device time per call. kernels: launches per call; by_kind sums to seconds."""

    seconds: float
    kernels: int
    by_kind: dict[str, float]
    names: dict[str, float]


def kind_of(kernel: str) -> str:
    """Return the part of a model to which a kernel belongs, by its name: attention, contraction or rest."""
    if ATTENTION.search(kernel):
        return "attention"
    return "contraction" if CONTRACTION.search(kernel) else "rest"


@contextmanager
def budget(seconds: float) -> Generator[None]:
    """Raises OverBudgetError in the main thread when the block takes longer; cannot stop a C call midway."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise OverBudgetError(f"over {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_time(
    call: Callable[[], object], device: torch.device, repetitions: int, warmup: int = 3
) -> GpuTime:
    """Median device time of `call` over repetitions; on a CPU, wall time, for trying the harness only."""
    for _ in range(warmup):
        call()
    synchronize(device)
    if device.type != "cuda":
        seconds = wall_time(call, device, repetitions)
        return GpuTime(seconds, 0, {"rest": seconds}, {})
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as traced:
        for _ in range(repetitions):
            call()
        synchronize(device)
    # User annotations (torch.compile's regions) also appear as device events and span kernels.
    events = [
        e
        for e in traced.events() or ()
        if e.device_type == DeviceType.CUDA and not getattr(e, "is_user_annotation", False)
    ]
    events.sort(key=lambda e: e.time_range.start)
    kinds: dict[str, float] = {}
    names: dict[str, float] = {}
    durations = busy([(event.time_range.start / 1e6, event.time_range.end / 1e6) for event in events])
    for event, duration in zip(events, durations, strict=True):
        seconds = duration / repetitions
        kinds[kind_of(event.name)] = kinds.get(kind_of(event.name), 0.0) + seconds
        names[event.name] = names.get(event.name, 0.0) + seconds
    total = median_by_repetition(durations, repetitions)
    scale = total / sum(kinds.values()) if kinds else 1.0
    return GpuTime(
        total,
        round(len(events) / repetitions),
        {kind: seconds * scale for kind, seconds in kinds.items()},
        dict(sorted(names.items(), key=lambda item: -item[1])),
    )


def busy(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return how long each span (begin, end) lasts beyond all spans before it; `spans` are in the order of
    their beginnings."""
    durations: list[float] = []
    latest = -math.inf
    for begin, end in spans:
        durations.append(max(0.0, end - max(begin, latest)))
        latest = max(latest, end)
    return durations


def median_by_repetition(durations: list[float], repetitions: int) -> float:
    """Total per repetition, median of them, where every one launched the same number of kernels."""
    per_call, left = divmod(len(durations), repetitions)
    if left or not per_call:
        return sum(durations) / repetitions
    return statistics.median(sum(durations[i * per_call : (i + 1) * per_call]) for i in range(repetitions))


def wall_time(call: Callable[[], object], device: torch.device, repetitions: int, calls: int = 1) -> float:
    """Median seconds of one synchronised call, or of each of several with no wait between them."""
    samples: list[float] = []
    for _ in range(repetitions):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        synchronize(device)
        samples.append((time.perf_counter() - start) / calls)
    return statistics.median(samples)


def host_time(call: Callable[[], object], device: torch.device, calls: int = 200, rounds: int = 7) -> float:
    """Host seconds per call when the device never makes the host wait: the best of several rounds."""
    best = float("inf")
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
        synchronize(device)
    return best


def event_time(call: Callable[[], object], rounds: int, calls: int = 1, pause: int = 0) -> float:
    """Median over rounds of the GPU's seconds of each of several calls, from the first one to the last.

    A pause of so many clock ticks first lets the host run ahead of the GPU.
    """
    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if pause:
            torch.cuda._sleep(pause)
        begin.record()
        for _ in range(calls):
            call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


SECONDS = 1.0  # the counter moves every few tens of milliseconds


def energy_of(call: Callable[[], object], device: torch.device, seconds: float = SECONDS) -> float | None:
    """Return the joules of a call: the mean over calls that fill so many seconds; None without a counter."""
    counter = counter_of(device)
    if counter is None:
        return None
    call()
    synchronize(device)
    calls, start, before = 0, time.perf_counter(), counter()
    while time.perf_counter() - start < seconds:
        call()
        synchronize(device)
        calls += 1
    return (counter() - before) / calls


def counter_of(device: torch.device) -> Callable[[], float] | None:
    """Return what reads the joules that a GPU took since its driver was loaded; None if it counts none."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    available = nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) == 0

    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) != 0:
            raise RuntimeError(f"{device} does not count its energy")
        return millijoules.value / 1e3

    try:
        return read if available and read() > 0 else None
    except RuntimeError:
        return None


L2_BYTES = 64 << 20  # of a device whose driver does not say
MOST_COPIES = 64


def copies_for(device: torch.device, size: int) -> int:
    """How many times `size` bytes to take in turn, so that none is still in the L2 when its turn comes."""
    if device.type != "cuda":
        return 1
    l2 = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or L2_BYTES
    return max(1, min(MOST_COPIES, -(-4 * l2 // max(size, 1))))


class Yardstick:
    """The time of a device-to-device copy. Bytes read and bytes written both count."""

    SMALL = 1 << 28  # bytes moved, below which a launch's fixed costs and the L2 count

    def __init__(self, device: torch.device, size: int = 1 << 30) -> None:
        self.device = device
        self._times: dict[int, float] = {}
        self.bandwidth = 2 * size / self._measured(size)

    def seconds(self, moved: int) -> float:
        """Return the seconds of a copy that moves `moved` bytes.

        Small copies are measured in cold memory when they are asked for; sizes within 6% share one
        measurement, scaled.
        """
        if moved >= self.SMALL or self.device.type != "cuda":
            return moved / self.bandwidth
        step = round(8 * math.log2(max(2, moved)))
        near = round(2 ** (step / 8))
        if near not in self._times:
            self._times[near] = self._measured(near // 2)
        return self._times[near] * moved / near

    def _measured(self, size: int) -> float:
        count = copies_for(self.device, size)
        sources = itertools.cycle(
            [torch.empty(size, dtype=torch.uint8, device=self.device).random_() for _ in range(count)]
        )
        return device_time(lambda: next(sources).clone(), self.device, repetitions=20).seconds


def yardstick_of(options: argparse.Namespace) -> Yardstick:
    return Yardstick(torch.device(options.device), 1 << 24 if options.quick else 1 << 30)
