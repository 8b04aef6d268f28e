"""Handle errors that appear when a compiled graph first runs as those of its compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._dynamo.eval_frame import innermost_fn
from torch._dynamo.exc import TorchDynamoException
from torch._ops import HigherOrderOperator, OpOverload

from fusion_compiler.errors import FusionError
from fusion_compiler.ops.schema import draws, written

_WITHOUT_EFFECTS = ("aten", "prims", "fusion_compiler")
_PASSED_ON = (FusionError, Warning, TorchDynamoException, torch.OutOfMemoryError)


def watched(
    run: Callable[..., Any],
    eager: Callable[..., Any],
    may_repeat: Callable[[], bool],
    give_up: Callable[[Exception], None],
) -> Callable[..., Any]:
    """Return `run`, whose calls go to `eager` if its first one raises an error that `eager` does not raise.

    may_repeat: asked after an error, True if nothing has happened yet that can be seen from outside. If it
        is False, the error is raised: nothing is done twice.
    give_up: called with the error if `eager` raises none. It warns, or raises when strict.

    An error that `eager` raises as well is the user's, and raised as eager's. After the first call without an
    error nothing is watched, and calling the result costs no more than calling `run`.
    """

    def first(*args: Any) -> Any:
        try:
            results = run(*args)
        except _PASSED_ON:
            raise
        except Exception as error:
            if not may_repeat():
                raise
            fault = error
        else:
            entry.__setstate__((run, (), {}, named))
            return results
        results = eager(*args)
        give_up(fault)
        entry.__setstate__((eager, (), {}, named))
        return results

    run = innermost_fn(run)  # TorchDynamo calls the result with itself turned off
    named = {"__name__": "run"}  # which TorchDynamo asks for in every call: to have none takes 0.5 us
    entry: Any = functools.partial(first)
    return entry


def has_effects(graph: fx.Graph) -> bool:
    """True if it can be seen from outside that an ATen graph was run: it writes, draws random numbers, calls
    a higher-order operator, or an operator of another library (a collective, say)."""
    return any(_has_effect(node.target) for node in graph.nodes if node.op == "call_function")


def _has_effect(target: Any) -> bool:
    if not isinstance(target, OpOverload):
        return isinstance(target, HigherOrderOperator)
    return target.namespace not in _WITHOUT_EFFECTS or bool(written(target)) or draws(target)
