"""How wide rows programs keep in registers: what legality allows, and what schedules take."""

from __future__ import annotations

from fusion_compiler.ir.device import DeviceSpec

ALONE = 16384  # columns of a row that one program has
PART = 8192  # columns of each program, where several share a row
MOST_PARTS = 64  # of a row, far fewer than the programs that run at once: they wait for each other
MOST_AT_ONCE = 128  # the same where all programs of all rows run at once, one a multiprocessor


def widest_shared(device: DeviceSpec) -> int:
    """Columns of a row that programs keep together, where they can tell each other what they reduced."""
    parts = MOST_AT_ONCE if device.sms >= MOST_AT_ONCE else min(MOST_PARTS, device.sms)
    return max(ALONE, parts * PART)
