"""A backward that writes over what was saved, in a graph that somebody goes through again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fusion_compiler.ir.views import again
from fusion_compiler.runtime.boxed import Boxed

# Whether the backward that runs is to leave its graph to a later one.
is_kept: Callable[[], bool] = getattr(torch._C, "_autograd")._get_current_graph_task_keep_graph  # noqa: B009


def sparing(run: Boxed, positions: Sequence[int]) -> Boxed:
    """`run`, which writes over the arguments at `positions`: where autograd keeps its graph
    (`backward(retain_graph=True)`), over copies of them."""
    if not positions:
        return run

    def call(arguments: list[Any]) -> Any:
        if is_kept():
            for position in positions:
                arguments[position] = again(arguments[position])
        return run(arguments)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call
