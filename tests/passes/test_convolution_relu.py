"""ReLU behind a convolution is computed by it, in inference."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.ops.own.convolution_relu import convolution_relu
from fusion_compiler.passes.rewrites import convolution_relu as rule
from fusion_compiler.passes.rewrites.convolution_relu import CONVOLUTION_RELU
from tests.passes.test_rewrites import on_cuda, targets, traced, traced_on_cuda

aten = torch.ops.aten


class Block(nn.Module):
    """A residual block whose batch norms are folded, as torchvision writes it: all in place, or nothing."""

    def __init__(self, width: int, inside: int, in_place: bool, stride: int = 1) -> None:
        super().__init__()
        self.one = nn.Conv2d(width, inside, 1)
        self.two = nn.Conv2d(inside, inside, 3, stride=stride, padding=2, dilation=2)
        self.three = nn.Conv2d(inside, width, 1, bias=False)
        self.shorter = nn.Conv2d(width, width, 1, stride=stride) if stride > 1 else nn.Identity()
        self.relu = nn.ReLU(inplace=in_place)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        out = self.three(self.relu(self.two(self.relu(self.one(x)))))
        before = self.shorter(x)
        if self.in_place:
            out += before
            return self.relu(out)
        return self.relu(before + out)


def net(in_place: bool) -> nn.Module:
    first = nn.Conv2d(3, 8, 3), nn.ReLU(in_place)
    return nn.Sequential(*first, Block(8, 4, in_place), Block(8, 4, in_place, 2))


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rule, "has_tensor_units", lambda x: True)


def innermost(model: nn.Module) -> tuple[nn.Module, Tensor]:
    x = torch.randn(2, 3, 12, 11, dtype=torch.float64)
    order = torch.channels_last
    return model.double().eval().to(memory_format=order), x.to(memory_format=order)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.usefixtures("everywhere")
def test_a_residual_net(in_place: bool) -> None:
    model, x = innermost(net(in_place))
    fast = fc.compile(model, backend="interpret", strict=True)
    with torch.no_grad():
        truth = model(x.clone())
        ours = fast(x)
    torch.testing.assert_close(ours, truth)
    assert ours.stride() == truth.stride()
    (plan,) = fast.plan
    assert plan.notes["convolution and ReLU"] == "done x7: one call"
    calls = [left.target for left in plan.leftovers]
    assert calls.count("fusion_compiler.convolution_relu.default") == 7
    assert calls.count("aten.convolution.default") == 1 and len(calls) == 8, "of the shorter way"


@pytest.mark.usefixtures("everywhere")
def test_training_keeps_what_relu_hides() -> None:
    model, x = innermost(net(False))
    exact = copy.deepcopy(model)
    fast = fc.compile(model, backend="interpret", strict=True)
    for called in (fast, exact):
        called(x).square().sum().backward()
    for ours, truth in zip(model.parameters(), exact.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, truth.grad)
    assert "convolution and ReLU" not in fast.plan[0].notes


@pytest.mark.usefixtures("everywhere")
def test_numerics_of_eager_round_before_relu() -> None:
    model, x = innermost(net(False))
    with torch.no_grad():
        fast = fc.compile(model, backend="interpret", strict=True, numerics="eager")
        torch.testing.assert_close(fast(x), model(x))
    assert "convolution and ReLU" not in fast.plan[0].notes


X, W, B, Z = (2, 8, 9, 9), (8, 8, 3, 3), (8,), (2, 8, 7, 7)


def read_twice(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    y = F.conv2d(x, w, b)
    return F.relu(y) + y


def doubled(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.relu(torch.add(F.conv2d(x, w, b), z, alpha=2))


def broadcast(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w, b) + z[:, :1])


def grouped(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    return F.relu(F.conv2d(x, w[:, :4], b, groups=2))


def written_over(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    z = z + 1
    return F.relu(z.add_(F.conv2d(x, w, b))) + z


def changed_between(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    x = x + 1
    y = F.conv2d(x, w, b)
    x.zero_()
    return F.relu(y) + x.sum()


def changed_addend(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
    z = z + 1
    y = F.conv2d(x, w, b) + z
    z.zero_()
    return F.relu(y) + z


OTHERS = [read_twice, doubled, broadcast, grouped, written_over, changed_between, changed_addend]


@pytest.mark.parametrize("function", OTHERS)
@pytest.mark.usefixtures("everywhere")
def test_what_is_not_a_convolution_with_relu(function: Callable[..., Tensor]) -> None:
    args = [torch.randn(s, dtype=torch.float64) for s in (X, W, B, Z)]
    args = [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in args]
    new, notes = CONVOLUTION_RELU.apply(traced(function, *args))
    assert not any(note.is_done for note in notes) and convolution_relu not in targets(new)
    fast: Any = fc.compile(function, backend="interpret")
    with torch.no_grad():
        torch.testing.assert_close(fast(*args), function(*args))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_in_16_bits(dtype: torch.dtype) -> None:
    def called(x: Tensor, w: Tensor, b: Tensor, z: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, w, b)) + z

    fakes = [t.to(dtype) for t in on_cuda(X, W, B, Z)]
    fakes = [t.to(memory_format=torch.channels_last) if t.dim() == 4 else t for t in fakes]
    with torch.no_grad():
        new, _ = CONVOLUTION_RELU.apply(traced_on_cuda(called, *fakes))
    assert (convolution_relu in targets(new)) == (dtype is not torch.float32)


def test_images_channel_by_channel_stay() -> None:
    def called(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.relu(F.conv2d(x, w, b))

    gm = traced_on_cuda(called, *(t.bfloat16() for t in on_cuda(X, W, B)))
    assert CONVOLUTION_RELU.apply(gm) == (gm, ())


def test_the_operator() -> None:
    x, w, b, z = (torch.randn(s) for s in (X, W, B, Z))
    sizes = [1, 1], [0, 0], [1, 1]
    torch.testing.assert_close(convolution_relu(x, w, b, z, *sizes), F.relu(F.conv2d(x, w, b) + z))
    for addend in (None, z):
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(convolution_relu, (x, w, b, addend, *sizes), test_utils=checks)
