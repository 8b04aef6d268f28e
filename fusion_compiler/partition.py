"""Which activations are saved for backward: AOTAutograd's min-cut, told what our clusters recompute.

A value is recomputed in backward where that needs fewer saved bytes and only work that a
cluster does on the way: element-wise ops, casts, constants, and random numbers from a saved seed.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._functorch import config, partitioners
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._ordered_set import OrderedSet

from fusion_compiler.calls import mark_gradients
from fusion_compiler.loops import exact
from fusion_compiler.pinned import pin
from fusion_compiler.random import merge_seeds

_aten = torch.ops.aten


def partition(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward; see torch._functorch.partitioners."""
    merge_seeds(joint)
    joint.graph.eliminate_dead_code()
    merge_equal(joint.graph)
    pin(joint.graph)
    mark_gradients(joint.graph)
    default = partitioners.get_default_op_list
    extended = functools.cache(lambda: _extended(default()))
    with config.patch(cse=False), patch.object(partitioners, "get_default_op_list", extended):
        return partitioners.min_cut_rematerialization_partition(joint, inputs, **options)


def merge_equal(graph: fx.Graph) -> None:
    """Calls of one operator with the same arguments become one, in place.

    As PyTorch's own pass does, which imports all of Inductor: half a second of a process's first
    compile. Tensors that are returned stay apart, as do calls with a mutation between them.
    """
    returned = {_storage(n) for n in graph.output_node().all_input_nodes} - {None}
    known: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            known.clear()
        elif _repeatable(node) and _storage(node) not in returned:
            first = known.setdefault((node.target, exact(node.args), exact(node.kwargs)), node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _repeatable(node: fx.Node) -> bool:
    """Whether a call gives the same values each time."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    drawn = torch.Tag.nondeterministic_seeded in node.target.tags
    return not drawn and "empty" not in node.target._schema.name  # uninitialised memory


def _storage(node: fx.Node) -> StorageWeakRef | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage())


def _extended(ops: partitioners.OpTypes) -> partitioners.OpTypes:
    more = OrderedSet[Callable[..., Any]](
        [
            torch.ops.prims.iota,
            _aten.full_like,
            _aten.zeros_like,
            _aten.ones_like,
            _aten.scalar_tensor,
            torch.ops.fusion_compiler.uniform,
        ]
    )
    return replace(ops, fusible_ops=ops.fusible_ops | more, recomputable_ops=ops.recomputable_ops | more)
