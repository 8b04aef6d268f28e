"""Keep the values of tensors that trial runs write over, and put them back."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

SMALL = 1 << 24  # bytes of a tensor that is always copied on its device


@contextmanager
def preserved(tensors: Sequence[Tensor], room: int) -> Generator[Callable[[], None]]:
    """Put back the values that tensors have now at the end of the context.

    room: bytes that copies on the device may take; what is larger is copied to the host. Yields a function
    that puts back the values of the former between two runs, such as counters: the latter take longer than a
    run.
    """
    near: list[tuple[Tensor, Tensor]] = []
    far: list[tuple[Tensor, Tensor]] = []
    for tensor in (tensor.data for tensor in tensors):  # whose version nobody asks about
        if tensor.nbytes > max(SMALL, room):
            far.append((tensor, tensor.to("cpu", copy=True)))
            continue
        near.append((tensor, tensor.clone()))
        room -= tensor.nbytes

    def restore() -> None:
        _put_back(near)

    try:
        yield restore
    finally:
        _put_back(near + far)


def _put_back(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, copy in pairs:
        tensor.copy_(copy)


def room_below_peak(index: int) -> int:
    """Return the bytes that may be allocated on a device without a new peak of the allocated memory."""
    return torch.cuda.max_memory_allocated(index) - torch.cuda.memory_allocated(index)
