"""Helpers that several examples share: launch a Triton kernel on any machine, and compute a result's
error."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from fusion_compiler.runtime.interpreter import run_source

TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
}


def launch(kernel: JITFunction[Any], rows: int, *arguments: Tensor | int, **constants: int) -> None:
    """Launch `rows` programs of a kernel: on a GPU, or in this package's interpreter of Triton on a CPU."""
    first = arguments[0]
    assert isinstance(first, Tensor)
    if first.is_cuda:
        kernel[(rows,)](*arguments, **constants)
        return
    source = f"import triton\nimport triton.language as tl\n\n\n{inspect.getsource(kernel.fn)}"
    for name, value in constants.items():
        source = source.replace(f"{name}: tl.constexpr", f"{name}: tl.constexpr = {value}")
    types = [TYPES[a.dtype] if isinstance(a, Tensor) else "i32" for a in arguments]
    values = [a.data_ptr() if isinstance(a, Tensor) else a for a in arguments]
    run_source(source, kernel.fn.__name__, types, values, (rows,))


def relative_error(got: Tensor, exact: Tensor) -> float:
    """Return the norm of the error, divided by the norm of the exact result."""
    return float((got.detach().double() - exact.detach()).norm() / exact.detach().norm())
