"""Read from an operator's arguments which dimensions it works along, counted from the front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusion_compiler.ops.views import wrap


def wrapped(dims: int | Sequence[int] | None, rank: int) -> tuple[int, ...]:
    """Return dimensions in ascending order; None and an empty list stand for all of them."""
    if rank == 0 or dims is None or (isinstance(dims, Sequence) and not dims):
        return tuple(range(rank))
    return tuple(sorted(wrap(d, rank) for d in ([dims] if isinstance(dims, int) else dims)))


def reduced_dims(arguments: Mapping[str, Any], rank: int) -> tuple[int, ...]:
    """Return the dimensions that a reduction reduces.

    arguments: by the names of the schema (`schema.bound`). rank: the operand's. An empty list means all
    dimensions. PyTorch's any and all, unlike the others, take it for none: their result then has another
    shape than these dimensions say.
    """
    return wrapped(arguments.get("dim"), rank)


def dim_of(arguments: Mapping[str, Any], rank: int) -> int | None:
    """Return the one dimension that an operator works along, such as a scan or a gather; None for a 0-d
    tensor. arguments: by the names of the schema (`schema.bound`)."""
    return wrap(arguments["dim"], rank) if rank else None
