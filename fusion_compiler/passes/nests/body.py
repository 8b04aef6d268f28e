"""The nests of a region, and the graph that one of them computes.

    forward    m, l, o              one nest: m and l are carried along the keys
    backward   D                    row sums that gradients of scores read
               dQ                   one nest along the keys
               dK, dV               one nest along the queries
               the gradient of a bias   one nest along the axes that the bias lacks

Each graph computes the scores that it needs again, from the factors of their products and from row statistics
of other nests. It is plain ATen, and as such its own reference.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from fusion_compiler.capture.graphs import fake_mode
from fusion_compiler.ir.layout import is_view_node
from fusion_compiler.ir.walk import reached
from fusion_compiler.ops.schema import HALVES, is_cast
from fusion_compiler.passes.nests.copies import is_free_copy, stored_behind
from fusion_compiler.passes.nests.region import PRODUCTS, Exit, Region, count, is_pointwise

_aten = torch.ops.aten
# A tensor with so many times the elements of all that it is computed from is computed again where it is read:
# a mask from positions or documents, keys that several heads share.
WORTH_COMPUTING = 4


@dataclass(frozen=True)
class Nest:
    """A part of a region that one kernel computes.

    exits: its reductions. paths: by exit, what it computes of it before it stores it (`stored_behind`).
    nodes: all that it computes, in the order of the graph. inputs: what it reads. results: what it stores of
    the exits that are read outside.
    """

    exits: tuple[Exit, ...]
    paths: tuple[tuple[fx.Node, ...], ...]
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]

    @property
    def stored(self) -> tuple[fx.Node, ...]:
        """Return what is stored of each exit, if it is read outside."""
        return tuple((e.node, *path)[-1] for e, path in zip(self.exits, self.paths, strict=True))

    def graph(self) -> fx.GraphModule:
        """Return the nest as a graph of its own, from `inputs` to `results`: float32 instead of 16-bit floats
        between the two, as a kernel computes."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.inputs:
            copies[node] = graph.placeholder(node.name)
            copies[node].meta = dict(node.meta)
        for node in self.inputs:
            copies[node] = _converted(copies[node], _wide(node))
        for node in self.nodes:
            copies[node] = _widened(graph, node, copies)
        graph.output(tuple(_converted(copies[n], n.meta["val"].dtype) for n in self.results))
        return fx.GraphModule({}, graph)


def _wide(node: fx.Node) -> torch.dtype | None:
    dtype = getattr(node.meta["val"], "dtype", None)
    return torch.float32 if dtype in HALVES else dtype


def _converted(node: fx.Node, dtype: torch.dtype | None) -> fx.Node:
    """Return a node, or its conversion to another dtype."""
    if dtype is None or node.meta["val"].dtype == dtype:
        return node
    return _emitted(node.graph, node, _aten._to_copy.default, (node,), {"dtype": dtype})


def _widened(graph: fx.Graph, node: fx.Node, copies: Mapping[fx.Node, fx.Node]) -> fx.Node:
    """Return a copy of a call with float32 in the place of 16-bit floats."""

    def wide(value: Any) -> Any:
        return torch.float32 if value in (torch.float16, torch.bfloat16) else value

    args, kwargs = map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
    args, kwargs = tree_map_only(torch.dtype, wide, (args, kwargs))
    if is_cast(node.target) and args[0].meta["val"].dtype == wide(node.meta["val"].dtype):
        return args[0]
    return _emitted(graph, node, node.target, args, kwargs)


