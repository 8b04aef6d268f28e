"""Read a model as a chain of operators for the cut: what each takes, what it holds, and who reads its result.

The model is exported by torch.export, as torch.distributed.pipelining exports it. Its operators keep the
order of the model's code, which is one topological order of the DAG; the cuts are positions in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fusion_compiler.errors import NotExportableError, first_line
from fusion_compiler.ir.dag import OpDag, build, nbytes
from fusion_compiler.ir.effects import inside, is_random
from fusion_compiler.machines.plan import Crossing
from fusion_compiler.ops.schema import bound, runs_no_kernel, short_name, written

# Operators that torch.export keeps whole, and that return a view of their operand where they can.
COMPOSITE_VIEWS = ("reshape", "chunk", "split", "contiguous", "flatten", "unflatten", "to")


@dataclass(frozen=True)
class Workload:
    """A workload is an exported model, `name` its class. Node names are those of `graph`.

    dag: the operators with their arithmetic and bytes. order: the names of the operators, as they run.
    differentiable: nodes with a gradient; empty if the model is not trained.
    layers: for each operator the module of a repeated layer that it belongs to ("blocks.3"), else "".
    """

    name: str
    graph: fx.GraphModule
    dag: OpDag
    order: tuple[str, ...]
    differentiable: frozenset[str]
    layers: tuple[str, ...]

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Return {operator: its place in `order`}."""
        return {name: i for i, name in enumerate(self.order)}

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.graph.graph.find_nodes(op="placeholder"))

    @cached_property
    def attributes(self) -> Mapping[str, str]:
        """Return {node: the qualified name} of the parameters and buffers that are read."""
        return {node.name: str(node.target) for node in self.graph.graph.find_nodes(op="get_attr")}

    def tensor(self, attribute: str) -> object:
        """Return the parameter, buffer or submodule behind a node of `attributes`."""
        return attrgetter(self.attributes[attribute])(self.graph)

    def readers(self, name: str) -> tuple[int, ...]:
        """Return the positions of the operators that read a value; the end for a result of the model."""
        users = self.dag.consumers(name)
        end = (len(self.order),) if name in self.dag.outputs else ()
        return (*sorted(self.position[user] for user in users), *end)

    def accumulated(self, name: str) -> tuple[str, ...]:
        """Return the operands of an operator whose gradients are added to others: those of parameters to the
        ones of the microbatch before, and those of other values to the ones of readers further on."""
        here, end = self.position[name], len(self.order)

        def is_read_further_on(value: str) -> bool:
            later = [i for i in self.readers(value) if i > here]
            return any(i == end or self.order[i] in self.differentiable for i in later)

        operands = dict.fromkeys(n for n in self.dag.op(name).inputs if n in self.differentiable)
        return tuple(n for n in operands if n in self.attributes or is_read_further_on(n))

    def crossing(self, name: str) -> Crossing:
        (meta,) = self.dag.op(name).outputs
        return Crossing(name, tuple(map(int, meta.shape)), meta.dtype, name in self.differentiable)  # type: ignore[arg-type]

    def nbytes(self, name: str) -> int:
        """Return the bytes of all tensors of a node."""
        return nbytes(self.dag.op(name).outputs)


def workload(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool
) -> Workload:
    """Export a model and read its graph. Raises NotExportableError."""
    try:
        exported = torch.export.export(model, args, dict(kwargs))
    except Exception as error:  # torch.export runs the model's code, which may raise anything
        raise NotExportableError(model=type(model).__name__, detail=first_line(error)) from error
    graph: Any = exported.module(check_guards=False)
    share_names(graph)
    dag = build(graph)
    if any(
        not isinstance(size, int) for op in map(dag.op, dag.order) for m in op.outputs for size in m.shape
    ):
        raise NotExportableError(model=type(model).__name__, detail="its shapes depend on data")
    order = tuple(
        node.name for node in graph.graph.nodes if node.op not in ("placeholder", "get_attr", "output")
    )
    nodes = dag.nodes
    trained = differentiable(graph) if training else frozenset[str]()
    return Workload(
        type(model).__name__, graph, dag, order, trained, tuple(layer_of(nodes[name]) for name in order)
    )


def share_names(graph: fx.GraphModule) -> None:
    """Read a tensor with several names, as a tied weight, by the first of them alone, from one node."""
    first: dict[int, fx.Node] = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        value = attrgetter(str(node.target))(graph)
        node_of_value = first.setdefault(id(value), node)
        if node_of_value is not node:
            node.replace_all_uses_with(node_of_value)
            graph.graph.erase_node(node)
    graph.recompile()


