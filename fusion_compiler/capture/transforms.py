"""Check custom autograd functions under `torch.func.grad`, `vjp` or `jvp` within captured code.

TorchDynamo inlines the forward of such a `torch.autograd.Function` and forgets its backward, so the transform
would differentiate through the forward instead. Beside `torch.autograd.grad` it keeps the backward, but not
the derivative of that backward.

Before PyTorch 2.13, TorchDynamo also gives wrong gradients where a Function gets one tensor as two arguments
(pytorch#183604) and where a Function changes in place what it returns (pytorch#180642).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._dynamo.exc import Unsupported
from torch._dynamo.variables.misc import AutogradFunctionVariable
from torch._guards import TracingContext
from torch.autograd import Function
from torch.torch_version import TorchVersion

from fusion_compiler.errors import LostBackwardError

_TRANSFORMS = ("torch._functorch", "torch._C._functorch")
_FORWARD_MODE = ("_enter_dual_level", "enter_dual_level", "_make_dual", "make_dual")
AUTOGRAD_FUNCTION: Any = torch.ops.higher_order.autograd_function_apply  # in Dynamo's graph, with two graphs
_LOSES_GRADIENTS = TorchVersion(torch.__version__) < TorchVersion("2.13")


def check_functions(gm: fx.GraphModule) -> None:
    """Raise LostBackwardError if TorchDynamo has lost the backward of an autograd Function in `gm`.

    Called in a backend. In a graph that transforms functions, those outside of the transforms are refused as
    well: nothing tells them apart.
    """
    if _LOSES_GRADIENTS and any(_changes_a_result(node, gm) for node in gm.graph.nodes):
        raise LostBackwardError(
            function="an autograd.Function",
            what="changes its result in place",
            instead="compute the result in new tensors, or use PyTorch 2.13",
        )
    if not any(_transforms(node) for node in gm.graph.nodes):
        return
    inlined = {id(code) for code in TracingContext.get_traced_code() or ()}
    for function in _subclasses(Function):
        forward = getattr(function, "forward", None)
        if id(getattr(forward, "__code__", None)) in inlined:
            raise LostBackwardError(
                function=f"autograd.Function {function.__name__}",
                what="runs under torch.func or beside torch.autograd.grad",
                instead="compile the function that is transformed separately",
            )


def _transforms(node: fx.Node) -> bool:
    module, name = (getattr(node.target, a, None) or "" for a in ("__module__", "__name__"))
    if node.op != "call_function":
        return False
    return module.startswith(_TRANSFORMS) or name in _FORWARD_MODE or node.target is torch.autograd.grad


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _changes_a_result(node: fx.Node, gm: fx.GraphModule) -> bool:
    """True for `detach_`, and for an autograd Function whose captured forward returns one memory twice.

    TorchDynamo adds such a second result where the forward changes a result in place.
    """
    if node.op == "call_method" and node.target == "detach_":
        return True
    if node.target is not AUTOGRAD_FUNCTION:
        return False
    forward: Any = node.args[0]
    graph = getattr(gm, str(forward.target)).graph if isinstance(forward, fx.Node) else forward.graph
    results = graph.output_node().args[0][0]
    values = [r.meta.get("example_value") for r in results if isinstance(r, fx.Node)]
    storages = [v.untyped_storage()._cdata for v in values if isinstance(v, Tensor)]
    return len(set(storages)) < len(storages)


def broken_at_repeated_operands() -> AbstractContextManager[Any]:
    """Make TorchDynamo break the graph at a Function that gets one tensor as two arguments, while entered."""
    return patch.object(AutogradFunctionVariable, "call_apply", _apply) if _LOSES_GRADIENTS else nullcontext()


_traced_apply = AutogradFunctionVariable.call_apply


def _apply(function: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    nodes = [arg.as_proxy().node for arg in args if arg.is_tensor()]
    if len(set(nodes)) < len(nodes):
        raise Unsupported(f"{function.fn_cls.__name__}.apply with one tensor as two arguments")
    return _traced_apply(function, tx, args, kwargs)
