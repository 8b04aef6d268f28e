"""Grouped products of few rows are work for clusters.

    _grouped_mm(x, w, offs)   ->   expert_mm(x, w, g)   (`ir.experts`)   with g[r] = #{e: offs[e] <= r}

It takes as long as the matrices of these rows are read. A library's kernel is made for many rows of each
expert; a cluster reads each row's matrix once, with what comes before and after the product.

Rows behind the last offset, which no expert has and eager leaves as they were allocated, get the last
expert's product: g is clamped, and no index lies outside.
"""

from __future__ import annotations

import torch
from torch import fx

from fusion_compiler.capture.graphs import (
    ancestors,
    arguments,
    copied,
    emit,
    fake_mode,
    mutated_nodes,
    wants_gradient,
)
from fusion_compiler.ir.experts import expert_mm
from fusion_compiler.ir.rewrite_note import Notes, RewriteNote

_aten = torch.ops.aten
_GROUPED = _aten._grouped_mm.default
RULE = "experts"
MOST_ROWS = 16  # those of products that clusters hold


def choose_matrices(gm: fx.GraphModule) -> tuple[fx.GraphModule, Notes]:
    """Let those grouped products of `gm` (ATen above autograd) that have few rows choose their matrices."""
    calls = [c for c in gm.graph.find_nodes(op="call_function", target=_GROUPED) if _has_few_rows(c)]
    if not calls:
        return gm, ()
    written = mutated_nodes(gm.graph.nodes)
    refused = {call: reason for call in calls if (reason := _refusal(call, written))}
    notes = tuple(RewriteNote(RULE, c.name, c not in refused, refused.get(c) or _described(c)) for c in calls)
    if len(refused) == len(calls):
        return gm, notes
    new, nodes = copied(gm)
    chosen: dict[tuple[fx.Node, int, int], fx.Node] = {}
    for call in (nodes[c] for c in calls if c not in refused):
        named = arguments(call)
        rows, matrices = named["self"], named["mat2"]
        key = named["offs"], rows.meta["val"].shape[0], matrices.meta["val"].shape[0]
        with new.graph.inserting_before(call):
            if key not in chosen:
                chosen[key] = _experts(call, *key)
            call.replace_all_uses_with(emit(call, expert_mm, rows, matrices, chosen[key]))
        new.graph.erase_node(call)
    new.recompile()
    return new, notes


def _has_few_rows(call: fx.Node) -> bool:
    shape = arguments(call)["self"].meta["val"].shape
    return len(shape) == 2 and isinstance(shape[0], int) and 0 < shape[0] <= MOST_ROWS


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


def _described(call: fx.Node) -> str:
    rows, matrices = (arguments(call)[n].meta["val"].shape for n in ("self", "mat2"))
    return f"the matrices of {rows[0]} rows are read, of {matrices[0]}"


def _experts(call: fx.Node, offsets: fx.Node, rows: int, matrices: int) -> fx.Node:
    """int64 [rows]: which matrix a row is multiplied by."""
    with fake_mode([offsets.meta["val"]]):
        numbers = emit(call, _aten.arange.default, rows, device=offsets.meta["val"].device)
    ended = emit(call, _aten.le.Tensor, offsets, emit(call, _aten.unsqueeze.default, numbers, 1))
    return emit(call, _aten.clamp.default, emit(call, _aten.sum.dim_IntList, ended, [1]), 0, matrices - 1)
