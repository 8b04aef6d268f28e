"""Widths of rows that programs keep in registers, for legality and for schedules."""

from __future__ import annotations

from fusion_compiler.ir.device import DeviceSpec

ALONE = 16384  # columns of a row in one program
PART = 8192  # columns of each program that shares a row
# programs that share a row, far fewer than run at the same time, because they wait for each other
MOST_PARTS = 64
MOST_AT_ONCE = 128  # the same if all programs of all rows run at the same time, one per multiprocessor


def widest_shared(device: DeviceSpec) -> int:
    """Return the most columns of a row that programs can hold together, exchanging their reductions."""
    parts = MOST_AT_ONCE if device.sms >= MOST_AT_ONCE else min(MOST_PARTS, device.sms)
    return max(ALONE, parts * PART)
