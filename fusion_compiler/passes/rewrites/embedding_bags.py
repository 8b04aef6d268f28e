"""Bags of embeddings that all have as many rows are lookups and sums.

    embedding_bag(w, i, arange(0, n, k), mode="sum")   ->   embedding(w, i.view(-1, k)).sum(1)

The gradient of such a sum is one row for each bag (`ops/decompositions/rows_by_number.py`:
`embedding_backward`).
"""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import ancestors, arguments, emit, size_of
from fusion_compiler.ir.graph_pass import Pass
from fusion_compiler.passes.rewrites.engine import Replacement, Replacements
from fusion_compiler.passes.rewrites.mask_algebra import UnprovedError, expression, integers_of

_aten = torch.ops.aten
RULE = "embedding bags"
_BAGS = (_aten.embedding_bag.default, _aten.embedding_bag.padding_idx)
_SUM, _MEAN = 0, 1


def _look(node: fx.Node, written: set[fx.Node]) -> Replacement | None:
    count = _rows_of_each(node, written)
    results = [user for user in node.users if user.users]
    if not count or len(results) != 1:
        return None
    unread = [user for user in node.users if not user.users]
    summed = functools.partial(_summed, count=count)
    return Replacement(lambda nodes: summed(nodes[node]), "lookups and a sum", (*unread, node), results[0])


def _rows_of_each(node: fx.Node, written: set[fx.Node]) -> int | None:
    """Return how many rows each bag has, or None where they may differ or more than sums is asked for."""
    named = arguments(node)
    offsets, last = named["offsets"], named["include_last_offset"]
    read = [u for u in node.users if u.target is not operator.getitem or (u.users and u.args[1] != 0)]
    if read or named["mode"] not in (_SUM, _MEAN) or named["scale_grad_by_freq"] or named["sparse"]:
        return None
    if not ancestors(offsets).isdisjoint(written):
        return None
    try:
        (place,), element, _ = integers_of(offsets)
    except UnprovedError:
        return None
    count: Any = element.coeff(place)
    bags = expression(offsets.meta["val"].shape[0]) - (1 if last else 0)
    total = expression(named["indices"].meta["val"].shape[0])
    even = count.is_Integer and count > 0 and (element - count * place).expand() == 0
    return int(count) if even and total != 0 and (bags * count - total).expand() == 0 else None


def _summed(node: fx.Node, count: int) -> fx.Node:
    named = arguments(node)
    weight, indices, factors = named["weight"], named["indices"], named["per_sample_weights"]
    padding, counts = named.get("padding_idx"), None
    indices = emit(node, _aten.reshape.default, indices, [-1, count])
    rows = emit(node, _aten.embedding.default, weight, indices)
    if factors is not None:
        factors = emit(node, _aten.reshape.default, factors, [-1, count, 1])
        rows = emit(node, _aten.mul.Tensor, rows, factors)
    if padding is not None:
        padding = emit(node, operator.add, size_of(node, weight, 0), padding) if padding < 0 else padding
        counts = emit(node, _aten.ne.Scalar, emit(node, _aten.unsqueeze.default, indices, -1), padding)
        rows = emit(node, _aten.where.ScalarOther, counts, rows, 0.0)
    total = emit(node, _aten.sum.dim_IntList, rows, [1])
    if named["mode"] == _SUM:
        return total
    if counts is None:
        return emit(node, _aten.div.Scalar, total, float(count))
    each = emit(node, _aten.clamp_min.default, emit(node, _aten.sum.dim_IntList, counts, [1]), 1)
    return emit(node, _aten.div.Tensor, total, each)


EMBEDDING_BAGS = Pass(
    RULE,
    Replacements(RULE, _BAGS, _look),
    does="Replace bags of embeddings of equal size by a lookup and a sum.",
    when="all bags have as many rows",
)
