"""The result of `fc.partition`: a plan that prints and draws itself, makes the modules of its stages, and
measures them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.pipelining  # pyright: ignore[reportUnusedImport] registers pipe_split
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fusion_compiler.errors import MachinesError, OtherGraphError
from fusion_compiler.machines.estimate import Clock, timed_passes
from fusion_compiler.machines.page import page
from fusion_compiler.machines.plan import PipelinePlan, Stage
from fusion_compiler.machines.simulate import simulate
from fusion_compiler.machines.text import text_of
from fusion_compiler.machines.workload import share_names


class Pipeline(PipelinePlan):
    """A pipeline is a plan with the model that it cuts."""

    def __str__(self) -> str:
        return text_of(self)

    def html(self, path: str | Path) -> None:
        """Write the plan as one page that opens offline, with the predicted step as a timeline."""
        Path(path).write_text(page(self), encoding="utf-8")

    def rehearsed(
        self,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None = None,
        *,
        prepare: Callable[[fx.GraphModule], Callable[..., Any]] = lambda m: m,
    ) -> Pipeline:
        """Return this plan with the times of its stages measured on this machine, divided by the machines'
        `speed`, and the step that follows from them.

        args, kwargs: the arguments of one microbatch, on the model's device. prepare: returns the callable
        that runs for a stage's module, as `fc.compile` does. The model keeps its gradients and buffers.
        Raises MachinesError if the model is on the meta device.
        """
        if any(p.is_meta for p in self.graph.parameters()):
            detail = "a model on the meta device cannot run"
            raise MachinesError(detail=detail, todo="give it real parameters")
        stages = []
        values, keywords = pytree.tree_map_only(
            Tensor, lambda t: t.detach().requires_grad_(t.requires_grad), (args, dict(kwargs or {}))
        )
        clock = Clock(next((p.device for p in self.graph.parameters()), torch.device("cpu")))
        for stage, module in zip(self.stages, self.modules(), strict=True):
            with unchanged(module):
                call = functools.partial(prepare(module), *values, **keywords)
                received = [t for t in pytree.tree_leaves((values, keywords)) if isinstance(t, Tensor)]
                forward, backward, results = timed_passes(call, clock, self.training, received)
            speed = self.machines[self.rank(stage.number)].speed
            stages.append(replace(stage, forward_us=forward / speed, backward_us=backward / speed))
            values, keywords = tuple(t.detach().requires_grad_(t.requires_grad) for t in results), {}
        step = simulate(
            self.schedule,
            [(s.forward_us, s.backward_us) for s in stages],
            [(e.forward_us, e.backward_us) for e in self.edges],
            len(self.machines),
            self.microbatches,
            self.training,
            [e.latency_us for e in self.edges],
        )
        return replace(self, stages=tuple(stages), events=step.events, step_us=step.us, bubble=step.bubble)

    def modules(self) -> tuple[fx.GraphModule, ...]:
        """Return a module for each stage, with the model's own parameters under their own names.

        The first takes the model's arguments, every other the tensors of the edge before it, in their order.
        Each returns the tensors of the edge after it, and the last the model's results: a tensor if it is
        one, else a tuple.
        """
        return tuple(map(self._module, self.stages))

    def _module(self, stage: Stage) -> fx.GraphModule:
        nodes = {node.name: node for node in self.graph.graph.nodes}
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        if stage.number:
            names = [tensor.name for tensor in self.edges[stage.number - 1].tensors]
        else:
            names = [node.name for node in self.graph.graph.find_nodes(op="placeholder")]
        for name in names:
            copies[nodes[name]] = placeholder = graph.placeholder(name)
            placeholder.meta = dict(nodes[name].meta)
        read = {n for name in stage.operators for n in nodes[name].all_input_nodes if n.op == "get_attr"}
        for node in self.graph.graph.nodes:  # in its order
            if node in read or node.name in stage.operators:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        if stage.number + 1 < len(self.stages):
            results = [nodes[tensor.name] for tensor in self.edges[stage.number].tensors]
        else:
            (output,) = self.graph.graph.find_nodes(op="output")
            results = list(output.args[0]) if isinstance(output.args[0], list | tuple) else [output.args[0]]
        values = tuple(copies[n] if isinstance(n, fx.Node) else n for n in results)
        graph.output(values[0] if len(values) == 1 else values)
        if stage.number == 0:  # arguments and keywords as the model's own
            codegen: Any = self.graph.graph._codegen
            graph.set_codegen(type(codegen)(codegen.pytree_info._replace(out_spec=None)))
        return fx.GraphModule(self.graph, graph, class_name=f"Stage{stage.number}")

    def split_policy(self, traced: fx.GraphModule) -> fx.GraphModule:
        """Insert a `pipe_split` before each stage but the first, and behind it the operators that the stage
        repeats. Pass this method to `torch.distributed.pipelining.pipeline` as its `split_policy`.

        That function gives each stage a copy of a tied weight. Raises OtherGraphError for another graph.
        """
        share_names(traced)
        nodes: Mapping[str, fx.Node] = {node.name: node for node in traced.graph.nodes}
        for node in self.graph.graph.nodes:
            other = nodes.get(node.name)
            if other is None or shape_of(other) != shape_of(node) or str(other.target) != str(node.target):
                raise OtherGraphError(node=node.name)
        for stage in self.stages[1:]:
            here = [name for name in stage.operators if name not in stage.repeated]
            copies: dict[fx.Node, fx.Node] = {}
            with traced.graph.inserting_before(nodes[here[0]]):
                traced.graph.call_function(torch.ops.pippy._pipe_split.default)
                for name in stage.repeated:
                    copies[nodes[name]] = traced.graph.node_copy(nodes[name], lambda n, c=copies: c.get(n, n))
            for name in here:
                for node, again in copies.items():
                    nodes[name].replace_input_with(node, again)
        computed = {name for stage in self.stages for name in stage.operators if name not in stage.repeated}
        for name in reversed([n.name for n in self.graph.graph.nodes if n.op == "call_function"]):
            if name not in computed and not nodes[name].users:  # each stage that reads it repeats it
                traced.graph.erase_node(nodes[name])
        traced.recompile()
        return traced


def shape_of(node: fx.Node) -> object:
    value = node.meta.get("val")
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None


@contextmanager
def unchanged(module: nn.Module) -> Generator[dict[str, Tensor]]:
    """Put gradients and buffers back at the end. Yield the buffers' values by name."""
    gradients = [(p, p.grad) for p in module.parameters()]
    values = {name: buffer.clone() for name, buffer in module.named_buffers()}
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield values
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for name, buffer in module.named_buffers():
            buffer.copy_(values[name])
