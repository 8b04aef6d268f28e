"""Patterns without an example: calls of ATen operators, recorded on parameters that stand for anything.

    relu(conv2d(x, w, b, stride))     x, w: tensors of any shape; b: a tensor or None; stride: any list

Operators match themselves, overloads included, and no cast is looked through. The ops that such a pattern may
match are those behind its candidates, so the rest of a graph is not read.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import networkx as nx
import torch
from torch import fx
from torch.fx._lazy_graph_module import _make_graph_module, _use_lazy_graph_module
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy

from fusion_compiler.capture.graphs import emit
from fusion_compiler.ir.dag import Op, OpDag, argument_of, metas_of
from fusion_compiler.ir.ops import Kind
from fusion_compiler.ir.pattern_text import parameter_names
from fusion_compiler.passes.patterns.trace import Traced
from fusion_compiler.patterns import Pattern


class Recorded:
    """A node of a graph for code that is called on it: operators that it calls become nodes of the graph.

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
        leaves = pytree.tree_leaves((args, kwargs))
        first = next(leaf for leaf in leaves if isinstance(leaf, Recorded))
        args, kwargs = pytree.tree_map_only(Recorded, lambda each: each.node, (args, kwargs or {}))
        return first.call(func, *args, **kwargs)


def recomputed(value: Any) -> Any:
    """Return a value, which backward had better compute again than have saved."""
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


def occurs(traced: Traced, graph: fx.Graph) -> bool:
    """True if a graph has each of the operators of a recorded pattern."""
    targets = (op.target for op in traced.indexed.op.values() if op.target != "placeholder")
    return all(graph.find_nodes(op="call_function", target=t, sort=False) for t in targets)  # type: ignore[arg-type]


def region(gm: fx.GraphModule, patterns: Iterable[Traced]) -> OpDag:
    """Return the ops of `gm` that recorded patterns may match, with what these read, and without costs."""
    roots: dict[Any, int] = {}
    for traced in patterns:
        target = traced.dag.op(traced.root).target
        roots[target] = max(roots.get(target, 0), traced.depth)
    inside: set[fx.Node] = set()
    edge: set[fx.Node] = set()
    for target, depth in roots.items():
        reached = {*gm.graph.find_nodes(op="call_function", target=target, sort=False)}
        for _ in range(depth):
            inside |= reached
            reached = {n for node in reached for n in node.all_input_nodes}
        edge |= reached
    return _dag(gm, sorted(inside | edge), inside)


def _dag(gm: fx.GraphModule, nodes: Iterable[fx.Node], inside: Iterable[fx.Node]) -> OpDag:
    """Return a DAG of some nodes. inside: those whose operands are among them."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    complete, inputs = {*inside}, list[str]()
    for node in nodes:
        reads = tuple(n.name for n in node.all_input_nodes) if node in complete else ()
        is_input = node.op in ("placeholder", "get_attr")
        inputs += [node.name] if is_input else []
        args = tuple(map(argument_of, node.args)) if node in complete else ()
        kwargs = tuple((k, argument_of(v)) for k, v in node.kwargs.items()) if node in complete else ()
        target = node.op if is_input else node.target
        metas = metas_of(node.meta.get("val"))
        op = Op(node.name, target, Kind.OPAQUE, reads, metas, args, kwargs, flops=0, bytes=0, source=None)
        graph.add_node(node.name, op=op)
        graph.add_edges_from((name, node.name) for name in reads)
    return OpDag(graph, tuple(inputs), (), gm)
