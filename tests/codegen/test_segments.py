"""Sums over some of the rows and the inner columns, beside the rows' own, in one reading of the data."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fusion_compiler as fc
from fusion_compiler.codegen import assemble
from fusion_compiler.codegen.emit import emit
from fusion_compiler.ir.canonical import canonical
from fusion_compiler.ir.device import device_spec
from fusion_compiler.ir.kernel import Buffer, Program
from fusion_compiler.ir.loops import COLS, ROWS, LoopNest
from fusion_compiler.passes.fuse.legality import first_refusal
from fusion_compiler.runtime.launch import interpret
from fusion_compiler.runtime.target import compile_for
from fusion_compiler.schedule.analysis import Analysis, pieces_of
from fusion_compiler.schedule.row_tiles import Cols, RowTile
from tests.exactness import Compiled, not_as_close, placements, wide
from tests.hand_made import contiguous
from tests.nests import Nest
from tests.versions import not_before, of_measured_versions

GROUPS = {"n": ROWS, "g": ROWS, "c": COLS, "s": COLS}
H200 = device_spec("h200")


def norm_like(sizes: dict[str, int], kept: str) -> Nest:
    """y = x * w - sum of the row, with sums over segments before and after it, and a maximum."""
    live = [name for name, size in sizes.items() if size > 1]
    nest = Nest({name: (sizes[name], GROUPS[name]) for name in live})
    left = [name for name in kept if name in live]
    x = nest.load("x", *live, dtype=torch.float32)
    scaled = nest.mul(x, nest.load("w", *(n for n in live if n in "gc"), dtype=torch.float32))
    y = nest.sub(scaled, nest.reduce("sum", scaled))
    nest.store("y", y, *live, dtype=torch.float32)
    nest.store("before", nest.mul(nest.segments("sum", x, *left), nest.constant(0.5)), *left)
    nest.store("after", nest.segments("sum", y, *left), *left)
    nest.store("most", nest.segments("max", y, *left), *left)
    return nest


def expected(x: Tensor, w: Tensor, kept: str) -> list[Tensor]:
    dims = [d for d, name in enumerate(GROUPS) if name not in kept]
    scaled = x * w[None, :, :, None]
    y = scaled - scaled.sum((2, 3), keepdim=True)
    return [y, x.sum(dims) * 0.5, y.sum(dims), y.amax(dims)]


def built(loops: LoopNest, schedule: RowTile, shapes: dict[str, tuple[int, ...]]) -> Program:
    buffers = {n: contiguous(n, shape, torch.float32) for n, shape in shapes.items()}
    return assemble.build(assemble.Nests((loops,), buffers), placements(loops, schedule), "norm_like", "")


def poisoned(*args: object, **options: object) -> Tensor:
    """Memory as a kernel may find it: what it does not write it must not read."""
    shape, _ = args
    return torch.full(shape, torch.nan if options["dtype"].is_floating_point else 7, **options)  # type: ignore


SCHEDULES = (
    RowTile(1, 256, Cols.WHOLE), RowTile(2, 256, Cols.WHOLE), RowTile(4, 256, Cols.WHOLE, programs=2),
    RowTile(1, 16, Cols.LOOP), RowTile(2, 64, Cols.LOOP), RowTile(1, 128, Cols.WHOLE, splits=2),
    RowTile(1, 32, Cols.LOOP, splits=3), RowTile(1, 128, Cols.WHOLE, programs=2, splits=2),
    RowTile(1, 64, Cols.WHOLE, splits=4),
)  # fmt: skip


@pytest.mark.sample(20)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize(
    ("shape", "kept"),
    [
        *(((3, 2, 3, 64), kept) for kept in ("gc", "c", "g", "nc")),
        *(((3, 2, 3, 48), kept) for kept in ("ngc", "gc")),  # more in a segment than a tile makes alone
        ((5, 1, 6, 32), "gc"),
        ((1, 3, 4, 48), "gc"),
        ((1, 1, 3, 80), "c"),
    ],
    ids=str,
)
def test_every_part_is_summed_once(
    shape: tuple[int, ...], kept: str, schedule: RowTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = dict(zip(GROUPS, shape, strict=True))
    loops = norm_like(sizes, kept).nest()
    assert first_refusal(Analysis(loops), H200) is None
    small = tuple(sizes[name] for name in kept)
    outputs = {"y": shape, "before": small, "after": small, "most": small}
    program = built(loops, schedule, {"x": shape, "w": (shape[1], shape[2]), **outputs})
    assert [len(program.kernels), len(program.scratch) >= 3] == [2, True]
    x, w = torch.randn(shape), torch.randn(shape[1], shape[2])
    monkeypatch.setattr(torch, "empty_strided", poisoned)
    given = {"x": x, "w": w}
    ours = interpret(program, [given[b.name] for b in program.inputs])
    for result, truth in zip(ours, expected(x.double(), w.double(), kept), strict=True):
        torch.testing.assert_close(result, truth.float(), rtol=1e-5, atol=1e-4)


def test_what_a_segment_comes_to_is_summed_once() -> None:
    """sum(x * w) along a block with one w is w times sum(x), which is stored anyway."""
    shape, nest = (3, 2, 3, 64), norm_like({"n": 3, "g": 2, "c": 3, "s": 64}, "gc")
    shapes = {"x": shape, "w": (2, 3), "y": shape, "before": (2, 3), "after": (2, 3), "most": (2, 3)}
    narrow, wide = (built(nest.nest(), RowTile(1, n, Cols.WHOLE, splits=192 // n), shapes) for n in (64, 32))
    mixed = built(nest.nest(), RowTile(1, 128, Cols.WHOLE, splits=2), shapes)
    sums = [p.kernels[0].source.count("tl.sum(") for p in (narrow, wide, mixed)]
    assert sums == [3, 3, 4]  # before and after the row's sum, and what the others sent of that


def test_a_piece_crosses_no_segment() -> None:
    def columns(segment: int, block: int, kept: str) -> tuple[int, int]:
        nest = norm_like({"n": 2, "g": 2, "c": 3, "s": segment}, kept)
        analysis = Analysis(nest.nest())
        pieces = pieces_of(analysis, block, analysis.segmented[0])
        return pieces.columns, pieces.count

    assert columns(64, 256, "gc") == (64, 3)
    assert columns(64, 16, "gc") == (16, 12)
    assert columns(48, 64, "c") == (16, 9)
    assert columns(49, 64, "g") == (64, 3)  # the row is one segment, and ends where it ends


@pytest.mark.parametrize(
    ("nest", "reason"),
    [
        (norm_like({"n": 3, "g": 2, "c": 3, "s": 49}, "c"), "segments of 49 columns"),
        (norm_like({"n": 3, "g": 2, "c": 3, "s": 64}, "s"), "keeps columns inside of those"),
    ],
    ids=["odd", "inner"],
)
def test_what_does_not_fall_into_pieces_is_refused(nest: Nest, reason: str) -> None:
    refusal = first_refusal(Analysis(nest.nest()), H200)
    assert refusal is not None and refusal[0] == "segments" and reason in refusal[1]


def test_nothing_but_stores_follows_a_sum_over_segments() -> None:
    nest = norm_like({"n": 3, "g": 2, "c": 3, "s": 64}, "gc")
    x = nest.load("x", "n", "g", "c", "s", dtype=torch.float32)
    nest.store("z", nest.mul(x, nest.segments("sum", x, "g", "c")), "n", "g", "c", "s")
    refusal = first_refusal(Analysis(nest.nest()), H200)
    assert refusal is not None and "of which each row has only a part" in refusal[1]


# GroupNorm and its like, from PyTorch code.


def group_norm_silu(groups: int) -> Callable[..., Tensor]:
    return lambda x, w, b: F.silu(F.group_norm(x, groups, w, b))


def by_hand(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Groups of four channels; its gradients are autograd's own."""
    parts = x.view(x.shape[0], -1, 4 * x.shape[2] * x.shape[3])
    centred = parts - parts.mean(-1, keepdim=True)
    unit = centred * torch.rsqrt((centred * centred).mean(-1, keepdim=True) + 1e-5)
    return torch.tanh(unit.view_as(x) * w[:, None, None] + b[:, None, None])


