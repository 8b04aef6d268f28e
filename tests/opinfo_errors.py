"""Arguments that eager refuses: what is compiled raises the same class of exception.

    python -m tests.opinfo --errors [--filter REGEX] [--samples N] [--seed N] [--json FILE] [--resume]

Cases are PyTorch's own (`error_inputs_func` of each OpInfo), and N of its samples of each operator with one
argument changed: another shape or dtype, another number, values out of every range. A case counts if eager
raises; it is compiled for the default backend and for kernels in Triton's interpreter.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

import fusion_compiler as fc
from tests.samples import opinfo_samples
from tests.versions import TORCH

BACKENDS = ("auto", "interpret")
MOST_ELEMENTS = 1 << 12
SAMPLES = 40  # of each operator, from which those that are changed are drawn
MOST = 12  # of these, unless fewer are asked for

# Nothing is changed in calls of these: eager reaches outside of wrong arguments, or divides by zero.
UNCHECKED = (
    "lu_unpack",
    "linalg_lu_solve",
    "lu_solve",
    "linalg_ldl_solve",
    "torch_ops_aten__scaled_dot_product_flash_attention_for_cpu",
)

_OUT = "PyTorch's capture computes what out= names apart, and copies it: that converts dtypes and may overlap"
_ABOVE = "PyTorch's capture decomposes it above autograd, where no compiler sees the call"

# Operators that do not raise eager's exception for every call, and why.
EXCEPTIONS = {
    "aminmax": _OUT,
    "cat": _OUT,
    "complex": _OUT,
    "take": _OUT,
    "nn_functional_linear": _ABOVE,
    "nn_functional_multi_margin_loss": _ABOVE,
    "nn_functional_multilabel_margin_loss": _ABOVE,
    "nn_functional_one_hot": _ABOVE,
    "nanquantile": _ABOVE,
    "quantile": _ABOVE,
    **({"isclose": _ABOVE} if TORCH < (2, 13) else {}),  # where equal_nan=True does not broadcast
}


@dataclass(frozen=True)
class Case:
    """One call of an operator. change: what was changed in a sample, or that it is PyTorch's own."""

    operator: Callable[..., Any]
    leaves: tuple[Any, ...]
    structure: Any
    change: str

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Return fresh copies of the positional and the named arguments."""
        return copy.deepcopy(tree_unflatten(list(self.leaves), self.structure))


def cases(info: Any, most: int, choose: random.Random) -> list[Case]:
    """All error inputs of an OpInfo, and at most `most` samples of it with one argument changed."""
    listed = [] if info.error_inputs_func is None else info.error_inputs_func(info, "cpu")
    result = [_case(info, e.sample_input, f"error input {n}") for n, e in enumerate(listed)]
    dtype = next((d for d in (torch.float32, torch.int64, torch.bool) if d in info.dtypes), None)
    if dtype is None or not most or info.formatted_name in UNCHECKED:
        return result
    samples = [_case(info, s, f"sample {n}") for n, s in enumerate(opinfo_samples(info, dtype, SAMPLES))]
    changed = [c for s in samples if _elements(s.leaves) <= MOST_ELEMENTS for c in _changed(s)]
    return result + choose.sample(changed, min(most, len(changed)))


def _case(info: Any, sample: Any, change: str) -> Case:
    leaves, structure = tree_flatten(([sample.input, *sample.args], sample.kwargs))
    return Case(info.op, tuple(leaves), structure, change)


def _elements(leaves: tuple[Any, ...]) -> int:
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def _changed(case: Case) -> Iterator[Case]:
    for place, leaf in enumerate(case.leaves):
        for change, value in _changes(leaf):
            leaves = (*case.leaves[:place], value, *case.leaves[place + 1 :])
            yield Case(case.operator, leaves, case.structure, f"{case.change}, argument {place} {change}")


def _changes(leaf: Any) -> Iterator[tuple[str, Any]]:
    """Other values of one argument, most of which are wrong. Sizes stay small: they may be multiplied."""
    if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested:
        x = leaf.detach()
        for dim in range(x.dim()):
            yield f"longer along {dim}", torch.cat([x, x.narrow(dim, 0, min(1, x.shape[dim]))], dim)
        yield "with one more dimension", x.unsqueeze(0).repeat(2, *[1] * x.dim())
        yield "of another dtype", x.to(torch.int64 if x.is_floating_point() else torch.float32)
        if not x.is_complex() and x.dtype is not torch.bool:
            yield "far above", (x + 1000).to(x.dtype)
            yield "far below", (x - 1000).to(x.dtype)
    elif isinstance(leaf, int) and not isinstance(leaf, bool):
        yield "higher", leaf + 9
        yield "lower", -leaf - 9
    elif isinstance(leaf, float):
        yield "negated", -leaf - 1
    elif isinstance(leaf, str):
        yield "unknown", f"{leaf}?"


def outcome(case: Case, backend: str) -> str | None:
    """Return what differs from eager, None if nothing does or eager does not raise."""
    args, kwargs = case.arguments()
    try:
        case.operator(*args, **kwargs)
        return None
    except Exception as error:
        eager = error

    def call(args: list[Any], kwargs: dict[str, Any]) -> Any:
        return case.operator(*args, **kwargs)

    torch._dynamo.reset()
    try:
        results = fc.compile(call, backend=backend)(*case.arguments())
    except Exception as error:
        return None if isinstance(error, type(eager)) else f"{_said(error)}, eager has {_said(eager)}"
    forms = [f"{t.dtype} {list(t.shape)}" for t in tree_leaves(results) if isinstance(t, Tensor)]
    return f"returns {', '.join(forms)}, eager has {_said(eager)}"


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"


def raises(case: Case) -> bool:
    """True if eager raises an exception."""
    args, kwargs = case.arguments()
    try:
        case.operator(*args, **kwargs)
    except Exception:
        return True
    return False


def differences(info: Any, most: int, choose: random.Random) -> Iterator[tuple[str, str | None]]:
    """Yield each call that eager refuses, with a backend, and what differs from eager (None if nothing)."""
    for case in cases(info, most, choose):
        for backend in BACKENDS if raises(case) else ():
            yield f"{case.change}, {backend}", outcome(case, backend)
