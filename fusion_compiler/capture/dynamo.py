"""Run torch.compile under settings of our own, which hold for no other compilation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

import torch
from torch._dynamo import config
from torch._dynamo.convert_frame import compile_lock
from torch._dynamo.variables import TensorVariable

from fusion_compiler.capture.transforms import broken_at_repeated_operands
from fusion_compiler.ops.decompositions.traced_gradients import traced_gradients

# allow_rnn: TorchDynamo traces into nn.LSTM, nn.GRU and nn.RNN, each one operator (`ops.own.recurrent`).
# trace_autograd_ops: `torch.autograd.grad` is part of a graph, so that its result can be differentiated.
# record_runtime_overhead: the code around a graph calls a profiler twice, which takes 2 us of every call.
SETTINGS: dict[str, Any] = {
    "allow_rnn": True, "trace_autograd_ops": True, "record_runtime_overhead": False
}  # fmt: skip


def dynamo_compiled(
    function: Callable[..., Any],
    backend: Callable[..., Any],
    *,
    dynamic: bool | None = None,
    fullgraph: bool = False,
) -> Callable[..., Any]:
    """Return `function` compiled as `torch.compile` does, and traced under `SETTINGS`."""
    context: Any = torch._dynamo.optimize(backend=backend, nopython=fullgraph, dynamic=dynamic)
    if hasattr(context, "callback"):  # not where TORCHDYNAMO_DISABLE is set
        context.callback = _Tracing(context.callback)
    return context(function)


class _Tracing:
    """TorchDynamo calls this object with each frame to trace: it calls `callback` under `SETTINGS`."""

    def __init__(self, callback: Any) -> None:
        self._callback = callback
        # TorchDynamo's C code follows this attribute to the backend. It must not have to run Python for that.
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with (
            compile_lock,
            config.patch(SETTINGS),
            _backward_untraced(),
            broken_at_repeated_operands(),
            traced_gradients(),
        ):
            return self._callback(*args, **kwargs)


_backward = TensorVariable.method_backward


def _backward_untraced() -> AbstractContextManager[Any]:
    methods: Any = getattr(TensorVariable, "tp_methods", {})
    if "backward" in methods:  # since PyTorch 2.15
        return patch.dict(methods, backward=type(methods["backward"])(_untraced_backward))
    return patch.object(TensorVariable, "method_backward", _untraced_backward)


def _untraced_backward(*args: Any, **kwargs: Any) -> Any:
    """End a graph at `Tensor.backward()`: what it does to leaves, hooks included, is left to autograd."""
    with config.patch(trace_autograd_ops=False):
        return _backward(*args, **kwargs)
