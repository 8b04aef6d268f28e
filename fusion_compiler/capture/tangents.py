"""Compile backward for the gradients that arrive: others are of results that the loss is not computed from.

Autograd fills in zeros for the others. For logits beside a loss this is a tensor of their size, written, read
and added in vain, at the moment when most memory is in use. Here a constant zero takes their place, and melts
into the kernel that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule

from fusion_compiler.capture.arguments import has_storage, in_forward_mode, is_plain
from fusion_compiler.runtime.boxed import Boxed, boxed

Missing = tuple[bool, ...]  # for each gradient that a backward graph takes


def tangents_of(graph: fx.GraphModule) -> tuple[int, ...]:
    """Return the positions, among the placeholders of a backward graph, of the gradients from which it
    starts."""
    placeholders = graph.graph.find_nodes(op="placeholder")
    return tuple(i for i, node in enumerate(placeholders) if node.name.startswith("tangents"))


def separable(results: Sequence[fx.Node | None]) -> bool:
    """True if it pays to compile for the gradients that arrive, from a forward graph's results for the
    caller: there are several, and zeros in a gradient's place need no sizes that only a call knows."""
    values = [node.meta.get("val") for node in results if node is not None]
    tensors = [v for v in values if isinstance(v, torch.Tensor) and v.dtype.is_floating_point]
    return len(tensors) > 1 and all(type(v) is FakeTensor and _static(v) for v in tensors)


def _static(value: torch.Tensor) -> bool:
    sizes: tuple[Any, ...] = tuple(value.shape)
    return all(isinstance(n, int) for n in sizes)


def without(graph: fx.GraphModule, missing: Missing) -> fx.GraphModule:
    """Return a copy of a backward graph with zeros for the missing gradients, whose placeholders stay
    unread."""
    nodes = fx.Graph()
    nodes.output(nodes.graph_copy(graph.graph, {}))
    nodes.output_node().meta = dict(graph.graph.output_node().meta)
    copy = LazyGraphModule(graph, nodes)
    placeholders = copy.graph.find_nodes(op="placeholder")
    for position, gone in zip(tangents_of(graph), missing, strict=True):
        node = placeholders[position]
        if not gone or not node.users:
            continue
        with copy.graph.inserting_before(placeholders[-1].next), node.meta["val"].fake_mode:
            zeros = _zeros(node, dict(next(iter(node.users)).meta))  # their place is that of who reads them
        node.replace_all_uses_with(zeros)
    copy.recompile()
    return copy


def _zeros(node: fx.Node, meta: dict[str, Any]) -> fx.Node:
    """Return zeros of the size, type and order of dims of what a node is, made at the insertion point."""
    graph, value = node.graph, node.meta["val"]
    order = sorted(range(value.dim()), key=lambda dim: (-value.stride(dim), dim))
    sizes = [value.shape[dim] for dim in order]
    options = {"dtype": value.dtype, "device": value.device}
    zeros = graph.call_function(torch.ops.aten.full.default, (sizes, 0), {**options, "pin_memory": False})
    zeros.meta = {**meta, "val": torch.full(sizes, 0, **options)}
    if order == list(range(value.dim())):
        return zeros
    back = [order.index(dim) for dim in range(value.dim())]
    permuted = graph.call_function(torch.ops.aten.permute.default, (zeros, back))
    permuted.meta = {**meta, "val": zeros.meta["val"].permute(back)}
    return permuted


class Backward:
    """A backward graph is compiled for each set of gradients that is missing when it is called.

    compile: takes a graph, what is missing in it, and a number that tells it from those compiled before.
    several: whether a gradient may be missing; otherwise it is compiled once.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        compile: Callable[[fx.GraphModule, Missing, int], Boxed],
        *,
        several: bool = True,
    ) -> None:
        self._graph, self._compile = graph, compile
        self._tangents = tangents_of(graph) if several else ()
        self._compiled: dict[Missing, Boxed] = {}

    def _variant(self, missing: Missing) -> Boxed:
        with compile_lock:
            if missing not in self._compiled:  # another thread's first call may be through by now
                graph = without(self._graph, missing) if any(missing) else self._graph
                self._compiled[missing] = self._compile(graph, missing, len(self._compiled))
            return self._compiled[missing]

    def prepare(self) -> None:
        """Compile for the gradients that are expected: the loss's alone, if one result is a number."""
        placeholders = self._graph.graph.find_nodes(op="placeholder")
        dims = [placeholders[i].meta["val"].dim() for i in self._tangents]
        if not dims or dims.count(0) == 1:
            self._variant(tuple([dim != 0 for dim in dims]))

    def __call__(self, args: list[Any]) -> Any:
        missing = tuple([args[i] is None for i in self._tangents])
        return (self._compiled.get(missing) or self._variant(missing))(args)


def any_gradients(run: Boxed, graph: fx.GraphModule) -> Boxed:
    """Return `run`, a compiled backward `graph`, as a function of gradients of any kind.

    No guard sees the gradients. A lazy one gets memory that holds its values. `graph` runs eager for those of
    `torch.autograd.grad(is_grads_batched=True)` and for those with a forward-mode tangent: a kernel reads one
    tensor's memory.
    """
    positions = tangents_of(graph)

    def call(args: list[Any]) -> Any:
        for i in positions:
            gradient = args[i]
            if gradient is not None and not is_plain(gradient):
                if not has_storage(gradient):
                    return _eager(args)
                args[i] = gradient.clone()
        return _eager(args) if in_forward_mode() else run(args)

    def _eager(args: list[Any]) -> Any:
        missing = tuple([args[i] is None for i in positions])
        return (without(graph, missing) if any(missing) else graph)(*args)

    return boxed(call)


def leave_undefined(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` of a trained graph, so that its backward sees which gradients are missing."""
    node_types: list[type] = []  # the class of the graph's node in autograd's graph, once it was seen

    def call(*args: Any) -> Any:
        results: Sequence[Any] = run(*args)
        for result in results:
            node: Any = result.grad_fn if isinstance(result, torch.Tensor) else None
            if node is None or not hasattr(node, "set_materialize_grads"):
                continue
            # A result that is an argument has the node of what made it.
            if not node_types and not any(isinstance(a, torch.Tensor) and a.grad_fn is node for a in args):
                node_types.append(type(node))
            if type(node) in node_types:
                node.set_materialize_grads(False)
                break
        return results

    return call
