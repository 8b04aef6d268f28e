"""Autocast CUDA FakeTensors that C++ does not take for tensors of a GPU (capture/target.py).

C++ casts the arguments of an operator only if they are on the device that autocast is entered for. What it
casts them to depends on their dtypes alone, so it is asked with other FakeTensors of the same dtypes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

Shown = Callable[[], AbstractContextManager[None]]
_AUTOCAST, _AUTOGRAD = DispatchKey.AutocastCUDA, DispatchKey.AutogradCUDA


@contextmanager
def autocasting(shown: Shown) -> Generator[None]:
    """Cast the arguments of operators under the Python dispatcher as autocast on a GPU does.

    shown: while it is entered, C++ takes CUDA FakeTensors for tensors of a GPU.
    """
    casts: dict[Any, tuple[Sequence[Any], Any]] = {}

    def call(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        others = tuple(repr(x) for x in leaves if not isinstance(x, Tensor))
        key = op, tuple(t.dtype for t in tensors), others, spec, torch.get_autocast_dtype("cuda")
        if key not in casts:
            casts[key] = pytree.tree_flatten(_cast(op, leaves, spec, shown))
        cast, spec = casts[key]
        rest = iter(tensors)
        with torch._C._ExcludeDispatchKeyGuard(DispatchKeySet(_AUTOCAST)):
            leaves = [next(rest).to(x.dtype) if isinstance(x, _Dtype) else x for x in cast]
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return op(*args, **kwargs)

    with ExitStack() as stack:
        for op in _operators():
            stack.enter_context(with_kernel(op, _AUTOCAST, functools.partial(call, op)))
        yield


@contextmanager
def with_kernel(op: OpOverload, key: DispatchKey, function: Callable[..., Any]) -> Generator[None]:
    """Compute an operator by a function at a dispatch key, under the Python dispatcher."""
    with patch.dict(op.py_kernels, {key: function}):
        op._dispatch_cache.clear()
        try:
            yield
        finally:
            op._dispatch_cache.clear()


class _Dtype:
    """An object of this class stands for a tensor of this dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class _Reached(BaseException):
    """The exception carries the arguments with which an operator is called after autocast."""


@functools.cache
def _operators() -> tuple[OpOverload, ...]:
    """Return the operators whose arguments autocast may cast on a GPU."""
    names = (n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::"))
    cast = (n for n in names if torch._C._dispatch_has_kernel_for_dispatch_key(n, "AutocastCUDA"))
    parts = (n.removeprefix("aten::").partition(".") for n in cast)
    return tuple(getattr(getattr(torch.ops.aten, name), overload or "default") for name, _, overload in parts)


def _cast(op: OpOverload, leaves: Sequence[Any], spec: Any, shown: Shown) -> tuple[Any, Any]:
    """Return the arguments that C++ gives `op` under autocast, with a _Dtype for each tensor."""

    def reach(*args: Any, **kwargs: Any) -> None:
        raise _Reached(args, kwargs)

    with _disable_current_modes(), shown(), torch.no_grad(), FakeTensorMode():
        tensors = [
            torch.empty(x.shape, dtype=x.dtype, device="cuda") if isinstance(x, Tensor) else x for x in leaves
        ]
        args, kwargs = pytree.tree_unflatten(tensors, spec)
        with enable_python_dispatcher(), with_kernel(op, _AUTOGRAD, reach):
            try:
                op._op_dk(_AUTOCAST, *args, **kwargs)
            except _Reached as reached:
                args, kwargs = reached.args
    return pytree.tree_map_only(Tensor, lambda t: _Dtype(t.dtype), (args, kwargs))
