"""List what the cost model knows about a GPU: one row of hardware numbers per device, all in this file.

Throughputs are written as the vendor's architecture guides give them (lanes per multiprocessor and
clock) and multiplied out by properties. Copy bandwidth was measured on an H200: 4.28e12 B/s of its
4.8e12 B/s datasheet figure; every other row takes the same fraction of its own datasheet.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from fusion_compiler.errors import FusionWarning, UnsupportedDeviceError

COPY_FRACTION = 4.28 / 4.8  # measured copy bandwidth / datasheet bandwidth, H200
# One Philox4x32-7 call and its conversion to floats, in 32-bit integer instructions. With ten rounds 62 at
# the H200's rate, nearly six each: a 128K x 1024 dropout kernel that called it once per element took 495 us.
PHILOX_INSTRUCTIONS = 45
# The share of the tensor units' peak rate that large products reach: 16384 x 1024 x 4096 in bf16, measured
# 0.188 ms.
GEMM_SHARE = 0.74
DEFAULT = "h200"


@dataclass(frozen=True)
class DeviceSpec:
    """A row describes one GPU. "sm" is a streaming multiprocessor or a compute unit; bandwidths are in bytes
    a second.

    patterns: lower-case substrings of the device name that the driver reports.
    target: what kernels are compiled for ("sm_90", "gfx942").
    clock: boost clock in Hz. *_lanes: results per clock and sm.
    copy_bandwidth: device-to-device copy, counting bytes read and bytes written.
    l2_bandwidth: what a second reading from L2 adds to a kernel that already streams from memory.
    tensor_flops: dense 16-bit matrix flops a second, accumulated in float32.
    launch_us: period of back-to-back launches of an empty kernel, seen from the GPU.
    floor_us: the shortest time in which a kernel that reads and writes anything ends.
    """

    name: str
    patterns: tuple[str, ...]
    target: str
    sms: int
    clock: float
    copy_bandwidth: float
    l2_bytes: int
    l2_bandwidth: float
    tensor_flops: float
    fp32_lanes: int = 128
    fp64_lanes: int = 64
    special_lanes: int = 16
    integer_lanes: int = 64
    registers_per_sm: int = 65536
    max_threads_per_sm: int = 2048
    max_blocks_per_sm: int = 32
    shared_bytes: int = 228 * 1024
    warp_size: int = 32
    launch_us: float = 2.5
    floor_us: float = 2.2
    dram_latency_us: float = 0.8

    @property
    def shared_bytes_of_program(self) -> int:
        """Return the bytes of shared memory that one program may have: a kilobyte is reserved."""
        return self.shared_bytes - 1024

    @cached_property
    def fp32_per_s(self) -> float:
        """Return the float32 multiply-adds a second; also the rate at which instructions issue."""
        return self.sms * self.fp32_lanes * self.clock

    @cached_property
    def fp64_per_s(self) -> float:
        return self.sms * self.fp64_lanes * self.clock

    @cached_property
    def special_per_s(self) -> float:
        """Return how many exp2, log2, reciprocal, square root or tanh.approx a second run."""
        return self.sms * self.special_lanes * self.clock

    @cached_property
    def integer_per_s(self) -> float:
        """Return the 32-bit integer multiply-adds and logic operations a second."""
        return self.sms * self.integer_lanes * self.clock

    @property
    def capability(self) -> int:
        """Return the compute capability of an NVIDIA GPU, as 90 for sm_90; 0 for others."""
        family, _, number = self.target.partition("_")
        return int(number) if family == "sm" else 0

    @property
    def dependent_launch(self) -> bool:
        """True if the device has programmatic dependent launch, as NVIDIA's have from Hopper on."""
        return self.capability >= 90

    @cached_property
    def random_per_s(self) -> float:
        """Return the Philox numbers a second when all four lanes of a call are used."""
        return 4 * self.integer_per_s / PHILOX_INSTRUCTIONS


