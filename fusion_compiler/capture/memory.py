"""Tell in which part of whose memory a value of a functional graph lies, through its views."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fusion_compiler.capture.graphs import emit, erase_unused, fake_mode
from fusion_compiler.ir.dag import dim_of
from fusion_compiler.ir.layout import is_view_node
from fusion_compiler.ops.schema import WRITE_BACK


def show_arguments(graph: fx.Graph, shown: Mapping[int, int]) -> None:
    """Let results that are views of a written argument's new value be views of the argument, in place.

    AOTAutograd makes such a result again as a view of the argument only if the graph's result lies in the
    argument's memory. shown: {position of a result: position of its argument}.
    """
    placeholders, output = graph.find_nodes(op="placeholder"), graph.output_node()
    copies = {copy.args[0]: copy for copy in graph.find_nodes(op="call_function", target=WRITE_BACK)}
    results: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    for i, number in shown.items():
        views, base = [], results[i]
        while isinstance(base, fx.Node) and is_view_node(base):
            views.append(base)
            base = base.args[0]
        argument = copies.get(placeholders[number], placeholders[number])
        if not views or base.op == "placeholder" or metadata_of(base) != metadata_of(argument):  # type: ignore[union-attr]
            continue
        with graph.inserting_before(output):
            for view in reversed(views):
                argument = emit(view, view.target, argument, *view.args[1:], **view.kwargs)  # type: ignore[arg-type]
        results[i] = argument
        output.args = (type(output.args[0])(results),)  # type: ignore[call-arg,arg-type]
        erase_unused({*views, base})  # type: ignore[arg-type]


def root(node: fx.Node) -> fx.Node:
    """Return the node whose memory a chain of views shows."""
    while is_view_node(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def has_strides(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def metadata_of(node: fx.Node) -> object:
    """Return the dtype, device, sizes and strides of a node's value; None for what is no strided tensor."""
    if not has_strides(node):
        return None
    value: torch.Tensor = node.meta["val"]
    return value.dtype, value.device, *(tuple(map(dim_of, n)) for n in (value.shape, value.stride()))


def place(node: fx.Node) -> object:
    """Return the root of a chain of views, and the sizes, strides and offset of the view in its memory."""
    chain: list[fx.Node] = []
    while node is not root(node):
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    value = node.meta["val"]
    with fake_mode([value]), torch.no_grad():
        for view in reversed(chain):
            values = fx.map_arg((view.args[1:], view.kwargs), lambda n: n.meta.get("val"))
            value = view.target(value, *values[0], **values[1])  # type: ignore[operator,index]
    sizes: Iterable[Sequence[Any]] = (value.shape, value.stride(), (value.storage_offset(),))
    return node, tuple(map(dim_of, itertools.chain.from_iterable(sizes)))
