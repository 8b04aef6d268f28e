"""Find the methods of a module besides `forward` through which it is trained."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

# What Lightning's Trainer calls instead of `forward`, and compiles of a module that torch.compile returned.
STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def compiled_methods(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the methods of `model` that are compiled as `forward` is.

    Lightning's modules declare by the attribute `_compiler_ctx` that their steps are.
    """
    if not hasattr(model, "_compiler_ctx"):
        return ()
    return tuple(name for name in STEPS if callable(getattr(type(model), name, None)))


def other_methods(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yield the names and functions of the methods of a module's class that nn.Module does not have."""
    names = {name for base in cls.__mro__ for name in vars(base)} - set(dir(nn.Module))
    for name in sorted(names):
        member = next(vars(base)[name] for base in cls.__mro__ if name in vars(base))
        if isinstance(member, types.FunctionType) and not name.startswith("__"):
            yield name, member


def watched(
    method: Callable[..., Any], is_called: Callable[[], bool], missed: Callable[[str], None]
) -> Callable[..., Any]:
    """Return `method`, which calls `missed` with its name when a result of it gets a gradient.

    is_called: whether the compiled module has been called, after which nothing is watched.
    """
    name = method.__name__

    def arrived(gradient: torch.Tensor) -> None:
        del gradient
        if not is_called():
            missed(name)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        if not (torch.compiler.is_dynamo_compiling() or is_called()):
            leaves = (leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
            for leaf in leaves:
                if leaf.grad_fn is not None:
                    leaf.register_hook(arrived)
                    break
        return result

    return call
