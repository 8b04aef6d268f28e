"""Joules of a step, from the device's own counter."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

from benchmarks.harness.timing import synchronize

SECONDS = 1.0  # the counter moves every few tens of milliseconds


def energy_of(call: Callable[[], object], device: torch.device, seconds: float = SECONDS) -> float | None:
    """Joules of one call, of those that run one after the other for so long; None without a counter."""
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
    """Reads the joules that a GPU has taken since its driver was loaded; None where it counts none."""
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    found = nvml.nvmlInit_v2() == 0 and nvml.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) == 0

    def read() -> float:
        millijoules = ctypes.c_ulonglong()
        if nvml.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(millijoules)) != 0:
            raise RuntimeError(f"{device} does not count its energy")
        return millijoules.value / 1e3

    try:
        return read if found and read() > 0 else None
    except RuntimeError:
        return None
