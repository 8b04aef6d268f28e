"""Read and cut fx graphs that may hold in-place operators, for all rewrites."""

from __future__ import annotations

import contextlib
import copy
import operator
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves, tree_map_only

from fusion_compiler.ir.dag import metas_of
from fusion_compiler.ir.effects import has_effect
from fusion_compiler.ir.graph_pass import Refused
from fusion_compiler.ir.walk import reached
from fusion_compiler.ops.own.channel_order import dimensions_in_memory
from fusion_compiler.ops.schema import bound, draws, reads_strides, written

# A LazyGraphModule compiles its code when it is first called: most graphs here are only read.

# What a node that replaces another inherits from it.
ORIGIN = ("nn_module_stack", "source_fn_stack", "stack_trace", "recompute", "ac_graph_id", "custom")


def copied(gm: fx.GraphModule) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Return a copy of `gm` that shares its tensors, and {node of `gm`: node of the copy}."""
    nodes: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    output = graph.graph_copy(gm.graph, nodes)
    graph.output(output).meta = copy.copy(gm.graph.output_node().meta)
    new = LazyGraphModule(gm, graph, gm.__class__.__name__)
    new.meta = gm.meta
    keep_sources(gm, new, nodes.items())
    return new, nodes


def keep_sources(gm: fx.GraphModule, new: fx.GraphModule, nodes: Iterable[tuple[fx.Node, fx.Node]]) -> None:
    """Let `new`, another form of Dynamo's graph `gm`, say where its arguments come from.

    nodes: pairs of a node of `gm` and the same node of `new`.
    """
    for before, after in nodes:
        if hasattr(before, "_dynamo_source"):
            after._dynamo_source = before._dynamo_source  # type: ignore[attr-defined]
    if hasattr(gm, "_param_name_to_source"):
        new._param_name_to_source = gm._param_name_to_source
    unregister_constants(new)


def eager(gm: fx.GraphModule) -> Callable[..., Any]:
    """Return the code of `gm` as a function, whose errors are raised and not printed as well."""
    LazyGraphModule.force_recompile(gm)
    return gm.forward


def form_of(gm: fx.GraphModule) -> tuple[str, ...]:
    """Return what graphs have in common that compute the same of arguments that lie in memory alike, whatever
    their nodes are called."""
    numbers = {node: f"%{number}" for number, node in enumerate(gm.graph.nodes)}
    lines = list[str]()
    for node in gm.graph.nodes:
        value, called = node.meta.get("val"), map_arg((node.args, node.kwargs), numbers.__getitem__)
        target = "" if node.op == "placeholder" else node.target
        lines.append(f"{node.op} {target} {called} {metas_of(value) or value}")
    return tuple(lines)


def unregister_constants(gm: fx.GraphModule) -> None:
    """Turn constants of a trace into plain attributes. As buffers, AOTAutograd would take them for the user's
    inputs and ask Dynamo for their source."""
    for name, constant in list(gm.named_buffers(recurse=False)):
        del gm._buffers[name]
        gm.__dict__[name] = constant


def place_of(tensor: torch.Tensor) -> int:
    """Return a number for the memory in which a tensor lies."""
    return tensor.untyped_storage()._cdata


def arguments(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of an ATen call by the names of its schema, with defaults filled in."""
    assert isinstance(node.target, OpOverload)
    return bound(node.target, node.args, node.kwargs)


def is_pure(node: fx.Node) -> bool:
    """True for an ATen call that has no effect and always gives the same value for the same inputs."""
    target = node.target
    return (
        node.op == "call_function"
        and isinstance(target, OpOverload)
        and target.namespace == "aten"
        and not (written(target) or draws(target) or has_effect(node))
        and "empty" not in target._schema.name  # uninitialised memory
    )


def ancestors(node: fx.Node) -> set[fx.Node]:
    """Return `node` and everything from which it is computed."""
    return reached([node], lambda n: n.all_input_nodes)


def nodes_in(value: Any) -> list[fx.Node]:
    """Return the nodes in an argument, which may be a list."""
    nodes: list[fx.Node] = []
    map_arg(value, nodes.append)
    return nodes


def wants_gradient(node: fx.Node) -> bool:
    """True if a node is an input of the graph with a gradient, as Dynamo saw it when it captured the
    graph."""
    value = node.meta.get("example_value", node.meta.get("val"))
    return node.op == "placeholder" and isinstance(value, torch.Tensor) and value.requires_grad


def is_trained(nodes: Iterable[fx.Node]) -> bool:
    """True if the gradient of one of these nodes is wanted."""
    return torch.is_grad_enabled() and any(map(wants_gradient, nodes))


