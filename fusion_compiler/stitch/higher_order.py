"""Compile higher-order operators, which take graphs as arguments.

Control flow (`CONTROL_FLOW`) stays PyTorch's own call, and the graphs that it takes are compiled as their
caller is. FlexAttention has a kernel through Inductor alone (`LOWERED`): called as it is, it stores its
scores. So a call of it is a graph that Inductor compiles when it first runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch._guards import TracingContext, detect_fake_mode, tracing
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from fusion_compiler.ir.views import laid, strides_of
from fusion_compiler.ops.schema import CONTROL_FLOW

_HIGHER = torch.ops.higher_order
LOWERED = (_HIGHER.flex_attention, _HIGHER.flex_attention_backward)


class CompiledGraph(nn.Module):
    """A compiled graph stands in the place of the one that an operator takes.

    run: takes a list and returns one. strides: of each operand, as the graph was traced with; None if they
    are not known. one: whether the graph returns its result alone.
    """

    def __init__(
        self, run: Callable[[list[Any]], Any], strides: Sequence[tuple[int, ...] | None], one: bool
    ) -> None:
        super().__init__()
        self._run, self._strides, self._one = run, strides, one

    def forward(self, *operands: Any) -> Any:
        results = self._run([laid(x, s) for x, s in zip(operands, self._strides, strict=True)])
        return results[0] if self._one else results


def inner_graphs(gm: fx.GraphModule) -> dict[str, fx.GraphModule]:
    """Return the graphs that the control flow of `gm` takes, by the names of its attributes."""
    nodes = (n for node in gm.graph.nodes if node.target in CONTROL_FLOW for n in node.all_input_nodes)
    return {str(n.target): getattr(gm, str(n.target)) for n in nodes if _is_graph(n)}


def compiled_graph(
    graph: fx.GraphModule, compile: Callable[[fx.GraphModule], Callable[[list[Any]], Any]]
) -> CompiledGraph:
    """Return the callable that runs in place of `graph`. compile: takes a graph that returns a tuple."""
    one = isinstance(graph.graph.output_node().args[0], fx.Node)
    strides = [strides_of(value) for value in _inputs(graph)]
    return CompiledGraph(compile(_returning_a_tuple(graph) if one else graph), strides, one)


def _returning_a_tuple(graph: fx.GraphModule) -> fx.GraphModule:
    copy = fx.Graph()
    copy.output((copy.graph_copy(graph.graph, {}),))
    return fx.GraphModule(graph, copy)


class Lowered:
    """A call of a higher-order operator on tensors is compiled when it is first made.

    gm: takes the tensors, returns the results as a flat tuple. form: as what the operator returns them.
    Raises what Inductor raises.
    """

    def __init__(self, name: str, gm: fx.GraphModule, form: pytree.TreeSpec) -> None:
        self.__name__ = name
        self._gm, self._form = gm, form
        self._run: Callable[[list[Any]], Sequence[Any]] | None = None

    def __call__(self, *operands: Any) -> Any:
        with compile_lock:
            if self._run is None:
                self._run = self._compiled()
        return pytree.tree_unflatten(self._run(list(operands)), self._form)

    def _compiled(self) -> Callable[[list[Any]], Sequence[Any]]:
        from torch._inductor.compile_fx import compile_fx_inner

        for name, part in self._gm.named_children():
            setattr(self._gm, name, in_its_operators(part))
        fakes = _inputs(self._gm)
        with tracing(TracingContext(detect_fake_mode(fakes))):
            return compile_fx_inner(self._gm, fakes)  # type: ignore[return-value]


def in_its_operators(part: nn.Module) -> fx.GraphModule:
    """Return a graph that an operator takes, in the operators that Inductor compiles, which are not ours."""
    from torch._inductor.decomposition import select_decomp_table

    return make_fx(part, decomposition_table=select_decomp_table())(*_inputs(part))


def _inputs(part: nn.Module) -> list[Any]:
    assert isinstance(part, fx.GraphModule)
    return [node.meta["val"] for node in part.graph.find_nodes(op="placeholder")]


def lowered(node: fx.Node, module: fx.GraphModule) -> tuple[Lowered, list[fx.Node]]:
    """Return the function to call in place of a higher-order operator's node, and its operands."""
    operands = [n for n in node.all_input_nodes if not _is_graph(n)]
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for operand in operands:
        env[operand] = graph.placeholder(operand.name)
        env[operand].meta = {"val": operand.meta["val"]}
    for part in filter(_is_graph, node.all_input_nodes):
        env[part] = graph.get_attr(str(part.target))
    call = graph.node_copy(node, env.__getitem__)
    paths, form = pytree.tree_flatten_with_path(node.meta["val"])
    graph.output(tuple(_at(graph, call, path, value) for path, value in paths))
    name = str(node.target.name())  # type: ignore[union-attr]
    return Lowered(name, fx.GraphModule(module, graph), form), operands


def _is_graph(node: fx.Node) -> bool:
    return node.op == "get_attr" and "val" not in node.meta


def _at(graph: fx.Graph, call: fx.Node, path: tuple[Any, ...], value: Any) -> fx.Node | None:
    """Return the node of one result, or None if the result is None."""
    if value is None:
        return None
    result, part = call, call.meta["val"]
    for key in path:
        part = key.get(part)
        result = graph.call_function(operator.getitem, (result, key.idx))
        result.meta = {"val": part}
    return result
