"""Loads of which an element serves a run of lanes: values under each schedule, masks, and how many."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn import functional as F

import fusion_compiler as fc
from fusion_compiler.runtime.target import compile_for
from tests.codegen.test_dependent_launch import programs_of
from tests.disassembly import instructions
from tests.exactness import Compiled, not_as_close, wide

Function = Callable[..., Tensor]


def nibbles(group: int) -> Function:
    """A product with weights of four bits, of which `group` have one scale."""

    def product(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
        both = torch.stack((w & 15, w >> 4), -1).flatten(1).to(x.dtype) - 8
        return F.linear(x, (both.unflatten(1, (-1, group)) * scale[..., None]).flatten(1))

    return product


def arguments(rows: int, width: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    w = torch.randint(0, 256, (rows, width // 2), dtype=torch.uint8)
    return torch.randn(1, width), w, torch.rand(rows, width // group)


@pytest.mark.parametrize("schedule", range(4))
@pytest.mark.parametrize(("width", "group"), [(512, 128), (512, 32), (384, 32), (2048, 64), (96, 48)])
def test_products_of_nibbles(width: int, group: int, schedule: int) -> None:
    fn, inputs = nibbles(group), arguments(24, width, group)
    compiled = Compiled(fn, schedule)
    ours = compiled(*inputs)
    assert not_as_close(ours, fn(*inputs), fn(*map(wide, inputs))) is None


def repeated(x: Tensor, s: Tensor) -> Tensor:
    return x * s.repeat_interleave(x.shape[-1] // s.shape[-1], -1)


def nearest(x: Tensor, small: Tensor) -> Tensor:
    height, width = x.shape[-2:]
    return x + small[..., :, None, :, None].expand(-1, -1, 2, -1, 2).reshape(-1, height, width)


def in_padding(x: Tensor, s: Tensor) -> Tensor:
    """Outside the first of each four the value is zero, and counts."""
    return x + F.pad(s[..., None], (0, 3)).flatten(-2)


def of_one_channel(x: Tensor) -> Tensor:
    """Its gradient: an element serves a channel's pixels, and is hidden from the other channel's."""
    return torch.logsumexp(x, (2, 3)).unbind(1)[0]


def normalized(x: Tensor, s: Tensor) -> Tensor:
    return F.layer_norm(repeated(x, s), x.shape[-1:])


@pytest.mark.sample(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("fn", "sizes"),
    [
        (repeated, ((6, 256), (6, 16))),
        (repeated, ((6, 200), (6, 25))),
        (repeated, ((5, 96), (5, 4))),
        (nearest, ((3, 16, 24), (3, 8, 12))),
        (in_padding, ((7, 512), (7, 128))),
        (of_one_channel, ((3, 2, 2, 3),)),
        (of_one_channel, ((64, 4, 4, 6),)),
        (normalized, ((9, 1024), (9, 8))),
        (normalized, ((3, 20000), (3, 1250))),
    ],
    ids=lambda arguments: arguments.__name__ if callable(arguments) else str(arguments),
)
def test_values_and_gradients(fn: Function, sizes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> None:
    inputs = [torch.randn(*size, dtype=dtype) for size in sizes]

    def with_gradients(called: Any, tensors: list[Tensor]) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        out = called(*leaves)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        return [out.detach(), *torch.autograd.grad(out, leaves, weight)]

    for schedule in range(3):
        ours = with_gradients(Compiled(fn, schedule), inputs)
        eager, exact = with_gradients(fn, inputs), with_gradients(fn, [wide(t) for t in inputs])
        for triple in zip(ours, eager, exact, strict=True):
            assert not_as_close(*triple) is None


def plan_of(fn: Function, *inputs: Tensor) -> fc.FusionPlan:
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        tensors = [t.to(torch.bfloat16) if t.is_floating_point() else t for t in inputs]
        (plan,) = fc.explain(fn, *tensors, device="h200").plans
    return plan


def test_a_byte_is_loaded_once_for_its_two_numbers() -> None:
    """And a scale for its group: a twentieth of the instructions are loads, where more than a tenth were."""
    plan = plan_of(nibbles(128), *arguments(4096, 2048, 128))
    (cluster,) = plan.clusters
    for program in programs_of(plan, cluster):
        (kernel,) = program.kernels
        assert re.search(r"fm\.repeated\(tl\.load\([^\n]*, 2\)", kernel.source), kernel.source
        assert re.search(r"fm\.repeated\(tl\.load\([^\n]*, 16\)", kernel.source), "of 128 a word"
        listing = instructions(kernel, "sm_90")
        assert sum("LDG" in line for line in listing) < len(listing) / 20
        assert compile_for(kernel, "sm_90").spills == 0
        compile_for(kernel, "gfx942")


def test_what_is_one_element_for_the_block_is_no_run() -> None:
    plan = plan_of(repeated, torch.randn(64, 32768), torch.randn(64, 4))
    for program in programs_of(plan, plan.clusters[0]):
        assert "fm.repeated" not in program.kernels[0].source