def mutated_nodes(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """Return the nodes whose memory some in-place call of `nodes` writes to, directly or through a view."""
    return {node for call in nodes for into in written_arguments(call) for node in aliases(into)}


def written_arguments(node: fx.Node) -> list[Any]:
    """Return the arguments that a call writes into."""
    positions = written(node.target)
    return [list(arguments(node).values())[i] for i in positions] if positions else []


def between(first: fx.Node, last: fx.Node, inside: Collection[fx.Node]) -> list[fx.Node]:
    """Return the nodes from `first` on and before `last` that are not in `inside`."""
    nodes: list[fx.Node] = []
    while first is not last:
        nodes += [] if first in inside else [first]
        first = first.next
    return nodes


def refuse_effects(nodes: Iterable[fx.Node], what: str) -> None:
    """Raise Refused if one of the nodes between `what` is no operator and has an effect."""
    for node in nodes:
        if node.op == "call_function" and not isinstance(node.target, OpOverload) and node.is_impure():
            raise Refused(f"{node.name} comes between {what}")


def aliases(value: Any) -> set[fx.Node]:
    """Return a node, or several, and all nodes whose memory they may show."""
    return reached(nodes_in(value), _viewed)


def _viewed(node: fx.Node) -> list[fx.Node]:
    """Return the arguments whose memory a call's result may be."""
    if not isinstance(node.target, OpOverload):
        return node.all_input_nodes
    named = arguments(node)
    return nodes_in([named[a.name] for a in node.target._schema.arguments if a.alias_info is not None])


def emit(like: fx.Node, target: OpOverload | Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """Return a call at the graph's insertion point that comes from where `like` does, its value traced."""
    node = like.graph.call_function(target, args, kwargs)
    node.meta = {k: copy.copy(v) for k, v in like.meta.items() if k in ORIGIN}
    node.meta["val"] = _called(node, {})
    return node


def replaced_by(node: fx.Node, result: fx.Node) -> fx.Node:
    """Erase a node whose readers read `result` from now on, and return that."""
    node.replace_all_uses_with(result)
    node.graph.erase_node(node)
    return result


def stored_in_order(like: fx.Node, node: fx.Node, value: torch.Tensor) -> fx.Node:
    """Emit a copy of a tensor whose dimensions lie in memory in the order of `value`'s."""
    order = dimensions_in_memory(value)
    aten = torch.ops.aten
    stored = emit(like, aten.contiguous.default, emit(like, aten.permute.default, node, order))
    return emit(like, aten.permute.default, stored, [order.index(d) for d in range(len(order))])


def size_of(like: fx.Node, tensor: fx.Node, dim: int) -> Any:
    """Return a tensor's size for a call at the graph's insertion point: a number, or a node if it is a
    symbol."""
    size = tensor.meta["val"].shape[dim]
    return size if isinstance(size, int) else emit(like, torch.ops.aten.sym_size.int, tensor, dim)


def fake_mode(values: Iterable[Any]) -> AbstractContextManager[Any]:
    """Return the context that makes FakeTensors of the same trace as `values`. Another mode may be active
    around it, because backward is compiled when it first runs."""
    modes = (value.fake_mode for value in values if isinstance(value, FakeTensor))
    return next(modes, contextlib.nullcontext())


def _called(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Return the result of a call for `values` of its operands, and for their traced values where it has
    none."""
    args, kwargs = map_arg((node.args, dict(node.kwargs)), lambda n: values.get(n, n.meta.get("val")))
    with fake_mode(tree_leaves((args, kwargs))), torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def trace_again(node: fx.Node) -> None:
    """Trace the value of a call whose operands have a new layout. Raise what the call raises."""
    if node.op == "call_function":
        node.meta["val"] = _called(node, {})


def trace_strides(first: fx.Node) -> None:
    """Trace again the value of `first`, whose operand has a new layout, and all that this changes in the
    graph; shapes stay.

    Raises Refused, with all values as they were, if other strides would be seen or a call raises for them.
    """
    values: dict[fx.Node, Any] = {}
    node = first
    while node.op != "root":
        if node is first or any(n in values for n in node.all_input_nodes):
            if node is not first:
                refuse_strides(node)
            try:
                value = _called(node, values)
            except (RuntimeError, ValueError) as error:
                raise Refused(str(error)) from error
            if tree_map_only(torch.Tensor, _strides, value) != tree_map_only(
                torch.Tensor, _strides, node.meta["val"]
            ):
                values[node] = value
        node = node.next
    for changed, value in values.items():
        changed.meta["val"] = value


def refuse_strides(node: fx.Node) -> None:
    """Raise Refused if other strides of an operand would be seen."""
    if node.op == "output":
        raise Refused("a result of the graph shows its strides")
    is_known = isinstance(node.target, OpOverload) or node.target is operator.getitem
    if reads_strides(node.target) or not is_known:
        raise Refused(f"{node.target} depends on strides")


def _strides(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tuple(tensor.stride())


def erase_unused(nodes: set[fx.Node]) -> None:
    """Erase the pure nodes among `nodes` that nothing reads any more."""
    for node in sorted(nodes, reverse=True):
        if not node.users and is_pure(node):
            node.graph.erase_node(node)
