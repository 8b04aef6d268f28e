"""Support a backward pass whose graph is kept, by `retain_graph=True` or `create_graph=True`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusion_compiler.errors import DoubleBackwardError
from fusion_compiler.ir.views import again
from fusion_compiler.runtime.boxed import Boxed, boxed

# True while a backward runs that keeps its graph for a later one (retain_graph=True).
is_kept: Callable[[], bool] = getattr(torch._C, "_autograd")._get_current_graph_task_keep_graph  # noqa: B009


def sparing(run: Boxed, positions: Sequence[int]) -> Boxed:
    """Return `run`, which writes over the arguments at `positions`; if autograd keeps its graph
    (`backward(retain_graph=True)`), over copies of them."""
    if not positions:
        return run

    def call(arguments: list[Any]) -> Any:
        if is_kept():
            for position in positions:
                arguments[position] = again(arguments[position])
        return run(arguments)

    return boxed(call)


def refuse_double_backward() -> None:
    """Make the backward pass of the gradients that are being computed raise DoubleBackwardError.

    Called in a compiled backward that keeps its graph. Where autograd records it, PyTorch calls it within an
    `autograd.Function` whose context is the local variable `double_ctx` of a caller. That function's own
    backward raises without saying what to do.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name != "apply":
        node: Any = frame.f_locals.get("double_ctx")
        if hasattr(node, "register_prehook"):
            node.register_prehook(_refuse)
            return
        frame = frame.f_back


def _refuse(gradients: Any) -> None:
    del gradients
    raise DoubleBackwardError
