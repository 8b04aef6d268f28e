"""Helpers for the numbers in schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fusion_compiler.ir.device import DeviceSpec

WARP = 32  # threads of the warps in which shapes are given
WORD = 8  # elements of two bytes in the widest access


def padded(size: int) -> int:
    """Return the smallest power of two that is not less than `size`."""
    return 1 << max(0, size - 1).bit_length()


def are_apart(terms: Iterable[tuple[int, int]]) -> bool:
    """True if no two elements have the same index. terms: the (step, size) of each axis of the index."""
    reach = 0
    for step, size in sorted(terms):
        if step <= reach and size != 1:
            return False
        reach += step * (size - 1)
    return True


def powers(low: int, high: int) -> Iterator[int]:
    """Yield the powers of two from `low`, which is one, to `high`; only `high` if it is less than `low`."""
    n = min(low, high)
    while n <= high:
        yield n
        n *= 2


def warps_of(warps: int, device: DeviceSpec) -> int:
    """Return the number of a device's warps with as many threads as `warps` of 32."""
    return max(1, warps * WARP // device.warp_size)
