"""Recognise calls that run exactly once: they draw random numbers, or are made for what they do, not for a
result.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from torch import fx

from fusion_compiler.ops import schema

_is_impure = fx.Node.is_impure


def is_random(node: fx.Node) -> bool:
    """True if a call draws random numbers, also where a higher-order operator does so within it."""
    return any(map(schema.draws, (node.target, *node.args))) or any(map(is_random, inside(node)))


def inside(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the nodes of the graphs that a higher-order operator takes."""
    for operand in node.all_input_nodes:
        if operand.op == "get_attr" and "val" not in operand.meta:
            graph = attrgetter(str(operand.target))(operand.graph.owning_module)
            yield from graph.graph.nodes if isinstance(graph, fx.GraphModule) else ()


def has_effect(node: fx.Node) -> bool:
    """True if a call is made for what it does: an assertion, a print, any operator that returns nothing."""
    return node.op == "call_function" and schema.has_effect(node.target)


def is_impure(node: fx.Node, *args: Any, **kwargs: Any) -> bool:
    """True if `fx.Node.is_impure`, which dead-code elimination asks, is True, and for each call that has an
    effect.

    PyTorch lists such operators one by one. `_assert_async` without a message, and operators of a user that
    return nothing, are not in its list.
    """
    return has_effect(node) or _is_impure(node, *args, **kwargs)
