"""Define an operator of the project in PyTorch's dispatcher."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload


def define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    *,
    tags: Sequence[torch.Tag] = (),
    gradient: Callable[..., Any] | None = None,
    save: Callable[..., Any] | None = None,
) -> OpOverload:
    """Define `fusion_compiler::name` and return its overload.

    run: computes the result on any device. fake: returns a result of its form for FakeTensors; `run` by
    default. gradient, save: `backward` and `setup_context` of `torch.library.register_autograd`.
    """
    full = f"fusion_compiler::{name}"
    torch.library.define(full, schema, tags=tags)
    torch.library.impl(full, "CompositeExplicitAutograd")(run)
    torch.library.register_fake(full)(fake or run)
    if gradient is not None:
        torch.library.register_autograd(full, gradient, setup_context=save)
    return getattr(torch.ops.fusion_compiler, name).default
