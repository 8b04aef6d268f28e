"""Attention in other forms, as models write it and as calls with a mask, on a GPU: values and gradients
beside eager and float64, and no scores in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from benchmarks.chains.variants import VARIANTS, Shape
from tests.exactness import not_as_close
from tests.passes.test_general_attention import (
    LOWEST,
    MASKED,
    added,
    added_to_capped,
    capped_with_added,
    inputs_of,
    notes_of,
    run_all,
    two_layers,
)

Code = Callable[..., Any]
BY_NAME = {variant.name: variant for variant in VARIANTS}


def on_gpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors on the GPU; those of floating point in bfloat16, with gradients."""
    return [
        x.detach().to("cuda", torch.bfloat16).requires_grad_() if x.is_floating_point() else x.cuda()
        for x in tensors
    ]


def check(code: Code, inputs: Sequence[Tensor]) -> None:
    compiled: Any = fc.compile(code, strict=True)
    for one, theirs, exact in zip(*run_all(compiled, code, inputs), strict=True):
        assert not (wrong := not_as_close(one, theirs, exact)), wrong
    assert notes_of(compiled)[0].startswith("done")


@pytest.mark.parametrize("length", [900, 1024])
@pytest.mark.parametrize("name", [name for name in BY_NAME if "dropout" not in name])
def test_variants(name: str, length: int) -> None:
    variant = BY_NAME[name]
    sizes = {"width": 64, "values": 64} | dict(variant.sizes)
    shape = Shape(2, 8, length, dtype=torch.bfloat16, device="cuda", **sizes)
    check(variant.code, inputs_of(variant, shape))


@pytest.mark.parametrize("name", MASKED)
def test_calls_with_a_mask(name: str) -> None:
    code, more = MASKED[name]
    check(code, on_gpu([*Shape(2, 4, 70, 16, 16).inputs(), *more()]))


@pytest.mark.parametrize("length", [900, 1024])
@pytest.mark.parametrize("is_left", [True, False])
def test_masks_of_the_lowest_number_hide_padding(is_left: bool, length: int) -> None:
    """Rows of padding at the left see no key: their weights are those of all keys."""

    def code(q: Tensor, k: Tensor, v: Tensor, shown: Tensor) -> Tensor:
        place = torch.arange(length, device=q.device)
        mask = (place <= place[:, None]) & shown[:, None, None, :]
        scores = 20 * torch.tanh(q @ k.mT / 20) + torch.where(mask, 0.0, LOWEST).to(q.dtype)
        return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    place = torch.arange(length, device="cuda")
    shown = torch.stack((place >= 0, place >= 333 if is_left else place < 600))
    check(code, [*Shape(2, 2, length, 64, 64, dtype=torch.bfloat16, device="cuda").inputs(), shown])


@pytest.mark.parametrize("length", [300, 1024])
@pytest.mark.parametrize("code", [added, added_to_capped, capped_with_added, two_layers])
def test_gradients_of_a_bias_that_is_as_large_as_scores(code: Code, length: int) -> None:
    shape = Shape(1, 4, length, dtype=torch.bfloat16, device="cuda")
    inputs = [*shape.inputs(), shape.normal(1, 4, length, length)]
    compiled: Any = fc.compile(code, strict=True, disable=("fused attention",))
    for one, theirs, exact in zip(*run_all(compiled, code, inputs), strict=True):
        assert not (wrong := not_as_close(one, theirs, exact)), wrong
    assert all(note.startswith("done") for note in notes_of(compiled))


def test_scores_are_never_stored() -> None:
    length = 8192
    variant = BY_NAME["soft cap, documents"]
    inputs = inputs_of(variant, Shape(1, 1, length, 64, 64, dtype=torch.bfloat16, device="cuda"))
    compiled = fc.compile(variant.code, strict=True)
    with torch.no_grad():
        compiled(*inputs)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        compiled(*inputs)
    assert torch.cuda.max_memory_allocated() - before < length * length
