"""Choose the activations that are saved for backward: AOTAutograd's min-cut, with the costs of clusters.

A value is recomputed in backward if that saves bytes and needs only operators that a cluster fuses:
element-wise operators, casts, constants, random numbers from a saved seed. This holds even if a product reads
the value, so that the cluster has to store it again. An activation's result is an example: the kernel of the
activation's gradient computes it from an operand that the kernel reads anyway. `saved_values` limits how much
is saved.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import networkx
import torch
from torch import fx
from torch._functorch import config, partitioners
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._ordered_set import OrderedSet
from torch.utils.checkpoint import CheckpointPolicy

from fusion_compiler.capture.memory import place
from fusion_compiler.capture.saved_values import Budget, Note, mark_single_runs, seconds, within
from fusion_compiler.ir.calls import is_backward, mark_gradients
from fusion_compiler.ir.device import DEFAULT, device_spec
from fusion_compiler.ir.effects import has_effect, is_random
from fusion_compiler.ir.layout import is_view_node
from fusion_compiler.ir.loops import exact
from fusion_compiler.ir.reproducible import mark_reproducible
from fusion_compiler.ops.decompositions import rows_by_number
from fusion_compiler.ops.decompositions.tensors import hinted
from fusion_compiler.ops.own.random import merge_seeds
from fusion_compiler.ops.own.recurrent import FORWARDS
from fusion_compiler.ops.schema import WRITE_BACK, is_cast
from fusion_compiler.ops.table import OPS, Form, form_of, is_always_held

_aten = torch.ops.aten
# The cut nearest to the sink is the same for every maximum flow. For 32 layers the default algorithm takes
# two to three seconds, and this one a quarter of a second.
_flow = networkx.algorithms.flow.boykov_kolmogorov


def partition(
    joint: fx.GraphModule,
    inputs: Any,
    *,
    rewrite: Callable[[fx.Graph], None] | None = None,
    note: Note = lambda note: None,
    memory: Budget = "fast",
    device: str | None = None,
    **options: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Split a joint graph into forward and backward; see torch._functorch.partitioners.

    rewrite: changes the joint graph in place before it is split.
    memory: the limit of memory in use at once (`saved_values.within`). note: receives the outcome.
    device: the name of the DeviceSpec that sets the prices.
    """
    merge_seeds(joint)
    read_wide_statistics(joint.graph)
    joint.graph.eliminate_dead_code()
    merge_equal(joint.graph)
    mark_reproducible(joint.graph)
    mark_gradients(joint.graph)
    look_up_again(joint.graph)
    keep_records(joint.graph)
    if rewrite is not None:
        rewrite(joint.graph)
    mark_single_runs(joint.graph)
    default = partitioners.get_default_op_list
    extended = functools.cache(lambda: _extended(default()))
    choose = within(memory, partitioners.choose_saved_values_set, note)
    price = seconds(device_spec(device or _device(joint.graph)))
    with (
        config.patch(cse=False, ban_recompute_materialized_backward=False),
        patch.object(partitioners, "get_default_op_list", extended),
        patch.object(partitioners, "choose_saved_values_set", choose),
        patch.object(partitioners, "estimate_runtime", price),
        patch.object(partitioners, "reordering_to_mimic_autograd_engine", _reordered),
        patch.object(networkx, "minimum_cut", functools.partial(networkx.minimum_cut, flow_func=_flow)),
    ):
        forward, backward = partitioners.min_cut_rematerialization_partition(joint, inputs, **options)
    keep_old_values(forward, backward, options["num_fwd_outputs"])
    return forward, backward


_reorder = partitioners.reordering_to_mimic_autograd_engine


def _reordered(backward: fx.GraphModule) -> fx.GraphModule:
    """Reorder as PyTorch does, without generating Python code for a graph that is never run."""
    with patch.object(fx, "GraphModule", LazyGraphModule):
        return _reorder(backward)


def _device(graph: fx.Graph) -> torch.device | str:
    """Return the device of a graph's arguments, or the default device to plan for if none is on a GPU."""
    values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    devices = (value.device for value in values if isinstance(value, torch.Tensor))
    return next((device for device in devices if device.type == "cuda"), DEFAULT)


def keep_old_values(forward: fx.GraphModule, backward: fx.GraphModule, outputs: int) -> None:
    """Let forward save a copy of each argument that it writes into and backward reads, made before the write.

    Changes both graphs in place.

    outputs: how many results of the forward are the caller's; the others are saved.
    """
    returned = forward.graph.output_node()
    results: list[Any] = list(returned.args[0])  # type: ignore[arg-type]
    written = {_storage(node) for node in _written(forward.graph)} - {None}
    saved = [i for i, n in enumerate(results) if i >= outputs and isinstance(n, fx.Node)]
    stale = [i for i in saved if _storage(results[i]) in written]
    if not stale:
        return
    last = forward.graph.find_nodes(op="placeholder")[-1]
    arguments = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    for i in stale:
        node = results[i]
        with forward.graph.inserting_after(last if node.op == "placeholder" else node):
            copy = results[i] = forward.graph.call_function(_aten.clone.default, (node,))
        copy.meta = node.meta | {"val": node.meta["val"].clone()}
        arguments[node.name]._rename(copy.name)  # it is no longer an argument of the caller
        arguments[node.name].target, arguments[node.name].meta = copy.name, dict(copy.meta)
    returned.args = (type(returned.args[0])(results),)  # type: ignore[call-arg,arg-type]
    forward.recompile()
    backward.recompile()
    # A copy is dense, and its original may have been part of a larger tensor.
    inputs = [node.meta["val"] for node in arguments.values()]
    FakeTensorProp(backward, detect_fake_mode(inputs)).propagate_dont_convert_inputs(*inputs)


