"""Walk along edges from some items, whatever these are: nodes of a graph, names of ops, numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def walk(start: Iterable[T], further: Callable[[T], Iterable[T]]) -> Iterator[T]:
    """Yield the items of `start`, those that `further` returns for each of them, and so on, each once."""
    seen, pending = set[T](), [*start]
    while pending:
        if (item := pending.pop()) not in seen:
            seen.add(item)
            yield item
            pending += further(item)


def reached(start: Iterable[T], further: Callable[[T], Iterable[T]]) -> set[T]:
    """Return all items of a walk."""
    return set(walk(start, further))
