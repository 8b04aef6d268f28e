"""Split a compiled backward in two: the gradients of activations first, and those of parameters later.

In a zero-bubble pipeline the stage before waits for the gradients of a stage's inputs, and those of its
weights fill the time in which its machine would wait. PyTorch splits eager autograd's graph for that; a
compiled backward is a single node of it. Within `deferring` that node returns the first half alone, and
leaves a function that computes the second from what the first half and the forward have saved for it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.convert_frame import compile_lock
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.node import map_arg

from fusion_compiler.capture.arguments import in_forward_mode, is_plain
from fusion_compiler.capture.first_run import has_effects
from fusion_compiler.capture.graphs import copied, emit, nodes_in
from fusion_compiler.capture.tangents import Missing, tangents_of, without
from fusion_compiler.ir.graph_pass import Refused
from fusion_compiler.ir.layout import is_view_node
from fusion_compiler.ir.walk import reached
from fusion_compiler.ops.table import is_always_held
from fusion_compiler.runtime.boxed import Boxed, boxed
from fusion_compiler.runtime.retained import is_kept

CompileHalf = Callable[[fx.GraphModule, str], Boxed]  # of a graph, and its name with what it is compiled for


@dataclass
class Deferred:
    """The gradients of parameters that are still to be computed.

    steps: compute them, and add them to `.grad` as autograd would. refusals: why a backward computed them at
        once.
    """

    steps: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])
    refusals: list[str] = field(default_factory=list[str])

    def run(self) -> None:
        """Compute the gradients. Each step's memory is released before the next one begins."""
        while self.steps:
            self.steps.pop(0)()


_open: list[Deferred] = []  # not of a thread: on a GPU, autograd runs backward in threads of its own


@contextmanager
def deferring() -> Generator[Deferred]:
    """Let the compiled backwards that run within compute the gradients of parameters later; yield these."""
    deferred = Deferred()
    _open.append(deferred)
    try:
        yield deferred
    finally:
        _open.pop()


@dataclass(frozen=True)
class Halves:
    """The halves are the two graphs of a backward.

    inputs: takes what the backward takes, and returns its gradients, None for those of `weights`, and then
        the values that only it computes and `weights` reads.
    weights: takes the arguments at the positions `saved` of the backward, and then those values.
    """

    inputs: fx.GraphModule
    weights: fx.GraphModule
    saved: tuple[int, ...]


def split(graph: fx.GraphModule, later: Collection[int]) -> Halves:
    """Split a backward graph. later: the positions of the results that the second graph computes.

    Raises Refused if something is done in the graph that has to be done once and in its order.
    """
    if has_effects(graph.graph):
        raise Refused("it writes, draws random numbers, or calls an operator of another library")
    graph = _convolutions_apart(graph)
    arguments = graph.graph.find_nodes(op="placeholder")
    results: Sequence[Any] = graph.graph.output_node().args[0]  # type: ignore[assignment]
    early = [None if i in later else result for i, result in enumerate(results)]
    late = [results[i] for i in later]
    first = {*arguments, *reached(nodes_in(early), lambda n: n.all_input_nodes)}
    for node in graph.graph.nodes:  # a call's results are taken apart where it is called
        if node.target is operator.getitem and node.args[0] in first:
            first.add(node)
    first -= _recomputed(graph)  # each half that reads these values computes them
    read = reached(late, lambda n: () if n in first else n.all_input_nodes)
    kept = [node for node in graph.graph.nodes if node in read & first and node.op != "get_attr"]
    if any(not isinstance(node.meta.get("val"), Tensor) for node in kept):
        raise Refused("the gradients of parameters need a value that is no tensor")
    saved = [node for node in kept if node.op == "placeholder"]
    computed = [node for node in kept if node.op != "placeholder"]
    return Halves(
        _part(graph, arguments, [*early, *computed]),
        _part(graph, [*saved, *computed], late),
        tuple(arguments.index(node) for node in saved),
    )


