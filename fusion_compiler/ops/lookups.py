"""Say of every operator that looks elements up by indices which argument is looked up in, and along what.

    embedding(weight, i)          Lookups("weight", ((0, i),))
    gather(x, 1, i)               Lookups("self", ((1, i),), is_pointwise=True)
    x[:, i, j]                    Lookups("self", ((1, i), (2, j)), wraps=True)
    expert_mm(rows, w, expert)    Lookups("matrices", ((0, expert),))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch._ops import OpOverload

from fusion_compiler.ops.dims import dim_of
from fusion_compiler.ops.own.experts import expert_mm
from fusion_compiler.ops.own.put import put

aten = torch.ops.aten


@dataclass(frozen=True)
class Lookups:
    """The lookups of one call.

    operand: the name of the argument whose elements are looked up, or written.
    indices: the dimensions of that argument which are indexed, in ascending order, each with its index.
    wraps: True if negative indices count from the end.
    in_bounds: True if the operator promises indices that are in bounds.
    is_pointwise: True if the index has an element for each element of the result. Otherwise the dimensions of
        the indices, broadcast together, take the place of the dimensions that they index.
    """

    operand: str
    indices: tuple[tuple[int, Any], ...] = ()
    wraps: bool = False
    in_bounds: bool = False
    is_pointwise: bool = False


# Each operator with the argument that holds the index, or a list of one index or None for each dimension.
_OPERATORS: Mapping[OpOverload, tuple[str, Lookups]] = {
    aten.embedding.default: ("indices", Lookups("weight")),
    aten.gather.default: ("index", Lookups("self", is_pointwise=True)),
    aten.index_select.default: ("index", Lookups("self")),
    aten.index.Tensor: ("indices", Lookups("self", wraps=True)),
    aten._unsafe_index.Tensor: ("indices", Lookups("self", wraps=True, in_bounds=True)),
    expert_mm: ("expert", Lookups("matrices")),
    put: ("indices", Lookups("view", wraps=True)),
}
# The lookups whose result is nothing but the elements that are looked up, with the argument that holds these.
GATHERS = {
    target: looked.operand for target, (_, looked) in _OPERATORS.items() if target not in (expert_mm, put)
}


def looks_up(target: object) -> TypeGuard[OpOverload]:
    """True for an operator that looks elements up by indices that are data, or writes them."""
    return target in _OPERATORS


def lookups_of(target: OpOverload, arguments: Mapping[str, Any], rank: Callable[[Any], int]) -> Lookups:
    """Return the lookups of a call of an operator that looks something up.

    arguments: by the names of the schema (`schema.bound`). rank: returns the number of dimensions of one.
    """
    name, lookups = _OPERATORS[target]
    index = arguments[name]
    if index is None:
        return lookups
    if isinstance(index, list | tuple):
        return replace(lookups, indices=tuple((d, i) for d, i in enumerate(index) if i is not None))
    dim = dim_of(arguments, rank(arguments[lookups.operand])) if "dim" in arguments else 0
    return replace(lookups, indices=((dim or 0, index),))
