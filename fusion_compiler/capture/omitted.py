"""Leave fields of a model's result out where it trains, so that no graph has to return them.

A model of transformers returns its logits beside its loss, which stores them whole. Code that only wants the
loss, as a Trainer's, gets None in their place, and the loss then runs in chunks (passes/chunks).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import nn


def omitting(forward: Callable[..., Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """Return `forward`, a module's, with None in the place of some results beside a loss, in training.

    names: fields of the result, a dataclass or a dict that has a `loss`. Without a loss the result is kept.
    """

    @functools.wraps(forward)
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        values = _fields_of(result) if self.training and torch.is_grad_enabled() else {}
        if values.get("loss") is None or not set(names) <= values.keys():
            return result
        return type(result)(**{**values, **dict.fromkeys(names)})

    return call


def kept_of(result: Any, names: tuple[str, ...]) -> str:
    """Return why a training step's result still has what was to be left out, or ""."""
    values = _fields_of(result)
    missing = [name for name in (*names, "loss") if name not in values]
    return f"the result, a {type(result).__name__}, has no field {missing[0]!r}" if missing else ""


def _fields_of(result: Any) -> dict[str, Any]:
    if is_dataclass(result):  # transformers' ModelOutput is a dict as well, without the fields that are None
        return {field.name: getattr(result, field.name) for field in fields(result)}
    return dict(result) if isinstance(result, dict) else {}  # pyright: ignore[reportUnknownVariableType]
