"""Convolutions whose images are turned so that channels are innermost: same results, laid out as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion_compiler as fc
from fusion_compiler.ir.plan import FusionPlan
from fusion_compiler.ops.decompositions import images
from fusion_compiler.passes.rewrites import innermost_channels
from fusion_compiler.passes.rewrites.innermost_channels import use_channels_last
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
    patch.setattr(innermost_channels, "_pays", lambda graph, convolutions, *_: bool(convolutions))


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
    assert fast.plan[0].notes["channels last"].startswith("refused" if left else "done")
    for our, their, true in zip(ours, run(eager, eager, x), run(exact, exact, x.double()), strict=True):
        torch.testing.assert_close(our.double(), true, rtol=1e-4, atol=1e-4)
        assert steps(our) == steps(their)


def steps(x: Tensor) -> list[int]:
    return [step for step, size in zip(x.stride(), x.shape, strict=True) if size != 1]


@pytest.mark.parametrize("net", [Residual, Grouped, Sequence, Video], ids=lambda n: n.__name__)
def test_all_that_convolutions_read_is_turned(net: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(innermost_channels, "_pays", lambda graph, convolutions, *_: bool(convolutions))
    model = net().eval()
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())

    def function(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(model, dict(zip(tensors, values, strict=True)), (x,))

    shapes = [CASES[net], *(tuple(t.shape) for t in tensors.values())]
    for dtype, turned in ((torch.bfloat16, True), (torch.float32, False)):
        fakes = on_cuda(*shapes, dtype=dtype)
        gm = traced_on_cuda(function, *fakes)
        new, notes = use_channels_last(gm)
        assert bool(notes) == (new is not gm) == turned
        calls = [n for n in new.graph.nodes if n.target in CONVOLUTIONS]
        read = [v.meta["val"] for n in calls for v in n.args[:2]]
        assert all((v.stride(1) == 1) == turned for v in read if max(v.shape[2:]) > 1)
        before, after = (g.graph.output_node().all_input_nodes[0].meta["val"] for g in (gm, new))
        assert before.stride() == after.stride()


def test_gradients_leave_a_compiled_pass_with_the_strides_of_their_tensors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turn_always(monkeypatch)
    model, x = Grouped(), torch.randn(CASES[Grouped]).requires_grad_()
    leaves = [x, *model.parameters()]
    gradients = torch.autograd.grad(fc.compile(model, backend="eager")(x).square().sum(), leaves)
    assert [g.stride() for g in gradients] == [leaf.stride() for leaf in leaves]


class Squeeze(nn.Module):
    """Squeeze-and-excitation of [n, c, h, w]."""

    def __init__(self, channels: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(channels, inner, 1), nn.Conv2d(inner, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))))


def expanding(
    groups: int, kernel: int, act: type[nn.Module], squeeze: bool = True, width: int = 128
) -> nn.Module:
    """A 1 x 1 convolution, one of groups, squeeze-and-excitation and a 1 x 1: [n, 32, h, w] -> the same."""

    def norm(*convolution: Any, **options: Any) -> list[nn.Module]:
        return [nn.Conv2d(*convolution, bias=False, **options), nn.BatchNorm2d(convolution[1])]

    inner = norm(width, width, kernel, padding=kernel // 2, groups=groups)
    excite = [Squeeze(width, 8)] if squeeze else []
    return nn.Sequential(*norm(32, width, 1), act(), *inner, act(), *excite, *norm(width, 32, 1))


class ConvNeXtBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(32, 32, 7, padding=3, groups=32), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(self.conv(x).permute(0, 2, 3, 1)))))
        return y.permute(0, 3, 1, 2)


class Net(nn.Module):
    """A stem, a residual block and a head: [n, 3, 28, 28] -> [n, 10]."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32)
        self.block, self.head = block, nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.head(F.adaptive_avg_pool2d(F.relu(x + self.block(x)), 1).flatten(1))


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "EfficientNet": lambda: expanding(128, 5, nn.SiLU),
    "MobileNetV3": lambda: expanding(128, 3, nn.Hardswish),
    "RegNetY": lambda: expanding(8, 3, nn.ReLU),
    "ResNeXt": lambda: expanding(16, 3, nn.ReLU, squeeze=False),
    "ConvNeXt": ConvNeXtBlock,
}
SIDES = (28, 14)  # of the images of `Net`, and no number of its channels


@pytest.mark.sample(3)
@pytest.mark.parametrize("block", BLOCKS)
def test_inside_a_net_no_image_has_channels_first(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(innermost_channels, "has_tensor_units", lambda x: x.dtype is torch.bfloat16)
    monkeypatch.setattr(images, "_on_gpu", lambda x: x.is_floating_point())
    model = Net(BLOCKS[block]()).to(torch.bfloat16)
    report = fc.explain(model, torch.empty(256, 3, 28, 28, dtype=torch.bfloat16))
    forward, backward = report.plans
    assert forward.notes["channels last"].startswith("done")
    assert stored_channels_first(forward) == stored_channels_first(backward) == set()


def stored_channels_first(plan: FusionPlan) -> set[str]:
    """Images that kernels and library calls of a plan store with a side as the innermost dimension."""
    stored = {name for cluster in plan.clusters for name in cluster.outputs}
    stored |= {left.subject for left in plan.leftovers}
    stored |= {
        name for name in plan.dag.order if plan.dag.op(name).inputs and {*plan.dag.op(name).inputs} & stored
    }
    names: set[str] = set()
    for name in stored:
        for value in plan.dag.op(name).outputs:
            image = len(value.shape) == 4 and value.shape[0] == 256 and 1 not in value.shape
            if image and value.shape[value.stride.index(1)] in SIDES:
                names.add(name)
    return names


def test_norms_of_groups_copy_no_image_to_and_fro(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_always(monkeypatch)
    model = Grouped()
    fast: Any = fc.compile(model, backend="eager")
    fast(torch.randn(CASES[Grouped])).sum().backward()
    results = [op.outputs[0] for plan in fast.plan for op in map(plan.dag.op, plan.dag.order) if op.outputs]
    images = [value.stride for value in results if value.shape[1:] == (16, 6, 5)]
    assert images and all(stride[1] == 1 for stride in images)


def test_a_net_that_returns_a_part_of_an_image_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(innermost_channels, "_pays", lambda *_: True)

    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.aten.slice.Tensor(F.conv2d(x, w), 2, 0, 6, 2)

    gm = traced_on_cuda(function, *on_cuda((2, 8, 8, 8), (8, 8, 3, 3)))
    new, notes = use_channels_last(gm)
    assert new is gm and not notes[0].is_done and "part of a larger tensor" in notes[0].reason


def test_a_net_that_is_turned_already_stays() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w)

    x, w = (t.to(memory_format=torch.channels_last) for t in on_cuda((2, 8, 6, 6), (8, 8, 3, 3)))
    gm = traced_on_cuda(function, x, w)
    assert use_channels_last(gm) == (gm, ())
