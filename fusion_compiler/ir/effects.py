"""Recognise calls that run exactly once: they draw random numbers, or are made for what they do, not for a
result.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

_aten, _higher_order = torch.ops.aten, torch.ops.higher_order
# Operators that return something but are called for their effect.
_EFFECTS = (
    _aten._functional_assert_async.msg,
    _aten._functional_sym_constrain_range.default,
    _aten._functional_sym_constrain_range_for_size.default,
    _higher_order.auto_functionalized,  # a user's operator that writes into its arguments
    _higher_order.auto_functionalized_v2,
)
_is_impure = fx.Node.is_impure


def draws(operator: object) -> bool:
    """True if an operator draws from a random generator, so that equal calls give different values."""
    return isinstance(operator, OpOverload) and _draws(operator)


@functools.cache
def _draws(operator: OpOverload) -> bool:
    takes_generator = any("Generator" in str(a.type) for a in operator._schema.arguments)
    return takes_generator or torch.Tag.nondeterministic_seeded in operator.tags


def is_random(node: fx.Node) -> bool:
    """True if a call draws random numbers, also where a higher-order operator does so within it."""
    return any(map(draws, (node.target, *node.args))) or any(map(is_random, _inside(node)))


def _inside(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of the graphs that a higher-order operator takes."""
    for operand in node.all_input_nodes:
        if operand.op == "get_attr" and "val" not in operand.meta:
            graph = attrgetter(str(operand.target))(operand.graph.owning_module)
            yield from graph.graph.nodes if isinstance(graph, fx.GraphModule) else ()


def has_effect(node: fx.Node) -> bool:
    """True if a call is made for what it does: an assertion, a print, any operator that returns nothing."""
    if node.op != "call_function":
        return False
    returns_nothing = isinstance(node.target, OpOverload) and not node.target._schema.returns
    return returns_nothing or node.target in _EFFECTS


def is_impure(node: fx.Node, *args: Any, **kwargs: Any) -> bool:
    """True if `fx.Node.is_impure`, which dead-code elimination asks, is True, and for each call that has an
    effect.

    PyTorch lists such operators one by one. `_assert_async` without a message, and operators of a user that
    return nothing, are not in its list.
    """
    return has_effect(node) or _is_impure(node, *args, **kwargs)
