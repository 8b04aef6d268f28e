"""Patterns without an example: calls of ATen operators are recorded on parameters that stand for anything.

    relu(conv2d(x, w, b, stride))     x, w: tensors of any shape; b: a tensor or None; stride: any list

Operators match themselves, overloads included, and no cast is looked through. Such a pattern may
match only ops behind its candidates, so the rest of a graph is not read.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import networkx as nx
import torch
from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.utils.checkpoint import CheckpointPolicy

from fusion_compiler.capture.graphs import emit
from fusion_compiler.ir.dag import Op, OpDag, TensorMeta, argument_of
from fusion_compiler.ir.pattern_text import parameter_names
from fusion_compiler.ops.table import Kind
from fusion_compiler.passes.patterns.trace import Traced
from fusion_compiler.patterns import Pattern


class Recorded:
    """A Recorded stands for a node of a graph: operators that code calls on it become nodes of the graph.

    like: the node from which the new ones inherit their origin, and whose graph has FakeTensors as values;
        None where nodes have no values. Other attributes are those of the value: shape, dtype, dim().
    """

    def __init__(self, node: fx.Node, like: fx.Node | None = None) -> None:
        self.node, self.like = node, like

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node.meta["val"], name)

    def __getitem__(self, position: int) -> Recorded:
        return self.call(operator.getitem, self.node, position)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Recorded:
        if self.like is None:
            return Recorded(self.node.graph.call_function(target, args, kwargs))
        return Recorded(emit(self.like, target, *args, **kwargs), self.like)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Recorded:
        operands: list[Recorded] = []

        def node(value: Any) -> Any:
            if isinstance(value, Recorded):
                operands.append(value)
                return value.node
            return [*map(node, value)] if isinstance(value, list | tuple) else value

        args, kwargs = node(args), {key: node(value) for key, value in (kwargs or {}).items()}
        return operands[0].call(func, *args, **kwargs)


def recomputed(value: Any) -> Any:
    """Return a value, marked so that backward rather computes it again than saves it."""
    if isinstance(value, Recorded):
        value.node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    return value


@functools.cache
def recorded(pattern: Pattern) -> Traced:
    """Return a pattern whose parameters stand for tensors and literals of any kind."""
    graph = fx.Graph()
    names = parameter_names(pattern.code, len(pattern.example))
    places = [graph.placeholder(name) for name in names]
    result = pattern.code(*map(Recorded, places)).node
    nodes = [*graph.nodes]
    graph.output(result)
    with _use_lazy_graph_module(True):  # nobody runs it
        gm = _make_graph_module(torch.nn.Module(), graph)
    dag = replace(_dag(gm, nodes, nodes), outputs=(result.name,))
    tensors = {position: place.name for position, place in enumerate(places)}
    return Traced(pattern.name, pattern, dag, tensors, {}, saved=False, recorded=True)


def roots_of(traced: Traced, graph: fx.Graph) -> list[fx.Node]:
    """Return the calls of the operator with which a recorded pattern ends; none if it cannot occur."""
    targets = (op.target for op in traced.indexed.op.values() if op.target != "placeholder")
    if not all(graph.find_nodes(op="call_function", target=t, sort=False) for t in targets):  # type: ignore[arg-type]
        return []
    target: Any = traced.dag.op(traced.root).target
    return graph.find_nodes(op="call_function", target=target, sort=False)


def region(gm: fx.GraphModule, roots: Mapping[fx.Node, int]) -> OpDag:
    """Return the ops before some nodes, at most so many before each, without costs."""
    inside: set[fx.Node] = set()
    edge: set[fx.Node] = set()
    for root, depth in roots.items():
        reached = {root}
        for _ in range(depth):
            inside |= reached
            reached = {n for node in reached for n in node.all_input_nodes}
        edge |= reached
    return _dag(gm, sorted(inside | edge), inside)


def _dag(gm: fx.GraphModule, nodes: Iterable[fx.Node], inside: Iterable[fx.Node]) -> OpDag:
    """Return a DAG of some nodes. inside: the nodes whose operands are among them; others are its inputs.

    The DAG has ranks instead of shapes, and no edges: matching compares no sizes, and goes from an op to what
    it reads.
    """
    graph: nx.DiGraph[str] = nx.DiGraph()
    complete, inputs = {*inside}, list[str]()
    for node in nodes:
        is_input = node not in complete or node.op in ("placeholder", "get_attr")
        inputs += [node.name] if is_input else []
        reads = () if is_input else tuple(n.name for n in node.all_input_nodes)
        args = () if is_input else tuple(map(argument_of, node.args))
        kwargs = () if is_input else tuple((k, argument_of(v)) for k, v in node.kwargs.items())
        target = "placeholder" if is_input else node.target
        value = node.meta.get("val")
        tensors = (value,) if isinstance(value, torch.Tensor) else ()
        metas = tuple(TensorMeta((0,) * t.dim(), (), t.dtype, t.device.type) for t in tensors)
        op = Op(node.name, target, Kind.OPAQUE, reads, metas, args, kwargs, flops=0, bytes=0, source=None)
        graph.add_node(node.name, op=op)
    return OpDag(graph, tuple(inputs), (), gm)
