"""Trace repeated blocks once: AOTAutograd's trace of one is copied for the others.

A block is one call in the graph that AOTAutograd gets. While it traces forward and backward, the first
block of a kind runs as it would without; in the place of a later one its nodes are copied, behind an autograd
function. The last two run as well. What autograd records between the gradients of the results of the last
but one and those of what it reads is copied for the blocks before it. The joint graph is the one that would
have been traced, with sums over several blocks in another order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd.functional_utils import from_fun, to_fun
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, track_tensor_tree
from torch.fx.node import map_arg
from torch.fx.traceback import NodeSource, NodeSourceAction
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from fusion_compiler.capture.graphs import ORIGIN, copied, place_of
from fusion_compiler.capture.repeats import Repeat, constant, look, repeats

_PASS = "Interpreter_PropagateUnbackedSymInts"  # by whose name AOTAutograd's trace of a graph goes
_APART = 1 << 32  # between the numbers that autograd gives to the operators of one block and of the next


class UnlikeError(Exception):
    """The trace of a block cannot be copied for another block."""


def with_blocks(gm: fx.GraphModule) -> fx.GraphModule:
    """Return `gm`, a pre-autograd graph, with each repeated block as one call, or `gm` itself if none
    repeats."""
    repeated = repeats(gm.graph)
    if not repeated:
        return gm
    copy, nodes = copied(gm)
    graph = copy.graph
    for repeat in repeated:
        once = _Once(repeat)
        for k, block in enumerate(repeat.blocks):
            old = [nodes[n] for n in block]
            with graph.inserting_before(old[0]):
                call = graph.call_function(_Block(once, k), tuple(nodes[n] for n in repeat.inputs[k]))
                for i, position in enumerate(repeat.outputs):
                    nodes[block[position]] = graph.call_function(operator.getitem, (call, i))
            for position in repeat.outputs:
                old[position].replace_all_uses_with(nodes[block[position]])
            for node in reversed(old):
                graph.erase_node(node)
    return copy


class _Block:
    """A call of this object stands in the graph for the stretch `index` of a repeat."""

    __name__ = "block"

    def __init__(self, once: _Once, index: int) -> None:
        self._once, self._index = once, index

    def __call__(self, *arguments: Any) -> list[Any]:
        return self._once.call(self._index, arguments)


@dataclass(frozen=True)
class _Trace:
    """A trace has nodes in order, between its inputs and its results. None stands for an absent tensor."""

    inputs: Sequence[fx.Node | None]
    nodes: Sequence[fx.Node]
    results: Sequence[fx.Node | None]


class _Once:
    """An object of this class holds the blocks of one repeat while they are traced."""

    def __init__(self, repeat: Repeat) -> None:
        self._repeat = repeat
        self._place = {node.name: i for i, node in enumerate(repeat.blocks[0])}
        self._tracer: Any = None
        self._about: object = None  # the arguments of the block that is copied
        self.results: list[tuple[Any, bool]] = []  # of that block, and whether they have gradients
        self._forward: _Trace | None = None
        self._second: _Trace | None = None  # of the last block but one
        self._backward: _Trace | None = None
        self._tangents: list[object] = []
        self._opened: Any = None

    def call(self, k: int, arguments: Sequence[Any]) -> list[Any]:
        if not all(type(a) is FunctionalTensor for a in arguments):
            return self._run(k, arguments)
        is_recorded = torch.is_grad_enabled() and any(a.requires_grad for a in arguments)
        about = [is_recorded, *map(_about, arguments)]
        mode = get_proxy_mode()
        tracer = None if mode is None else mode.tracer
        if self._about is None or tracer is not self._tracer:
            self._tracer, self._about, self._backward = tracer, about, None
            results, self._forward = self._traced(k, arguments)
            self.results = [(from_fun(r), r.requires_grad) for r in results]
            return results
        if about != self._about:
            return self._run(k, arguments)
        later = len(self._repeat.blocks) - k
        if is_recorded and (later > 2 or tracer is None):
            return list(_Copy.apply(self, k, *arguments))  # type: ignore[arg-type]
        if not is_recorded:
            return self.copy_forward(k, arguments)[0]
        if later == 1:
            return self._run(k, arguments)
        inside: Any = _Border.apply(self.end_backward, *arguments)
        results, self._second = self._traced(k, inside)
        return list(_Border.apply(self.begin_backward, *results))  # type: ignore[arg-type]

    def _run(self, k: int, arguments: Sequence[Any]) -> list[Any]:
        """Run block `k` as an Interpreter does, which notes in the trace where nodes come from; return its
        results."""
        values = dict(zip(self._repeat.inputs[k], arguments, strict=True))

        def value_of(node: fx.Node) -> Any:
            return constant(node) if node.op == "get_attr" else values[node]

        for node in self._repeat.blocks[k]:
            args, kwargs = map_arg((node.args, dict(node.kwargs)), value_of)
            with fx_traceback.set_current_meta(node, _PASS):
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
        return [values[self._repeat.blocks[k][i]] for i in self._repeat.outputs]

    def _traced(self, k: int, arguments: Sequence[Any]) -> tuple[list[Any], _Trace]:
        if self._tracer is None:  # AOTAutograd looks at the results alone
            return self._run(k, arguments), _Trace((), (), ())
        before = self._end()
        results = self._run(k, arguments)
        inputs, outputs = map(self._node, arguments), map(self._node, results)
        return results, _Trace([*inputs], self._since(before), [*outputs])

    def _end(self) -> fx.Node:
        return next(iter(reversed(self._tracer.graph.nodes)))

    def _since(self, node: fx.Node) -> list[fx.Node]:
        nodes: list[fx.Node] = []
        while (node := node.next).op != "root":
            nodes.append(node)
        return nodes

    def _node(self, value: Tensor | None) -> fx.Node | None:
        """Return the node whose value is a functional tensor."""
        if value is None:
            return None
        slot = get_proxy_slot(from_fun(value), self._tracer, None)  # type: ignore[call-overload]
        if slot is None:
            raise UnlikeError("a tensor is not in the trace")
        return slot.proxy.node

    # -- copying -----------------------------------------------------------------------------------

    def copy_forward(self, k: int, arguments: Sequence[Any]) -> tuple[list[Any], dict[fx.Node, fx.Node]]:
        """Return the results of block `k`, and {original: copy} of its nodes, empty outside of a trace."""
        assert self._forward is not None
        if self._tracer is None:
            values = _Values({})
            with _outside():
                copies = [values.like(result) for result, _ in self.results]
            return [to_fun(value) for value in copies], {}
        nodes = _pairs(self._forward.inputs, map(self._node, arguments))
        self._copy(self._forward.nodes, nodes, k, lambda number: number + (k + 1) * _APART)
        return [self._value(nodes[r]) for r in self._forward.results if r is not None], nodes

    def copy_backward(
        self, k: int, nodes: dict[fx.Node, fx.Node], tangents: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Return the gradients of what block `k` reads. nodes: the nodes that `copy_forward` returned."""
        forward, second, backward = self._forward, self._second, self._backward
        if forward is None or second is None or backward is None:
            raise UnlikeError("no backward was traced that could be copied")
        if [*map(_about, tangents)] != self._tangents:
            raise UnlikeError("gradients of blocks are laid out in different ways")
        if [*map(_target, forward.nodes)] != [*map(_target, second.nodes)]:
            raise UnlikeError("blocks were traced in different ways")
        same = _pairs((*second.inputs, *second.nodes), (*forward.inputs, *forward.nodes))
        copies = _pairs(same, map(nodes.__getitem__, same.values()))
        copies = _pairs((*copies, *backward.inputs), (*copies.values(), *map(self._node, tangents)))
        numbers: dict[Any, Any] = {s.meta.get("seq_nr"): nodes[f].meta.get("seq_nr") for s, f in same.items()}
        self._copy(backward.nodes, copies, k, lambda number: numbers.get(number, number))
        values = {None: None} | dict(zip(backward.inputs, tangents, strict=True))
        results = ((r, None if r is None else copies[r]) for r in backward.results)
        return [values[r] if r in values or new is None else self._value(new) for r, new in results]

    def _copy(
        self,
        originals: Sequence[fx.Node],
        nodes: dict[fx.Node, fx.Node],
        k: int,
        numbered: Callable[[int], int],
    ) -> None:
        """Add copies for block `k` to the trace and to `nodes`, which has the nodes that they read."""
        graph = self._tracer.graph
        values = _Values(nodes)
        with _outside():
            for node in originals:
                if any(n not in nodes for n in node.all_input_nodes):
                    raise UnlikeError(f"{node.name} reads what another block may not")
                new = nodes[node] = graph.node_copy(node, nodes.__getitem__)
                new.meta = {**node.meta, **self._origin(node, k)}
                if "seq_nr" in node.meta:
                    new.meta["seq_nr"] = numbered(node.meta["seq_nr"])
                new.meta["val"] = tree_map_only(Tensor, values.like, node.meta.get("val"))

    def _origin(self, node: fx.Node, k: int) -> dict[str, Any]:
        """Return the metadata of block `k` that says where a copy of a forward node comes from."""
        source = next(iter(node.meta.get("from_node") or ()), None)
        place = None if source is None else self._place.get(source.name)
        if place is None:
            return {}
        model = self._repeat.blocks[k][place]
        meta = {key: model.meta[key] for key in ORIGIN if key in node.meta and key in model.meta}
        return meta | {"from_node": [NodeSource(model, _PASS, NodeSourceAction.CREATE)]}

    def _value(self, node: fx.Node) -> Any:
        """Return the functional tensor of a copied node."""
        value = node.meta["val"]
        track_tensor_tree(value, fx.Proxy(node, self._tracer), constant=None, tracer=self._tracer)
        return to_fun(value)

    # -- between the gradients of the last block but one -------------------------------------------

    def begin_backward(self, tangents: Sequence[Tensor | None]) -> None:
        self._tangents = [*map(_about, tangents)]
        self._opened = self._end(), [*map(self._node, tangents)]

    def end_backward(self, gradients: Sequence[Tensor | None]) -> None:
        before, inputs = self._opened
        results = [*map(self._node, gradients)]
        self._backward = _Trace(inputs, self._since(before), results)


