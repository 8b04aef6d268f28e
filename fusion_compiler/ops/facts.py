"""Facts about operators that follow from their rows in the table and from their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._ops import OpOverload

from fusion_compiler.ops.dims import dim_of, reduced_dims
from fusion_compiler.ops.products import factors_of
from fusion_compiler.ops.syntax import Literal
from fusion_compiler.ops.table import Form, Kind, spec_of
from fusion_compiler.ops.views import wrap

aten = torch.ops.aten
# No cluster holds these.
_SCATTERS: dict[object, tuple[tuple[str, ...], ...]] = {
    aten.scatter.src: (("self", "src"),),
    aten.scatter.value: (("self", "value"),),
    aten.scatter_add.default: (("self", "src"),),
}


def dims_along(target: OpOverload, arguments: Mapping[str, Any], rank: int) -> tuple[int, ...] | None:
    """Return the dimensions along which an element of the result depends on the operand's elements at other
    places: those of a reduction, a scan, a lookup, a flip or a pad. Return None for any other operator.

    arguments: by the names of the schema (`schema.bound`). rank: the operand's.
    """
    spec = spec_of(target)
    kind, form = (None, None) if spec is None else (spec.kind, spec.form)
    if kind is Kind.REDUCTION:
        return reduced_dims(arguments, rank)
    if kind is Kind.SCAN or target is aten.gather.default or target in _SCATTERS:
        dim = dim_of(arguments, rank)
        return () if dim is None else (dim,)
    if form is Form.REVERSAL:
        return tuple(wrap(d, rank) for d in arguments["dims"])
    if form is Form.PADDING:
        pad = arguments["pad"]
        return tuple(rank - 1 - i // 2 for i in range(0, len(pad), 2) if pad[i] != 0 or pad[i + 1] != 0)
    return None


def linear_in(target: object) -> tuple[tuple[str, ...], ...]:
    """Return the groups of arguments in which an operator is linear (see `OpSpec`): of a row of the table, of
    a matrix product or of a scatter."""
    spec, factors = spec_of(target), factors_of(target)
    if spec is not None:
        return spec.linear
    if factors is None or factors.rank is None:
        return _SCATTERS.get(target, ())
    added = (factors.added,) if factors.added else ()
    return (factors.left, *added), (factors.right, *added)


def filled_with(target: object, arguments: Mapping[str, Any]) -> float | None:
    """Return the number that a new tensor is filled with, or None for any other operator's result.

    arguments: by the names of the schema, with a node for what is computed.
    """
    spec = spec_of(target)
    if spec is None or spec.expr is None or spec.form is not Form.FILL:
        return None
    value: Any = spec.expr(**arguments)
    value = value.value if isinstance(value, Literal) else value
    return value if isinstance(value, int | float) else None