def _written(graph: fx.Graph) -> list[fx.Node]:
    """Return the arguments that a forward graph writes into, or into which AOTAutograd writes its results."""
    writes = graph.find_nodes(op="call_function", target=WRITE_BACK)
    written = [write.args[0] for write in writes if isinstance(write.args[0], fx.Node)]
    descriptors: Sequence[object] = graph.output_node().meta.get("desc", ())
    later = [d.mutated_input for d in descriptors if isinstance(d, InputMutationAOTOutput)]
    arguments = graph.find_nodes(op="placeholder") if later else []
    return written + [node for node in arguments if node.meta.get("desc") in later]


def read_wide_statistics(graph: fx.Graph) -> None:
    """Let a norm's backward read the mean and rstd in float32, as the forward computed both; in place.

    The operator returns both in eager's dtype, which may have 16 bits, and backward would convert them back.
    """
    for node in list(graph.nodes):
        if not _casts(node, _NORMS_BACKWARD):
            continue
        (source,) = node.all_input_nodes
        while source.target is _aten.alias.default:  # autograd detaches saved values
            (source,) = source.all_input_nodes
        if not _casts(source, _NORMS):
            continue
        (wide,) = source.all_input_nodes
        if wide.meta["val"].dtype == node.meta["val"].dtype:
            node.replace_all_uses_with(wide)
            graph.erase_node(node)


_NORMS = ("native_layer_norm", "native_group_norm", "group_norm")
_NORMS_BACKWARD = tuple(f"{name}_backward" for name in _NORMS)


def _casts(node: fx.Node, operators: tuple[str, ...]) -> bool:
    """True if a node is a conversion that stems from one of some operators."""
    return is_cast(node.target) and _is_of(node, operators)


def _is_of(node: fx.Node, operators: tuple[str, ...]) -> bool:
    original = node.meta.get("original_aten")  # a copy of the overload
    return getattr(original, "_opname", None) in operators


def look_up_again(graph: fx.Graph) -> None:
    """Let backward repeat a lookup whose result is larger than its source if only clusters read the result.

    Changes the graph in place. A saved result costs memory, and a store in forward that no cluster needs.
    """
    for node in graph.nodes:
        is_lookup = form_of(node.target) is Form.LOOKUP
        if not is_lookup or is_backward(node) or not any(map(is_backward, node.users)):
            continue
        sizes = (hinted(node.args[0].meta["val"].numel()), hinted(node.meta["val"].numel()))
        if sizes[0] < sizes[1] and all(map(_reads_on_the_way, node.users)):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE


def _reads_on_the_way(node: fx.Node) -> bool:
    """True if only clusters read a value through `node`, an operator or a view."""
    if is_view_node(node):
        return all(map(_reads_on_the_way, node.users))
    return is_always_held(node.target)


def keep_records(graph: fx.Graph) -> None:
    """Mark the operands and results of recurrent layers as saved, in place.

    The record of a layer (`ops.own.recurrent`) refers to their memory, which must not be overwritten before
    the backward pass. A layer that a checkpointed region runs again makes a new record.
    """
    for node in graph.nodes:
        if node.target in FORWARDS and "recompute" not in node.meta:
            for other in (*node.all_input_nodes, *node.users):
                other.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def merge_equal(graph: fx.Graph) -> None:
    """Merge calls of one operator with equal arguments, in place.

    PyTorch has such a pass, but it imports all of Inductor, which adds half a second to a process's first
    compile. Returned tensors are not merged, and neither are calls with a mutation between them.
    """
    returned = {_storage(n) for n in graph.output_node().all_input_nodes} - {None}
    first_calls: dict[object, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            first_calls.clear()
        elif _repeatable(node) and _storage(node) not in returned:
            first = first_calls.setdefault(_equality_key(node), node)
            if first is not node:
                rows_by_number.check_as(first, node)
                node.replace_all_uses_with(first)
                graph.erase_node(node)


def _equality_key(node: fx.Node) -> Any:
    """Return the key by which `merge_equal` recognises equal calls. Checks of the same numbers are equal,
    through whatever views they read these."""
    if (check := rows_by_number.checked(node)) is not None:
        count, numbers = check
        return count, place(numbers)
    return node.target, exact(node.args), exact(node.kwargs)


def _repeatable(node: fx.Node) -> bool:
    """True if a call gives the same values each time, and has no effect."""
    if not isinstance(node.target, OpOverload):
        return node.target is operator.getitem
    uninitialised = "empty" in node.target._schema.name
    return not (is_random(node) or has_effect(node) or uninitialised)


def _storage(node: fx.Node) -> StorageWeakRef | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return StorageWeakRef(value.untyped_storage())


def _extended(ops: partitioners.OpTypes) -> partitioners.OpTypes:
    forms = (Form.FILL, Form.COUNT, Form.PADDING, Form.REVERSAL, Form.RANDOM)
    more = OrderedSet[Callable[..., Any]](spec.target.overloadpacket for spec in OPS if spec.form in forms)
    return replace(ops, fusible_ops=ops.fusible_ops | more, recomputable_ops=ops.recomputable_ops | more)
