"""Gradients clipped by their norm without being written: the update multiplies them by the factor.

torch.nn.utils.clip_grad_norm_    read gradients | read and write gradients | step(): read them
FusedOptimizer.clip_grad_norm_    read gradients | step(): read them, times a factor in the device's memory
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm


class Clip:
    """A `Clip` holds the factor by which the gradients of some parameters are to be multiplied.

    norm: the total norm of the gradients, as PyTorch computes it. factor: a tensor of at most 1.0, on which
    the host has not waited.
    """

    def __init__(self, params: Sequence[Tensor], max_norm: float, **options: Any) -> None:
        grads = [param.grad for param in params if param.grad is not None]
        self.norm: Tensor = get_total_norm(grads, **options)
        self.max_norm: float = max_norm
        total: Any = self.norm
        total = total.full_tensor() if hasattr(total, "full_tensor") else total  # the norm of all processes
        self.factor: Tensor = (max_norm / (total + 1e-6)).clamp(max=1.0)
        self._versions = [(weakref.ref(grad), grad._version) for grad in grads]

    def is_of(self, params: Sequence[Tensor], refuse: Callable[[Tensor], NoReturn]) -> bool:
        """Return True if the parameters have the clipped gradients, unchanged, and False if they have none.

        Calls `refuse` with a parameter whose gradient has been written since, or did not exist then.
        """
        versions = {id(grad): version for ref, version in self._versions if (grad := ref()) is not None}
        if not any(id(param.grad) in versions for param in params):
            return False
        for param in params:
            if param.grad is not None and versions.get(id(param.grad)) != param.grad._version:
                refuse(param)
        return True

    def write(self, params: Sequence[Tensor]) -> None:
        """Multiply the gradients by the factor, as PyTorch's function does."""
        with torch.no_grad():
            clip_grads_with_norm_(list(params), self.max_norm, self.norm)
