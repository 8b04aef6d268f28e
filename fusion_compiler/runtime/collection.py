"""Leave the old generation alone in Python's garbage collection while a graph is compiled.

A compilation makes millions of objects that live until its end, and a process that has PyTorch and a model's
library imported has a million more: Python then goes through all of them, again and again, and frees next to
nothing: a sixth of the first step of BERT with 12 layers. Young objects are collected as before, less often,
so that what a compilation drops is freed.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Generator
from contextlib import contextmanager

# Objects made until the young ones are looked through, and how often until the next older ones are.
WHILE_COMPILING = (20_000, 20, 1_000_000)

_lock = threading.Lock()
_inside = 0
_before: tuple[int, int, int] = gc.get_threshold()


@contextmanager
def rare_collections() -> Generator[None]:
    """Run no full collections while entered. Several threads may enter it, and each of them again."""
    global _inside, _before
    with _lock:
        _inside += 1
        if _inside == 1 and gc.get_threshold()[0]:  # 0: somebody has turned collections off
            _before = gc.get_threshold()
            gc.set_threshold(*WHILE_COMPILING)
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside and gc.get_threshold() == WHILE_COMPILING:
                gc.set_threshold(*_before)
