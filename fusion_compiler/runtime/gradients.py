"""Hand gradients on while a compiled backward runs, as soon as one exists and its parameter was last read.

Autograd gets the gradients of a compiled backward only at the end, when all of them exist. So a stitched
backward calls a `Handover` as soon as a gradient exists and nothing reads the parameter any more. Whoever
takes gradients of parameters (`take`) gets it there, and autograd gets None for it.

That is right if the parameter has no other gradient in the pass. Autograd does not say so, so the first pass
of each backward hands nothing on and looks: if the tensor that arrives at the parameter is the very tensor
that this backward computed, there was no other. A further gradient in a later pass is a second one to who
took the first.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils.weak import WeakTensorKeyDictionary

from fusion_compiler.ir.graph_info import GraphInfo, Phase, argument_name
from fusion_compiler.runtime.boxed import Boxed, boxed

Taker = Callable[[Tensor, Tensor], bool]  # of (parameter, its gradient): whether it is taken

_takers: Any = WeakTensorKeyDictionary()  # parameter -> weak method of who takes its gradients


def take(param: Tensor, taker: Taker) -> None:
    """Register `taker` (held by a weak reference) to receive the parameter's gradients in the middle of
    compiled backward passes."""
    _takers[param] = weakref.WeakMethod(taker)


def leave(param: Tensor) -> None:
    _takers.pop(param, None)


class Handovers:
    """An object of this class creates the handovers of one compile(): what a backward hands on is for
    arguments of its forward."""

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[int, ...]] = {}  # graph -> which arguments of its forward are tensors

    def of(self, gm: fx.GraphModule, info: GraphInfo) -> Handover | None:
        """Return the handover of a backward whose forward came before, or None for other graphs."""
        graph = info.name.partition(".")[0]
        if info.phase is Phase.FORWARD:
            values = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
            self._tensors[graph] = tuple(i for i, v in enumerate(values) if isinstance(v, Tensor))
        tensors = self._tensors.get(graph)
        if info.phase is not Phase.BACKWARD or tensors is None:
            return None
        origins = {i: info.origins.get(argument_name(i)) for i in tensors}
        parameters = [i for i, origin in origins.items() if origin is not None and origin.kind == "parameter"]
        return Handover(gm, tensors, parameters)


class Handover:
    """A handover belongs to one backward graph.

    gm: its placeholders that are arguments of the forward graph have their names (`argument_name`); its
        outputs are the gradients of these arguments.
    tensors: which arguments of the forward graph are tensors: those that autograd has an edge for.
    parameters: which of them are parameters.
    """

    def __init__(self, gm: fx.GraphModule, tensors: Sequence[int], parameters: Sequence[int]) -> None:
        self.enabled = True
        self.hooks = {position: self._give(position) for position in parameters}
        self._tensors = tuple(tensors)
        names = [node.name for node in gm.graph.find_nodes(op="placeholder")]
        self._arguments = {names.index(n): i for i in tensors if (n := argument_name(i)) in names}
        self._alone: Any = WeakTensorKeyDictionary()  # parameter -> whether its gradient is this graph's
        self._running = threading.local()

    def around(self, run: Boxed) -> Boxed:
        """Return `run` of the stitched graph, with what it needs to hand gradients on."""

        def call(arguments: list[Any]) -> Any:
            if not (_takers and self.enabled) or torch.is_grad_enabled():
                return run(arguments)
            self._running.edges = self._edges(arguments)
            try:
                return run(arguments)
            finally:
                self._running.edges = {}

        return boxed(call)

    def _give(self, position: int) -> Callable[[Tensor], Tensor | None]:
        """Return the hook that is called with the gradient of argument `position`, and returns what the graph
        returns for it."""

        def give(grad: Tensor) -> Tensor | None:
            edge = getattr(self._running, "edges", {}).get(position)
            return grad if edge is None or not self._handed(edge, grad) else None

        give.__name__ = "give"
        return give

    def _edges(self, arguments: Sequence[Any]) -> Mapping[int, Any]:
        """Return where autograd will put the gradients that somebody takes: argument -> the parameter's
        node."""
        node: Any = torch._C._current_autograd_node()  # type: ignore[attr-defined]
        following: Sequence[Any] = node.next_functions if node is not None else ()
        if len(following) != len(self._tensors):
            return {}
        edges = {
            position: edge
            for position, (edge, _) in zip(self._tensors, following, strict=True)
            if (param := getattr(edge, "variable", None)) is not None and param in _takers
        }
        new = [position for position, edge in edges.items() if edge.variable not in self._alone]
        shared = self._shared(arguments, edges) if new else set[int]()
        for position in new:
            if position in shared:
                self._alone[edges[position].variable] = False
        return edges

    def _shared(self, arguments: Sequence[Any], edges: Mapping[int, Any]) -> set[int]:
        """Return the positions of parameters whose memory is read by another name as well."""
        memory = Counter(_memory(edge.variable) for edge in edges.values())
        for i, argument in enumerate(arguments):
            if isinstance(argument, Tensor) and self._arguments.get(i) not in edges:
                memory[_memory(argument)] += 1
        return {position for position, edge in edges.items() if memory[_memory(edge.variable)] > 1}

    def _handed(self, edge: Any, grad: Tensor) -> bool:
        param = edge.variable
        alone = self._alone.get(param)
        if alone is False or not _will_arrive(edge) or not _is_as_given(param, grad):
            return False
        if alone is None:
            self._look(edge, param, grad)
            return False
        method = _takers.get(param)
        taker: Taker | None = method() if method is not None else None
        return taker is not None and taker(param, grad)

    def _look(self, edge: Any, param: Tensor, grad: Tensor) -> None:
        """Note whether the gradient that arrives at a parameter is `grad`, to which nothing is added while it
        is held."""
        pending: list[Tensor] = [grad]

        def arrived(grads: Sequence[Tensor | None]) -> None:
            if pending:
                self._alone[param] = grads[0] is pending.pop()
            handle.remove()

        handle = edge.register_prehook(arrived)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _will_arrive(edge: Any) -> bool:
    """True if the pass accumulates this gradient. It does not under torch.autograd.grad, or if `inputs` names
    other tensors."""
    try:
        return torch._C._will_engine_execute_node(edge)  # type: ignore[attr-defined]
    except RuntimeError:  # torch.autograd.grad
        return False


def _is_as_given(param: Any, grad: Tensor) -> bool:
    """True if autograd would store the gradient as it is, and only its taker has a hook."""
    alike = (grad.shape, grad.dtype, grad.stride()) == (param.shape, param.dtype, param.stride())
    return alike and not param._backward_hooks and len(param._post_accumulate_grad_hooks or ()) <= 1
