"""Write times and sizes in the unit that fits."""

from __future__ import annotations


def timed(us: float) -> str:
    """Return microseconds as "12 us", "3.4 ms" or "1.20 s"."""
    size = abs(us)
    return f"{us:.0f} us" if size < 1e3 else f"{us / 1e3:.1f} ms" if size < 1e6 else f"{us / 1e6:.2f} s"


def sized(nbytes: float) -> str:
    """Return bytes as "512 B", "4.2 kB", "6.6 MB" or "11.4 GB"."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes:.0f} B"