MIB = 1 << 20
DEVICES: tuple[DeviceSpec, ...] = (
    DeviceSpec(
        name="h200",
        patterns=("h200",),
        target="sm_90",
        sms=132,
        clock=1.98e9,
        copy_bandwidth=4.28e12,
        l2_bytes=60 * MIB,
        l2_bandwidth=8.0e12,  # fitted: softmax of 32768 columns, second pass from L2, 0.75
        tensor_flops=989e12,
    ),
    DeviceSpec(
        name="h100",
        patterns=("h100",),
        target="sm_90",
        sms=132,
        clock=1.98e9,
        copy_bandwidth=3.35e12 * COPY_FRACTION,
        l2_bytes=50 * MIB,
        l2_bandwidth=8.0e12,
        tensor_flops=989e12,
    ),
    DeviceSpec(
        name="a100",
        patterns=("a100",),
        target="sm_80",
        sms=108,
        clock=1.41e9,
        copy_bandwidth=2.039e12 * COPY_FRACTION,
        l2_bytes=40 * MIB,
        l2_bandwidth=4.7e12,  # the H200's, by sms x clock
        tensor_flops=312e12,
        fp32_lanes=64,
        fp64_lanes=32,
        shared_bytes=164 * 1024,
    ),
    DeviceSpec(
        name="b200",
        patterns=("b200",),
        target="sm_100",
        sms=148,
        clock=1.965e9,
        copy_bandwidth=8e12 * COPY_FRACTION,
        l2_bytes=126 * MIB,
        l2_bandwidth=1.3e13,  # no measurement: keeps the H200's ratio to copy bandwidth
        tensor_flops=2250e12,
    ),
    DeviceSpec(
        name="mi300x",
        patterns=("mi300",),
        target="gfx942",
        sms=304,
        clock=2.1e9,
        copy_bandwidth=5.3e12 * COPY_FRACTION,
        l2_bytes=256 * MIB,  # the Infinity Cache: the level that a second kernel reads from
        l2_bandwidth=1.0e13,  # no measurement: 0.6 of the datasheet's 17.2e12 peak
        tensor_flops=1307e12,
        registers_per_sm=131072,
        shared_bytes=64 * 1024,
        warp_size=64,
    ),
    DeviceSpec(
        name="rtx4090",
        patterns=("rtx 4090", "rtx4090"),
        target="sm_89",
        sms=128,
        clock=2.52e9,
        copy_bandwidth=1.008e12 * COPY_FRACTION,
        l2_bytes=72 * MIB,
        l2_bandwidth=4.0e12,  # no measurement: about half of the L2's read bandwidth in microbenchmarks
        tensor_flops=165e12,
        fp64_lanes=2,
        max_threads_per_sm=1536,
        max_blocks_per_sm=24,
        shared_bytes=100 * 1024,
    ),
)
_BY_NAME = {spec.name: spec for spec in DEVICES}


def device_spec(device: str | torch.device) -> DeviceSpec:
    """Return the row of a device, by its own name ("a100") or for a torch device ("cuda:0").

    A CPU or meta device, and a CUDA device on a machine that has none, plan for an H200. A GPU that
    no row names gets one made from its driver's properties, with a FusionWarning.
    Raises UnsupportedDeviceError for a name that is neither a row nor a torch device, or for a device of
    another type.
    """
    if isinstance(device, str) and device.lower() in _BY_NAME:
        return _BY_NAME[device.lower()]
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError):
        raise UnsupportedDeviceError(device=device, known=", ".join(_BY_NAME)) from None
    if torch_device.type in ("cpu", "meta"):
        return _BY_NAME[DEFAULT]
    if torch_device.type != "cuda":
        raise UnsupportedDeviceError(device=device, known=", ".join(_BY_NAME))
    if not torch.cuda.is_available():
        return _BY_NAME[DEFAULT]
    return spec_of_properties(torch.cuda.get_device_properties(torch_device))


def spec_of_properties(properties: Any) -> DeviceSpec:
    """Return the row whose pattern is in the driver's device name, or else one made from the properties.

    Either way the number of multiprocessors is the driver's: a partition or a smaller variant of a
    known GPU has fewer, and proportionally less L2 traffic.
    """
    name = str(properties.name).lower()
    sms = int(properties.multi_processor_count)
    for spec in DEVICES:
        if any(pattern in name for pattern in spec.patterns):
            if sms == spec.sms:
                return spec
            return replace(spec, sms=sms, l2_bandwidth=spec.l2_bandwidth * sms / spec.sms)
    spec = _from_driver(properties, name, sms)
    warnings.warn(
        f"no hardware numbers for {properties.name!r}: fusion decisions use estimates from the "
        f"driver's properties and the {spec.target} family. Add a row to DEVICES in "
        "fusion_compiler/ir/device.py to plan for it exactly.",
        FusionWarning,
        stacklevel=3,
    )
    return spec


def _from_driver(properties: Any, name: str, sms: int) -> DeviceSpec:
    """Return the nearest row, scaled to the driver's properties: of the same target family, or else the
    default."""
    amd = getattr(properties, "gcnArchName", "") if torch.version.hip else ""
    target = str(amd).split(":")[0] if amd else f"sm_{properties.major}{properties.minor}"
    family = target[:-1]
    near = next((s for s in DEVICES if s.target == target), None)
    near = near or next((s for s in DEVICES if s.target[:-1] == family), _BY_NAME[DEFAULT])
    scale = sms / near.sms
    # kHz and bits; not every torch build reports them
    clock = 1e3 * getattr(properties, "clock_rate", 0) or near.clock
    transfers = 2e3 * getattr(properties, "memory_clock_rate", 0)  # a second; memory is double data rate
    datasheet = transfers * getattr(properties, "memory_bus_width", 0) / 8
    bandwidth = datasheet * COPY_FRACTION or near.copy_bandwidth * scale
    scale *= clock / near.clock
    return replace(
        near,
        name=name,
        patterns=(name,),
        target=target,
        sms=sms,
        clock=clock,
        copy_bandwidth=bandwidth,
        l2_bytes=getattr(properties, "L2_cache_size", 0) or near.l2_bytes,
        l2_bandwidth=near.l2_bandwidth * scale,
        tensor_flops=near.tensor_flops * scale,
        registers_per_sm=getattr(properties, "regs_per_multiprocessor", 0) or near.registers_per_sm,
        max_threads_per_sm=properties.max_threads_per_multi_processor,
        shared_bytes=getattr(properties, "shared_memory_per_multiprocessor", 0) or near.shared_bytes,
        warp_size=getattr(properties, "warp_size", 0) or near.warp_size,
    )
