"""Read facts about operators from their schemas."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

HALVES = (torch.float16, torch.bfloat16)
aten, higher_order = torch.ops.aten, torch.ops.higher_order
# Operators that take graphs, and run them as often as data or sizes say.
CONTROL_FLOW = tuple(getattr(higher_order, n) for n in ("cond", "while_loop", "map_impl", "scan"))
# Writes a result into an argument, at the end of what a graph does with the argument.
WRITE_BACK = aten.copy_.default
_CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_READS_STRIDES = (aten.as_strided.default, aten.as_strided_.default)
# Operators that return something but are called for their effect.
_EFFECTS = (
    aten._functional_assert_async.msg,
    aten._functional_sym_constrain_range.default,
    aten._functional_sym_constrain_range_for_size.default,
    higher_order.auto_functionalized,  # a user's operator that writes into its arguments
    higher_order.auto_functionalized_v2,
)
_SHORT = {"convert_element_type": "cast", "_to_copy": "cast"}


def runs_no_kernel(target: object) -> bool:
    """True if eager runs the op without a kernel: a view of its input, or an element of a tuple."""
    if isinstance(target, OpOverload):
        return target.is_view or target is aten._unsafe_view.default
    return target is operator.getitem


def short_name(target: object) -> str:
    """Return "add" for aten.add.Tensor, "cast" for conversions, the name of any other callable."""
    if isinstance(target, OpOverload):
        name = target._schema.name.split("::")[-1]
        return _SHORT.get(name, name)
    return getattr(target, "__name__", None) or str(target)


def written(overload: object) -> tuple[int, ...]:
    """Return the positions of the arguments that an operator writes into.

    `detach_`, which traces of torch.tensor(...) hold, leaves the numbers as they are.
    """
    if not isinstance(overload, OpOverload) or overload is aten.detach_.default:
        return ()
    arguments = overload._schema.arguments
    return tuple(i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write)


def sizes_argument(target: object) -> int | None:
    """Return the position of the argument with the sizes of the result, as views and new tensors take it."""
    arguments = target._schema.arguments if isinstance(target, OpOverload) else ()
    return next((i for i, a in enumerate(arguments) if a.name in ("size", "shape")), None)


def is_cast(target: object) -> bool:
    """True if an operator copies its operand, perhaps to another dtype."""
    return target in _CASTS


def reads_strides(target: object) -> bool:
    """True if the values of the result depend on the operand's strides, which no other operator shows."""
    return target in _READS_STRIDES


def has_effect(target: object) -> bool:
    """True if an operator is called for what it does: an assertion, a print, anything without a result."""
    returns_nothing = isinstance(target, OpOverload) and not target._schema.returns
    return returns_nothing or target in _EFFECTS


def draws(target: object) -> bool:
    """True if an operator draws from a random generator, so that equal calls give different values."""
    return isinstance(target, OpOverload) and _draws(target)


@cache
def _draws(target: OpOverload) -> bool:
    takes_generator = any("Generator" in str(a.type) for a in target._schema.arguments)
    return takes_generator or torch.Tag.nondeterministic_seeded in target.tags


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