class _Values:
    """FakeTensors of copies share memory as those of the originals do."""

    def __init__(self, nodes: Mapping[fx.Node, fx.Node]) -> None:
        self._memory: dict[int, Tensor] = {}
        for node, new in nodes.items():
            value = node.meta.get("val")
            if isinstance(value, Tensor):
                self._memory[place_of(value)] = new.meta["val"]

    def like(self, value: Tensor) -> Tensor:
        if not isinstance(value, FakeTensor):
            raise UnlikeError("a value of the trace is no FakeTensor")
        layout, place = (value.shape, value.stride()), place_of(value)
        memory = self._memory.get(place)
        if memory is None:
            length = value.untyped_storage().nbytes() // value.itemsize
            memory = self._memory[place] = torch.empty(length, dtype=value.dtype, device="meta")
        if memory.dtype != value.dtype:
            raise UnlikeError("memory is read as another dtype")
        with value.fake_mode if isinstance(memory, FakeTensor) else nullcontext():
            view = memory.as_strided(*layout, value.storage_offset())
        return view if isinstance(view, FakeTensor) else FakeTensor(value.fake_mode, view, value.device)


class _Border(torch.autograd.Function):
    """Return the values unchanged, and pass their gradients to `take`."""

    @staticmethod
    def forward(ctx: Any, take: Callable[[Sequence[Tensor | None]], None], *values: Any) -> tuple[Any, ...]:
        ctx.take = take
        return _marked(ctx, [to_fun(from_fun(v)) for v in values], [v.requires_grad for v in values])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        ctx.take(gradients)
        return None, *gradients


