"""The codecs of links, in eager PyTorch and as kernels, and which codec a link gets."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion_compiler as fc
from fusion_compiler.errors import InvalidOptionError
from fusion_compiler.ir.decision import Decision
from fusion_compiler.machines.compression import (
    BLOCK,
    CODECS,
    Codec,
    Coder,
    Compression,
    blocks_of,
    choose,
    select,
)  # fmt: skip
from fusion_compiler.machines.links import Wire
from fusion_compiler.machines.plan import Crossing, Edge, PipelinePlan

CPU = torch.device("cpu")
by_kernels = partial(fc.compile, backend="interpret")


def plainly(function: Any) -> Any:
    """Leave a coder's function in eager PyTorch."""
    return function


def plain(codec: Codec, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Coder:
    """Return a coder whose functions run in eager PyTorch."""
    return Coder(codec, shape, dtype, plainly)


def through(coder: Coder, x: Tensor) -> Tensor:
    mask = [coder.select(x)] if coder.mask else []
    return coder.decode(coder.encode(x, *mask), *mask)


def edge(*shapes: tuple[int, ...], us: float = 1.0, number: int = 0) -> Edge:
    tensors = tuple(Crossing(f"t{i}", shape, torch.float32, True) for i, shape in enumerate(shapes))
    return Edge(number, number + 1, tensors, us, us)


@pytest.mark.parametrize("bits", [16, 8, 4])
def test_each_number_is_off_by_at_most_half_a_level(bits: int) -> None:
    x = torch.randn(7, 131) * torch.logspace(-8, 3, 131)
    decoded = through(plain(Codec(bits=bits), x.shape), x)
    flat = blocks_of(x)
    if bits == 16:
        bound = flat.abs() * 2**-8
    else:
        # Half a level, and what rounding the scale to bfloat16 takes from the largest numbers.
        parts = flat.view(len(flat), Codec(bits=bits).scales, -1)
        largest = parts.abs().amax(-1, keepdim=True)
        bound = (largest * (0.5 / (2 ** (bits - 1) - 1) + 2**-8) + 0 * parts).view_as(flat)
    error = (blocks_of(decoded) - flat).abs()
    assert (error <= bound).all()
    assert (error > bound / 100).any()


@pytest.mark.parametrize("keep", [1, 26, 64, 255])
def test_the_largest_numbers_of_each_block_are_kept(keep: int) -> None:
    x = torch.randn(9, BLOCK) * torch.logspace(-20, 5, 9).unsqueeze(-1)
    mask = select(x, keep)
    assert (mask.sum(-1) == keep).all()
    size = x.abs()
    smallest = torch.where(mask, size, torch.inf).amin(-1)
    largest = torch.where(mask, 0, size).amax(-1)
    assert (smallest >= largest - size.amax(-1) / 2000).all()


def test_equal_numbers_and_zeros_are_kept_in_their_order() -> None:
    x = torch.stack((torch.zeros(BLOCK), torch.ones(BLOCK), torch.arange(BLOCK) % 2.0))
    mask = select(x, 64)
    assert (mask.sum(-1) == 64).all()
    assert mask[:2, :64].all() and mask[2, 1:128:2].all()


def test_what_is_kept_comes_back_to_its_place() -> None:
    x = torch.randn(3, 200)
    decoded = through(plain(Codec(keep=64, bits=16), x.shape), x)
    kept = decoded != 0
    assert kept.view(-1)[:512].view(2, -1).sum(-1).eq(64).all()
    torch.testing.assert_close(decoded[kept], x[kept], rtol=2**-8, atol=0)


@pytest.mark.parametrize(
    "codec", [Codec(bits=8), Codec(bits=4), Codec(keep=26, bits=8), Codec(keep=64, bits=16)]
)
def test_nan_arrives(codec: Codec) -> None:
    x = torch.randn(2, BLOCK)
    x[1, 77] = torch.nan
    decoded = through(plain(codec, x.shape), x)
    assert decoded[1, 77].isnan() and not decoded[0].isnan().any()


@pytest.mark.sample(2)
@pytest.mark.parametrize("codec", [*CODECS, Codec(keep=40, bits=16)], ids=str)
def test_kernels_compute_what_eager_computes(codec: Codec) -> None:
    x = torch.randn(5, 77)
    eager, kernels = plain(codec, x.shape), Coder(codec, x.shape, x.dtype, by_kernels)
    mask = [eager.select(x)] if codec.sparse else []
    if codec.sparse:
        assert torch.equal(kernels.select(x), mask[0])
    for one, two in zip(kernels.encode(x, *mask), eager.encode(x, *mask), strict=True):
        assert torch.equal(one, two)
    stored = eager.encode(x, *mask)
    assert torch.equal(kernels.decode(stored, *mask), eager.decode(stored, *mask))
    torch.testing.assert_close(kernels.lost(x, stored, *mask), eager._lost(x, stored, *mask))


def test_selecting_is_kernels_of_this_compiler_and_no_sort() -> None:
    coder = Coder(Codec(keep=26), (16, BLOCK), torch.float32, by_kernels)
    x = torch.randn(16, BLOCK)
    coder.select(x)
    (plan,) = coder.select.plan
    assert len(plan.clusters) <= 3  # the threshold, the running count, the bytes
    assert not [d for d in plan.decisions if d.rule in ("eager op", "library call")]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_message_is_as_short_as_its_codec_says(codec: Codec) -> None:
    wire = Wire(edge((64, 256)), codec, CPU, plainly, feedback=False)
    assert wire.forward.nbytes == codec.bits_per_number * 64 * 256 / 8
    # The gradient has no mask, and at least 8 bits.
    back = Codec(codec.keep, max(8, codec.bits)).bits_per_number - codec.sparse
    assert wire.backward.nbytes == back * 64 * 256 / 8


def wire_of(codec: Codec | None, feedback: bool = False) -> Wire:
    return Wire(edge((3, 200), (40,)), codec, CPU, plainly, feedback)


def test_the_gradient_comes_back_at_the_places_that_the_forward_pass_kept() -> None:
    source, target = wire_of(Codec(keep=64, bits=16)), wire_of(Codec(keep=64, bits=16))
    tensors = torch.randn(3, 200), torch.randn(40)
    arrived = target.unpack_forward(2, source.pack_forward(2, tensors))
    gradients = torch.randn(3, 200), torch.randn(40)
    back = source.unpack_backward(2, target.pack_backward(2, gradients))
    for x, gradient, result in zip(arrived, gradients, back, strict=True):
        assert result is not None
        torch.testing.assert_close(result, torch.where(x != 0, gradient, 0), rtol=2**-8, atol=0)
    assert not source.masks and not target.masks


def test_a_wire_without_a_codec_changes_nothing() -> None:
    source, target = wire_of(None), wire_of(None)
    tensors = torch.randn(3, 200), torch.randn(40)
    arrived = target.unpack_forward(0, source.pack_forward(0, tensors))
    assert all(torch.equal(a, b) and a.requires_grad for a, b in zip(arrived, tensors, strict=True))
    back = source.unpack_backward(0, target.pack_backward(0, (tensors[0], None)))
    assert back[0] is not None and torch.equal(back[0], tensors[0])
    assert back[1] is not None and not back[1].any()


def test_feedback_sends_later_what_a_gradient_lost() -> None:
    """The mean of what arrives of a constant gradient comes to it; without feedback it stays off."""
    gradient = torch.randn(3, 200)
    errors: list[float] = []
    for feedback in (False, True):
        source, target = wire_of(Codec(bits=4), feedback), wire_of(Codec(bits=4), feedback)
        for wire in (source, target):  # the gradient in 4 bits, too
            wire.back_coders, wire.backward = wire.coders, wire.forward
        total = torch.zeros(3, 200)
        for turn in range(20):
            target.unpack_forward(turn, source.pack_forward(turn, (gradient, torch.zeros(40))))
            back = source.unpack_backward(turn, target.pack_backward(turn, (gradient, None)))[0]
            assert back is not None
            total += back
        errors.append(float((total / 20 - gradient).abs().mean()))
    assert errors[1] < errors[0] / 5


def plan_of(*us: float, compute: float) -> PipelinePlan:
    plan = object.__new__(PipelinePlan)
    stages = [SimpleNamespace(us=compute) for _ in range(len(us) + 1)]
    object.__setattr__(plan, "stages", tuple(stages))
    object.__setattr__(plan, "edges", tuple(edge((64, 256), us=u, number=i) for i, u in enumerate(us)))
    return plan


def codecs(compression: Compression | None, plan: PipelinePlan) -> list[Codec | None]:
    return [codec for codec, _ in choose(compression, plan)]


def test_the_slowest_link_is_compressed_most_and_fast_ones_not_at_all() -> None:
    plan = plan_of(1000.0, 500.0, 250.0, 50.0, compute=100.0)
    assert codecs(Compression(ratio=7), plan) == [Codec(bits=4), Codec(bits=8), Codec(bits=16), None]
    assert codecs(Compression(ratio=4), plan) == [Codec(bits=8), Codec(bits=16), None, None]
    assert codecs(Compression(keep=0.25), plan) == [Codec(64), Codec(128), Codec(256), None]
    assert codecs(None, plan) == [None] * 4


def test_each_choice_says_why() -> None:
    decisions: list[Decision] = [d for _, d in choose(Compression(), plan_of(1000.0, 50.0, compute=100.0))]
    assert [d.is_done for d in decisions] == [True, False]
    assert "100% of the slowest link's time" in decisions[0].reason
    assert "50 us" in decisions[1].reason and "100 us" in decisions[1].reason


@pytest.mark.parametrize(
    "wrong", [{"keep": 0.0}, {"keep": 1.5}, {"ratio": 0.5}, {"bits": 3}, {"bits": 4, "keep": 0.5}]
)
def test_other_values_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidOptionError):
        replace(Compression(), **wrong)
