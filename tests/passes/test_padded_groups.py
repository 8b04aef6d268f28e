"""Grouped convolutions with groups padded to a fast width: values, gradients, strides, plans and refusals."""

from __future__ import annotations

import copy
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
from tests.passes.test_innermost_channels import (
    Net,
    expanding,
    run,
    steps,
    stored_channels_first,
    turn_always,
)
from tests.passes.test_rewrites import on_cuda, targets, traced_on_cuda

RULE = "padded groups"
# Input channels, output channels, groups, stride, bias, channels last in memory before.
SHAPES = {
    "both widths": (6, 6, 2, 1, False, False),
    "both to different widths": (6, 18, 2, 2, True, False),
    "input channels alone": (6, 16, 2, 1, True, False),
    "output channels alone": (16, 10, 2, 2, True, False),
    "channels last before": (10, 6, 2, 1, True, True),
}


class Between(nn.Module):
    """A grouped convolution between batch norms and ReLU, and squeeze-and-excitation of its result."""

    def __init__(self, inputs: int, outputs: int, groups: int, stride: int, bias: bool) -> None:
        super().__init__()
        self.first = nn.BatchNorm2d(inputs)
        self.conv = nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups, bias=bias)
        self.second, self.squeeze = nn.BatchNorm2d(outputs), nn.Linear(outputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.second(self.conv(F.relu(self.first(x)))))
        return y * torch.sigmoid(self.squeeze(y.mean((2, 3))))[:, :, None, None]


@pytest.mark.parametrize("shape", SHAPES)
def test_values_gradients_and_strides_are_eagers(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    turn_always(monkeypatch)
    monkeypatch.setattr(innermost_channels, "padding_refusal", lambda *_: "")
    *sizes, last = SHAPES[shape]
    model, x = Between(*sizes), torch.randn(2, sizes[0], 7, 5)  # type: ignore[arg-type]
    if last:
        x, model = (value.to(memory_format=torch.channels_last) for value in (x, model))
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    fast: Any = fc.compile(model, backend="interpret", strict=True)
    ours = run(model, fast, x)
    assert fast.plan[0].notes[RULE].startswith("done")
    for our, their, true in zip(ours, run(eager, eager, x), run(exact, exact, x.double()), strict=True):
        torch.testing.assert_close(our.double(), true, rtol=1e-4, atol=1e-4)
        assert steps(our) == steps(their)


def test_a_nan_stays_in_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    turn_always(monkeypatch)
    monkeypatch.setattr(innermost_channels, "padding_refusal", lambda *_: "")
    model, x = nn.Conv2d(9, 6, 3, groups=3), torch.randn(1, 9, 5, 6)
    x[0, 4, 2, 3], x[0, 7, 0, 0] = torch.nan, torch.inf
    with torch.no_grad():
        ours = fc.compile(model, backend="interpret", strict=True)(x)
        torch.testing.assert_close(ours, model(x), equal_nan=True)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("width", "groups", "padded"), [(128, 16, False), (144, 12, True), (144, 6, True), (128, 4, False)]
)
def test_paddings_are_part_of_the_kernels_around_a_convolution(
    width: int, groups: int, padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of 8, 12, 24 and 32 channels; only 12 and 24 are no fast widths."""
    monkeypatch.setattr(innermost_channels, "has_tensor_units", lambda x: x.dtype is torch.bfloat16)
    monkeypatch.setattr(images, "_on_gpu", lambda x: x.is_floating_point())
    model = Net(expanding(groups, 3, nn.ReLU, width=width)).to(torch.bfloat16)
    report = fc.explain(model, torch.empty(256, 3, 28, 28, dtype=torch.bfloat16))
    for plan in report.plans:
        assert plan.notes["channels last"].startswith("done")
        assert (RULE in plan.notes) == padded
        assert stored_channels_first(plan) == set()
        if padded:
            assert channels_of_read_images(plan) <= {3, 8, 32, width, groups * fast(width // groups)}
            assert not stored_twice(plan, width, groups * fast(width // groups))


def fast(width: int) -> int:
    return next(n for n in (8, 16, 32, 64) if n >= width)


def channels_of_read_images(plan: FusionPlan) -> set[int]:
    """Channels of the images [256, c, h, w] that convolutions read."""
    read = [
        value
        for left in plan.leftovers
        for i in plan.dag.op(left.subject).inputs
        for value in plan.dag.op(i).outputs
    ]
    return {value.shape[1] for value in read if len(value.shape) == 4 and value.shape[0] == 256}  # type: ignore[misc]


def stored_twice(plan: FusionPlan, width: int, padded: int) -> list[str]:
    """Results of clusters that are padded or cut copies of an image that is stored as well."""

    def elements(name: str) -> int:
        shape = plan.dag.op(name).outputs[0].shape
        return torch.Size([n for n in shape if isinstance(n, int)]).numel()

    stored = {name for cluster in plan.clusters for name in cluster.outputs}
    stored |= {call.subject for call in plan.leftovers}
    twice: list[str] = []
    for cluster in plan.clusters:
        for name in cluster.outputs:
            op = plan.dag.op(name)
            while op.inputs and len(op.inputs) == 1 and op.name not in stored - {name}:
                op = plan.dag.op(op.inputs[0])
            pair = {elements(name) * padded, elements(op.name) * padded} if op.outputs else set()
            if op.name in stored - {name} and pair and elements(name) * padded == elements(op.name) * width:
                twice.append(name)
    return twice


def notes_of(shape: tuple[int, ...], groups: int) -> tuple[Any, list[Any]]:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.conv2d(x, w, padding=1, groups=groups).sum()

    gm = traced_on_cuda(function, *on_cuda(shape, (shape[1], shape[1] // groups, 3, 3)))
    new, notes = use_channels_last(gm)
    return new, [note for note in notes if note.rule == RULE]


def test_padding_is_refused_where_it_does_not_pay() -> None:
    new, (note,) = notes_of((64, 576, 14, 14), 24)
    assert note.is_done and note.reason == "groups of 24 channels padded to 32"
    assert torch.ops.aten.constant_pad_nd.default in targets(new)
    for shape, groups in (
        ((1, 576, 14, 14), 24),
        ((64, 192, 56, 56), 48),
    ):  # one image; groups of four channels
        new, (note,) = notes_of(shape, groups)
        assert not note.is_done and note.reason.startswith("padding takes them from")
        assert torch.ops.aten.constant_pad_nd.default not in targets(new)
    for groups in (18, 1, 576):  # a fast width, one group, depthwise
        assert notes_of((64, 576, 14, 14), groups)[1] == []
