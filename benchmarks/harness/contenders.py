"""Who is compared: one name -> a way to compile a function or a module."""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

Compile = Callable[[Any], Any]


def eager(model: Any) -> Any:
    return model


inductor: Compile = functools.partial(torch.compile, dynamic=False)
autotune: Compile = functools.partial(torch.compile, dynamic=False, mode="max-autotune-no-cudagraphs")


def with_cuda_graphs(mode: str) -> Compile:
    """torch.compile in a mode that records CUDA graphs: a step says where it begins, as its manual asks."""

    def compile_(model: Any) -> Any:
        compiled = torch.compile(model, dynamic=False, mode=mode)

        def called(*args: Any, **kwargs: Any) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return compiled(*args, **kwargs)

        return called

    return compile_


def ours(backend: str) -> Compile:
    import fusion_compiler as fc

    return lambda model: fc.compile(model, backend=backend)


def liger_functional() -> Any:
    """Return Liger's functional module, installed or unpacked in the folder LIGER_PATH, or None without it.

    Its kernels (0.8.5) write into their inputs and into the gradients that they are given.
    """
    folder = os.environ.get("LIGER_PATH")
    if folder and folder not in sys.path:
        sys.path.append(folder)
    try:
        import liger_kernel.transformers.functional as functional  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        why = f"{type(error).__name__}: {error}"
        print(f"liger is left out: {why}; LIGER_PATH can name a folder that holds it")
        return None
    return functional


def contenders(
    with_autotune: bool, backend: str = "auto", only: str = "", *, with_graphs: bool = False
) -> dict[str, Compile]:
    """In the order of the table's columns. Liger has kernels rather than a compiler: see `Case.liger`.

    with_graphs: also torch.compile with CUDA graphs, and its tuning with them, for whole steps.
    backend: of ours; "interpret" checks the harness and the kernels' values on a CPU.
    only: a regular expression that the names must match.
    """
    chosen: dict[str, Compile] = {"eager": eager, "compile": inductor}
    if with_graphs:
        chosen["graphs"] = with_cuda_graphs("reduce-overhead")
    if with_autotune:
        chosen["autotune"] = with_cuda_graphs("max-autotune") if with_graphs else autotune
    chosen["ours"] = ours(backend)
    return {name: compile_ for name, compile_ in chosen.items() if re.search(only, name)}


def eager_ops(compiled: Any) -> list[str] | None:
    """Targets that ours left as ATen calls although they are no contractions; None for other contenders."""
    plan = getattr(compiled, "plan", None)
    return None if plan is None else sorted({left.target for p in plan for left in p.leftovers})


def recorded_graphs(compiled: Any) -> dict[str, str | None] | None:
    """Return the decision about recording for each of our graphs; None for other contenders."""
    plan = getattr(compiled, "plan", None)
    return None if plan is None else {p.name: p.notes.get("CUDA graph") for p in plan}
