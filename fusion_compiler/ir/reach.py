"""Walk any graph."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

T = TypeVar("T", bound=Hashable)


def reached(start: Iterable[T], further: Callable[[T], Iterable[T]]) -> set[T]:
    """Return the nodes of `start`, the nodes that `further` returns for each of them, and so on."""
    nodes, pending = set[T](), [*start]
    while pending:
        if (node := pending.pop()) not in nodes:
            nodes.add(node)
            pending += further(node)
    return nodes
