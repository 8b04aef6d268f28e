"""Custom autograd functions under `torch.func.grad`, `vjp` or `jvp` within captured code.

TorchDynamo inlines the forward of such a `torch.autograd.Function` and forgets its backward, so the transform
would differentiate through the forward instead. Beside `torch.autograd.grad` it keeps the backward, but not
the derivative of that backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx
from torch._guards import TracingContext
from torch.autograd import Function

from fusion_compiler.errors import LostBackwardError

_TRANSFORMS = ("torch._functorch", "torch._C._functorch")
_FORWARD_MODE = ("_enter_dual_level", "enter_dual_level", "_make_dual", "make_dual")


def check_functions(gm: fx.GraphModule) -> None:
    """Raise LostBackwardError if `gm` transforms functions and TorchDynamo has inlined an autograd Function.

    Called in a backend. Functions outside of the transforms are refused as well: nothing tells them apart.
    """
    if not any(_transforms(node) for node in gm.graph.nodes):
        return
    inlined = {id(code) for code in TracingContext.get_traced_code() or ()}
    for function in _subclasses(Function):
        forward = getattr(function, "forward", None)
        if id(getattr(forward, "__code__", None)) in inlined:
            raise LostBackwardError(function=function.__name__)


def _transforms(node: fx.Node) -> bool:
    module, name = (getattr(node.target, a, None) or "" for a in ("__module__", "__name__"))
    if node.op != "call_function" or name == "AutogradFunctionApply":
        return False
    return module.startswith(_TRANSFORMS) or name in _FORWARD_MODE or node.target is torch.autograd.grad


def _subclasses(cls: type) -> Iterator[type]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
