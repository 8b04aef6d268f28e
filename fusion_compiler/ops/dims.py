"""Read from an operator's arguments which dimensions it works along, counted from the front."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from fusion_compiler.ops.table import Kind, spec_of
from fusion_compiler.ops.views import wrap

aten = torch.ops.aten
_LOOKUPS = frozenset({
    aten.gather.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default,
})  # fmt: skip


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


def dims_along(target: OpOverload, arguments: Mapping[str, Any], rank: int) -> tuple[int, ...] | None:
    """Return the dimensions along which an element of the result depends on the operand's elements at other
    places: those of a reduction, a scan, a lookup, a flip or a pad. Return None for any other operator.

    arguments: by the names of the schema (`schema.bound`). rank: the operand's.
    """
    spec = spec_of(target)
    kind = spec.kind if spec is not None else None
    if kind is Kind.REDUCTION:
        return reduced_dims(arguments, rank)
    if kind is Kind.SCAN or target in _LOOKUPS:
        dim = dim_of(arguments, rank)
        return () if dim is None else (dim,)
    if target is aten.flip.default:
        return tuple(wrap(d, rank) for d in arguments["dims"])
    if target is aten.constant_pad_nd.default:
        pad = arguments["pad"]
        return tuple(rank - 1 - i // 2 for i in range(0, len(pad), 2) if pad[i] != 0 or pad[i + 1] != 0)
    return None
