"""Who is compared: one name -> a way to compile a function or a module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Compile = Callable[[Any], Any]


def eager(model: Any) -> Any:
    return model


def inductor(model: Any) -> Any:
    return torch.compile(model, dynamic=False)


def autotune(model: Any) -> Any:
    return torch.compile(model, dynamic=False, mode="max-autotune-no-cudagraphs")


def ours(model: Any) -> Any:
    import fusion_compiler as fc

    return fc.compile(model)


def liger_functional() -> Any:
    """Liger's functional module; ImportError where it is not installed."""
    import liger_kernel.transformers.functional as functional  # pyright: ignore[reportMissingImports]

    return functional


def contenders(with_autotune: bool, with_inductor: bool = True) -> dict[str, Compile]:
    """In the order of the table's columns. Liger has kernels rather than a compiler: see clusters.py."""
    chosen: dict[str, Compile] = {"eager": eager}
    if with_inductor:
        chosen["compile"] = inductor
    if with_autotune:
        chosen["autotune"] = autotune
    return chosen | {"ours": ours}


def eager_ops(compiled: Any) -> list[str] | None:
    """Targets that ours left as ATen calls although they are no contractions; None for other contenders."""
    plan = getattr(compiled, "plan", None)
    return None if plan is None else sorted({left.target for p in plan for left in p.leftovers})