def _emitted(graph: fx.Graph, like: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
    call = graph.create_node("call_function", target, args, kwargs, like.name)
    value, dtype = like.meta["val"], kwargs.get("dtype") if is_cast(target) else _wide(like)
    if not isinstance(value, torch.Tensor) or value.dtype != dtype:
        values = map_arg((args, kwargs), lambda n: n.meta["val"])
        with fake_mode([value]), torch.no_grad():
            value = target(*values[0], **values[1])
    call.meta = {**like.meta, "val": value}
    return call


def nests_of(region: Region, order: Mapping[fx.Node, int], recompute: bool = True) -> tuple[Nest, ...]:
    """Return the nests of a region, those first whose results others read. recompute: a nest computes a
    tensor again, instead of reading it, if the tensor is much larger than all that it is computed from."""
    exits, levels = {e.node: e for e in region.exits}, dict[fx.Node, int]()
    last: dict[tuple[bool, frozenset[int]], int] = {}
    for end in region.exits:
        read = _slice(region, [end.node], region.statistics) & exits.keys() - {end.node} - region.scores
        same = [exits[n] for n in read if exits[n].backward == end.backward]
        # The law of carried reductions lets forward nests read row statistics before they are final.
        levels[end.node] = max(
            (levels[e.node] + (end.backward or e.over != end.over) for e in same), default=0
        )
        if end.node not in region.statistics:
            kind = end.backward, end.over
            last[kind] = max(last.get(kind, 0), levels[end.node])
    groups: dict[tuple[bool, int, frozenset[int]], list[Exit]] = {}
    for end in region.exits:
        is_result = end.node not in region.statistics  # it may wait for others that are summed over the same
        level = last[end.backward, end.over] if is_result else levels[end.node]
        groups.setdefault((end.backward, level, end.over), []).append(end)
    ordered = sorted(groups, key=lambda k: k[:2])
    nests = [_nest(region, tuple(groups[key]), order, recompute) for key in ordered]
    outside = {n for nest in nests for n in nest.inputs}
    return tuple(replace(n, results=tuple(r for r in n.stored if r in outside | {*n.results})) for n in nests)


def _nest(region: Region, exits: tuple[Exit, ...], order: Mapping[fx.Node, int], recompute: bool) -> Nest:
    ends = [e.node for e in exits]
    inside = _slice(region, ends, region.statistics - set(ends))
    inside -= region.statistics - set(ends)
    paths = tuple(map(stored_behind, ends))
    inside |= {node for path in paths for node in path}
    for node in [n for end in inside for n in end.all_input_nodes if n not in inside]:
        inside |= _computed(node) if recompute else set()
    nodes = sorted(inside, key=order.__getitem__)
    inputs = dict.fromkeys(n for node in nodes for n in node.all_input_nodes if n not in inside)
    nest = Nest(exits, paths, tuple(nodes), tuple(inputs), ())
    return replace(nest, results=tuple(n for n in nest.stored if any(u not in inside for u in n.users)))


def _slice(region: Region, ends: Sequence[fx.Node], stops: frozenset[fx.Node]) -> set[fx.Node]:
    """Return `ends` and the values of a region that they are computed from, up to `stops`, stops included."""
    within = region.scores | region.bridges | region.statistics

    def read(node: fx.Node) -> list[fx.Node]:
        return [n for n in node.all_input_nodes if n in within]

    behind = [n for end in ends for n in read(end)]
    return {*ends, *reached(behind, lambda node: [] if node in stops else read(node))}


def _computed(node: fx.Node) -> set[fx.Node]:
    """Return a value that a nest reads, and all that it is computed from, if that is worth to be computed
    again. If not, return the views through which it is read."""
    views = set[fx.Node]()
    while is_free_copy(node) or (
        is_view_node(node) and isinstance(node.args[0], fx.Node) and node.target is not operator.getitem
    ):
        views.add(node)
        node = node.all_input_nodes[0]

    def is_inner(node: fx.Node) -> bool:
        return is_pointwise(node) and node.target not in PRODUCTS

    behind = reached([node], lambda n: n.all_input_nodes if is_inner(n) else ())
    inside = {n for n in behind if is_inner(n)}
    read = sum(count(leaf) for leaf in behind - inside)
    largest = max(count(n) for n in (node, *views))
    return views | (inside if node in inside and read * WORTH_COMPUTING <= largest else set())
