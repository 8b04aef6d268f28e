"""Numbers that schedules are made of."""

from __future__ import annotations

from collections.abc import Iterator

from fusion_compiler.ir.device import DeviceSpec

WARP = 32  # threads of those that shapes are written in


def padded(size: int) -> int:
    """The least power of two that is no smaller."""
    return 1 << max(0, size - 1).bit_length()


def powers(low: int, high: int) -> Iterator[int]:
    """Powers of two from `low`, which is one, to `high`; `high` alone where it is below."""
    n = min(low, high)
    while n <= high:
        yield n
        n *= 2


def warps_of(warps: int, device: DeviceSpec) -> int:
    """Warps of a device with as many threads as `warps` of 32."""
    return max(1, warps * WARP // device.warp_size)
