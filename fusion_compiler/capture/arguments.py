"""Handle arguments that mean something else than the memory which kernels read: lazy, dual and wrapped
tensors.

TorchDynamo's guards compare the dispatch keys and the type of every tensor that enters a graph, and
`capture/guards.py` adds the level of forward-mode differentiation. So a decision that is made when a graph is
compiled holds for each of its calls, and costs a call nothing. No guard sees the gradients that enter a
backward graph: `any_gradients` in `capture/tangents.py` looks at those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fusion_compiler.capture.fakes import fake_of
from fusion_compiler.capture.graphs import copied
from fusion_compiler.errors import ArgumentKindError

_aten = torch.ops.aten
has_storage: Callable[[Tensor], bool] = torch._C._has_storage  # type: ignore[attr-defined]
_IN_PLACE = (
    *("iadd", "iand", "ifloordiv", "ilshift", "imatmul", "imod", "imul"),
    *("ior", "ipow", "irshift", "isub", "itruediv", "ixor"),
)
_PLAIN = (Tensor, nn.Parameter, FakeTensor)

Resolve = Callable[[Tensor], Tensor]


def is_plain(tensor: Tensor) -> bool:
    """True if the memory of `tensor` holds its values: no lazy negation, conjugation or zeros, no wrapper."""
    return not (tensor.is_neg() or tensor.is_conj() or tensor._is_zerotensor() or not has_storage(tensor))  # type: ignore[attr-defined]


def in_forward_mode() -> bool:
    """True within `torch.autograd.forward_ad.dual_level()`, where any tensor may have a tangent."""
    return forward_ad._current_level >= 0


@dataclass(frozen=True)
class Entry:
    """An entry is a graph whose arguments are plain tensors, in place of one whose arguments may be views of
    such tensors.

    graph, inputs: what is compiled. resolve: by position of an argument, the function that makes the view
    which `graph` takes; it has the argument's memory, so what the graph writes is seen there. returned: by
    position of a result, the position of the argument that is this result.
    """

    graph: fx.GraphModule
    inputs: tuple[Any, ...]
    resolve: dict[int, Resolve]
    returned: dict[int, int]

    def around(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Return `run`, the compiled `graph`, as a function of the arguments of the original graph."""
        if not self.resolve:
            return run
        resolve, returned = [*self.resolve.items()], [*self.returned.items()]

        def call(*args: Any) -> Any:
            plain = [*args]
            for position, view in resolve:
                plain[position] = view(args[position])
            results = [*run(*plain)]
            for position, argument in returned:
                results[position] = args[argument]
            return results

        return call


def enter(gm: fx.GraphModule, inputs: Sequence[Any]) -> Entry:
    """Return a graph for plain tensors that computes what `gm`, a graph of TorchDynamo's, does.

    inputs: the example inputs. A lazily negated or conjugated tensor enters as a view of its memory, and the
    graph negates or conjugates that. A subclass without `__torch_dispatch__` enters as a Tensor: TorchDynamo
    has traced its `__torch_function__`. Raises ArgumentKindError for arguments that only eager can read.
    """
    if in_forward_mode():
        raise ArgumentKindError(argument="an argument", kind="may have a forward-mode tangent")
    placeholders = gm.graph.find_nodes(op="placeholder")
    resolve: dict[int, Resolve] = {}
    for position, (node, value) in enumerate(zip(placeholders, inputs, strict=True)):
        if isinstance(value, Tensor) and (view := _resolution(node.name, value)) is not None:
            resolve[position] = view
    if not resolve:
        return Entry(gm, tuple(inputs), {}, {})
    graph, nodes = copied(gm)
    entered = [nodes[node] for node in placeholders]
    returned = _returned(graph.graph, {entered[position]: position for position in resolve})
    plain = [*inputs]
    for position, view in resolve.items():
        plain[position] = _plain_example(inputs[position], view)
        entered[position].meta["example_value"] = plain[position]
        if view is not _as_tensor:
            _view_in_graph(graph.graph, entered[position], entered[-1], view)
    graph.recompile()
    return Entry(graph, tuple(plain), resolve, returned)


def _resolution(name: str, value: Tensor) -> Resolve | None:
    """Return the function that makes a plain tensor of an argument; None if it is one."""
    if is_traceable_wrapper_subclass(value):
        return None  # AOTAutograd takes it apart
    kind = type(value)
    dispatch = "__torch_dispatch__"
    if getattr(kind, dispatch) is not getattr(Tensor, dispatch) and kind is not FakeTensor:
        raise ArgumentKindError(argument=name, kind=f"is a {kind.__name__}, which has a __torch_dispatch__")
    if value.layout is torch.strided and not has_storage(value):
        raise ArgumentKindError(argument=name, kind="is a wrapper of torch.func.vmap or grad")
    if value._is_zerotensor():  # type: ignore[attr-defined]
        raise ArgumentKindError(argument=name, kind="is a lazy tensor of zeros, without memory")
    views: list[Resolve] = [torch._neg_view] if value.is_neg() else []
    views += [torch._conj] if value.is_conj() else []
    views += [] if kind in _PLAIN or isinstance(value, nn.Parameter) else [_as_tensor]
    if len(views) > 1:
        raise ArgumentKindError(argument=name, kind=f"is a lazily negated or conjugated {kind.__name__}")
    return views[0] if views else None


def _as_tensor(value: Tensor) -> Tensor:
    return value.as_subclass(Tensor)


def _plain_example(value: Tensor, view: Resolve) -> Tensor:
    """Return what the graph takes in place of an example input, with the sizes that TorchDynamo gave it."""
    context = TracingContext.try_get()
    if view is _as_tensor or isinstance(value, FakeTensor) or context is None or context.fake_mode is None:
        return view(value)
    return view(fake_of(value, context.fake_mode, context))


def _view_in_graph(graph: fx.Graph, argument: fx.Node, last: fx.Node, view: Resolve) -> None:
    """Let the readers of an argument read its view: `f(x)` -> `f(_neg_view(x))`."""
    target = _aten._neg_view.default if view is torch._neg_view else _aten._conj.default
    readers = [*argument.users]
    with graph.inserting_after(last):
        lazy = graph.call_function(target, (argument,))
    lazy.meta = {**(readers[0].meta if readers else {}), "example_value": argument.meta["example_value"]}
    for reader in readers:
        reader.replace_input_with(argument, lazy)


def _returned(graph: fx.Graph, arguments: dict[fx.Node, int]) -> dict[int, int]:
    """Return, by position of a result, the position of the argument that the result is, written or not."""
    returned: dict[int, int] = {}
    for position, node in enumerate(graph.output_node().args[0]):  # type: ignore[arg-type]
        while isinstance(node, fx.Node) and _returns_its_first(node):
            node = node.args[0]
        if isinstance(node, fx.Node) and node in arguments:
            returned[position] = arguments[node]
    return returned


def _returns_its_first(node: fx.Node) -> bool:
    """True for an operator that writes into its first argument and returns it."""
    if node.op == "call_method":
        name = str(node.target)
    else:
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