def with_gradients(fn: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = fn(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, weights)]


@pytest.mark.parametrize(
    ("fn", "shape", "dtype"),
    [
        (group_norm_silu(2), (3, 8, 4, 4), torch.float32),
        (group_norm_silu(2), (2, 4, 32, 32), torch.bfloat16),
        (group_norm_silu(1), (3, 4, 8, 8), torch.bfloat16),
        (group_norm_silu(6), (3, 6, 5, 5), torch.float32),  # a row is a channel: any size
        (group_norm_silu(4), (1, 8, 8, 8), torch.float32),
        (by_hand, (3, 8, 4, 8), torch.float32),
    ],
)
def test_values_and_gradients_in_one_kernel_each(
    fn: Callable[..., Tensor], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    inputs = (torch.randn(shape).to(dtype), *(torch.randn(shape[1]).to(dtype) for _ in range(2)))
    compiled = Compiled(fn)
    ours, eager = with_gradients(compiled, inputs), with_gradients(fn, inputs)
    problems = [not_as_close(*v) for v in zip(ours, eager, with_gradients(fn, wide(inputs)), strict=True)]
    assert not any(problems), problems
    assert [len(plan.clusters) for plan in compiled.plans] == [1, 1]


def backward(*shape: int) -> tuple[fc.Report, tuple[Program, ...]]:
    """GroupNorm's backward in bfloat16 for an H200: the report, and its first cluster's candidates."""
    with FakeTensorMode():
        sizes = (shape, shape[1:2], shape[1:2])
        inputs = [torch.empty(s, dtype=torch.bfloat16, device="cuda", requires_grad=True) for s in sizes]
        report = fc.explain(group_norm_silu(32), *inputs, device="h200")
    plan = report.plans[1]
    key = canonical(plan.clusters[0], plan.dag)
    buffers: dict[str, Buffer] = {b.name: b for b in key.buffers}
    return report, emit(key.nests, plan.clusters[0].name, "", buffers, H200)


def test_a_block_of_several_segments_does_not_spill() -> None:
    report, (first, *_) = backward(256, 256, 32, 32)
    assert [k.source.count("tl.reshape") for k in first.kernels] == [2, 0]
    assert len(report.plans[1].clusters) == 1
    assert [compile_for(kernel, "sm_90").spills for kernel in first.kernels] == [0, 0]
    source = first.kernels[0].source  # fewer tiles wait for the row's sums once the segments' are stored
    assert source.index("segment_sum") < source.index("tl.store(partial_1_ptr") < source.index("row_sum")


@not_before((2, 12), "the gradient of SiLU has no sigmoid to keep")
@of_measured_versions
def test_what_took_special_functions_is_kept_and_the_rest_computed_again() -> None:
    """Between the sums and dx: x as it was loaded, and the product in which the sigmoid is."""
    _, (first, *_) = backward(16, 512, 128, 128)
    kernel = first.kernels[0]
    counts = [kernel.source.count(name) for name in ("_sigmoid(", "fm.again(in1_loaded)", "fm.sums(")]
    assert counts == [1, 1, 2]
    binary = compile_for(kernel, "sm_90")
    assert binary.registers == kernel.registers == 64 and not binary.spills


def test_images_of_odd_size_take_two_kernels_as_the_report_says() -> None:
    report, _ = backward(32, 320, 63, 65)
    assert len(report.plans[1].clusters) == 2
    assert "segments of 4095 columns, which do not divide into blocks" in " ".join(str(report).split())


def test_more_partial_results_than_they_save_are_two_kernels() -> None:
    report, _ = backward(65536, 64, 4, 4)
    assert len(report.plans[1].clusters) == 2


def test_channels_that_lie_inside_are_an_axis_of_the_tile() -> None:
    """Channels-last: those of a pixel lie side by side, and a tile has all of them."""

    def scaled(x: Tensor) -> Tensor:
        y = x / x.amax((1, 2, 3), keepdim=True)
        return y / y.amax(1, keepdim=True)

    x = torch.rand(4, 64, 8, 8).contiguous(memory_format=torch.channels_last)
    compiled = Compiled(scaled)
    assert not_as_close(compiled(x), scaled(x), scaled(x.double())) is None
    assert len(compiled.plans[0].clusters) == 1


def test_a_sum_over_pixels_keeps_channels_that_lie_inside_of_them() -> None:
    """Channels-last: channels, which the sum keeps, lie inside of the pixels that it reduces."""
    x, weight, shift, out = (torch.randn(s) for s in ((2, 16, 8, 8), (16,), (2, 16), (2, 16, 8, 8)))

    def block(x: Tensor, weight: Tensor, shift: Tensor) -> Tensor:
        return F.silu(F.group_norm(x + shift[:, :, None, None], 8, weight))

    def gradients(fn: Callable[..., Tensor], order: torch.memory_format, dtype: torch.dtype) -> list[Tensor]:
        given = [t.to(dtype, copy=True).requires_grad_() for t in (x, weight, shift)]
        first = given[0].contiguous(memory_format=order)
        fn(first, *given[1:]).backward(out.to(dtype).contiguous(memory_format=order))
        return [t.grad for t in given if t.grad is not None]

    rows = torch.contiguous_format
    eager, truth = (gradients(block, rows, d) for d in (torch.float32, torch.float64))
    for our, their, true in zip(
        gradients(Compiled(block), torch.channels_last, torch.float32), eager, truth, strict=True
    ):
        assert not_as_close(our, their, true) is None