class _Copy(torch.autograd.Function):
    """Copy the trace of another block, forward and backward, in the place of a block."""

    @staticmethod
    def forward(ctx: Any, once: _Once, k: int, *arguments: Any) -> tuple[Any, ...]:
        results, nodes = once.copy_forward(k, arguments)
        ctx.copied = once, k, nodes
        return _marked(ctx, results, [wanted for _, wanted in once.results])

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> tuple[Any, ...]:
        once, k, nodes = ctx.copied
        return None, None, *once.copy_backward(k, nodes, tangents)


def _marked(ctx: Any, values: Sequence[Any], differentiable: Sequence[bool]) -> tuple[Any, ...]:
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(v for v, wanted in zip(values, differentiable, strict=True) if not wanted))
    return tuple(values)


@contextmanager
def _outside() -> Generator[None]:
    """Disable every mode that traces, while entered."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


def _pairs(nodes: Iterable[fx.Node | None], others: Iterable[fx.Node | None]) -> dict[fx.Node, fx.Node]:
    """Return {node: other} of the pairs. Raise UnlikeError if a node has two different partners."""
    pairs: dict[fx.Node, fx.Node] = {}
    for node, other in zip(nodes, others, strict=True):
        if node is None and other is None:
            continue
        if node is None or other is None or pairs.setdefault(node, other) is not other:
            raise UnlikeError("blocks are connected in different ways")
    return pairs


def _target(node: fx.Node) -> Any:
    """Return the target of a node. The names of constants do not count."""
    return node.op if node.op == "get_attr" else node.target


def _about(value: Tensor | None) -> object:
    """Return the properties of a tensor on which a trace depends."""
    return None if value is None else (look(value), value.requires_grad)
