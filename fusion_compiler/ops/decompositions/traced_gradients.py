"""Keep whole the operators that PyTorch runs whole in eager but writes out, above autograd, while it traces.

No table of decompositions sees these: interpolation becomes gathers whose gradient is a scatter; a recurrent
layer some ten operators for each of its steps; on PyTorch 2.11 the gradient of a running product becomes
products for every element of a row. Within `traced_gradients` they stay whole.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey
from torch._C._functorch import peek_interpreter_stack
from torch._ops import OpOverload

from fusion_compiler.ops.decompositions.tensors import widened
from fusion_compiler.ops.own.recurrent import KINDS, recurrent

aten = torch.ops.aten

# Their gradient is an operator. Traced it would be a scatter that adds, whose indices a GPU sorts first.
INTERPOLATIONS = tuple(
    getattr(getattr(aten, name), overload)
    for name in (
        *(f"upsample_{mode}" for mode in ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d")),
        *("upsample_trilinear3d", "upsample_bicubic2d"),
        *(f"_upsample_nearest_exact{rank}d" for rank in (1, 2, 3)),
    )
    for overload in ("default", "vec")
)


def cumprod_backward(grad: Tensor, x: Tensor, dim: int, result: Tensor) -> Tensor:
    """Return the gradient [x's shape, x's dtype] of result = cumprod(x, dim), with one division for each
    element.

    Before a row's first zero it is sum(grad * result, from here on) / x; at that zero the sum of grad times
    the products without it; beyond it nothing.
    """
    op = aten.cumprod_backward.default
    if x.is_complex() or x.ndim == 0 or x.numel() == 0:
        return op._op_dk(DispatchKey.CompositeImplicitAutograd, grad, x, dim, result)
    grad, factors, result = (widened(t) for t in (grad, x, result))
    zeros = (factors == 0).cumsum(dim)
    before, at = zeros == 0, (factors == 0) & (zeros == 1)
    sums = torch.where(before, grad * result, 0.0).flip(dim).cumsum(dim).flip(dim)
    without = torch.where(at, 1.0, factors).cumprod(dim)
    at_zero = torch.where(before, 0.0, grad * without).sum(dim, keepdim=True)
    return torch.where(before, sums / factors, torch.where(at, at_zero, 0.0)).to(x.dtype)


# Traced, they take integers, for which eager has no kernel.
_SHRINKS = (aten.hardshrink.default, aten.softshrink.default)
_KEYS = (DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd)


def recurrent_kernels(kind: str, overload: str) -> dict[DispatchKey, Callable[..., Any]]:
    """Return the kernels that keep a recurrent layer whole. A function transform sees it written out."""
    op: OpOverload = getattr(getattr(aten, kind), overload)
    written_out = op.py_kernels[DispatchKey.CompositeImplicitAutograd]

    def run(*arguments: Any) -> tuple[Tensor, ...]:
        transform: Any = peek_interpreter_stack()
        if transform is not None:
            return written_out(*arguments)
        return recurrent(kind, overload == "data", *arguments)

    return dict.fromkeys(_KEYS, functools.wraps(written_out)(run))


_INSTEAD: dict[OpOverload, dict[DispatchKey, Callable[..., Any]]] = {
    **{op: {} for op in (*INTERPOLATIONS, *_SHRINKS)},
    aten.cumprod_backward.default: {DispatchKey.CompositeImplicitAutograd: cumprod_backward},
    **{
        getattr(getattr(aten, kind), overload): recurrent_kernels(kind, overload)
        for kind in KINDS
        for overload in ("input", "data")
    },
}


@contextlib.contextmanager
def traced_gradients() -> Generator[None]:
    """Keep the operators of this file whole in traces, while entered."""

    def become(kernels: dict[OpOverload, dict[DispatchKey, Callable[..., Any]]]) -> None:
        for op, of_keys in kernels.items():
            for key in _KEYS:
                op.py_kernels.pop(key, None)
            op.py_kernels.update(of_keys)
            op._dispatch_cache.clear()

    before = {op: {k: op.py_kernels[k] for k in _KEYS if k in op.py_kernels} for op in _INSTEAD}
    try:
        become(_INSTEAD)
        yield
    finally:
        become(before)