def differentiable(graph: fx.GraphModule) -> frozenset[str]:
    """Return the nodes whose values have a gradient: floats that depend on a trained parameter."""
    names: set[str] = set()
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        floats = any(isinstance(x, Tensor) and x.is_floating_point() for x in pytree.tree_leaves(value))
        if node.op == "get_attr":
            tensor = attrgetter(str(node.target))(graph)
            floats = isinstance(tensor, Tensor) and tensor.requires_grad
        elif node.op == "placeholder":
            floats = floats and any(
                isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves(value)
            )
        else:
            stopped = "detach" in str(node.target)
            floats = floats and not stopped and any(n.name in names for n in node.all_input_nodes)
        if floats:
            names.add(node.name)
    return frozenset(names)


def module_path(node: fx.Node) -> str:
    """Return the innermost module of the user's whose code made the node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def layer_of(node: fx.Node) -> str:
    """Return the path of a node's module up to its first number: the layer of a list of layers; ""
    outside."""
    pieces = module_path(node).split(".")
    number = next((i for i, piece in enumerate(pieces) if piece.isdigit()), None)
    return "" if number is None else ".".join(pieces[: number + 1])


def mutated(node: fx.Node) -> tuple[fx.Node, ...]:
    """Return the operands that an operator writes into: all of them, of a region with such an operator."""
    if any(map(mutated, inside(node))):
        return tuple(node.all_input_nodes)
    places = written(node.target)
    operands = list(bound(node.target, node.args, node.kwargs).values()) if places else []  # type: ignore[arg-type]
    return tuple(v for i in places if isinstance(v := operands[i], fx.Node))


def base_of(node: fx.Node) -> fx.Node:
    """Return the node whose memory a view shows."""
    while node.op == "call_function" and is_view(node.target) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def is_view(target: object) -> bool:
    """True if an operator may return its operand's memory, and so takes no time."""
    return runs_no_kernel(target) or short_name(target) in COMPOSITE_VIEWS


def cuttable(work: Workload) -> tuple[bool, ...]:
    """Return for each position 0 ... n whether the model can be cut before that operator.

    It cannot where a list of tensors would cross, or a number; nor between a value and an operator that
    writes into it or into a view of it, since the other machine would have a copy. Every stage of a model
    that is trained has an operator with a gradient.
    """
    n, nodes = len(work.order), work.dag.nodes
    allowed = [True] * (n + 1)
    trained = [i for i, name in enumerate(work.order) if name in work.differentiable]
    if trained:
        forbid(allowed, 0, trained[0])
        forbid(allowed, trained[-1], n)
    for i, name in enumerate(work.order):
        node = nodes[name]
        if not isinstance(node.meta.get("val"), Tensor):
            forbid(allowed, i, max((i, *work.readers(name))))
        for operand in mutated(node):
            forbid(allowed, work.position.get(base_of(operand).name, i), i)
    return tuple(allowed)


def forbid(allowed: list[bool], first: int, last: int) -> None:
    """Forbid the cuts between two operators that have to be on one machine."""
    for i in range(first + 1, min(last, len(allowed) - 2) + 1):
        allowed[i] = False


def repeatable(work: Workload, us: Sequence[float], send_us: Callable[[int], float]) -> frozenset[str]:
    """Return the operators that are computed again on each machine that reads them, instead of sent.

    Their results have no gradient, are not random, and take no longer to compute than to send: masks,
    position tables, rotary factors. us: microseconds of each operator. send_us: of so many bytes.
    """
    nodes = [work.dag.nodes[name] for name in work.order]
    overwritten = {base_of(operand) for node in nodes for operand in mutated(node)}
    chain_us: dict[str, float] = {}
    roots: dict[str, frozenset[str]] = {}
    for node, own_us in zip(nodes, us, strict=True):
        once = node.name in work.differentiable or is_random(node)
        if once or overwritten & {*map(base_of, (node, *node.all_input_nodes))}:
            continue
        reads = [n.name for n in node.all_input_nodes if n.op != "get_attr"]
        sent = frozenset[str]().union(*(roots.get(n, frozenset([n])) for n in reads))
        chain = own_us + sum(chain_us.get(n, 0.0) for n in reads)
        before, size = sum(map(work.nbytes, sent)), work.nbytes(node.name)
        if (before < size or (before == size and is_view(node.target))) and chain <= send_us(size):
            chain_us[node.name], roots[node.name] = chain, sent
    return frozenset(chain_us)