def _convolutions_apart(graph: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph in which no call computes a convolution's gradients of both its input and its
    weights. Two calls take as long as one: each gradient has a kernel of its own."""
    copy, _ = copied(graph)
    target = torch.ops.aten.convolution_backward.default
    for node in copy.graph.find_nodes(op="call_function", target=target):
        *operands, (of_input, of_weight, of_bias) = node.args
        with copy.graph.inserting_before(node):
            for mask in ([of_input, False, False], [False, of_weight, of_bias]):
                part = emit(node, target, *operands, mask)
                for user in list(node.users):
                    if mask[user.args[1]]:
                        user.replace_input_with(node, part)
        copy.graph.erase_node(node)
    return copy


def _recomputed(graph: fx.GraphModule) -> set[fx.Node]:
    """Return the values that clusters recompute from what the forward saved, without any gradient."""
    arguments = graph.graph.find_nodes(op="placeholder")
    tangents = {arguments[i] for i in tangents_of(graph)}
    available = {*arguments} - tangents
    for node in graph.graph.nodes:
        is_held = node.op == "call_function" and (is_always_held(node.target) or is_view_node(node))
        if is_held and available.issuperset(node.all_input_nodes):
            available.add(node)
    return available - {*arguments}


def _part(graph: fx.GraphModule, arguments: Sequence[fx.Node], results: Sequence[Any]) -> fx.GraphModule:
    """Return the part of a graph that computes `results` from `arguments`."""
    part = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in arguments:
        copies[node] = part.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    needed = reached(nodes_in(results), lambda n: () if n in copies else n.all_input_nodes)
    for node in graph.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(map_arg(tuple(results), copies.__getitem__))
    return LazyGraphModule(graph, part)


def deferrable(run: Boxed, graph: fx.GraphModule, compile: CompileHalf) -> Boxed:
    """Return `run`, a compiled backward `graph`, which within `deferring` leaves the gradients of parameters
    for later. The halves are compiled when they first run.
    """
    tangents = tangents_of(graph)
    results: Sequence[Any] = graph.graph.output_node().args[0]  # type: ignore[assignment]
    compiled: dict[tuple[Missing, tuple[int, ...]], tuple[Boxed, Boxed, tuple[int, ...]]] = {}

    def halves(args: Sequence[Any], later: tuple[int, ...]) -> tuple[Boxed, Boxed, tuple[int, ...]]:
        """Return the compiled halves and `Halves.saved`, or raise Refused."""
        arrived = [args[i] for i in tangents if args[i] is not None]
        if is_kept() or in_forward_mode() or not all(map(is_plain, arrived)):
            raise Refused("autograd keeps its graph, or a gradient is of a kind that kernels do not read")
        missing = tuple([args[i] is None for i in tangents])
        with compile_lock:
            if (missing, later) not in compiled:
                parts = split(without(graph, missing) if any(missing) else graph, later)
                about = f"{len(compiled) + 1 if compiled else ''} {later} without {missing}"
                inputs = _compiled(parts.inputs, f"inputs{about}", compile)
                weights = _compiled(parts.weights, f"weights{about}", compile)
                compiled[missing, later] = inputs, weights, parts.saved
            return compiled[missing, later]

    def call(args: list[Any]) -> Any:
        if not _open:
            return run(args)
        try:
            parameters = _parameters(results)
            if not parameters:
                return run(args)
            inputs, weights, saved = halves(args, tuple(parameters))
        except Refused as reason:
            _open[-1].refusals.append(str(reason))
            return run(args)
        kept = [args[i] for i in saved]
        values = inputs(args)
        versions = [value._version for value in kept]
        kept += values[len(results) :]

        def finish() -> None:
            _check_versions(kept, versions)
            _accumulate(parameters.values(), weights(kept))

        _open[-1].steps.append(finish)
        return values[: len(results)]

    return boxed(call)


def _check_versions(saved: Sequence[Tensor], versions: Sequence[int]) -> None:
    """Raise RuntimeError if what the forward saved was written to since it had these versions."""
    changed = [i for i, (value, n) in enumerate(zip(saved, versions, strict=False)) if value._version != n]
    if changed:
        shapes = ", ".join(str(list(saved[i].shape)) for i in changed)
        raise RuntimeError(
            f"tensors of shape {shapes} were modified by an inplace operation between the two halves of a "
            "backward pass that both read them"
        )


def _compiled(part: fx.GraphModule, name: str, compile: CompileHalf) -> Boxed:
    """Return a compiled graph, or the graph itself if it only passes its arguments on."""
    if any(node.op == "call_function" for node in part.graph.nodes):
        return compile(part, name)
    return lambda args: part(*args)


def _parameters(results: Sequence[Any]) -> dict[int, nn.Parameter]:
    """Return the parameters whose gradients are among the results of the node of autograd's graph that is
    running, by position. Those with hooks are left out: autograd would call the hooks twice."""
    node: Any = torch._C._current_autograd_node()
    leaves: list[Any] = [getattr(after, "variable", None) for after, _ in node.next_functions]
    parameters = {
        i: leaf
        for i, leaf in enumerate(leaves)
        if isinstance(leaf, nn.Parameter) and not (leaf._backward_hooks or leaf._post_accumulate_grad_hooks)
    }
    if parameters and len(leaves) != len(results):
        raise Refused("its forward takes arguments that are no tensors, such as sizes")
    return {i: leaf for i, leaf in parameters.items() if isinstance(results[i], fx.Node)}


def _accumulate(parameters: Iterable[nn.Parameter], gradients: Sequence[Tensor | None]) -> None:
    """Add gradients to those of the parameters, by autograd's rules for memory that others hold."""
    pairs = [(p, gradient) for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
    torch.autograd.backward([p for p, _ in pairs], [gradient for _, gradient in pairs])
