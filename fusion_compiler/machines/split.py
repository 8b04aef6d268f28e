"""Make the modules of a plan's stages, and the `split_policy` of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed.pipelining  # pyright: ignore[reportUnusedImport] registers pipe_split
from torch import Tensor, fx

from fusion_compiler.errors import OtherGraphError
from fusion_compiler.machines.plan import PipelinePlan, Stage
from fusion_compiler.machines.workload import share_names


def stage_modules(plan: PipelinePlan) -> tuple[fx.GraphModule, ...]:
    """Return a module for each stage, with the model's own parameters under the model's own names.

    The first takes the model's arguments. Every other takes the tensors of the edge before it, in their
    order. Each returns the tensors of the edge after it, and the last the model's results: a tensor if it is
    one, else a tuple.
    """
    return tuple(stage_module(plan, stage) for stage in plan.stages)


def stage_module(plan: PipelinePlan, stage: Stage) -> fx.GraphModule:
    nodes = {node.name: node for node in plan.graph.graph.nodes}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    if stage.number:
        names = [tensor.name for tensor in plan.edges[stage.number - 1].tensors]
    else:
        names = [node.name for node in plan.graph.graph.find_nodes(op="placeholder")]
    for name in names:
        copies[nodes[name]] = placeholder = graph.placeholder(name)
        placeholder.meta = dict(nodes[name].meta)
    read = {n for name in stage.operators for n in nodes[name].all_input_nodes if n.op == "get_attr"}
    for node in plan.graph.graph.nodes:  # in its order
        if node in read or node.name in stage.operators:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    if stage.number + 1 < len(plan.stages):
        results = [nodes[tensor.name] for tensor in plan.edges[stage.number].tensors]
    else:
        (output,) = plan.graph.graph.find_nodes(op="output")
        results = list(output.args[0]) if isinstance(output.args[0], list | tuple) else [output.args[0]]
    values = tuple(copies[n] if isinstance(n, fx.Node) else n for n in results)
    graph.output(values[0] if len(values) == 1 else values)
    if stage.number == 0:  # arguments and keywords as the model's own
        codegen: Any = plan.graph.graph._codegen
        graph.set_codegen(type(codegen)(codegen.pytree_info._replace(out_spec=None)))
    return fx.GraphModule(plan.graph, graph, class_name=f"Stage{stage.number}")


def split(plan: PipelinePlan, traced: fx.GraphModule) -> fx.GraphModule:
    """Insert a `pipe_split` before each stage but the first, and the operators that it repeats behind that.

    Raises OtherGraphError if `traced` is not the graph that was cut.
    """
    share_names(traced)
    nodes: Mapping[str, fx.Node] = {node.name: node for node in traced.graph.nodes}
    for node in plan.graph.graph.nodes:
        other = nodes.get(node.name)
        if other is None or shape_of(other) != shape_of(node) or str(other.target) != str(node.target):
            raise OtherGraphError(node=node.name)
    for stage in plan.stages[1:]:
        here = [name for name in stage.operators if name not in stage.repeated]
        copies: dict[fx.Node, fx.Node] = {}
        with traced.graph.inserting_before(nodes[here[0]]):
            traced.graph.call_function(torch.ops.pippy._pipe_split.default)
            for name in stage.repeated:
                copies[nodes[name]] = traced.graph.node_copy(nodes[name], lambda n, c=copies: c.get(n, n))
        for name in here:
            for node, again in copies.items():
                nodes[name].replace_input_with(node, again)
    computed = {name for stage in plan.stages for name in stage.operators if name not in stage.repeated}
    for name in reversed([n.name for n in plan.graph.graph.nodes if n.op == "call_function"]):
        if name not in computed and not nodes[name].users:  # each stage that reads it repeats it
            traced.graph.erase_node(nodes[name])
    traced.recompile()
    return traced


def shape_of(node: fx.Node) -> object:
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
