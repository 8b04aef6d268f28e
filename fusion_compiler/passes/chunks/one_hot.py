"""The sum of a row that has one element other than zero is that element.

    sum(where(arange(n) == label, x, 0), dim, keepdim=True)    ->    where(0 <= label < n, x, 0)

A loss's gradient begins with such rows, as large as the logits. Where their sum is needed before any of the
gradient's elements, they would be computed twice.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import arguments, emit
from fusion_compiler.passes.chunks.generated import counted
from fusion_compiler.passes.chunks.linear import is_zero
from fusion_compiler.passes.chunks.rows import shape

aten = torch.ops.aten


def sum_one_hot(graph: fx.Graph) -> None:
    """Replace, in place, sums over the classes of rows that are compared with labels."""
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        named = arguments(node)
        chosen, dims = named["self"], named["dim"]
        if chosen.target is not aten.where.self or named["dtype"] is not None or len(dims or ()) != 1:
            continue
        dim = dims[0] % len(shape(chosen))
        label, value = _label(chosen, dim), chosen.args[1]
        if label is None or not isinstance(value, fx.Node) or not is_zero(chosen.args[2]):
            continue
        with graph.inserting_before(node):
            replacement = _chosen(node, label, value, shape(chosen)[dim])
            if not named["keepdim"]:
                replacement = emit(node, aten.squeeze.dim, replacement, dim)
        if shape(replacement) != shape(node) or replacement.meta["val"].dtype != node.meta["val"].dtype:
            continue  # label and value are broadcast: the sum has more rows than they have
        node.replace_all_uses_with(replacement)
    graph.eliminate_dead_code()


def _chosen(node: fx.Node, label: fx.Node, value: fx.Node, classes: int) -> fx.Node:
    below = emit(node, aten.lt.Scalar, label, 0)
    unknown = emit(node, aten.logical_or.default, below, emit(node, aten.ge.Scalar, label, classes))
    return emit(node, aten.masked_fill.Scalar, value, unknown, 0)


def _label(chosen: fx.Node, dim: int) -> fx.Node | None:
    """Return `label` of where(0, 1, ... == label, value, 0), with 0, 1, ... along a dimension along which
    label and value are the same, or None for any other form."""
    compared, value = chosen.args[:2]
    if not isinstance(compared, fx.Node) or compared.target is not aten.eq.Tensor:
        return None
    size, dim = shape(chosen)[dim], dim - len(shape(chosen))
    sides: Any = compared.args
    for numbers, label in (sides, sides[::-1]):
        is_along = _size(numbers, dim) == size == math.prod(shape(numbers))
        if is_along and counted(numbers) == (0, 1) and _size(label, dim) == _size(value, dim) == 1:
            return label
    return None


def _size(node: Any, dim: int) -> int:
    """Return the size of a tensor along a dimension, counted from the last; 1 if it lacks the dimension."""
    sizes = shape(node) if isinstance(node, fx.Node) else ()
    return sizes[dim] if len(sizes) >= -dim else 1
