"""Convolutions whose images are turned so that channels are innermost: same results, laid out as before."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.passes.rewrites import innermost_channels
from fusion_compiler.passes.rewrites.innermost_channels import turn_channels
from tests.passes.test_rewrites import on_cuda, traced_on_cuda

CONVOLUTIONS = {torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default, torch.ops.aten.conv3d.default}


class Residual(nn.Module):
    """A stem, a residual block with writes in place, and a head that views what it pools."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.one, self.two = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8 * 4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu_(self.norm(self.stem(x))), 2)
        x = F.relu(self.two(F.gelu(self.one(x))) + x, inplace=True)
        return self.head(F.adaptive_avg_pool2d(x, 2).view(x.shape[0], -1))


class Images(nn.Module):
    """Returns images, one of them a view, and one that was written through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, dilation=2, groups=1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        wide = self.one(x)
        rows = wide.view(x.shape[0], -1)
        rows.mul_(2)
        return wide, self.two(wide).sin(), wide.transpose(1, 3)


class Grouped(nn.Module):
    """As in diffusion: norms of groups, with weights and without, one beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(8, 16, 3, padding=1), nn.Conv2d(16, 8, 3, padding=1)
        self.first, self.second = nn.GroupNorm(4, 16), nn.GroupNorm(2, 8, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.two(F.silu(self.first(self.one(x)))) + x)


class Sequence(nn.Module):
    """As a speech encoder begins."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv1d(8, 16, 3, padding=1), nn.Conv1d(16, 16, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(F.gelu(self.two(F.gelu(self.one(x)))).permute(0, 2, 1), (16,))


class Video(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv3d(8, 8, 3, padding=1), nn.Conv3d(8, 8, (1, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.two(F.silu(self.one(x))).flatten(2)


CASES: dict[type[nn.Module], tuple[int, ...]] = {
    Residual: (2, 3, 16, 16),
    Images: (2, 8, 7, 9),
    Grouped: (2, 8, 6, 5),
    Sequence: (2, 8, 12),
    Video: (2, 8, 3, 6, 5),
}


def turn_always(patch: pytest.MonkeyPatch) -> None:
    """Put channels last on a CPU and in float32 too, and in nets so small that it does not pay."""
    patch.setattr(innermost_channels, "has_tensor_units", lambda x: True)
    patch.setattr(innermost_channels, "_pays", lambda graph, convolutions: bool(convolutions))


def run(model: nn.Module, called: Any, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    out = called(x)
    results = list(out) if isinstance(out, tuple) else [out]
    torch.stack([r.sin().sum() for r in results]).sum().backward()
    assert x.grad is not None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    buffers = [b for b in model.buffers() if b.is_floating_point()]
    return [*results, x.grad, *gradients, *buffers]


@pytest.mark.parametrize("net", CASES, ids=lambda n: n.__name__)
def test_results_and_their_layout_are_the_same(net: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    turn_always(monkeypatch)
    model, x = net(), torch.randn(CASES[net])
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fast: Any = fc.compile(model, backend="interpret", strict=net is not Residual)
    ours = run(model, fast, x)
    left = net is Images  # a write through a view has to show
    assert fast.plan[0].notes["channels innermost"].startswith("refused" if left else "done")
    for our, their, true in zip(ours, run(eager, eager, x), run(exact, exact, x.double()), strict=True):
        torch.testing.assert_close(our.double(), true, rtol=1e-4, atol=1e-4)
        assert steps(our) == steps(their)


def steps(x: Tensor) -> list[int]:
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size != 1]


@pytest.mark.parametrize("net", [Residual, Grouped, Sequence, Video], ids=lambda n: n.__name__)
def test_all_that_convolutions_read_is_turned(net: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(innermost_channels, "_pays", lambda graph, convolutions: bool(convolutions))
    model = net().eval()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())

    def function(x: Tensor, *given: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(tensors, given, strict=True)), (x,))

    shapes = [CASES[net], *(tuple(t.shape) for t in tensors.values())]
    for dtype, turned in ((torch.bfloat16, True), (torch.float32, False)):
        fakes = on_cuda(*shapes, dtype=dtype)
        gm = traced_on_cuda(function, *fakes)
        new, notes = turn_channels(gm)
        assert bool(notes) == (new is not gm) == turned
        found = [n for n in new.graph.nodes if n.target in CONVOLUTIONS]
        read = [v.meta["val"] for n in found for v in n.args[:2]]
        assert all((v.stride(1) == 1) == turned for v in read if max(v.shape[2:]) > 1)
        before, after = (g.graph.output_node().all_input_nodes[0].meta["val"] for g in (gm, new))
        assert before.stride() == after.stride()


def test_norms_of_groups_copy_no_image_to_and_fro(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_always(monkeypatch)
    model = Grouped()
    fast: Any = fc.compile(model, backend="eager")
    fast(torch.randn(CASES[Grouped])).sum().backward()
    found = [op.outputs[0] for plan in fast.plan for op in map(plan.dag.op, plan.dag.order) if op.outputs]
    images = [value.stride for value in found if value.shape[1:] == (16, 6, 5)]
    assert images and all(stride[1] == 1 for stride in images)


def test_a_net_that_returns_a_part_of_an_image_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(innermost_channels, "_pays", lambda graph, convolutions: True)
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.aten.slice.Tensor(F.conv2d(x, w), 2, 0, 6, 2)

    gm = traced_on_cuda(function, *on_cuda((2, 8, 8, 8), (8, 8, 3, 3)))
    new, notes = turn_channels(gm)
    assert new is gm and not notes[0].applied and "part of a larger tensor" in notes[0].reason


def test_a_net_that_is_turned_already_stays() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w)

    x, w = (t.to(memory_format=torch.channels_last) for t in on_cuda((2, 8, 6, 6), (8, 8, 3, 3)))
    gm = traced_on_cuda(function, x, w)
    assert turn_channels(gm) == (gm, ())
