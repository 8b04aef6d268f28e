"""Read facts about operators from their schemas."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

# Operators that take graphs, and run them as often as data or sizes say.
CONTROL_FLOW = tuple(getattr(torch.ops.higher_order, n) for n in ("cond", "while_loop", "map_impl", "scan"))
_SHORT = {"convert_element_type": "cast", "_to_copy": "cast"}


def is_view(target: object) -> bool:
    """True if eager runs the op without a kernel: a view of its input, or an element of a tuple."""
    if isinstance(target, OpOverload):
        return target.is_view or target is torch.ops.aten._unsafe_view.default
    return target is operator.getitem


def short_name(target: object) -> str:
    """Return "add" for aten.add.Tensor, "cast" for conversions, the name of any other callable."""
    if isinstance(target, OpOverload):
        name = target._schema.name.split("::")[-1]
        return _SHORT.get(name, name)
    return getattr(target, "__name__", None) or str(target)


def written(overload: object) -> tuple[int, ...]:
    """Return the positions of the arguments that an operator writes into."""
    arguments = overload._schema.arguments if isinstance(overload, OpOverload) else ()
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def sizes_argument(target: object) -> int | None:
    """Return the position of the argument with the sizes of the result, as views and new tensors take it."""
    arguments = target._schema.arguments if isinstance(target, OpOverload) else ()
    return next((i for i, a in enumerate(arguments) if a.name in ("size", "shape")), None)


def bound(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by the names of the operator's schema, with defaults filled in."""
    named = defaults_of(target)
    return {**named, **dict(zip(named, args, strict=False)), **kwargs}


@cache
def defaults_of(target: OpOverload) -> Mapping[str, Any]:
    """Return {name: default} of an operator's arguments, in their order; None where there is no default."""
    return {a.name: a.default_value for a in target._schema.arguments}


@cache
def default_numbers(target: OpOverload) -> Mapping[str, int | float]:
    """Return the arguments that are numbers unless a call has others, such as alpha = 1 of a sum."""
    defaults = defaults_of(target).items()
    return {n: v for n, v in defaults if isinstance(v, int | float) and not isinstance(v, bool)}
