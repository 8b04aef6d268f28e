"""Grouped products of few rows are work for clusters.

    _grouped_mm(x, w, offs)   ->   expert_mm(x, w, g)   (`ops.own.experts`)   with g[r] = #{e: offs[e] <= r}

Such a product takes as long as the matrices of its rows are read. A library's kernel is made for many rows of
each expert; a cluster reads each row's matrix once, with what comes before and after the product.

Rows behind the last offset, which belong to no expert and which eager leaves uninitialised, get the last
expert's product: g is clamped, so that no index lies outside.
"""

from __future__ import annotations

import functools

import torch
from torch import fx

from fusion_compiler.capture.graphs import (
    ancestors,
    arguments,
    emit,
    fake_mode,
    mutated_nodes,
    size_of,
    wants_gradient,
)
from fusion_compiler.ir.dag import FEW_ROWS, dim_of, most_of
from fusion_compiler.ir.decision import Decisions
from fusion_compiler.ir.dims import Dim
from fusion_compiler.ir.graph_pass import Pass, Refused
from fusion_compiler.ops.own.experts import expert_mm
from fusion_compiler.passes.rewrites.engine import Nodes, Site, edited
from fusion_compiler.passes.rewrites.routing import GROUPED, Routing, routing_of, unsort

_aten = torch.ops.aten
RULE = "expert products"


Key = tuple[fx.Node, Dim, int]


def fuse_expert_products(gm: fx.GraphModule) -> tuple[fx.GraphModule, Decisions]:
    """Let the grouped products of `gm` (ATen above autograd) that have few rows choose their matrices."""
    calls = [c for c in gm.graph.find_nodes(op="call_function", target=GROUPED) if _has_few_rows(c)]
    if not calls:
        return gm, ()
    written = mutated_nodes(gm.graph.nodes)
    refused = {call: reason for call in calls if (reason := _refusal(call, written))}
    taken = [c for c in calls if c not in refused]
    routings = {key: _routing(key, taken, written) for key in dict.fromkeys(map(_key, taken))}
    chosen: dict[Key, fx.Node] = {}

    def choose(call: fx.Node, nodes: Nodes) -> str:
        key = _key(call)
        routing, node = routings[key], nodes[call]
        if key not in chosen:
            is_sorted = not isinstance(routing, Routing)
            chosen[key] = _counted(node) if is_sorted else unsort(routing, nodes, written)
        nodes[call] = _choose(node, chosen[key], key[2])
        return _described(call, routing)

    return edited(gm, [Site(RULE, c.name, refused.get(c) or functools.partial(choose, c)) for c in calls])


def _key(call: fx.Node) -> Key:
    """Return (offsets, number of rows, number of matrices), which determine the matrix of each row."""
    named = arguments(call)
    rows, matrices = (named[n].meta["val"].shape[0] for n in ("self", "mat2"))
    return named["offs"], dim_of(rows), matrices


def _routing(key: Key, calls: list[fx.Node], written: set[fx.Node]) -> Routing | str:
    """Return the sort that orders the rows of calls if it can be left out, else the reason why it cannot."""
    try:
        routing = routing_of(key[0], key[2], written)
    except Refused as reason:
        return str(reason)
    others = {c for c in routing.sorted_rows if c.target is GROUPED} ^ {c for c in calls if _key(c) == key}
    return routing if not others else "other products have these offsets"


def _choose(call: fx.Node, numbers: fx.Node, matrices: int) -> fx.Node:
    """Replace a call by one that chooses the matrix of each row by its number."""
    named = arguments(call)
    with call.graph.inserting_before(call):
        expert = emit(call, _aten.clamp.default, numbers, 0, matrices - 1)
        result = emit(call, expert_mm, named["self"], named["mat2"], expert)
    call.replace_all_uses_with(result)
    call.graph.erase_node(call)
    return result


def _has_few_rows(call: fx.Node) -> bool:
    shape = arguments(call)["self"].meta["val"].shape
    if len(shape) != 2:
        return False
    return 0 < shape[0] <= FEW_ROWS if isinstance(shape[0], int) else most_of(shape[0]) is not None


def _refusal(call: fx.Node, written: set[fx.Node]) -> str:
    named = arguments(call)
    rows, matrices = (named[n].meta["val"] for n in ("self", "mat2"))
    if torch.is_grad_enabled() and any(map(wants_gradient, ancestors(call))):
        return "its gradient is wanted"
    if named["offs"] is None or matrices.dim() != 3:
        return "its rows are not those of one matrix each"
    if named["offs"] in written:
        return "its offsets are written in place"
    if named["bias"] is not None or {matrices.dtype, call.meta["val"].dtype} != {rows.dtype}:
        return "it adds a bias" if named["bias"] is not None else "its result has another dtype"
    if not all(isinstance(n, int) and n > 0 for n in matrices.shape):
        return "how large its matrices are is only known at run time"
    return ""


def _described(call: fx.Node, routing: Routing | str) -> str:
    _, rows, matrices = _key(call)
    order = "not sorted" if isinstance(routing, Routing) else f"sorted, as {routing}"
    return f"{rows} rows read a matrix each, of {matrices}; rows are {order}"


def _counted(call: fx.Node) -> fx.Node:
    """Emit int64 [rows of the call]: for each row the number of groups that end before it."""
    offsets, x = (arguments(call)[name] for name in ("offs", "self"))
    with call.graph.inserting_before(call), fake_mode([offsets.meta["val"]]):
        numbers = emit(call, _aten.arange.default, size_of(call, x, 0), device=offsets.meta["val"].device)
        ended = emit(call, _aten.le.Tensor, offsets, emit(call, _aten.unsqueeze.default, numbers, 1))
        return emit(call, _aten.sum.dim_IntList, ended, [1])


EXPERT_PRODUCTS = Pass(
    RULE,
    fuse_expert_products,
    does="Compute grouped products of few rows in clusters.",
    when="inference with few rows of each expert",
    gains="each matrix is read once, with what comes before and after the product",
    rounds_as_eager=False,
)
