"""Arguments in every layout: results have eager's strides, values and gradients are as good as eager's.

    python -m tests.opinfo --layouts [--filter REGEX] [--samples N] [--seed N] [--json FILE] [--resume]

N of PyTorch's samples of each operator, those of most dimensions first, are laid out in each of `FORMS`, then
each tensor in one that is drawn. They are compiled as a user's code is, with kernels in Triton's interpreter.
A stride counts where the size is greater than 1.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tests.versions import TORCH

MOST = 4  # samples of each operator, unless fewer are asked for
SAMPLES = 40  # of each operator, from which those with the most dimensions are taken

# Operators whose fake tensors PyTorch 2.11 lays out differently from their results.
_FAKED_DIFFERENTLY = """
    fft_fft fft_fft2 fft_fftn fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfftn fft_irfftn fft_rfft fft_rfft2
    fft_rfftn nn_functional_pad_reflect nn_functional_pad_replicate nn_functional_pad_replicate_negative stft
"""

# Operators whose results are laid out differently from eager's, and why.
EXCEPTIONS: dict[str, str] = {
    "median": "of equal elements, the one whose index is returned is not defined",
    "polar": "PyTorch lays out its fake tensor otherwise where an argument is expanded",
}
if TORCH < (2, 13):
    EXCEPTIONS |= dict.fromkeys(_FAKED_DIFFERENTLY.split(), "PyTorch lays out fake tensors differently")


def contiguous(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def reversed_order(x: Tensor) -> Tensor:
    order = tuple(reversed(range(x.dim())))
    return contiguous(x.permute(order)).permute(order)


def transposed(x: Tensor) -> Tensor:
    return contiguous(x.transpose(-1, -2)).transpose(-1, -2) if x.dim() > 1 else contiguous(x)


def sliced(x: Tensor) -> Tensor:
    """Every other element of a larger tensor, from its second one on."""
    larger = x.new_zeros([2 * size + 1 for size in x.shape])
    return larger[tuple(slice(1, None, 2) for _ in x.shape)].copy_(x)


def expanded(x: Tensor) -> Tensor:
    """The first element along the first dimension, repeated along it with a stride of 0."""
    return contiguous(x.narrow(0, 0, 1)).expand(x.shape) if x.dim() and x.shape[0] else contiguous(x)


def channels_last(x: Tensor) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.clone(memory_format=formats.get(x.dim(), torch.contiguous_format))


FORMS: tuple[Callable[[Tensor], Tensor], ...] = (reversed_order, transposed, sliced, expanded, channels_last)


def laid_out(samples: Sequence[Any], most: int, choose: random.Random, drawn_only: bool = False) -> list[Any]:
    """At most `most` samples, each in every layout, and once with every tensor in a layout that is drawn.

    drawn_only: only the latter.

    samples: dataclasses with a number, leaves, and tensors, which are some of the leaves.
    """
    plain = [s for s in samples if all(_is_plain(x) for x in s.tensors)]
    chosen = sorted(plain, key=lambda s: -sum(min(size, 3) for x in s.tensors for size in x.shape))[:most]
    every = [] if drawn_only else [lambda form=form: form for form in FORMS]
    forms = [*every, lambda: choose.choice(FORMS)]
    numbered = enumerate((sample, form) for sample in chosen for form in forms)
    return [_relaid(sample, number, form) for number, (sample, form) in numbered]


def _relaid(sample: Any, number: int, form: Callable[[], Callable[[Tensor], Tensor]]) -> Any:
    """A sample by another number, each of whose tensors is laid out by what `form()` returns."""

    def relaid(x: Tensor) -> Tensor:
        return form()(x.detach()).requires_grad_(x.requires_grad)

    leaves = tuple(relaid(x) if isinstance(x, Tensor) else x for x in sample.leaves)
    return replace(sample, number=number, leaves=leaves)


def _is_plain(x: Tensor) -> bool:
    return x.layout is torch.strided and not x.is_nested


def strides(x: Tensor) -> tuple[int | None, ...]:
    """The strides of a tensor that is not empty, None along dimensions of one element."""
    if x.layout is not torch.strided or not x.numel():
        return ()
    return tuple(stride if size > 1 else None for stride, size in zip(x.stride(), x.shape, strict=True))
