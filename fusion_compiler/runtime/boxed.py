"""Wrap functions that take their arguments as one list, which they may empty, and choose which of two
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

Boxed = Callable[[list[Any]], Any]

_pauses = 0
_groups = 0


@contextmanager
def unrecorded() -> Generator[None]:
    """Run graphs that are recorded unasked as without CUDA graphs, in all threads."""
    global _pauses
    _pauses += 1
    try:
        yield
    finally:
        _pauses -= 1


def paused() -> bool:
    """True within `unrecorded`."""
    return _pauses > 0


@contextmanager
def beside_group() -> Generator[None]:
    """Let graphs be recorded beside a process group, in all threads.

    A capture waits for the device. So the caller promises that no message which the device waits for depends
    on one that this process sends later, and that parameters stay where they are.
    """
    global _groups
    _groups += 1
    try:
        yield
    finally:
        _groups -= 1


def is_beside_group() -> bool:
    """True within `beside_group`."""
    return _groups > 0


def boxed(run: Boxed) -> Boxed:
    """Return `run`, marked for AOTAutograd as a function that takes its arguments as one list."""
    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def after_one(first: Boxed, later: Boxed) -> Boxed:
    """Return a function that calls `first` once, then always `later`."""
    current = first

    def call(arguments: list[Any]) -> Any:
        nonlocal current
        called, current = current, later
        return called(arguments)

    return boxed(call)


def unless(condition: Callable[[], bool], plain: Boxed, later: Boxed) -> Boxed:
    """Return a function that calls `later`, or `plain` where the condition holds, and while the user records
    a CUDA graph of his own."""

    def call(arguments: list[Any]) -> Any:
        hindered = condition() or torch.cuda.is_current_stream_capturing()
        return (plain if hindered else later)(arguments)

    return boxed(call)
